"""A collective as an `optax.GradientTransformation`: `init` and `update`, over one group of leaves or many.

    gradient leaves -> one f32[n] of each group        reduce_groups
      -> total of each group, by its collective
      -> mean, rounded to the dtypes of the leaves
      -> all groups applied, or none                   _apply_or_undo
      -> the mean as leaves; the next state

Where the gradient of one worker, or the mean, holds NaN or Inf, every worker returns
zeros and carries its state over to the next step. What follows in a chain is undone by
`atomic`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxsparse import _compat
from jaxsparse.arrays import flatten
from jaxsparse.collectives import Collective
from jaxsparse.collectives._base import Traits
from jaxsparse.comm import axes_of, comm_of, ordering
from jaxsparse.comm.replication import mark_total
from jaxsparse.transform import checks
from jaxsparse.transform.groups import (
  Assignment,
  Group,
  Method,
  Shapes,
  Special,
  assign_collectives,
  check_special,
  groups_of,
)
from jaxsparse.transform.metrics import count_step
from jaxsparse.transform.shards import Shards, check_inside, shards_of
from jaxsparse.transform.state import (
  Layout,
  ReduceState,
  add_row,
  first_row,
  join_groups,
)
from jaxsparse.transform.wrapped import PLACEHOLDER, mean_dtypes
from jaxsparse.types import ArrayTree, Comm, Commit, Counters, Reduced, SpecTree, State


@jax.tree_util.register_static  # as a pytree with `init` and `update` for leaves it would lose its attributes
class Transform(optax.GradientTransformationExtraArgs):
  """A jaxsparse transform, which can be made again with other collectives.

  Attributes:
    comm: the workers.
    with_collectives: `with_collectives(change)` is the transform with the collectives
      that `change(collectives)` returns, one for each. Wrappers such as
      `js.momentum_corrected` put theirs around them.
  """

  comm: Comm
  with_collectives: Callable[["_Change"], "Transform"]


_Change = Callable[[list[Collective]], list[Collective]]


def collective_transform(
  collective: Collective,
  axis: _compat.AxisName | Comm,
  special: Special | None = None,
  shardings: SpecTree = None,
) -> Transform:
  """The transform that averages gradients with `collective` over the workers of `axis`; see `js.make_transform`."""
  # `special` gives some leaves other collectives by their names; `collective` is that
  # of the rest.
  assignment = (
    assign_collectives(collective, special) if special else Assignment([collective])
  )
  # shapes by name -> groups of leaves
  grouped = functools.partial(groups_of, assignment=assignment)
  return grouped_transform(grouped, assignment.collectives, axis, shardings, special)


def grouped_transform(
  grouped: Callable[[Shapes], list[Group]],
  collectives: list[Collective],
  axis: _compat.AxisName | Comm,
  shardings: SpecTree,
  special: Special | None,
) -> Transform:
  """The transform that reduces the groups of a gradient over the workers of `axis`.

  Args:
    grouped: gives the groups of leaves of these shapes, by name.
    collectives: those of all groups, each once: `with_collectives` can reject them
      before there are parameters.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    shardings: of the parameters inside a worker, where neither their types nor
      `js.init` tell them.
    special: regular expressions -> collectives; each expression must match the name of
      a leaf. None checks nothing.
  """
  comm = comm_of(axis)

  def init(params: optax.Params) -> ReduceState:
    if isinstance(params, PLACEHOLDER):
      # `optax.tree_map_params` looks for copies of parameters: this state has none, so
      # one leaf stands for it.
      return cast(Any, jnp.int32(0))
    checks.check_own_leaves(params)
    if special:
      check_special(special, params)
    # Shapes by name: the state records names, shapes and groups as its `method`.
    shapes = flatten.leaf_shapes(params)
    groups = tuple(grouped(shapes))
    method = Method(tuple(shapes), tuple(shapes.values()), groups)
    return first_state(comm, method, shards_of(comm, params, shardings))

  def with_collectives(change: _Change) -> Transform:
    # `grouped` of the new transform: the same groups, with changed collectives.
    def changed(shapes: Shapes) -> list[Group]:
      groups = grouped(shapes)
      # Without groups, where no leaf has an entry, `change` might reject an empty list.
      collectives = change([group.collective for group in groups]) if groups else []
      return [
        group._replace(collective=new)
        for group, new in zip(groups, collectives, strict=True)
      ]

    # `change` is called here, too, to raise at once for collectives that its wrapper
    # rejects; in `changed` it gets copies that are fitted to the groups.
    return grouped_transform(changed, change(collectives), axis, shardings, special)

  update = functools.partial(_update, comm, grouped)
  transform = Transform(init, update)
  transform.comm, transform.with_collectives = comm, with_collectives
  return transform


def _update(
  comm: Comm,
  grouped: Callable[[Shapes], list[Group]],
  updates: optax.Updates,
  state: ReduceState,
  params: ArrayTree = None,
  *,
  agree: jax.Array | None = None,
  **extra: ArrayTree,
) -> tuple[optax.Updates, ReduceState]:
  """`update` of the transform.

  Args:
    comm: the workers.
    grouped: gives the groups of leaves of these shapes, by name.
    updates: the gradients of this worker.
    state: of this worker.
    params: not read.
    agree: None in a usual step. `js.local_steps` gives it in a step without an
      exchange: bool[], whether this worker is finite. Nothing but this flag is sent.
    **extra: not read.

  Returns:
    The mean over workers, and the next state.
  """
  del params, extra
  flatten.check_leaves(updates)
  check_inside(comm, state.layout.shards)
  # Between exchanges of `js.local_steps` the update is zeros, and the step is skipped
  # unless all workers are finite.
  if agree is not None:
    agreed = comm.all_reduce(agree.astype(jnp.int32), "min") > 0
    return optax.tree.zeros_like(updates), state.idle(~agreed)
  groups = grouped(flatten.leaf_shapes(updates))
  # A state made for other groups is refused before its arrays are read.
  checks.check_method(state, groups, updates, comm.size)
  if not groups:  # no leaf has an entry, as with a label of `optax.multi_transform`
    return updates, state.idle(jnp.bool_(False))
  checks.check_local(comm, updates)
  checks.warn_of_frozen([state], updates)
  leaves, structure = jax.tree.flatten(updates)
  # The dtypes to round the mean to, by leaf: those of the gradients, unless
  # `js.local_steps` gives those of the parameters by the context `mean_dtypes`.
  parameter_dtypes = dict(mean_dtypes.value)
  dtypes = [
    parameter_dtypes.get(name, jnp.result_type(leaf))
    for name, leaf in flatten.leaves_by_name(updates).items()
  ]
  step = functools.partial(reduce_groups, comm, divisor=comm.divisor, dtypes=dtypes)
  leaves, state = at_devices(step, groups, leaves, state)
  return jax.tree.unflatten(structure, leaves), state


# A custom derivative that raises: JAX's own would be wrong, without an error.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_derivative(flat: jax.Array, name: str) -> jax.Array:  # noqa: ARG001
  """The gradient of a group whose collective has no derivative."""
  return flat


@_without_derivative.defjvp
def _refuse_derivative(name: str, *_: ArrayTree) -> ArrayTree:
  raise TypeError(
    f"{name}: there is no derivative of an exchange that selects or rounds entries: use js.dense_transform, or give "
    "`update` jax.lax.stop_gradient of the gradients"
  )


def first_state(comm: Comm, method: Method, shards: Shards | None) -> ReduceState:
  """The state of one worker before the first step; where a worker has several devices, of all of them.

  Args:
    comm: the workers.
    method: the leaves and their groups.
    shards: how leaves lie on the devices of a worker; None for workers of one device.
  """
  check_inside(comm, shards)
  start = functools.partial(_start_groups, size=comm.size)
  if shards:
    # A shard_map without arguments over the axes inside a worker, on the mesh around
    # it: each device starts with its own pieces, and results are concatenated.
    device = lambda: add_device_axis(*start(shards.groups(method.groups)))
    carried, counters = _compat.shard_map(
      device, None, (), PartitionSpec(shards.names), shards.names
    )()
  else:
    carried, counters = start(method.groups)
  layout = Layout.of_workers(
    comm.size, sum(group.entries for group in method.groups), shards, method
  )
  # `mark_total` declares the layout as equal on all workers, for checks of replication.
  return ReduceState(carried, counters, mark_total(layout, axes_of(comm)))


def _start_groups(groups: Sequence[Group], size: int) -> tuple[State, Counters]:
  """What one device carries before the first step, and its counters; `size` is the number of workers."""
  # An error about sizes should come before any array of n is made.
  for group in groups:
    group.collective.check_size(group.entries, size)
  return join_groups(
    [group.collective.init(group.entries, size) for group in groups]
  ), Counters.zeros()


def init_state(collective: Collective, n: int, size: int) -> ReduceState:
  """The state of one of `size` workers before the first step, of a flat vector of n entries.

  Raises:
    ValueError: for a number of entries that the collective cannot index, or that its
      options do not fit.
  """
  started = _start_groups([Group((0,), n, collective)], size)
  return ReduceState(*started, Layout.of_workers(size, n))


def at_devices(
  step: Callable, groups: Sequence[Group], leaves: list[jax.Array], state: ReduceState
) -> tuple[list[jax.Array], ReduceState]:
  """`step(groups, leaves, state)` at a worker: at each of its devices, on its pieces of the leaves.

  Where a worker has several devices, `step` gets the groups of one device, and the
  names of the axes of these devices as `inside=`.

  Args:
    step: returns (leaves, state) like those that it is given.
    groups: of whole leaves.
    leaves: of the worker, whole or sharded over its devices.
    state: of the worker.
  """
  layout = state.layout
  shards = layout.shards
  if not shards:
    return step(groups, leaves, state)
  # Specs along the axes inside a worker: of each leaf; of the state, one part a device.
  specs = list(shards.specs)
  split = PartitionSpec(shards.names)

  def device(
    leaves: list[jax.Array], carried: State, counters: Counters
  ) -> tuple[list[jax.Array], State, Counters]:
    # Shared arrays have a leading axis of devices in the state of a worker, [1, …]
    # here, which collectives do not know.
    shared = first_row(carried.shared)
    device_state = ReduceState(
      carried._replace(shared=shared), counters, layout._replace(shards=None)
    )
    pieces, after = step(
      shards.groups(groups), shards.cut(leaves), device_state, inside=shards.names
    )
    return shards.join(pieces, leaves), *add_device_axis(after.carried, after.counters)

  # None: over the mesh of the shard_map around, whose other axes are the workers'.
  program = _compat.shard_map(
    device, None, (specs, split, split), (specs, split, split), shards.names
  )
  # A shard_map rejects leaves that are sharded otherwise along Explicit axes.
  leaves = [
    _compat.resharded(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)
  ]
  leaves, carried, counters = program(leaves, state.carried, state.counters)
  return leaves, ReduceState(carried, counters, layout)


def add_device_axis(carried: State, counters: Counters) -> tuple[State, Counters]:
  """The state of one device with a leading axis of devices everywhere: shared arrays get one, others have one."""
  return carried._replace(shared=add_row(carried.shared)), counters


def reduce_step(
  collective: Collective,
  comm: Comm,
  grads: jax.Array,
  state: ReduceState,
  divisor: int = 1,
) -> tuple[jax.Array, ReduceState]:
  """One reduction at one worker: f32[n] to the f32[n] sum over workers, divided by `divisor`, and the next state."""
  # One leaf, number 0, in one group; the last list has the dtype of the result.
  groups = [Group((0,), grads.size, collective)]
  (update,), state = reduce_groups(comm, groups, [grads], state, divisor, [grads.dtype])
  return update, state


def _flatten(
  group: Group, leaves: list[jax.Array], dtypes: Sequence[jnp.dtype]
) -> tuple[jax.Array, Callable, flatten.LeafRounding | None]:
  """The gradient of a group, f32[n]; the function from f32[n] to its float32 leaves; the rounding to their dtypes.

  `leaves` and `dtypes` are of all groups, in pytree order. The rounding is None where
  all leaves of the group have 32 bits or more.
  """
  group_leaves = [leaves[leaf] for leaf in group.leaves]
  flat, unflatten = flatten.flatten(optax.tree.cast(group_leaves, jnp.float32))
  # Without this, JAX would take the choice of entries for a constant and return a wrong
  # derivative; with it, differentiation raises.
  if not group.collective.traits.differentiable:
    flat = _without_derivative(flat, group.collective.name)
  sizes = [leaf.size for leaf in group_leaves]
  rounding = flatten.rounding(sizes, [dtypes[leaf] for leaf in group.leaves])
  return flat, unflatten, rounding


def _apply_or_undo(
  reduced: Reduced,
  commit: Commit,
  traits: Traits,
  before: State,
  finite: jax.Array,
  axes: tuple[str, ...] | None,
) -> tuple[jax.Array, State]:
  """The update f32[n] and the next state of one group; zeros and the state before where the step is not `finite`.

  Args:
    reduced: the result of the collective.
    commit: from `reduced.mean`: returns the mean, f32[n], and the next residual.
    traits: of the collective.
    before: the state of the group before the step.
    finite: bool[], the same on all workers.
    axes: of the workers; None for a comm that does not name them.
  """
  update, residual = commit(finite, before.residual, traits.decay)
  # A total made of messages is equal on all workers, which types cannot show.
  if traits.replicates:
    update = mark_total(update, axes)
  # `commit` undoes the residual in the pass that writes it; all else is chosen here.
  # The fields of a `State` are (residual, worker, shared).
  worker, shared = optax.tree.where(finite, reduced.state[1:], before[1:])
  return update, State(residual, worker, mark_total(shared, axes))


def reduce_groups(
  comm: Comm,
  groups: list[Group],
  leaves: list[jax.Array],
  state: ReduceState,
  divisor: int,
  dtypes: Sequence[jnp.dtype],
  inside: Sequence[str] = (),
) -> tuple[list[jax.Array], ReduceState]:
  """One reduction of each group of leaves at one worker, or of their pieces at one of its devices.

  Selection ranks NaN and Inf above all numbers, so a NaN or Inf of any worker is in the
  total of every worker. So all workers skip the step without an extra message: they
  return zeros and keep the states of all groups. A total that is too large for the
  dtype of the gradient is Inf, too.

  Args:
    comm: the workers.
    groups: in the order in which they are sent.
    leaves: of the gradient, in pytree order; leaves in no group are returned unchanged.
    state: of one worker or device.
    divisor: of the totals, the number of workers for a mean.
    dtypes: of the results, one a leaf.
    inside: names of the axes of the devices of a worker, which agree on one scalar: all
      of them skip a step, or none; empty where a worker is one device.

  Returns:
    The sums of the leaves over the workers, divided by `divisor` and rounded to
    `dtypes`; and the next state. What is rounded off stays in the residuals, the same
    share at each worker.
  """
  axes = axes_of(comm)
  # (group, state before, result, commit, inverse of flattening) of each group.
  results = []
  are_finite: list[jax.Array] = []  # the means, the same at every worker
  for group, before in zip(groups, state.groups, strict=True):
    earlier = [are_finite[group_number] for group_number in group.waits_for]
    # A data dependency on a flag of each earlier mean holds back the messages of this
    # group until these means are computed.
    after_earlier = ordering.following(comm, earlier) if earlier else comm
    flat, unflatten, rounding = _flatten(group, leaves, dtypes)
    reduced = group.collective.reduce(after_earlier, flat, before)
    # `commit(finite, …)` below ends the step of this group, once all groups are known.
    mean, commit = reduced.mean(divisor, rounding)
    are_finite.append(mark_total(flatten.all_finite(mean), axes))
    results.append((group, before, reduced, commit, unflatten))
  # The groups of a step are kept together or undone together.
  finite = functools.reduce(jnp.logical_and, are_finite)
  # Each device has judged its own pieces; a worker skips as a whole.
  if inside:
    finite = jax.lax.pmin(finite.astype(jnp.int32), inside) > 0
  means = list(leaves)
  states = []
  for group, before, reduced, commit, unflatten in results:
    traits = group.collective.traits
    update, after = _apply_or_undo(reduced, commit, traits, before, finite, axes)
    states.append(after)
    for leaf, mean in zip(group.leaves, unflatten(update), strict=True):
      means[leaf] = mean.astype(dtypes[leaf])
  entries = sum(group.entries for group in groups)
  # `update` is that of the last group: `count_step` needs any array of the step.
  counters = count_step(
    [reduced.counters for _, _, reduced, *_ in results],
    entries,
    state.counters,
    finite,
    update,
  )
  return means, state._replace(carried=join_groups(states), counters=counters)
