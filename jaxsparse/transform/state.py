"""The optax state of a jaxsparse transform and of local steps, and functions that find both in the state of a chain.

The state consists of arrays only. Inside shard_map a worker sees its own part. Outside,
per-worker arrays are concatenated over workers along their leading axis, which is
sharded; shared arrays are replicated. The devices inside a worker (`shards`) have a
part each in the same way.

The state of a wrapper is a NamedTuple whose `per_worker()` lists the fields with a row
for each worker, [1, …] at one. `js.init`, `js.specs`, `js.resize`, `js.convert`,
checkpoints and `js.atomic` need to know no more of it; `js.flush` delivers residuals
and the movement of local steps only, so a wrapper that keeps gradients has to deliver
them itself.
"""

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import OptState

from jaxsparse import _compat
from jaxsparse.collectives import Collective
from jaxsparse.comm.verbs import mark_total
from jaxsparse.transform.groups import Method
from jaxsparse.transform.shards import Shards
from jaxsparse.types import ArrayTree, Counters, State

Kind = TypeVar("Kind")


class Layout(NamedTuple):
  """The sizes for which a state was made, as values: shapes alone do not show that a restored array was cut or padded.

  Attributes:
    workers: i32[], number of workers P.
    entries: u32[], number of gradient entries n; 2³² − 1 stands for that many or more.
    checksum: u32[], of the leaves to which the entries of residuals belong and of the
      collectives, as `shards` and `method` say.
    shards: how the gradient lies on the S devices of a worker; None where a worker is
      one device.
    method: the leaves and their collectives; None in a state of `js.simulate`, which
      knows of no leaves.

  Example:
    >>> Layout.of_workers(4, 100).workers
    Array(4, dtype=int32)
  """

  workers: jax.Array
  entries: jax.Array
  checksum: jax.Array
  shards: Shards | None = None
  method: Method | None = None

  @classmethod
  def of_workers(
    cls,
    workers: int,
    entries: int,
    shards: Shards | None = None,
    method: Method | None = None,
  ) -> Self:
    """The layout of a state of so many workers and gradient entries; `shards` and `method` as in `Layout`."""
    # Flax's `to_bytes`, as of a TrainState, fails for types that it does not know.
    # `shards` and `method` hold no array: as empty dicts they are not saved, and
    # `from_bytes` keeps those of its target. They are registered here, as every state
    # has a layout, and only if Flax is imported: jaxsparse does not need it.
    if flax := sys.modules.get("flax.serialization"):
      for static in (Method, Shards):
        flax.register_serialization_state(
          static, lambda _: {}, lambda target, _: target, override=True
        )
    checksum = jnp.uint32(checksum_of(shards, method))
    # An n beyond u32 is stored as the largest u32.
    most = jnp.uint32(min(entries, 2**32 - 1))
    return cls(jnp.int32(workers), most, checksum, shards, method)


def checksum_of(shards: Shards | None, method: Method | None) -> int:
  """The CRC-32 of shards and method as JSON: the same for equal layouts, in every process."""
  # A name and a tuple of this name alone are the same sharding.
  names_of_spec = lambda spec: [_compat.names_of(entry or ()) for entry in spec]
  layout = shards and {
    "axes": shards.axes,
    "shapes": shards.shapes,
    "specs": list(map(names_of_spec, shards.specs)),
  }
  groups = method and [
    (group.leaves, group.collective.label) for group in method.groups
  ]
  grouping = method and {
    "names": method.names,
    "shapes": method.shapes,
    "groups": groups,
  }
  # JSON is the same text in all processes; `hash` of strings is not.
  return zlib.crc32(json.dumps({"shards": layout, "method": grouping}).encode())


