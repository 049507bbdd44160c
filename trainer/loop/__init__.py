"""The training loop, and what goes with every step: traces, the watch on speeds, the summary."""
