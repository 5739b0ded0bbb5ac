"""Benchmarks: absl-flag binaries, one for each table or figure. `python -m benchmarks.NAME --help` explains each.

entry, workers, report  what they share: flags and errors; where workers run; tables, goals, files and figures
specs, methods, recipes collectives, methods of training, and optimizers with their schedules, as flags name them
tasks, trainer          models with their data, and a training of one, a step at a time
recorded                gradients of a training, to time updates with
netlab                  hosts with a network of their own, on one machine
papers, results         the papers' numbers; rows that were measured
"""
