"""Runs: prepared, started, seen through, gone on with after failures, and looked after when they have ended."""
