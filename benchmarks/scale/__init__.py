"""Scale on paper: the predicted time of an update for 8 … 4096 workers, and the making of its program.

predicting  seconds on the wire, by each algorithm's formula
compiling   the making of programs of all workers
figure      figures
"""
