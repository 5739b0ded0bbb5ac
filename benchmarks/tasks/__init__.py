"""Tasks of training runs: a model, its training data, and held-out data to measure it on."""
