"""What all floors agree on: cluster, plan, placement, facts, units, errors, files. No torch."""
