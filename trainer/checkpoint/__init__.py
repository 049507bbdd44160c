"""Checkpoints: writing, reading, and keeping them on hosts that share no folder."""
