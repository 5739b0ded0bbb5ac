"""Optimizer state and training steps of all workers.

step         `js.init` and `js.make_train_step`
starting     the state of all workers before the first step, as arrays or as shapes
conversion   `js.resize` and `js.convert`: a state for other workers, or for another collective
residual_rows  residuals of all workers, read and written on the host
flushing     `js.flush`: all residuals, delivered densely
worker       the step of one worker: loss, gradients, update, metrics
engine       where the workers run: a mesh, MPI, or the simulator; maps and compiles programs over them
stacked      `js.stacked`: the same for trainers that are programs of all workers
skipped      the warning where many steps in a row are skipped
agreement    `js.agreement`: whether the gradients of the workers agree
replicas     compares what must be the same on all workers, and the programs of all processes
program_digest  the digest of a program, the same in every process that traces it
donation     arguments whose buffers XLA may overwrite
simulation   `js.simulate`, one reduction of any number of workers on one device
timing       seconds that an update takes
"""
