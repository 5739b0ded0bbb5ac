"""A collective as an `optax.GradientTransformation`.

The way of a gradient:

    factories     js.NAME_transform and js.make_transform: the signature and documentation come from the dataclass
    groups        which leaves are reduced together, each group by one collective: `special=`, the bundles of a plan
    state         the optax state; `specs` has its PartitionSpecs
    update        init and update; a step with NaN or Inf is skipped
    shards        devices inside a worker, each of which reduces its own pieces of the leaves
    metrics       counters of a step, and `js.metrics`, read from the state
    wrapped       wrappers of optax that change leaves: the parameters as a transform inside them sees them
    checks        rejects states and gradients that do not fit, before anything is computed

Around it:

    atomic        `js.atomic`: a skipped step leaves everything as it was
    residuals     residuals, and the movement of local steps, in the shapes of the parameters
    local         `js.local_steps`: when workers exchange what they have moved; `fragments` of leaves
    exchange      how an update reaches the workers: at once, mixed with their own parameters, or delayed
    wrappers      around collectives: `js.momentum_corrected` (clipping and masking, too), `js.ef21`, `js.warmed_up`
    restored      `js.norm_restored`: the mean of updates, as long as each of them
    averaging     `js.average_momentum`: of optimizers of the workers' own
    named         `js.diloco`, `js.sparseloco`, `js.demo_transform`: chains with the defaults of their papers
    adam          `js.scale_by_window_adam`: for workers with optimizers of their own
"""
