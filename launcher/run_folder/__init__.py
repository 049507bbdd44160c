"""What a run leaves: its folder, the register of active runs, logs, and what they say of a failure."""
