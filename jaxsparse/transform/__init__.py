"""A collective as an `optax.GradientTransformation`.

factories     js.NAME_transform and js.make_transform: the signature and documentation come from the dataclass
update        init and update over groups of leaves; a step with NaN or Inf is skipped
groups        groups of leaves that are reduced together, each by one collective: `special=`, and the bundles of a plan
owed          residuals, carried over to other workers or other groups of leaves
shards        devices inside a worker, each of which reduces its own pieces of the leaves
ordering      data dependencies that order in-place writes and messages
state, specs  the optax state, and its PartitionSpecs
checks        rejects states and gradients that do not fit, before anything is computed
local         `js.local_steps`: parameters that differ between workers, and their exchange
atomic        `js.atomic`: a skipped step leaves everything as it was
fragments     leaves in fragments, which local steps exchange in turn
own           what each worker of local steps has of its own
named         `js.diloco`, `js.sparseloco`, `js.demo_transform`: chains with the defaults of their papers
adam          `js.scale_by_window_adam`: for workers with optimizers of their own
momentum      `js.momentum_corrected`, `js.warmed_up`: Deep Gradient Compression
metrics       `js.metrics`, read from the state
"""
