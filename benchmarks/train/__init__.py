"""Trains one model with several all-reduces, and compares accuracy, loss and words sent.

run     one run: a task with one method from one seed, and what is measured of it
report  runs as lines, a file, a table and figures
"""
