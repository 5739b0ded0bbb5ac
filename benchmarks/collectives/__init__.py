"""Milliseconds per update of every all-reduce, selection included, every timed result checked.

updates  times updates with all workers in step, and splits the time into its parts
laws     counts the wrong entries of an update
rows     rows of updates as JSON lines, a table and a figure
"""
