"""Measurements that feed the planner and that users trust: pipelines, bridges, operations, plans, parity."""
