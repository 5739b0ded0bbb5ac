"""A collective as an `optax.GradientTransformation`: `init` and `update`, over one group of leaves or many.

    gradient leaves -> one f32[n] of each group        reduce_groups
      -> total of each group, by its collective
      -> mean, rounded to the dtypes of the leaves
      -> all groups applied, or none                   _commit
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

from jaxsparse import _compat, sparse
from jaxsparse.arrays import flatten
from jaxsparse.collectives import Collective
from jaxsparse.comm import axes_of, comm_of, ordering
from jaxsparse.comm.replication import mark_total
from jaxsparse.select.accumulator import materialize
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
from jaxsparse.transform.state import Layout, ReduceState, join_groups
from jaxsparse.transform.wrapped import PLACEHOLDER, mean_dtypes
from jaxsparse.types import Comm, Counters, Deferred, Pending, Reduced, Sparse, State


@jax.tree_util.register_static  # as a pytree with `init` and `update` for leaves it would lose its attributes
class Transform(optax.GradientTransformationExtraArgs):
  """A jaxsparse transform, which can be made again with other collectives.

  Attributes:
    comm: the workers.
    with_collectives: `with_collectives(change)` is the transform with the collectives
      that `change(collectives)` returns, one for each.
  """

  comm: Comm
  with_collectives: Callable[
    [Callable[[list[Collective]], list[Collective]]], "Transform"
  ]


def collective_transform(
  collective: Collective,
  axis: _compat.AxisName | Comm,
  special: Special | None = None,
  shardings: Any = None,
) -> Transform:
  """The transform that averages gradients with `collective` over the workers of `axis`; see `js.make_transform`."""
  assignment = (
    assign_collectives(collective, special) if special else Assignment([collective])
  )
  grouped = functools.partial(groups_of, assignment=assignment)
  return grouped_transform(grouped, assignment.collectives, axis, shardings, special)


def grouped_transform(
  grouped: Callable[[Shapes], list[Group]],
  collectives: list[Collective],
  axis: _compat.AxisName | Comm,
  shardings: Any,
  special: Special | None,
) -> Transform:
  """The transform that reduces the groups of a gradient over the workers of `axis`.

  Args:
    grouped: gives the groups of leaves of these shapes, by name.
    collectives: those of all groups, each once.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a
      comm.
    shardings: of the parameters inside a worker, where neither their types nor
      `js.init` tell them.
    special: by expressions, each of which the name of a leaf must match.
  """
  comm = comm_of(axis)

  def init(params: optax.Params) -> ReduceState:
    if isinstance(params, PLACEHOLDER):
      # one leaf for all of the state, which has no copy of them
      return cast(Any, jnp.int32(0))
    checks.check_own_leaves(params)
    if special:
      check_special(special, params)
    shapes = flatten.leaf_shapes(params)
    method = Method(tuple(shapes), tuple(shapes.values()), tuple(grouped(shapes)))
    return first_state(comm, method, shards_of(comm, params, shardings))

  def update(
    updates: optax.Updates,
    state: ReduceState,
    params: Any = None,
    *,
    agree: jax.Array | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, ReduceState]:
    del params, extra
    flatten.check_leaves(updates)
    check_inside(comm, state.layout.shards)
    # `js.local_steps` between exchanges: zeros, and `skipped` unless all agree
    if agree is not None:
      agreed = comm.all_reduce(agree.astype(jnp.int32), "min") > 0
      return jax.tree.map(jnp.zeros_like, updates), state.idle(~agreed)
    groups = grouped(flatten.leaf_shapes(updates))
    checks.check_method(state, groups, updates, comm.size)
    if not groups:  # no leaf has an entry, as with a label of `optax.multi_transform`
      return updates, state.idle(jnp.bool_(False))
    checks.check_local(comm, updates)
    checks.warn_of_frozen(state, updates)
    leaves, structure = jax.tree.flatten(updates)
    # `js.local_steps` gives the dtypes of parameters where its updates are wider.
    given = dict(mean_dtypes.value)
    dtypes = [
      given.get(name, jnp.result_type(leaf))
      for name, leaf in flatten.leaves_by_name(updates).items()
    ]
    step = functools.partial(reduce_groups, comm, divisor=comm.divisor, dtypes=dtypes)
    leaves, state = at_devices(step, groups, leaves, state)
    return jax.tree.unflatten(structure, leaves), state

  def with_collectives(
    change: Callable[[list[Collective]], list[Collective]],
  ) -> Transform:
    def changed(shapes: Shapes) -> list[Group]:
      groups = grouped(shapes)
      collectives = change([group.collective for group in groups]) if groups else []
      return [
        group._replace(collective=new)
        for group, new in zip(groups, collectives, strict=True)
      ]

    return grouped_transform(changed, change(collectives), axis, shardings, special)

  transform = Transform(init, update)
  transform.comm, transform.with_collectives = comm, with_collectives
  return transform


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_derivative(flat: jax.Array, name: str) -> jax.Array:  # noqa: ARG001
  """The gradient of a group whose collective has no derivative."""
  return flat


@_without_derivative.defjvp
def _refuse_derivative(name: str, *_: Any) -> Any:
  raise TypeError(
    f"{name}: there is no derivative of an exchange that selects or rounds entries: use js.dense_transform, or give "
    "`update` jax.lax.stop_gradient of the gradients"
  )


def first_state(comm: Comm, method: Method, shards: Shards | None) -> ReduceState:
  """The state of one worker before the first step."""
  check_inside(comm, shards)
  start = functools.partial(_start_groups, size=comm.size)
  if shards:
    device = lambda: add_device_axis(*start(shards.groups(method.groups)))
    carried, counters = _compat.shard_map(
      device, None, (), PartitionSpec(shards.names), shards.names
    )()
  else:
    carried, counters = start(method.groups)
  layout = Layout.of_workers(
    comm.size, sum(group.entries for group in method.groups), shards, method
  )
  return ReduceState(carried, counters, mark_total(layout, axes_of(comm)))


def _start_groups(groups: Sequence[Group], size: int) -> tuple[State, Counters]:
  """What one device carries before the first step."""
  for group in groups:
    group.collective.check_size(group.entries, size)
  return join_groups(
    [group.collective.init(group.entries, size) for group in groups]
  ), Counters.zeros()


def init_state(collective: Collective, n: int, size: int) -> ReduceState:
  """The state of one of `size` workers before the first step, of n entries that belong to no leaves.

  Raises:
    ValueError: for a number of entries that the collective cannot index, or that its
      options do not fit.
  """
  return ReduceState(
    *_start_groups([Group((0,), n, collective)], size), Layout.of_workers(size, n)
  )


def at_devices(
  step: Callable, groups: Sequence[Group], leaves: list[jax.Array], state: ReduceState
) -> tuple[list[jax.Array], ReduceState]:
  """`step(groups, leaves, state)` at a worker: at each of its devices, on its pieces of the leaves.

  Where a worker has several devices, `step` gets their groups, and the names of the
  axes of these devices as well.
  """
  layout = state.layout
  shards = layout.shards
  if not shards:
    return step(groups, leaves, state)
  specs = list(shards.specs)
  split = PartitionSpec(shards.names)

  def device(
    leaves: list[jax.Array], carried: State, counters: Counters
  ) -> tuple[list[jax.Array], State, Counters]:
    shared = jax.tree.map(lambda x: x[0], carried.shared)
    one = ReduceState(
      carried._replace(shared=shared), counters, layout._replace(shards=None)
    )
    pieces, after = step(
      shards.groups(groups), shards.cut(leaves), one, inside=shards.names
    )
    return shards.join(pieces, leaves), *add_device_axis(after.carried, after.counters)

  program = _compat.shard_map(
    device, None, (specs, split, split), (specs, split, split), shards.names
  )
  leaves = [
    _compat.resharded(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)
  ]
  leaves, carried, counters = program(leaves, state.carried, state.counters)
  return leaves, ReduceState(carried, counters, layout)


def add_device_axis(carried: State, counters: Counters) -> tuple[State, Counters]:
  """The state of one device with a leading axis of devices everywhere; what workers share has none by itself."""
  return carried._replace(
    shared=jax.tree.map(lambda x: x[None], carried.shared)
  ), counters


def reduce_step(
  collective: Collective,
  comm: Comm,
  grads: jax.Array,
  state: ReduceState,
  divisor: int = 1,
) -> tuple[jax.Array, ReduceState]:
  """One reduction at one worker: f32[n] to the f32[n] sum over workers, divided by `divisor`, and the next state."""
  (update,), state = reduce_groups(
    comm, [Group((0,), grads.size, collective)], [grads], state, divisor, [grads.dtype]
  )
  return update, state


def reduce_groups(
  comm: Comm,
  groups: list[Group],
  leaves: list[jax.Array],
  state: ReduceState,
  divisor: int,
  dtypes: Sequence[Any],
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
    leaves: of the gradient.
    state: of one worker or device.
    divisor: of the totals.
    dtypes: of the results.
    inside: names of the axes of the devices of a worker, which agree on one scalar: all
      of them skip a step, or none.

  Returns:
    The sums of the leaves over the workers, divided by `divisor` and rounded to
    `dtypes`; and the next state. What is rounded off stays in the residuals, the same
    share at each worker.
  """
  means = list(leaves)
  states = state.groups
  grads, restore = zip(
    *(flatten.flatten([leaves[leaf] for leaf in group.leaves]) for group in groups),
    strict=True,
  )
  axes = axes_of(comm)
  delivered = []  # what the collectives return, with the mean, and what was rounded off
  are_finite: list[jax.Array] = []  # the means, the same at every worker
  for group, flat, before in zip(groups, grads, states, strict=True):
    earlier = [are_finite[number] for number in group.waits_for]
    own = (
      flat
      if group.collective.traits.differentiable
      else _without_derivative(flat, group.collective.name)
    )
    reduced = group.collective.reduce(
      ordering.following(comm, earlier) if earlier else comm, own, before
    )
    rounded = [dtypes[leaf] for leaf in group.leaves]
    rounding = flatten.rounding([leaves[leaf].size for leaf in group.leaves], rounded)
    up_to_sign = isinstance(reduced.total, Deferred) and reduced.total.up_to_sign
    if rounding and not (up_to_sign and len(set(rounded)) == 1):
      reduced = reduced.computed()
    total = reduced.total
    mean = jax.tree.map(
      lambda x: x / divisor,
      total.values if isinstance(total, Sparse | Deferred) else total,
    )
    error = None
    if rounding:
      exact = mean
      mean = rounding(exact, total.indices if isinstance(total, Sparse) else None)
      error = exact - mean
    delivered.append((reduced, mean, error))
    are_finite.append(mark_total(flatten.all_finite(mean), axes))
  finite = functools.reduce(jnp.logical_and, are_finite)
  if inside:
    finite = jax.lax.pmin(finite.astype(jnp.int32), inside) > 0
  for number, (group, result) in enumerate(zip(groups, delivered, strict=True)):
    update, after = _commit(
      *result, grads[number], states[number], group.collective.traits.decay, finite
    )
    update = mark_total(update, axes) if group.collective.traits.replicates else update
    states[number] = after._replace(shared=mark_total(after.shared, axes))
    for leaf, mean in zip(group.leaves, restore[number](update), strict=True):
      means[leaf] = mean.astype(dtypes[leaf])
  entries = sum(group.entries for group in groups)
  counters = count_step(
    [reduced.counters for reduced, *_ in delivered],
    entries,
    state.counters,
    finite,
    update,
  )
  return means, state.with_groups(states)._replace(counters=counters)


