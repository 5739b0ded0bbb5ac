"""Benchmarks: absl-flag binaries, one for each table or figure. `python -m benchmarks.NAME --help` explains each."""
