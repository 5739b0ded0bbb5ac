"""A collective as an `optax.GradientTransformation`, written once: one group of leaves or many (`groups`).

Each group is reduced by its own collective from its own state. Then all of them are applied, or none: where the
gradient of one worker, or the mean, holds NaN or Inf, every worker returns zeros and carries its state over to the next
step. What follows in a chain is undone by `atomic`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxsparse import _compat, flatten, sparse
from jaxsparse.collectives import Collective
from jaxsparse.comm import axes_of, comm_of
from jaxsparse.comm.replication import mark_total
from jaxsparse.flatten import Rounding
from jaxsparse.transform import checks, ordering
from jaxsparse.transform.groups import Assignment, Group, Method, Special, assigned, groups_of
from jaxsparse.transform.metrics import accumulated, of_all, without_messages
from jaxsparse.transform.shards import Shards, check_inside, shards_of
from jaxsparse.transform.state import Layout, ReduceState, joined
from jaxsparse.types import Comm, Counters, Pending, Reduced, Sparse, State, saturated


def transform_of(
  collective: Collective, axis: _compat.AxisName | Comm, special: Special | None = None, shardings: Any = None
) -> optax.GradientTransformation:
  """The transform that averages gradients with `collective` over the workers of `axis`.

  Args:
    collective: from `js.make_collective`, or one of your own.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a comm.
    special: collectives of leaves by their names, as of `js.spardl_transform`.
    shardings: of the parameters inside a worker, as of `js.spardl_transform`.

  Raises:
    TypeError: if `axis` is none of these.
    ValueError: for a label of `special` that is rejected, or with `special`, for a collective whose total differs
      between workers.

  Example:
    >>> import jaxsparse as js
    >>> tx = js.transform_of(js.make_collective("spardl", k=100), "workers", special={"bias": "dense"})
  """
  chosen = assigned(collective, special) if special else Assignment([collective], [])
  grouped = functools.partial(groups_of, assignment=chosen)
  return over_groups(grouped, chosen.collectives, axis, shardings, alone=not special)


class Transform(optax.GradientTransformationExtraArgs):
  """A jaxsparse transform, which can be made again with other collectives.

  Attributes:
    comm: the workers.
    over: `over(replace)` is the transform with the collectives that `replace(collectives)` returns, one for each.
  """

  comm: Comm
  over: Callable[[Callable[[list[Collective]], list[Collective]]], optax.GradientTransformation]


def over_groups(
  grouped: Callable[[Any], list[Group]],
  collectives: list[Collective],
  axis: _compat.AxisName | Comm,
  shardings: Any = None,
  alone: bool = False,
) -> optax.GradientTransformation:
  """The transform that reduces the groups of a gradient over the workers of `axis`.

  Args:
    grouped: gives the groups of a pytree.
    collectives: those of all groups, each once.
    axis: the name of the shard_map axis of the workers, a tuple of such names, or a comm.
    shardings: of the parameters inside a worker, where neither their types nor `js.init` tell them.
    alone: whether there is always one group. Its state is then that of the collective, otherwise a tuple with the state
      of each group.
  """
  comm = comm_of(axis)

  def init(params: optax.Params) -> ReduceState:
    flatten.count(params)
    return first_state(comm, Method.of(params, grouped(params), alone), shards_of(comm, params, shardings))

  def step(
    groups: Sequence[Group], leaves: list[jax.Array], state: ReduceState, inside: tuple[str, ...] = ()
  ) -> tuple[list[jax.Array], ReduceState]:
    """The means of the leaves, or of the pieces, of one device, and its next state."""
    parts, leaves = checks.parts_of(state, groups, comm.size, alone), list(leaves)
    own = [[leaves[leaf] for leaf in group.leaves] for group in groups]
    flat, restore = zip(*map(flatten.flatten, own), strict=True)
    means, parts = reduce_groups(groups, comm, flat, parts, comm.size, inside, list(map(flatten.rounding, own)))
    for group, unflatten, mean in zip(groups, restore, means, strict=True):
      for leaf, new in zip(group.leaves, unflatten(mean), strict=True):
        leaves[leaf] = new
    carried = joined([part.carried for part in parts], alone)
    counters = of_all([part.counters for part in parts], sum(group.entries for group in groups))
    return leaves, _finished(comm, state._replace(carried=carried, counters=counters))

  def update(
    updates: optax.Updates,
    state: ReduceState,
    params: optax.Params | None = None,
    *,
    agree: jax.Array | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, ReduceState]:
    del params, extra
    flatten.count(updates)
    groups, shards = grouped(updates), state.layout.shards
    check_inside(comm, shards)
    checks.check_local(comm, updates)
    if agree is not None:  # no exchange: the step is skipped unless `agree` holds at every worker
      agreed = comm.all_reduce(agree.astype(jnp.int32), "min") > 0
      return jax.tree.map(jnp.zeros_like, updates), without_messages(state, ~agreed)
    leaves, structure = jax.tree.flatten(updates)
    leaves, state = at_devices(step, groups, leaves, state)
    checks.check_method(state.layout.method, groups)
    return jax.tree.unflatten(structure, leaves), state

  def over(change: Callable[[list[Collective]], list[Collective]]) -> optax.GradientTransformation:
    def changed(tree: Any) -> list[Group]:
      groups = grouped(tree)
      collectives = change([group.collective for group in groups])
      return [group._replace(collective=new) for group, new in zip(groups, collectives, strict=True)]

    return over_groups(changed, change(collectives), axis, shardings, alone)

  made = Transform(init, update)
  made.comm, made.over = comm, over
  return made


def first_state(comm: Comm, method: Method, shards: Shards | None) -> ReduceState:
  """The state of one worker before the first step."""
  check_inside(comm, shards)

  def start(groups: Sequence[Group]) -> tuple[State, Counters]:
    """What one device carries."""
    starts = [init_state(group.collective, group.entries, comm.size).carried for group in groups]
    return joined(starts, method.alone), Counters.zeros()

  if shards:
    own = shards.groups(method.groups)
    carried, counters = shards.map(lambda: _stacked(start(own)), (), PartitionSpec(shards.names))()
  else:
    carried, counters = start(method.groups)
  layout = Layout.of(comm.size, sum(method.sizes), shards, method)
  return ReduceState(carried, counters, mark_total(layout, axes_of(comm)))


def at_devices(
  step: Callable, groups: Sequence[Group], leaves: list[jax.Array], state: ReduceState
) -> tuple[list[jax.Array], ReduceState]:
  """`step(groups, leaves, state)` at a worker: at each of its devices, on its pieces of the leaves.

  Where a worker has several devices, `step` gets their groups, and the names of the axes of these devices as well.
  """
  layout, shards = state.layout, state.layout.shards
  if not shards:
    return step(groups, leaves, state)
  shards.check(leaves)
  own = shards.groups(groups)

  def device(pieces: list[jax.Array], parts: tuple[State, Counters]) -> tuple[list[jax.Array], Any]:
    carried, counters = parts
    shared = jax.tree.map(lambda x: x[0], carried.shared)
    alone = ReduceState(carried._replace(shared=shared), counters, layout._replace(shards=None))
    pieces, after = step(own, pieces, alone, shards.names)
    return pieces, _stacked((after.carried, after.counters))

  leaves, (carried, counters) = shards.over(device, leaves, (state.carried, state.counters))
  return leaves, ReduceState(carried, counters, layout)


def _stacked(parts: tuple[State, Counters]) -> tuple[State, Counters]:
  """The state of one device with a leading axis of devices everywhere; what workers share has none by itself."""
  carried, counters = parts
  return carried._replace(shared=jax.tree.map(lambda x: x[None], carried.shared)), counters


def init_state(collective: Collective, n: int, size: int) -> ReduceState:
  """The state of one of `size` workers before the first step.

  Raises:
    ValueError: for a number of entries that the collective cannot index, or that its options do not fit.
  """
  collective.check_size(n, size)
  return ReduceState(collective.init(n, size), Counters.zeros(), Layout.of(size, n))


def reduce_step(
  collective: Collective, comm: Comm, grads: jax.Array, state: ReduceState, divisor: int = 1
) -> tuple[jax.Array, ReduceState]:
  """One reduction at one worker: f32[n] to the f32[n] sum over workers, divided by `divisor`, and the next state."""
  group = Group((0,), grads.size, collective)
  (update,), (state,) = reduce_groups([group], comm, [grads], [state], divisor)
  return update, _finished(comm, state)


def reduce_groups(
  groups: Sequence[Group],
  comm: Comm,
  grads: Sequence[jax.Array],
  states: Sequence[ReduceState],
  divisor: int = 1,
  inside: tuple[str, ...] = (),
  roundings: Sequence[Rounding | None] | None = None,
) -> tuple[list[jax.Array], list[ReduceState]]:
  """One reduction of each group at one worker, or at one of its devices.

  Selection ranks NaN and Inf above all numbers, so a NaN or Inf of any worker is in the total of every worker. So all
  workers skip the step without an extra message: they return zeros and keep the states of all groups. A total that is
  too large for the dtype of the gradient is Inf, too.

  Args:
    groups: in the order in which they are sent.
    comm: the workers.
    grads: f32[entries] of each group.
    states: of each group, with the counters of all of them together.
    divisor: of the totals.
    inside: names of the axes of the devices of a worker, which agree on one scalar: all of them skip a step, or none.
    roundings: of each group to the dtypes of its leaves, None where they hold every float32. What is rounded off stays
      in the residuals, the same share at each worker.

  Returns:
    f32[entries] of each group, its sum over the workers divided by `divisor`, and the next states.
  """
  delivered: list[_Delivered] = []
  for group, flat, state, rounding in zip(groups, grads, states, roundings or [None] * len(groups), strict=True):
    following = ordering.following(comm, [delivered[number].finite for number in group.after])
    delivered.append(_delivered(comm, group.collective.reduce(following, flat, state.carried), divisor, rounding))
  whole = functools.reduce(jnp.logical_and, [one.finite for one in delivered])
  if inside:
    whole = jax.lax.pmin(whole.astype(jnp.int32), inside) > 0
  decays = [group.collective.decay for group in groups]
  steps = [_applied(*one, whole) for one in zip(delivered, grads, states, decays, strict=True)]
  updates = [
    mark_total(update, axes_of(comm)) if group.collective.replicates else update
    for group, (update, _) in zip(groups, steps, strict=True)
  ]
  return updates, [state for _, state in steps]


class _Delivered(NamedTuple):
  """A reduction before it is known whether the step is skipped.

  Attributes:
    reduced: of the collective.
    mean: the total, or the values of its entries, divided by the number of workers and rounded.
    error: what was rounded off, like `mean`; None without rounding.
    finite: whether `mean` has neither NaN nor Inf, bool[], the same at every worker.
  """

  reduced: Reduced
  mean: jax.Array
  error: jax.Array | None
  finite: jax.Array


def _delivered(comm: Comm, reduced: Reduced, divisor: int, rounding: Rounding | None) -> _Delivered:
  total, error = reduced.total, None
  values, indices = (total.values, total.indices) if isinstance(total, Sparse) else (total, None)
  mean = values / divisor
  if rounding:
    exact, mean = mean, rounding(mean, indices)
    error = exact - mean
  return _Delivered(reduced, mean, error, mark_total(flatten.all_finite(mean), axes_of(comm)))


def _applied(
  delivered: _Delivered, grads: jax.Array, state: ReduceState, decay: float, finite: jax.Array
) -> tuple[jax.Array, ReduceState]:
  """The update and the next state of one group; zeros and the old state where the step is not `finite`."""
  total, carried, counters = delivered.reduced
  keep = lambda new, old: jnp.where(finite, new, old)
  zero = jnp.float32(0)
  if isinstance(carried.residual, Pending):
    residual = _materialized(carried.residual, finite, decay)
    zero = ordering.after(residual[:1], jnp.int32(0)).astype(jnp.float32)  # `grads` may become the update in place
  elif carried.residual is None:
    residual = None
  else:
    residual = keep(_times(decay, carried.residual), state.carried.residual)
  if residual is not None and delivered.error is not None:
    error = _times(decay, jnp.where(finite, delivered.error, 0.0))
    residual = sparse.add(residual, total.indices, error) if isinstance(total, Sparse) else residual + error
  rest = jax.tree.map(keep, carried._replace(residual=None), state.carried._replace(residual=None))
  mean = jnp.where(finite, delivered.mean, 0.0)
  update = sparse.put(jnp.full_like(grads, zero), total.indices, mean) if isinstance(total, Sparse) else mean
  counters = _counters(counters, grads.size, state.counters, finite)
  return update, state._replace(carried=rest._replace(residual=residual), counters=counters)


def _times(decay: float, residual: jax.Array) -> jax.Array:
  """β times a new residual. The product is stored: it costs no pass where the residual is written anyway."""
  return residual if decay == 1 else decay * residual


def _materialized(pending: Pending, finite: jax.Array, decay: float) -> jax.Array:
  """β times the new residual, f32[n], or the old one if not `finite`: one pass over n entries, and a few in place."""
  # All reads precede the writes in place, so that XLA can alias the buffers.
  finite = ordering.after(pending.entries.values, finite.astype(jnp.int32)) > 0
  # Not the sum that selection reads: XLA would compute that once, and store n entries for both.
  grads = jnp.where(finite, pending.grads, pending.residual)
  residual = jnp.where(finite, _times(decay, grads + pending.residual), pending.residual)
  indices = jnp.where(finite, pending.entries.indices, residual.size)
  return sparse.put(residual, indices, _times(decay, pending.entries.values))


def _counters(counters: Counters, n: int, before: Counters, finite: jax.Array) -> Counters:
  """The counters of a step of n entries, in the dtypes of those `before`, whose totals they carry on."""
  counters = counters._replace(
    density=jnp.asarray(counters.delivered, jnp.float32) / float(n),
    skipped=~finite,
    skipped_steps=before.skipped_steps + (~finite).astype(jnp.int32),
    total_words=before.total_words,
    total_wraps=before.total_wraps,
  )
  return jax.tree.map(lambda new, old: saturated(new, old.dtype).reshape(1), counters, before)


def _finished(comm: Comm, state: ReduceState) -> ReduceState:
  """The state at the end of a step: words are added up, and what workers share is marked."""
  carried = state.carried._replace(shared=mark_total(state.carried.shared, axes_of(comm)))
  return state._replace(carried=carried, counters=accumulated(state.counters))
