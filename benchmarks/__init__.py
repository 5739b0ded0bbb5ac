"""Benchmarks: absl-flag binaries, one for each table or figure. `python -m benchmarks.NAME --help` explains each.

A benchmark of several files is a package of that name. What they share:

entry, workers  running a benchmark: flags, errors, and where its workers run
specs, methods  collectives and methods of training, as flags name them
recipes         optimizers, schedules and clipping, likewise
tasks, trainer  models with their data, and a training of one, a step at a time
recorded        gradients of a training, to time updates with
netlab          hosts with a network of their own, on one machine
programs        compiled programs that ranks share
papers, report  the papers' numbers; goals, files and figures
results         rows that were measured
"""
