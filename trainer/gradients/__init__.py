"""From gradients to the update: buckets, sums over all holders, shards of weights, the optimizer."""
