"""The race: seconds until the loss of a real training is low enough, on a real network.

`benchmarks.race.__main__` is the command; `benchmarks.methods` has the methods, `benchmarks.recipes` the optimizers and
their schedules, `benchmarks.trainer` one training, a step at a time.

presets    the papers' recipes as flags
measuring  curves (loss over steps), paces (seconds a step) and whole runs
results    the rows of a file that is replaced whole whenever a row is added
standings  steps and seconds to a loss, from rows alone
report     the table and the figure of a file
"""
