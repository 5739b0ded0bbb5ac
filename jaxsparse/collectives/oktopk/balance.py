"""Who owns which region in Ok-Topk, and how owners with far more entries than the mean hand some to others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.comm import all_gather, exchange
from jaxsparse.select import threshold
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.sparse import bitset, saturating
from jaxsparse.sparse.capacities import climb, rungs
from jaxsparse.types import Comm, Sparse

_TRIGGER = 4  # balance where the fullest owner holds more than this many times the mean (§5.3)


class Sizes(NamedTuple):
  """How many entries the messages of a step hold at most.

  Attributes:
    even: L = ⌈k/P⌉, the equal share of a region.
    most: in a message of the split.
    direct: in a block of the all-gather, where nothing was balanced.
    surplus: in a message that balances; a block of the all-gather then holds `even`.
  """

  even: int
  most: int
  direct: int
  surplus: int


def even_bounds(n: int, size: int) -> jax.Array:
  """The P + 1 bounds of P regions of equal length, to within one entry.

  Example:
    >>> even_bounds(10, 4)
    Array([ 0,  2,  5,  7, 10], dtype=int32)
  """
  return jnp.array([n * region // size for region in range(size + 1)], jnp.int32)


def consensus_bounds(comm: Comm, chosen: jax.Array, n: int) -> jax.Array:
  """Regions that hold equally many selected entries, i32[P + 1]: the mean of what each worker would choose (§3.1.1).

  A worker that selected fewer than P entries proposes regions of equal length.

  Args:
    comm: at least two workers.
    chosen: the packed set of the entries that this worker selected.
    n: length of the gradient.
  """
  size, selected = comm.size, bitset.count(chosen)
  cut = jnp.arange(1, size, dtype=jnp.int32)
  ranks = cut * (selected // size) + cut * (selected % size) // size  # cut · selected / P without overflow
  proposal = threshold.of_ranks(chosen, ranks)
  proposal = jnp.where(selected < size, even_bounds(n, size)[1:-1], proposal)
  edge = lambda value: jnp.full(1, value, jnp.int32)
  return jnp.concatenate([edge(0), floor_mean(comm, proposal), edge(n)])


def floor_mean(comm: Comm, x: jax.Array) -> jax.Array:
  """⌊Σ_w x_w / P⌋ of i32 arrays, whose sum may be beyond int32."""
  quotient, rest = comm.all_reduce(jnp.stack([x // comm.size, x % comm.size]))
  return quotient + rest // comm.size


def imbalance(owned: jax.Array) -> jax.Array:
  """The largest over the mean, f32[]; 1 where all are 0.

  Example:
    >>> imbalance(jnp.array([1, 2, 9]))
    Array(2.25, dtype=float32)
  """
  counts = owned.astype(jnp.float32)
  return jnp.where(counts.max() > 0, counts.max() / jnp.maximum(counts.mean(), 1e-9), 1.0)


def balance_and_gather(
  comm: Comm, mine: Sparse, owned: jax.Array, sizes: Sizes, n: int
) -> tuple[Sparse, jax.Array, jax.Array]:
  """What the owners keep, on every worker: (entries [P · direct], imbalance of the blocks, words).

  Args:
    comm: the workers.
    mine: entries that this worker keeps.
    owned: i32[P], how many each worker keeps.
    sizes: of messages.
    n: length of the gradient.
  """
  crowded = (imbalance(owned) > _TRIGGER) | (owned.max() > sizes.direct)

  def gather(block: Sparse) -> tuple[Sparse, jax.Array]:
    """The blocks of all workers in rows of `direct` slots, and the words that took."""
    rows = sparse.widened(all_gather(comm, block), sizes.direct, n)
    return jax.tree.map(jnp.ravel, rows), saturating.times(block.indices.size, 2 * (comm.size - 1))

  def direct() -> tuple[Sparse, jax.Array, jax.Array]:
    capacities = rungs(-(-sizes.even // 2), sizes.direct, count=4)
    most = sparse.compressed(mine, mine.indices < n, sizes.direct, n)
    kept, words = climb(capacities, owned.max(), lambda c: gather(sparse.narrowed(most, c)))
    return kept, imbalance(owned), words

  def balanced() -> tuple[Sparse, jax.Array, jax.Array]:
    block = balance(comm, mine, owned, sizes.even, sizes.surplus, n)
    kept, words = gather(block)
    held = jnp.sum((kept.indices < n).reshape(comm.size, -1), axis=1, dtype=jnp.int32)
    return kept, imbalance(held), saturating.total(words, 2 * sizes.surplus * (comm.size - 1))

  if comm.size == 1:
    return direct()
  return jax.lax.cond(crowded, balanced, direct)


def balance(comm: Comm, mine: Sparse, owned: jax.Array, even: int, surplus: int, n: int) -> Sparse:
  """Moves entries from workers with more than an equal share to those with less, point to point (§3.1.2).

  All surplus entries of all workers stand in one line, by rank; all free places in another, the first of each worker
  before the second of any, so that no two workers have much to send to each other. Each entry goes to the place of its
  number: everyone knows from `owned` alone who sends what to whom.

  Args:
    comm: the workers.
    mine: entries of this worker.
    owned: i32[P], how many each worker has.
    even: the largest equal share.
    surplus: slots of a message.
    n: length of the gradient.

  Returns:
    [even] entries; what finds no room is in none of them.
  """
  share = jnp.minimum(-(-jnp.sum(owned, dtype=jnp.int32) // comm.size), even)
  above, below = jnp.maximum(owned - share, 0), jnp.maximum(share - owned, 0)
  line = _by_magnitude(mine, n)
  ordinal = jnp.arange(line.indices.size, dtype=jnp.int32) - share
  place = jnp.cumsum(above, dtype=jnp.int32)[comm.rank] - above[comm.rank] + ordinal
  free = jnp.arange(even, dtype=jnp.int32)[:, None] < below[None]
  found = jnp.searchsorted(jnp.cumsum(free.ravel(), dtype=jnp.int32), place + 1).astype(jnp.int32)
  moves = (ordinal >= 0) & (line.indices < n) & (found < free.size)
  away = sparse.split(line, jnp.where(moves, found % comm.size, comm.size), comm.size, surplus, n)
  came = exchange(comm, away)
  stays = sparse.where(ordinal < 0, line, n)
  here = jax.tree.map(lambda a, b: jnp.concatenate([a, b.reshape(-1)]), stays, came)
  return top_k_of_entries(here, even, even, n)[0]


def _by_magnitude(entries: Sparse, end: int) -> Sparse:
  """[c] entries, the largest magnitude first, empty slots last."""
  _, order = jax.lax.top_k(jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0), entries.indices.size)
  return jax.tree.map(lambda x: x[order], entries)
