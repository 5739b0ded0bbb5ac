"""Updates of PyTorch's DistributedDataParallel beside ours: `python -m benchmarks.peers --help`."""
