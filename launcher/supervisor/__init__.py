"""What runs where the run was started: it starts the agents, gives them their work, and sees it through."""
