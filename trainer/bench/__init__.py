"""What ranks and devices run to be measured: pipelines, whole plans, kinds of layers, parity."""
