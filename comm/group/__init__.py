"""The `het` process group: what c10d asks of it, collectives over islands, and how it fails and ends."""
