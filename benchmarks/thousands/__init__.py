"""Rounds of many workers: simulated with the real protocol, a real server under load, and real processes."""
