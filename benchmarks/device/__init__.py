"""What this machine's accelerator computes and how fast, in minutes: `python -m benchmarks.device --help`."""