def _commit(
  reduced: Reduced,
  mean: jax.Array,
  error: jax.Array | None,
  grads: jax.Array,
  before: State,
  decay: float,
  finite: jax.Array,
) -> tuple[jax.Array, State]:
  """The update f32[n] and the next state of one group; zeros and the state before where the step is not `finite`.

  Args:
    reduced: of the collective.
    mean: the total, or the values of its entries, divided by the number of workers and
      rounded.
    error: what was rounded off, like `mean`; None without rounding.
    grads: f32[n].
    before: the state before the step.
    decay: of the residual.
    finite: whether no mean of a group has NaN or Inf, bool[], the same at every worker.
  """
  total, after, _ = reduced
  zero = jnp.float32(0)
  residual = after.residual
  keep = functools.partial(jnp.where, finite)
  rest = jax.tree.map(
    keep, after._replace(residual=None), before._replace(residual=None)
  )
  if isinstance(total, Deferred):
    update, residual = total.finish(mean, error, finite, decay)
    return update, rest._replace(residual=residual)
  if isinstance(residual, Pending):
    residual = materialize(residual, finite, decay)
    # A 0 that depends on the new residual: all reads of `grads` precede the reuse of
    # its buffer for the update.
    zero = ordering.depend_on(residual[:1], jnp.float32(0))
  elif residual is not None:
    residual = jnp.where(
      finite, residual if decay == 1 else decay * residual, before.residual
    )
  if residual is not None and error is not None:
    error = decay * jnp.where(finite, error, 0.0)
    residual = (
      sparse.add(residual, total.indices, error)
      if isinstance(total, Sparse)
      else residual + error
    )
  update = jnp.where(finite, mean, 0.0)
  if isinstance(total, Sparse):
    update = sparse.put(jnp.full_like(grads, zero), total.indices, update)
  return update, rest._replace(residual=residual)
