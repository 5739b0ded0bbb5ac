"""The optax state of a jaxsparse transform and of local steps, and functions that find both in the state of a chain.

The state consists of arrays only. Inside shard_map a worker sees its own part. Outside, per-worker arrays are
concatenated over workers along their leading axis, which is sharded; shared arrays are replicated. The devices inside
a worker (`shards`) have a part each in the same way.
"""

import dataclasses
import json
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxsparse import _compat
from jaxsparse.comm.verbs import mark_total
from jaxsparse.sparse import flatten
from jaxsparse.transform.groups import Method
from jaxsparse.transform.shards import Shards
from jaxsparse.types import Counters, State


class Layout(NamedTuple):
  """The sizes for which a state was made, as values: shapes alone do not show that a restored array was cut or padded.

  Attributes:
    workers: i32[], number of workers P.
    entries: u32[], number of gradient entries n; 2³² − 1 stands for that many or more.
    checksum: u32[], of the leaves to which the entries of residuals belong and of the collectives, as `shards` and
      `method` say.
    shards: how the gradient lies on the S devices of a worker; None where a worker is one device.
    method: the leaves and their collectives; None in a state of `js.simulate`, which knows of no leaves.

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
  def of_workers(cls, workers: int, entries: int, shards: Shards | None = None, method: Method | None = None) -> Self:
    """The layout of a state of so many workers and gradient entries."""
    if flax := sys.modules.get("flax.serialization"):  # for `to_bytes` of a TrainState; the rest of a layout are arrays
      for static in (Method, Shards):
        flax.register_serialization_state(static, lambda _: {}, lambda own, _: own, override=True)
    checksum = jnp.uint32(checksum_of(shards, method))
    return cls(jnp.int32(workers), jnp.uint32(min(entries, 2**32 - 1)), checksum, shards, method)


def checksum_of(shards: Shards | None, method: Method | None, earlier: bool = False) -> int:
  """The checksum of a layout: of its JSON, or as version 0.1.0 computed it `earlier`, of a `repr`."""
  layout, grouping = None, None
  groups = [(group.leaves, group.collective.label) for group in method.groups] if method else []
  if earlier:
    return zlib.crc32(repr((shards, method and (method.names, method.shapes), groups)).encode())
  if shards:
    specs = [[_compat.names_of(part or ()) for part in spec] for spec in shards.specs]
    layout = {"axes": shards.axes, "shapes": shards.shapes, "specs": specs}
  if method:
    grouping = {"names": method.names, "shapes": method.shapes, "groups": groups}
  return zlib.crc32(json.dumps({"shards": layout, "method": grouping}).encode())


def checksums_of(shards: Shards | None, method: Method | None) -> list[int]:
  """The checksums of a layout in this version and before, when names of `flax.nnx` variables ended differently."""
  named = method and dataclasses.replace(method, names=tuple(name + flatten.VALUE for name in method.names))
  return [checksum_of(shards, one, earlier) for one in (method, named) for earlier in (False, True)]


class ReduceState(NamedTuple):
  """The optax state of a jaxsparse transform.

  Attributes:
    carried: the `State` of the collective. With `special=` and for `js.bucketed_transform` its residual, worker and
      shared parts are tuples, one part for each group of leaves.
    counters: `Counters` of the last step, [1] at each worker and [P] outside shard_map.
    layout: the `Layout` that the state was made for, the same on every worker.

  Where a worker has S devices (`layout.shards`), the arrays of its devices lie one after the other along the leading
  axes: counters are [S] at a worker and [P · S] outside shard_map, a residual of m entries a device f32[P · S · m], and
  shared arrays, the same on every worker but not on every device, have a leading axis of S.
  """

  carried: State
  counters: Counters
  layout: Layout


class Flight(NamedTuple):
  """An update that an exchange of `js.local_steps` has computed and that is not applied yet, the same on every worker.

  Attributes:
    update: like the parameters; zeros while nothing is in flight.
    left: i32[], the steps until it is applied; 0 while nothing is in flight.
    fragment: i32[], the number of the fragment that it is of.
  """

  update: Any
  left: jax.Array
  fragment: jax.Array


class Applied(NamedTuple):
  """Marks local steps with `apply_residual`; it has no arrays."""


class LocalState(NamedTuple):
  """The optax state of `js.local_steps`.

  Attributes:
    inner: the state of the inner optimizer; every leaf has a leading worker axis, [1, …] at a worker and [P, …] outside
      shard_map.
    outer: the state of the outer chain: residuals as in a `ReduceState`, everything else the same on every worker. With
      fragments a dict with the state of each by its number.
    moved: like the parameters, f32[1 or P, …]: the anchor minus the parameters of a worker, θ − θ_w, but for an applied
      residual; () with `every=1`, which leaves nothing moved.
    since: i32[], steps since the last exchange, with a delay since it was applied; with fragments since that of the
      last fragment.
    steps: i32[], steps since the state was made, without skipped ones.
    flight: with a delay the `Flight` of the last exchange; else ().
    applied: `Applied` where the parameters of a worker include its residual, θ_w = θ − moved − residual; else ().
  """

  inner: Any
  outer: Any
  moved: Any
  since: jax.Array
  steps: jax.Array
  flight: Any = ()
  applied: Any = ()


def is_reduce_state(node: Any) -> bool:
  """Whether a node of an optax state is a `ReduceState`."""
  return isinstance(node, ReduceState)


def is_local_state(node: Any) -> bool:
  """Whether a node of an optax state is a `LocalState`."""
  return isinstance(node, LocalState)


def reduce_states(state: Any) -> list[ReduceState]:
  """Every `ReduceState` within an optax state."""
  return [node for node in jax.tree.leaves(state, is_leaf=is_reduce_state) if is_reduce_state(node)]


def with_own_keys(state: Any, rank: jax.Array) -> Any:
  """The state of a worker before the first step, with the random keys of its own optimizers folded with its number."""
  fold = lambda leaf: jax.vmap(lambda key: jax.random.fold_in(key, rank))(leaf) if _compat.is_key(leaf) else leaf
  own = lambda node: node._replace(inner=jax.tree.map(fold, node.inner)) if is_local_state(node) else node
  return jax.tree.map(own, state, is_leaf=is_local_state)


def with_rows(state: Any, workers: int) -> Any:
  """The state with numbers that were set by hand in workers' own optimizers, a learning rate, given to each of them.

  Raises:
    ValueError: for arrays without a row for each worker, by their names.
  """

  def fit(path: Any, leaf: Any) -> Any:
    if jnp.shape(leaf)[:1] == (workers,):
      return leaf
    if jnp.ndim(leaf) == 0 and not isinstance(leaf, jax.ShapeDtypeStruct):
      return jnp.full(workers, leaf)
    raise ValueError(
      f"inner{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: give a number, or a row for each of the "
      f"{workers} workers"
    )

  own = [node.inner for node in local_states(state)]
  if all(jnp.shape(leaf)[:1] == (workers,) for leaf in jax.tree.leaves(own)):
    return state
  rows = lambda node: node._replace(inner=jax.tree_util.tree_map_with_path(fit, node.inner))
  fitted = lambda node: rows(node) if is_local_state(node) else node
  return jax.tree.map(fitted, state, is_leaf=is_local_state)


def local_states(state: Any) -> list[LocalState]:
  """Every `LocalState` within an optax state."""
  return [node for node in jax.tree.leaves(state, is_leaf=is_local_state) if is_local_state(node)]


def labelled(state: Any) -> dict[str, ReduceState]:
  """Every `ReduceState` within an optax state by its label: that of `optax.multi_transform`, else its path."""
  leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_reduce_state)
  found = [(path, node) for path, node in leaves if is_reduce_state(node)]
  labels = ["/".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)) for path, _ in found]
  if len(set(labels)) < len(labels) or "" in labels:
    labels = [jax.tree_util.keystr(path) for path, _ in found]
  return dict(zip(labels, (node for _, node in found), strict=True))


def has_worker_axis(state: Any) -> Any:
  """A state with booleans in place of arrays and of `ReduceState`s: whether they have a row for each worker.

  Those of the inner optimizers of local steps have; others are the same on every worker, but for a `ReduceState`.

  Example:
    >>> has_worker_axis((LocalState([jnp.zeros(2)], [jnp.zeros(2)], (), jnp.int32(0), jnp.int32(0)), jnp.zeros(3)))
    (LocalState(inner=[True], outer=[False], moved=(), since=False, steps=False, flight=(), applied=()), False)
  """

  def rows_of(node: Any) -> Any:
    if not is_local_state(node):
      return False
    inner, moved = jax.tree.map(lambda _: True, (node.inner, node.moved), is_leaf=is_reduce_state)
    return LocalState(inner, has_worker_axis(node.outer), moved, *jax.tree.map(lambda _: False, node[3:]))

  return jax.tree.map(rows_of, state, is_leaf=lambda node: is_local_state(node) or is_reduce_state(node))


def reduce_rows(state: Any) -> list[tuple[ReduceState, bool]]:
  """Every `ReduceState`, and whether it is that of an inner optimizer of local steps."""
  every, rows = jax.tree.leaves(state, is_leaf=is_reduce_state), jax.tree.leaves(has_worker_axis(state))
  return [(node, row) for node, row in zip(every, rows, strict=True) if is_reduce_state(node)]


def devices_of(node: ReduceState) -> int:
  """Number of devices of a worker, S."""
  return node.layout.shards.devices if node.layout.shards else 1


def in_groups(state: Any) -> bool:
  """Whether a transform of the state has groups of leaves, with a residual for each: by `special=` or a plan."""
  residuals = [node.carried.residual for node in reduce_states(state)]
  return any(isinstance(residual, tuple) and len(residual) > 0 for residual in residuals)


def is_skipped(state: Any) -> jax.Array:
  """Whether a transform skipped this step, bool[], on all devices of all workers; inside shard_map."""
  flags = [_compat.resharded(node.counters.skipped, PartitionSpec()) for node in reduce_states(state)]
  return mark_total(jnp.any(jnp.array([flag.reshape(-1)[0] for flag in flags])), None)


def join_groups(states: Sequence[State], alone: bool) -> State:
  """The state of a transform from those of its groups: that of the only one if `alone`, else tuples of their parts."""
  if not states:
    return State((), (), ())
  return states[0] if alone else State(*map(tuple, zip(*states, strict=True)))


def split_groups(carried: State) -> list[State]:
  """The state of each group of a transform."""
  if not isinstance(carried.residual, tuple):
    return [carried]
  return [State(*parts) for parts in zip(*carried, strict=True)]
