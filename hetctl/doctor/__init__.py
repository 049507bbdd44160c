"""What is wrong with hosts, networks, GPUs and software: checks by theme, each a pure rule over facts."""
