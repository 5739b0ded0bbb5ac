"""What XLA makes of every update for accelerators: `python -m benchmarks.compiled --help`."""
