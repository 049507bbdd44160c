"""What runs on a host of a run: the agent, its workers, and what it watches. Standard library only."""
