"""Optimizer state and training steps of all workers.

step         `js.init` and `js.make_train_step`
worker       the step of one worker: loss, gradients, update, metrics
engine       where the workers run: a mesh, MPI, or the simulator; maps and compiles programs over them
sharded      the engine of a mesh whose workers have several devices
replicas     compares values that must be equal on all workers
compiling    compiler options that keep collectives apart and overlap them with backward
simulation   `js.simulate`, one reduction of any number of workers on one device
timing       seconds that an update takes
"""
