"""One rank: its place in the plan, its process groups, its device, and what it did when."""