class ReduceState(NamedTuple):
  """The optax state of a jaxsparse transform.

  Attributes:
    carried: the `State`s of the collectives: its residual, worker and shared parts are
      tuples, one part for each group of leaves; `special=` and `js.bucketed_transform`
      have several groups.
    counters: `Counters` of the last step, [1] at each worker and [P] outside shard_map.
    layout: the `Layout` that the state was made for, the same on every worker.

  Where a worker has S devices (`layout.shards`), the arrays of its devices lie one
  after the other along the leading axes: counters are [S] at a worker and [P · S]
  outside shard_map, a residual of m entries a device f32[P · S · m], and shared arrays,
  the same on every worker but not on every device, have a leading axis of S.
  """

  carried: State
  counters: Counters
  layout: Layout

  @property
  def devices(self) -> int:
    """Number of devices of a worker, S."""
    return self.layout.shards.devices if self.layout.shards else 1

  @property
  def leaves(self) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the leaves that the transform covers; none in a state of `js.simulate`."""
    method = self.layout.method
    return list(zip(method.names, method.shapes, strict=True)) if method else []

  @property
  def collectives(self) -> list[Collective]:
    """The collective of each group of leaves; none in a state of `js.simulate`."""
    return (
      [group.collective for group in self.layout.method.groups]
      if self.layout.method
      else []
    )

  @property
  def groups(self) -> list[State]:
    """The state of the collective of each group of leaves."""
    # Each field of `carried` is a tuple with one item a group.
    return [State(*fields) for fields in zip(*self.carried, strict=True)]

  def map_arrays(self, local: Callable, shared: Callable, layout: Callable) -> Self:
    """The state with `local(x)`, `shared(x)` or `layout(x)` in place of each array x.

    Args:
      local: for arrays that differ between workers: the counters, and `carried` without
        its shared parts.
      shared: for the shared parts of `carried`: the same on every worker, with a piece
        for each device of a worker.
      layout: for the layout, the same on all workers and devices.
    """
    # () leaves out the shared parts, which are mapped below.
    carried, counters = jax.tree.map(
      local, (self.carried._replace(shared=()), self.counters)
    )
    carried = carried._replace(shared=jax.tree.map(shared, self.carried.shared))
    return type(self)(carried, counters, jax.tree.map(layout, self.layout))

  def idle(self, skipped: jax.Array) -> Self:
    """The state after a step without messages; `skipped`, bool[], says whether the workers skip it."""
    before = self.counters
    # No entry was sent, and a flag is not counted: all other counters have their
    # defaults, mostly 0.
    step = Counters(
      skipped=skipped,
      skipped_steps=before.skipped_steps + skipped.astype(jnp.int32),
      total_words=before.total_words,
      total_wraps=before.total_wraps,
    )
    return self._replace(counters=jax.tree.map(jnp.full_like, before, step))

  def undo_if(self, skipped: jax.Array, before: Self) -> Self:
    """The state `self` after a step; where it is skipped, the state `before` it, with the counters of the skipped step.

    `skipped`, bool[], may be true where this transform itself has not skipped: another
    transform of the chain has.
    """
    # `skipped_steps` counts from `before`: `self` may have counted the step already.
    counters = self.counters._replace(
      skipped=jnp.full_like(self.counters.skipped, skipped),
      skipped_steps=before.counters.skipped_steps + skipped.astype(jnp.int32),
    )
    carried = optax.tree.where(skipped, before.carried, self.carried)
    return self._replace(carried=carried, counters=counters)


class RestoredState(NamedTuple):
  """The optax state of `js.norm_restored`.

  Attributes:
    exchange: the state of the transform.
    products: f32[leaves, 2] of the last exchange, the same on every worker: Σ_w ⟨u_w,
      mean⟩ and Σ_w ⟨u_w, delivered_w⟩; zeros before the first one.
  """

  exchange: ReduceState
  products: jax.Array

  def factors(self, size: int) -> jax.Array:
    """1/s of each leaf at an exchange of `size` workers, f32[leaves], 1 … √P."""
    # s² = shared / delivered. s = 1 where `delivered` is not positive, as it is for a
    # leaf of zeros.
    shared, delivered = self.products.T
    # 1/P where updates are orthogonal, 1 where they are equal, but for rounding.
    ratio = shared / jnp.where(delivered > 0, delivered, 1.0)
    agreement = jnp.clip(ratio, 1 / size, 1.0)
    return jnp.where(delivered > 0, 1 / jnp.sqrt(agreement), 1.0)


class Flight(NamedTuple):
  """An update that an exchange of `js.local_steps` has computed and that is not applied yet, the same on every worker.

  Attributes:
    update: like the parameters; zeros while nothing is in flight.
    left: i32[], the steps until it is applied; 0 while nothing is in flight.
    fragment: i32[], the number of the fragment that it is of.
  """

  update: ArrayTree
  left: jax.Array
  fragment: jax.Array


class Applied(NamedTuple):
  """Marks local steps with `apply_residual`; it has no arrays."""


class LocalState(NamedTuple):
  """The optax state of `js.local_steps`.

  Attributes:
    inner: the state of the inner optimizer; every leaf has a leading worker axis, [1,
      …] at a worker and [P, …] outside shard_map.
    outer: the state of the outer chain for each fragment: residuals as in a
      `ReduceState`, everything else the same on every worker.
    moved: like the parameters, f32[1 or P, …]: the outer parameters minus those of a
      worker, θ − θ_w, but for an applied residual; () with `every=1`, which leaves
      nothing moved.
    since: i32[], steps since the last exchange, with a delay since it was applied; with
      fragments since that of the last fragment; -1 after a synchronization.
    steps: i32[], steps since the state was made, without skipped ones.
    flight: with a delay the `Flight` of the last exchange; else ().
    applied: `Applied` where the parameters of a worker include its residual, θ_w = θ −
      moved − residual; else ().
  """

  inner: OptState
  outer: tuple[ArrayTree, ...]
  moved: ArrayTree
  since: jax.Array
  steps: jax.Array
  flight: Any = ()
  applied: Any = ()

  @classmethod
  def per_worker(cls) -> tuple[str, ...]:
    """The fields whose arrays have a row for each worker."""
    return "inner", "moved"


def is_reduce_state(state: OptState) -> bool:
  """Whether a subtree of an optax state is a `ReduceState`."""
  return isinstance(state, ReduceState)


def is_local_state(state: OptState) -> bool:
  """Whether a subtree of an optax state is a `LocalState`."""
  return isinstance(state, LocalState)


def _states_of(state: OptState, kind: type[Kind]) -> list[Kind]:
  """Every state of a kind within an optax state."""
  is_kind = lambda subtree: isinstance(subtree, kind)
  return list(filter(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))


def add_row(tree: ArrayTree) -> ArrayTree:
  """The arrays with a leading axis of workers, here of one."""
  return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def first_row(tree: ArrayTree) -> ArrayTree:
  """The arrays at the first index of their leading axes."""
  return jax.tree.map(lambda leaf: leaf[0], tree)


def is_ours(state: OptState) -> bool:
  """Whether a subtree of an optax state is that of a jaxsparse transform or of local steps."""
  return isinstance(state, (ReduceState, LocalState))


def axes_of_workers(states: Sequence[ReduceState]) -> frozenset[str]:
  """The axes of the workers, by the types of their counters; none where no replication is checked."""
  axes = [_compat.axes_of_type(state.counters.skipped) for state in states]
  return frozenset().union(*axes)


def reduce_states(state: OptState) -> list[ReduceState]:
  """Every `ReduceState` within an optax state."""
  return _states_of(state, ReduceState)


def map_states(
  function: Callable[[ArrayTree], ArrayTree],
  state: OptState,
  kind: type = ReduceState,
) -> OptState:
  """The state with `function(substate)` in place of each state of that kind within it."""
  is_kind = lambda subtree: isinstance(subtree, kind)
  return jax.tree.map(
    lambda leaf: function(leaf) if is_kind(leaf) else leaf, state, is_leaf=is_kind
  )


def idle_step(state: OptState, skipped: jax.Array) -> OptState:
  """A state after a step without messages: `ReduceState.idle` of each."""
  return map_states(lambda reduce_state: reduce_state.idle(skipped), state)


def with_own_keys(state: OptState, rank: jax.Array) -> OptState:
  """The state of a worker before the first step, with the random keys of its own optimizers folded with `rank`.

  Keys outside of local steps, which are the same on every worker, stay.
  """
  # Keys of a worker's own have a leading axis of workers, here of one: hence the vmap.
  fold = jax.vmap(lambda key: jax.random.fold_in(key, rank))
  fold_own = lambda row, leaf: fold(leaf) if row and _compat.is_key(leaf) else leaf
  return jax.tree.map(fold_own, jax.tree.broadcast(worker_rows(state), state), state)


def with_rows(state: OptState) -> OptState:
  """The state with a row for each worker in all arrays of workers' own optimizers, also those set by hand.

  A user may replace an array [P] of a local optimizer, as a learning rate, by a number:
  it is repeated for each worker. A state without local steps stays as it is.

  Raises:
    ValueError: for arrays without a row for each worker, by their names.
  """

  def fit(path: jax.tree_util.KeyPath, leaf: Any, row: bool) -> ArrayTree:
    # `row`: whether each worker has a row of this array. `workers`: P, as below.
    if not row or jnp.shape(leaf)[:1] == (workers,):
      return leaf
    # A number set by hand, as `state.hyperparams["learning_rate"] = 0.1`.
    if jnp.ndim(leaf) == 0 and not isinstance(leaf, jax.ShapeDtypeStruct):
      return jnp.full(workers, leaf)
    raise ValueError(
      f"state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: give a number, or a row for each of the "
      f"{workers} workers"
    )

  states = local_states(state)
  if not states:
    return state
  outer = reduce_states(states[0].outer)[0]
  # P of this state, whose counters are [P · S]; 1 inside shard_map and under MPI. The
  # mesh may have another number of workers.
  workers = outer.counters.skipped.size // outer.devices
  fields = [getattr(local, name) for local in states for name in local.per_worker()]
  # This runs in every step, so the quick check comes first.
  shapes = map(jnp.shape, jax.tree.leaves(fields))
  if all(shape[:1] == (workers,) for shape in shapes):
    return state
  return jax.tree_util.tree_map_with_path(
    fit, state, jax.tree.broadcast(worker_rows(state), state)
  )


def local_states(state: OptState) -> list[LocalState]:
  """Every `LocalState` within an optax state."""
  return _states_of(state, LocalState)


def restored_states(state: OptState) -> list[RestoredState]:
  """Every `RestoredState` within an optax state."""
  return _states_of(state, RestoredState)


def labelled(state: OptState) -> dict[str, ReduceState]:
  """Every `ReduceState` within an optax state by its label: that of `optax.multi_transform`, else its path."""
  leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_reduce_state)
  pairs = [(path, leaf) for path, leaf in leaves if is_reduce_state(leaf)]
  # `optax.multi_transform` keeps states in a dict by label. Keys of other dicts count,
  # too: names of `optax.named_chain`, paths of momenta in `AveragedState`.
  is_label = lambda key: isinstance(key, jax.tree_util.DictKey)
  label = lambda path: "/".join(str(key.key) for key in path if is_label(key))
  labels = [label(path) for path, _ in pairs]
  # Where labels are missing or not unique, paths serve: longer, but never equal.
  if len(set(labels)) < len(labels) or "" in labels:
    labels = [jax.tree_util.keystr(path) for path, _ in pairs]
  return dict(zip(labels, (leaf for _, leaf in pairs), strict=True))


def worker_rows(state: OptState, within: bool = False) -> OptState:
  """A state with booleans in place of arrays and of `ReduceState`s: whether they have a row for each worker.

  The arrays in the fields that `per_worker` of a state lists have rows; all others are
  the same on every worker. A `ReduceState`, whose arrays are of both kinds, counts as
  one leaf: true if it is in such a field, as in an inner optimizer of local steps.

  Args:
    state: an optax state.
    within: whether the state is a part of such a field.

  Example:
    >>> worker_rows((LocalState([jnp.zeros(2)], [jnp.zeros(2)], (), jnp.int32(0), jnp.int32(0)), jnp.zeros(3)))
    (LocalState(inner=[True], outer=[False], moved=(), since=False, steps=False, flight=(), applied=()), False)
  """

  def rows_of(subtree: OptState) -> OptState:
    # `_has_rows` is true of a state with `per_worker`. All arrays within a field with
    # rows have rows, so no further `per_worker` is asked.
    if not _has_rows(subtree) or within:
      return within
    return type(subtree)(
      **{
        name: worker_rows(field, name in subtree.per_worker())
        for name, field in subtree._asdict().items()
      }
    )

  return jax.tree.map(
    rows_of,
    state,
    is_leaf=lambda tree: is_reduce_state(tree) or (_has_rows(tree) and not within),
  )


def _has_rows(state: OptState) -> bool:
  return isinstance(state, tuple) and hasattr(state, "per_worker")


def reduce_rows(state: OptState) -> list[tuple[ReduceState, bool]]:
  """Every `ReduceState`, and whether it is that of an inner optimizer of local steps."""
  every = jax.tree.leaves(state, is_leaf=is_reduce_state)
  rows = jax.tree.leaves(worker_rows(state))
  return [
    (leaf, row) for leaf, row in zip(every, rows, strict=True) if is_reduce_state(leaf)
  ]


def is_skipped(state: OptState) -> jax.Array:
  """Whether a transform skipped this step, bool[], on all devices of all workers; inside shard_map."""
  # Flags, [S] of the devices, are equal everywhere, so one entry of each suffices. They
  # may be sharded over devices: gathered before the first entry is read.
  flags = [
    _compat.resharded(reduce_state.counters.skipped, PartitionSpec()).reshape(-1)[0]
    for reduce_state in reduce_states(state)
  ]
  # `mark_total` declares the flag as equal on all workers, along all axes.
  return mark_total(jnp.any(jnp.array(flags)), None)


def join_groups(groups: Sequence[State]) -> State:
  """One `State` of tuples, an item for each group, from the states of the groups; undoes `ReduceState.groups`."""
  return State(
    *(tuple(getattr(group, name) for group in groups) for name in State._fields)
  )
