"""Residuals of all workers on the host, carried over to another number of workers or to other groups of leaves.

An update is `total / P`, so what P workers owe is the mean of their residuals r. Each of P′ workers takes over the
residuals of the workers that are congruent to it modulo P′, none if it is new:

    r′_w = P′/P Σ_{v ≡ w mod P′} r_v        hence        Σ_w r′_w / P′ = Σ_v r_v / P

Sums are of float64, rounded once: an entry of r′ is wrong by at most 2⁻²⁴ of its magnitude. A process reads the
residuals of its own workers only, unless other processes hold them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.flatten import leaf_shapes
from jaxsparse.transform.groups import Group
from jaxsparse.transform.state import ReduceState, devices_of, join_groups, split_groups
from jaxsparse.types import Counters, State


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

  def read(self, device: int) -> np.ndarray:
    """The residual of the leaf at a device."""
    return self.row(device)[self.start : self.start + self.size]

  def carry_over(self, number: int, devices: int, before: int, after: int) -> np.ndarray:
    """r′ of device `number` of all: f32[size], from those of `before` workers, for `after` workers."""
    worker, device = divmod(number, devices)
    owed = [self.read(old * devices + device).astype(np.float64) for old in range(worker, before, after)]
    total = functools.reduce(np.add, owed) if owed else np.zeros(self.size)  # no sum with 0: -0 stays -0
    return (total * after / before).astype(np.float32)


def residuals_of(nodes: Sequence[ReduceState], params: optax.Params, rank: int) -> list[Residual | None]:
  """The residual of each leaf of the parameters; None for a leaf that has none.

  Args:
    nodes: the states of transforms, of all workers or, under MPI, of one.
    params: the parameters.
    rank: number of this worker, where `nodes` are those of one.
  """
  found: list[Residual | None] = [None] * len(jax.tree.leaves(params))
  for node in nodes:
    rows = _rows_of(node, rank)
    for group, part in _groups(node):
      if part.residual is not None:
        row, start = functools.partial(_row, gather(part.residual), rows), 0
        for number, size, lies in _leaves(node, group, params):
          found[number] = Residual(row, rows, start, size, lies)
          start += size
  return found


def homes_of(nodes: Sequence[ReduceState], params: optax.Params) -> dict[int, Any]:
  """How each leaf of the parameters that has a residual lies on the devices inside a worker, by its number."""
  parts = [(node, group) for node in nodes for group, part in _groups(node) if part.residual is not None]
  return {number: lies for node, group in parts for number, _, lies in _leaves(node, group, params)}


def carry_over(
  fresh: ReduceState,
  params: optax.Params,
  residuals: Sequence[Residual | None],
  counters: Counters,
  before: int,
  after: int,
  rank: int,
) -> ReduceState:
  """`fresh` with the residuals and the totals of other states; what else its collectives remember starts anew.

  Args:
    fresh: the state before the first step, of `after` workers or, under MPI, of one of them.
    params: the parameters.
    residuals: of `before` workers, by leaf.
    counters: of the same workers.
    before: number of workers P.
    after: number of workers P′.
    rank: number of this worker, where `fresh` is the state of one.
  """
  devices, rows, parts = devices_of(fresh), _rows_of(fresh, rank), []

  def row(owed: Sequence[tuple[Residual | None, int]], device: int) -> np.ndarray:
    new = [r.carry_over(device, devices, before, after) if r else np.zeros(size, np.float32) for r, size in owed]
    return np.concatenate(new)

  def total(values: np.ndarray, device: int) -> np.ndarray:
    return values[device % devices, None]

  for group, part in _groups(fresh):
    if part.residual is not None:
      owed = [(residuals[number], size) for number, size, _ in _leaves(fresh, group, params)]
      part = part._replace(residual=_from_rows(part.residual, rows, functools.partial(row, owed)))
    parts.append(part)
  for name, values in _totals(counters, devices).items():
    carried = _from_rows(getattr(fresh.counters, name), rows, functools.partial(total, values))
    fresh = fresh._replace(counters=fresh.counters._replace(**{name: carried}))
  method = fresh.layout.method
  assert method is not None
  return fresh._replace(carried=join_groups(parts, method.alone))


def gather(x: Any) -> Any:
  """An array of which this process holds all; every process must call for an array that others hold in part."""
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return x
  if not x.is_fully_replicated:
    x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))  # type: ignore[attr-defined]
  return x.addressable_data(0)


def _totals(counters: Counters, devices: int) -> dict[str, np.ndarray]:
  """The totals [S] of the devices of the worker that has sent most."""
  names = ("skipped_steps", "total_words", "total_wraps")
  rows = {name: np.asarray(gather(getattr(counters, name))).reshape(-1, devices) for name in names}
  words = rows["total_wraps"].astype(np.float64) * 2.0**32 + rows["total_words"]
  most = int(np.argmax(words.sum(axis=1)))
  return {name: values[most] for name, values in rows.items()}


def _groups(node: ReduceState) -> Iterator[tuple[Group, State]]:
  """Each group of the transform with its state."""
  assert node.layout.method is not None
  return zip(node.layout.method.groups, split_groups(node.carried), strict=True)


def _leaves(node: ReduceState, group: Group, params: optax.Params) -> Iterator[tuple[int, int, Any]]:
  """Of each leaf of a group its number in the parameters, its entries at a device, and how it lies."""
  method, shards = node.layout.method, node.layout.shards
  assert method is not None
  numbers, sizes = _leaf_numbers(method.names, params), shards.sizes if shards else list(map(math.prod, method.shapes))
  for leaf in group.leaves:
    yield numbers[leaf], sizes[leaf], (shards.axes, shards.specs[leaf]) if shards else None


def _rows_of(node: ReduceState, rank: int) -> range:
  """The numbers of the devices whose arrays a state holds: those of all workers, or that of one under MPI."""
  rows = node.counters.skipped.size
  alone = rows == 1 and int(np.max(gather(node.layout.workers))) > 1
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


def _leaf_numbers(names: Sequence[str], tree: Any) -> list[int]:
  """The numbers of the leaves of these names: a transform may cover a part of a pytree, as under `optax.masked`.

  Example:
    >>> _leaf_numbers(["['a']", "['e']"], {"a": 0.0, "b": {"c": 0.0, "d": 0.0}, "e": 0.0})
    [0, 3]
  """
  numbers = {name: number for number, name in enumerate(leaf_shapes(tree))}
  return [numbers[name] for name in names]
