"""Seconds an iteration with communication hidden behind backward, on paper or in the network lab.

architectures  gradient tensors of well-known networks
iterations     seconds an iteration of these with a plan, predicted, and as the paper measured them
hiding         the same measured, with all ranks in step
runtime        what a runtime overlaps: measured, or read from a trace of JAX's profiler
contention     two all-reduces at once beside one alone, by message size
timelines      the figure of a plan
report         tables
"""
