"""Milliseconds per update of every all-reduce, selection included, every timed result checked."""
