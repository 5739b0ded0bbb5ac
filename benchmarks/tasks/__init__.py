"""Tasks of training runs: a model, its training data, and held-out data to measure it on.

One task a file. Those of `benchmarks.race` follow the protocol of `benchmarks.tasks.base`.
"""
