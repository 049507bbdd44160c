"""Faults planted in real runs on namespaced hosts, and what must be true after each."""
