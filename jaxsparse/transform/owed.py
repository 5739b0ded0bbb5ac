"""What workers owe, their residuals, carried over to another number of workers or to other groups of leaves.

An update is `total / P`, so what P workers owe is the mean of their residuals r. Each of P′ workers takes over the
residuals of the workers that are congruent to it modulo P′, none if it is new:

    r′_w = P′/P Σ_{v ≡ w mod P′} r_v        hence        Σ_w r′_w / P′ = Σ_v r_v / P

Sums are of float64 on the host, rounded once: an entry of r′ is wrong by at most 2⁻²⁴ of its magnitude. A process reads
the residuals of its own workers only, unless other processes hold them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse import flatten
from jaxsparse.transform.groups import Group
from jaxsparse.transform.state import ReduceState, devices_of, joined, split
from jaxsparse.transform.update import at_devices
from jaxsparse.types import Comm, Counters


class Residual(NamedTuple):
  """Where a state holds the residual of a leaf.

  Attributes:
    row: of the group of the leaf, at one device: f32[m] by the number of the device, `worker * S + device`.
    rows: the numbers of the devices whose residuals are there.
    start: the first entry of the leaf in a row.
    size: the number of its entries.
    lies: axes of the devices inside a worker, and the spec of the leaf along them; None for one device.
  """

  row: Callable[[int], np.ndarray]
  rows: range
  start: int
  size: int
  lies: Any

  def at(self, number: int) -> np.ndarray:
    """The residual of the leaf at a device."""
    return self.row(number)[self.start : self.start + self.size]

  def carried_over(self, number: int, devices: int, before: int, after: int) -> np.ndarray:
    """r′ of device `number` of all: f32[size], from those of `before` workers, for `after` workers."""
    worker, device = divmod(number, devices)
    owed = [self.at(old * devices + device).astype(np.float64) for old in range(worker, before, after)]
    if not owed:
      return np.zeros(self.size, np.float32)
    return (functools.reduce(np.add, owed) * after / before).astype(np.float32)


def residuals_of(nodes: Sequence[ReduceState], rank: int) -> dict[str, Residual]:
  """The residual of each leaf that has one, by the name of the leaf.

  Args:
    nodes: the states of transforms, of all workers or, under MPI, of one.
    rank: number of this worker, where `nodes` are those of one.
  """
  found = {}
  for node in nodes:
    rows = _rows_of(node, rank)
    for group, residual in _parts(node):
      if residual is not None:
        row = functools.partial(_row, whole(residual), rows)
        start = 0
        for leaf, size in _leaves(node, group):
          found[_method(node).names[leaf]] = Residual(row, rows, start, size, _lies(node, leaf))
          start += size
  return found


def homes_of(node: ReduceState) -> dict[str, Any]:
  """How each leaf that has a residual lies on the devices inside a worker, by the name of the leaf."""
  leaves = [leaf for group, residual in _parts(node) if residual is not None for leaf in group.leaves]
  return {_method(node).names[leaf]: _lies(node, leaf) for leaf in leaves}


def carried_over(
  fresh: ReduceState, residuals: dict[str, Residual], counters: Counters, before: int, after: int, rank: int
) -> ReduceState:
  """`fresh` with the residuals and the totals of other states; what else its collectives remember starts anew.

  Args:
    fresh: the state before the first step, of `after` workers or, under MPI, of one of them.
    residuals: of `before` workers, by leaf.
    counters: of the same workers.
    before: number of workers P.
    after: number of workers P′.
    rank: number of this worker, where `fresh` is the state of one.
  """
  devices, rows, parts = devices_of(fresh), _rows_of(fresh, rank), []

  def row(group: Group, number: int) -> np.ndarray:
    owed = [(residuals.get(_method(fresh).names[leaf]), size) for leaf, size in _leaves(fresh, group)]
    zeros = lambda size: np.zeros(size, np.float32)
    return np.concatenate(
      [one.carried_over(number, devices, before, after) if one else zeros(size) for one, size in owed]
    )

  for part, (group, residual) in zip(split(fresh.carried), _parts(fresh), strict=True):
    if residual is not None:
      part = part._replace(residual=_from_rows(residual, rows, functools.partial(row, group)))
    parts.append(part)
  carried = joined(parts, _method(fresh).alone)
  device = lambda totals, number: totals[number % devices, None]
  totals = {
    name: _from_rows(getattr(fresh.counters, name), rows, functools.partial(device, value))
    for name, value in _totals(counters, devices).items()
  }
  return fresh._replace(carried=carried, counters=fresh.counters._replace(**totals))


def delivered(
  comm: Comm, leaves: list[jax.Array], node: ReduceState, moved: list[jax.Array] | None = None
) -> tuple[list[jax.Array], ReduceState]:
  """The mean over the workers of what `taken` takes: one all-reduce at each device of a worker."""

  def mean(owing: list[jax.Array]) -> list[jax.Array]:
    if not owing:
      return owing
    flat, restore = flatten.flatten(owing)
    return restore(comm.all_reduce(flat) / comm.size)

  return taken(leaves, node, moved, mean)


def taken(
  leaves: list[jax.Array],
  node: ReduceState,
  moved: list[jax.Array] | None = None,
  mean: Callable[[list[jax.Array]], list[jax.Array]] = lambda owing: owing,
) -> tuple[list[jax.Array], ReduceState]:
  """The residual of a worker, in the shapes and dtypes of the leaves, and the state without it.

  What the dtype of a leaf rounds off, or cannot hold, stays in the residual.

  Args:
    leaves: of the parameters.
    node: the state of one worker.
    moved: θ − θ_w of local steps, f32 like each leaf, to add to the residual; the sum is f32.
    mean: maps the float32 leaves of a device to their means over the workers.
  """

  def step(
    groups: Sequence[Group], leaves: list[jax.Array], state: ReduceState, inside: tuple[str, ...] = ()
  ) -> tuple[list[jax.Array], ReduceState]:
    del inside
    parts, leaves = split(state.carried), list(leaves)
    owing: dict[int, jax.Array] = {}
    for group, part in zip(groups, parts, strict=True):
      own = [leaves[leaf].astype(jnp.float32) for leaf in group.leaves]
      if part.residual is not None:  # leaf by leaf: to add flat vectors would take two passes more
        owed = flatten.parts(part.residual, flatten.sizes(own))
        own = [mine + rest.reshape(mine.shape) for mine, rest in zip(own, owed, strict=True)]
      if part.residual is not None or moved is not None:
        owing |= dict(zip(group.leaves, own, strict=True))
    owing = dict(zip(owing, mean(list(owing.values())), strict=True))
    sent = {leaf: flatten.representable(exact, leaves[leaf].dtype) for leaf, exact in owing.items()}
    for leaf, new in sent.items():
      leaves[leaf] = new.astype(leaves[leaf].dtype)
    left = lambda leaf: jnp.zeros_like(sent[leaf]) if sent[leaf] is owing[leaf] else owing[leaf] - sent[leaf]
    rest = [
      part
      if part.residual is None
      else part._replace(residual=flatten.flatten([left(leaf) for leaf in group.leaves])[0])
      for group, part in zip(groups, parts, strict=True)
    ]
    return leaves, state._replace(carried=joined(rest, _method(node).alone))

  nothing = [jnp.zeros_like(leaf) for leaf in leaves]
  return at_devices(step, _method(node).groups, nothing if moved is None else list(moved), node)


def whole(x: Any) -> Any:
  """An array of which this process holds all; every process must call for an array that others hold in part."""
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return x
  if not x.is_fully_replicated:
    x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))  # type: ignore[attr-defined]
  return x.addressable_data(0)


def _totals(counters: Counters, devices: int) -> dict[str, np.ndarray]:
  """The totals [S] of the devices of the worker that has sent most."""
  names = ("skipped_steps", "total_words", "total_wraps")
  rows = {name: np.asarray(whole(getattr(counters, name))).reshape(-1, devices) for name in names}
  words = rows["total_wraps"].astype(np.float64) * 2.0**32 + rows["total_words"]
  most = int(np.argmax(words.sum(axis=1)))
  return {name: values[most] for name, values in rows.items()}


def _method(node: ReduceState) -> Any:
  return node.layout.method


def _parts(node: ReduceState) -> list[tuple[Group, Any]]:
  """Each group of the transform with its residual."""
  return [(group, one.residual) for group, one in zip(_method(node).groups, split(node.carried), strict=True)]


def _leaves(node: ReduceState, group: Group) -> list[tuple[int, int]]:
  """The leaves of a group, with their entries at one device."""
  sizes = node.layout.shards.sizes if node.layout.shards else _method(node).sizes
  return [(leaf, sizes[leaf]) for leaf in group.leaves]


def _lies(node: ReduceState, leaf: int) -> Any:
  shards = node.layout.shards
  return (shards.axes, shards.specs[leaf]) if shards else None


def _rows_of(node: ReduceState, rank: int) -> range:
  """The numbers of the devices whose arrays a state holds: those of all workers, or that of one under MPI."""
  rows = node.counters.skipped.size
  alone = rows == 1 and int(np.max(whole(node.layout.workers))) > 1
  return range(rank, rank + 1) if alone else range(rows)


def _row(x: Any, rows: range, number: int) -> np.ndarray:
  """Row `number` of an array with so many rows along its leading axes, flat."""
  each, number = x.size // len(rows), number - rows.start
  for shard in x.addressable_shards if isinstance(x, jax.Array) and x.ndim == 1 else ():
    low, high, _ = shard.index[0].indices(x.size)
    if low <= number * each and (number + 1) * each <= high:
      return np.asarray(shard.data)[number * each - low : (number + 1) * each - low]
  return np.asarray(x).reshape(len(rows), each)[number]


def _from_rows(like: jax.Array, rows: range, row: Callable[[int], np.ndarray]) -> jax.Array:
  """The array with the shape and the sharding of another one, made of so many rows along its leading axes."""
  each = like.size // len(rows)

  def part(index: Any) -> np.ndarray:
    low, high, _ = index[0].indices(like.shape[0]) if like.ndim == 1 else (0, like.size, 1)
    found = np.concatenate([row(rows.start + number) for number in range(low // each, high // each)])
    return found if like.ndim == 1 else found.reshape(like.shape)[index]

  return jax.make_array_from_callback(like.shape, like.sharding, part)
