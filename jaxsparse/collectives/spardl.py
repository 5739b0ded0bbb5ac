"""SparDL: Spar-Reduce-Scatter, Bruck all-gather, global residuals (Zhao et al., "SparDL", §3, Algorithm 1).

Blocks of the gradient are reduced while they travel, and each is cut to its L = ⌈k/P⌉ largest entries just before it
leaves, so that messages never grow. Six workers, the blocks that worker 0 sends in each round, L entries each:

    reduce-scatter   stride 4   blocks 4 5      ->  worker 4   which adds them to its own
                     stride 2   blocks 2 3      ->  worker 2
                     stride 1   block  1        ->  worker 1
                     worker 0 now holds the sum of block 0
    all-gather       stride 1   block  0        ->  worker 5
                     stride 2   blocks 0 1      ->  worker 4
                     stride 4   blocks 0 1      ->  worker 2   (2 of 6 were missing)

2⌈log₂P⌉ messages and 4 L (P − 1) words for any P: no round knows whether P is a power of two.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxsparse import routes
from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather
from jaxsparse.select import top_k
from jaxsparse.transform import transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State


def spardl_transform(
  axis: AxisName | Comm,
  *,
  density: float | None = None,
  k: int | None = None,
  teams: Literal[1] = 1,
  residual: Literal["global", "partial", "local"] = "global",
) -> optax.GradientTransformation:
  """Averages gradients over the workers, k of n entries a step, and keeps the rest for later steps (SparDL, §3).

  With `home = gradient + residual` at each of P workers, the update is `total / P`, where `total` estimates the sum of
  all `home` at k indices I, and the new residuals hold exactly what it leaves out:

      total + Σ_w residual_w  =  Σ_w home_w      (Law C)

  It must be the **first** transformation of its chain: it takes the local, un-averaged gradients of one worker, inside
  `jax.shard_map` over `axis` with `check_vma=False` (`js.make_train_step` does it), and what follows sees the average.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to deliver instead, 1 … n. It is rounded up to ⌈k/P⌉ for each of P blocks.
    teams: one team of all workers, so far.
    residual: what to keep of the entries that are not delivered. "global" keeps all. "partial" (without what later
      workers drop at I) and "local" (only what this worker did not send) are the paper's ablation (§4.1.3) and lose
      gradient mass.

  Returns:
    An `optax.GradientTransformation`. Its state holds the residual, f32[n] a worker, whatever the gradients' dtype.

  Raises:
    ValueError: for a density, k or residual outside their choices, outside shard_map, or with a state of other sizes.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.25), optax.sgd(0.1))
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> params = {"w": jnp.zeros((4, 4))}
    >>> state = js.init(tx, params, mesh, axis="workers")
    >>> step = js.make_train_step(lambda p, batch: jnp.sum((p["w"][None] - batch) ** 2), tx, mesh, axis="workers")
    >>> params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4, 4)))
    >>> float(metrics.loss)
    16.0
  """
  return transform_of(SparDL(density=density, k=k, teams=teams, residual=residual), axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparDL(SparseCollective):
  """SparDL with one team; see `spardl_transform` for the fields."""

  teams: Literal[1] = 1
  residual: Literal["global", "partial", "local"] = "global"

  @property
  def conserves(self) -> bool:
    return self.residual == "global"

  def share(self, n: int, size: int) -> int:
    """L, the entries of each of `size` blocks that travel."""
    return -(-self.entries(n) // size)

  def init(self, n: int, size: int) -> State:
    self.share(n, size)  # raises where k does not fit n
    return State(residual=jnp.zeros(n, jnp.float32))

  def cost(self, n: int, size: int) -> Cost:
    return Cost(messages=2 * len(routes.strides(size)), words=4 * self.share(n, size) * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, size = grads.size, comm.size
    length = -(-n // size)
    home = grads + state.residual
    blocks = (comm.rank + jnp.arange(size, dtype=jnp.int32)) % size
    held = jnp.pad(home, (0, size * length - n)).reshape(size, length)[blocks]

    dropped, sent = spar_reduce_scatter(comm, held, self.share(n, size))
    kept = all_gather(comm, Sparse(sent.indices[0], sent.values[0]))
    # From a place within a block to one of n; padding lands beyond n, where a scatter drops it.
    place = lambda sparse: sparse.indices + length * blocks[:, None]
    total = _put(jnp.zeros_like(home), place(kept), kept.values)
    residual = {
      "global": lambda: _put(home, place(kept), jnp.take_along_axis(dropped, kept.indices, axis=1)),
      "partial": lambda: _put(home, place(kept), 0.0),
      "local": lambda: _put(home, place(sent), 0.0),
    }[self.residual]()

    words = self.cost(n, size).words
    delivered = jnp.count_nonzero(kept.values) / n
    return Reduced(total, state._replace(residual=residual), Counters(words, words, delivered))


def spar_reduce_scatter(comm: Comm, held: jax.Array, share: int) -> tuple[jax.Array, Sparse]:
  """Sums P blocks over P workers, `share` entries of each, cut just before they leave (§3.1).

  In the home frame row b is block (rank + b) mod P. The bag of a stride s is then rows s … 2s − 1, clipped at P, and
  lands on the receiver's rows 0 … s − 1, for every P (the paper's Theorem 3.1 as a slice).

  Args:
    comm: the workers.
    held: f32[P, m], the blocks of this worker in its home frame.
    share: entries of each block that travel, at most m.

  Returns:
    (dropped, sent): f32[P, m], what was cut from each row at this worker, received parts included, and the `Sparse`
    [P, share] it selected in each row. Row 0 of `sent` is this worker's block of the sum; the others have left.
  """
  bags = []
  for stride in routes.strides(comm.size):
    held, bag = _take(held, stride, min(2 * stride, comm.size), share)
    got = comm.shift(bag, stride)
    rows = jnp.arange(got.indices.shape[0], dtype=jnp.int32)[:, None]
    held = held.at[rows, got.indices].add(got.values, unique_indices=True)
    bags.append(bag)
  dropped, own = _take(held, 0, 1, share)
  return dropped, jax.tree.map(lambda *rows: jnp.concatenate(rows), own, *reversed(bags))


def _take(held: jax.Array, first: int, last: int, share: int) -> tuple[jax.Array, Sparse]:
  """Moves the `share` largest entries of each of rows first … last − 1 out of `held`."""
  bag = top_k(held[first:last], share)
  rows = jnp.arange(first, last, dtype=jnp.int32)[:, None]
  return held.at[rows, bag.indices].set(0.0, unique_indices=True), bag


def _put(x: jax.Array, places: jax.Array, values: jax.Array | float) -> jax.Array:
  """Returns x with `values` at `places`, which are unique; those beyond its end are dropped."""
  return x.at[places].set(values, mode="drop", unique_indices=True)
