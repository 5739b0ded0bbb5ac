"""A collective as an `optax.GradientTransformation`.

factories     js.NAME_transform and js.make_transform: the signature and documentation come from the dataclass
update        init and update over groups of leaves; a step with NaN or Inf is skipped
groups        which leaves travel together, by which collective: `special=`, and the bundles of a plan
ordering      data dependencies that order writes in place and messages
state, specs  the optax state, and its PartitionSpecs
checks        states and gradients that do not fit, before anything is computed
local         parameters of a worker's own
metrics       what was communicated, read from the state
"""
