"""Residuals of all workers on the host, carried over to another number of workers or to other groups of leaves.

An update is `total / P`, so what P workers owe is the mean of their residuals r. Each
of P′ workers takes over the residuals of the workers that are congruent to it modulo
P′, none if it is new:

    r′_w = P′/P Σ_{v ≡ w mod P′} r_v        hence        Σ_w r′_w / P′ = Σ_v r_v / P

Sums are of float64, rounded once: an entry of r′ is wrong by at most 2⁻²⁴ of its
magnitude.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse.train.engine import Engine, put_global
from jaxsparse.transform.state import ReduceState
from jaxsparse.types import ArrayTree, Counters


class Residual(NamedTuple):
  """The residual of a leaf.

  Attributes:
    rows: f32[devices, entries] with row `worker * S + device` for each device of each
      worker, or under MPI with the only row of this worker.
    workers: number of workers P.
    placement: axes of the devices inside a worker, and the spec of the leaf along them;
      None for one device.
  """

  rows: np.ndarray
  workers: int = 1
  placement: Any = None

  def carry_over(self, index: int, devices: int, workers: int) -> np.ndarray:
    """The residual r′ of the leaf at one device of a new worker, f32[entries].

    Args:
      index: number of the device among all devices of the new workers.
      devices: number of devices of a worker, S.
      workers: number of new workers P′.
    """
    worker, device = divmod(index, devices)
    # Old workers w, w + P′, … go to worker w, each device's piece to the same device.
    indices = [old * devices + device for old in range(worker, self.workers, workers)]
    # `% held` matters for a single row alone, which stands for all: that of a rank of
    # MPI, or the zeros of a leaf without a residual.
    held = len(self.rows)
    owed = [self.rows[row % held].astype(np.float64) for row in indices]
    # Zeros for a new worker that takes over no residual. The sum does not start with
    # them: 0 + -0 is 0, and bits are kept.
    zeros = np.zeros(self.rows.shape[1])
    total = functools.reduce(np.add, owed) if owed else zeros
    # Σ r / P is kept, and the new workers divide by P′.
    return (total * workers / self.workers).astype(np.float32)


def residuals_of(states: Sequence[ReduceState], workers: int) -> dict[str, Residual]:
  """The residual of each leaf that has one, by its name.

  Args:
    states: of all workers, or of this rank of MPI.
    workers: number of workers P.
  """
  residuals: dict[str, Residual] = {}
  for state in states:
    for group_state, homes in zip(state.groups, homes_of(state), strict=True):
      if homes:
        # One row for each device whose residual is here, as `skipped` has one entry; a
        # row holds all leaves of the group, one after the other.
        rows = np.asarray(gather(group_state.residual))
        rows = rows.reshape(state.counters.skipped.size, -1)
        ends = np.cumsum([size for _, size, _ in homes])
        leaves = np.split(rows, ends[:-1], axis=1)
        residuals |= {
          name: Residual(leaf, workers, placement)
          for leaf, (name, _, placement) in zip(leaves, homes, strict=True)
        }
  return residuals


def carry_over(
  fresh: ReduceState,
  residuals: dict[str, Residual],
  counters: Counters,
  engine: Engine,
) -> ReduceState:
  """`fresh` with the residuals and total counters of the old workers; all else that collectives remember starts anew.

  Args:
    fresh: the state before the first step, of P′ workers or, under MPI, of one of them.
    residuals: of the P old workers, by the names of leaves.
    counters: of the old workers.
    engine: the workers of `fresh`.
  """
  devices = fresh.devices
  # Index, among the devices of all workers, of the first row here: a rank of MPI has
  # one row, its own; else there are all rows.
  first = engine.process if fresh.counters.skipped.size == 1 else 0

  def residual_of(homes: Sequence[_Home], like: jax.Array) -> jax.Array:
    # The residual of a group, placed as the fresh one, `like`. A leaf that had no
    # residual owes nothing: one row of zeros stands for all.
    leaves = [
      residuals.get(name) or Residual(np.zeros((1, size), np.float32))
      for name, size, _ in homes
    ]
    entries = sum(size for _, size, _ in homes)

    def rows(index: Any) -> np.ndarray:
      # JAX asks each process for its own slices of the array, f32[devices · entries]; a
      # slice has the entries of one or more whole devices.
      low, high, _ = index[0].indices(like.size)
      devices_held = range(first + low // entries, first + high // entries)
      return np.concatenate(
        [
          leaf.carry_over(device, devices, engine.workers)
          for device in devices_held
          for leaf in leaves
        ]
      )

    return jax.make_array_from_callback(like.shape, like.sharding, rows)

  carried = fresh.carried
  # One residual a group; `homes` is empty for a group without a residual.
  residual = tuple(
    residual_of(homes, like) if homes else like
    for homes, like in zip(homes_of(fresh), carried.residual, strict=True)
  )
  # Each new worker gets the totals of one old worker, at each of its devices.
  new = fresh.counters
  for name, row in _totals(counters, devices).items():
    like = getattr(new, name)
    tiled = np.tile(row, like.size // devices).reshape(like.shape)
    new = new._replace(**{name: put_like(like, tiled)})
  return fresh._replace(carried=carried._replace(residual=residual), counters=new)


def gather(x: Any) -> ArrayTree:
  """`x` as an array of which this process holds all; every process must call for an array that others hold in part.

  An array of numpy, or one that this process holds already, is returned as it is.
  """
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return x
  # A process reads its own shards only, so each device gets all of the array.
  if not x.is_fully_replicated:
    x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))  # type: ignore[attr-defined]
  return x.addressable_data(0)


def put_like(like: ArrayTree, x: Any) -> ArrayTree:
  """`x` with the sharding of `like`, an array or shape, if that is on a mesh; else `x` where it lies."""
  if getattr(x, "sharding", None) == like.sharding:
    return x
  return (
    put_global(gather(x), like.sharding)
    if isinstance(like.sharding, NamedSharding)
    else jnp.asarray(gather(x))
  )


def _totals(counters: Counters, devices: int) -> dict[str, np.ndarray]:
  """The totals of counters, by name, at the worker that has sent most: [S], one entry a device."""
  names = ("skipped_steps", "total_words", "total_wraps")
  rows = {
    name: np.asarray(gather(getattr(counters, name))).reshape(-1, devices)
    for name in names
  }
  # Workers may have sent different numbers of words, [P, S]: the largest stands for
  # all. `total_words` is modulo 2³², which it has passed `total_wraps` times.
  words = rows["total_wraps"].astype(np.float64) * 2.0**32 + rows["total_words"]
  busiest = np.argmax(words.sum(axis=1))
  return {name: values[busiest] for name, values in rows.items()}


# (name of a leaf, its entries at one device, how it is sharded inside a worker)
_Home = tuple[str, int, Any]


def homes_of(state: ReduceState) -> list[list[_Home]]:
  """The leaves of which the residual of each group consists, in order: (name, entries at a device, sharding).

  The sharding is (axes inside a worker, spec along them), None for workers of one
  device. The list of a group without a residual is empty.
  """
  method = state.layout.method
  shards = state.layout.shards
  # A state of `js.simulate` has no `method`; checks have refused it before.
  assert method is not None
  # Entries of each leaf at a device: of its piece, or of all of it.
  sizes = shards.sizes if shards else list(map(math.prod, method.shapes))
  home = lambda leaf: (
    method.names[leaf],
    sizes[leaf],
    (shards.axes, shards.specs[leaf]) if shards else None,
  )
  groups = zip(method.groups, state.groups, strict=True)
  return [
    [] if group_state.residual is None else list(map(home, group.leaves))
    for group, group_state in groups
  ]
