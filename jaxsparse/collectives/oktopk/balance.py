"""Regions of Ok-Topk, and balancing: owners with far more selected sums than the mean send some to others.

The owner of a region has the sums of its entries over all workers. L = ⌈k/P⌉.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.arrays import iota
from jaxsparse.collectives._messages import Writer, switch
from jaxsparse.select import threshold as by_threshold
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Sparse, saturated_sum

# balance if an owner has more than this many times the mean number of entries (§5.3)
TRIGGER = 4


class Sizes(NamedTuple):
  """The capacities of the messages of a step, in entries.

  Attributes:
    even: L = ⌈k/P⌉, of a message that balances, and of a block of the all-gather after
      balancing.
    most: of a message of the split.
    blocks: ascending, of a block of the all-gather without balancing, of which the
      smallest that is sufficient is used.
  """

  even: int
  most: int
  blocks: tuple[int, ...]

  @property
  def direct(self) -> int:
    """The largest of `blocks`."""
    return self.blocks[-1]


def even_bounds(n: int, size: int) -> jax.Array:
  """The P + 1 boundaries of P regions of equal length, to within one entry, i32[P + 1].

  Example:
    >>> even_bounds(10, 4)
    Array([ 0,  2,  5,  7, 10], dtype=int32)
  """
  bounds = [n * region // size for region in range(size + 1)]
  return jnp.array(bounds, jnp.int32)


def consensus_bounds(comm: Comm, chosen: jax.Array, n: int) -> jax.Array:
  """Boundaries of regions with about equally many selected entries, i32[P + 1] (§3.1.1).

  Each worker proposes boundaries that divide its own selected entries equally; the
  result is the mean of the proposals. A worker that selected fewer than P entries
  proposes regions of equal length.

  Args:
    comm: at least two workers.
    chosen: i32[c], the indices that this worker selected, ascending; n in empty slots,
      which are last.
    n: length of the gradient.
  """
  size = comm.size
  selected = jnp.sum(chosen < n, dtype=jnp.int32)
  cut = jnp.arange(1, size, dtype=jnp.int32)
  # Region `cut` begins at the entry of rank ⌊cut · selected / P⌋, without i32 overflow.
  ranks = cut * (selected // size) + cut * (selected % size) // size
  even = even_bounds(n, size)[1:-1]
  proposal = jnp.where(selected < size, even, chosen[ranks])
  edge = lambda value: jnp.full(1, value, jnp.int32)
  return jnp.concatenate([edge(0), floor_mean(comm, proposal), edge(n)])


def floor_mean(comm: Comm, x: jax.Array) -> jax.Array:
  """⌊Σ_w x_w / P⌋ of i32 arrays; the sum may exceed int32."""
  # x = quotient · P + rest: the sums of both fit in int32
  parts = jnp.stack([x // comm.size, x % comm.size])
  quotient, rest = comm.all_reduce(parts)
  return quotient + rest // comm.size


def imbalance(owned: jax.Array) -> jax.Array:
  """The largest number of entries over the mean, f32[]; 1 if all are 0.

  Example:
    >>> imbalance(jnp.array([1, 2, 9]))
    Array(2.25, dtype=float32)
  """
  counts = owned.astype(jnp.float32)
  most = counts.max()
  return jnp.where(most > 0, most / jnp.maximum(counts.mean(), 1e-9), 1.0)


Gathered = tuple[Sparse, list[Sparse], jax.Array, jax.Array]
"""Entries, rounding errors of this worker's messages, imbalance, words sent."""


def balance_and_gather(
  comm: Comm,
  writer: Writer,
  sums: Sparse,
  owned: jax.Array,
  sizes: Sizes,
  balances: bool,
) -> Gathered:
  """Gathers the selected sums of all owners on every worker, after balancing if an owner has far more than the mean.

  An owner has far more if it has more than 4 times the mean m, as in the paper, and
  more than the largest of `sizes.blocks` that is at most 2 L: balancing sends messages
  of L and then gathers blocks of L, so blocks of up to 2 L take no more words without
  it. The smallest entries of a block that overflows are in no result. If all owners
  have at most 4 m, blocks of 4 L deliver all entries if m ≤ L, else at least P · L, the
  most that balancing can deliver.

  Args:
    comm: the workers.
    writer: encodes and decodes messages.
    sums: the selected sums of this worker's region.
    owned: i32[P], the number of selected sums of each worker.
    sizes: the capacities of messages.
    balances: whether owners may be balanced; if not, no branch is compiled for it.

  Returns:
    (entries [P · direct], rounding errors of this worker's messages, imbalance of the
    gathered blocks f32[], words sent u32[]).
  """
  n = writer.codec.length
  block = _own_block(comm, sums, owned, sizes, n)
  gather = functools.partial(_gather, comm, writer, most=sizes.direct)
  # All branches return the same shapes. The branch without balancing has `unmoved`,
  # empty slots, in place of the rounding errors of messages that balance.
  nothing = sparse.empty((comm.size, sizes.even), n)
  unmoved = [nothing] if balances and writer.codec.rounds else []

  def direct(capacity: int) -> Gathered:
    kept, lost, words = gather(sparse.resize(block, capacity, n))
    return kept, lost + unmoved, imbalance(owned), words

  def balanced() -> Gathered:
    even, errors, balance_words = balance(comm, writer, sums, owned, sizes.even)
    kept, lost, words = gather(sparse.as_row(even))
    is_entry = (kept.indices < n).reshape(comm.size, -1)
    counts = jnp.sum(is_entry, axis=1, dtype=jnp.int32)
    return kept, lost + errors, imbalance(counts), saturated_sum(words, balance_words)

  if not balances:
    return switch(sizes.blocks, owned.max(), direct)
  return switch(sizes.blocks, _needed(owned, sizes), direct, balanced)


def _own_block(
  comm: Comm, sums: Sparse, owned: jax.Array, sizes: Sizes, n: int
) -> Sparse:
  """The selected sums of the own region as a block of the all-gather without balancing, [1, direct] entries.

  Args:
    comm: the workers.
    sums: [c] entries, the selected sums with empty slots (index n) between them.
    owned: i32[P], the number of selected sums of each worker.
    sizes: the capacities of messages; `direct` is the largest of a block.
    n: length of the gradient.

  Returns:
    All selected sums, or the `direct` largest magnitudes if they are more
    (`read_regions` cuts), in the order of their indices.
  """
  # Entries first, then the empty slots, as `read_regions` needs.
  packed = sparse.compress(sums, sums.indices < n, sums.indices.size, n)
  # one region: slots 0 … owned[rank] − 1
  region = jnp.stack([jnp.int32(0), owned[comm.rank]])
  return by_threshold.read_regions(packed, region, sizes.direct, n)


def _needed(owned: jax.Array, sizes: Sizes) -> jax.Array:
  """Entries of the fullest block, i32[], at most `sizes.direct`; `direct` + 1 if owners are to be balanced (§5.3).

  A region with more than `direct` selected sums delivers the `direct` largest ones.
  """
  most = owned.max()
  # The largest capacity with no more entries than balancing sends, which is 2 L: L to
  # balance, and L in the all-gather.
  cheap = max(capacity for capacity in sizes.blocks if capacity <= 2 * sizes.even)
  unbalanced = (imbalance(owned) > TRIGGER) & (most > cheap)
  # Beyond all capacities `switch` takes its last branch, which balances.
  return jnp.where(unbalanced, sizes.direct + 1, jnp.minimum(most, sizes.direct))


def _gather(
  comm: Comm, writer: Writer, block: Sparse, most: int
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """The blocks of all workers in rows of `most` slots, concatenated, [P · most]; rounding errors; the words sent.

  `block` is [1, c] entries of this worker, with c at most `most`.
  """
  # message 1 of the step, after the split
  rows, lost, words = writer.gather_rows(comm, block, 1, most)
  resized = sparse.resize(rows, most, writer.codec.length)
  return jax.tree.map(jnp.ravel, resized), lost, words


def balance(
  comm: Comm, writer: Writer, entries: Sparse, owned: jax.Array, even: int
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """Moves entries from workers with more than the mean number to those with fewer, point to point (§3.1.2).

  The surplus of a worker are its smallest magnitudes beyond the mean number. Surplus
  entries are numbered by rank. Free slots are numbered round-robin: the first one of
  each worker, then the second of each, so that no pair of workers exchanges many
  entries. Surplus entry i moves to free slot i. Every worker computes these numbers
  from `owned` alone. A worker has at most `even` free slots, so no message is longer.

  Args:
    comm: the workers.
    writer: encodes and decodes messages.
    entries: [c] entries of this worker, with empty slots anywhere.
    owned: i32[P], the number of entries of each worker.
    even: the largest number of entries of a worker after balancing.

  Returns:
    [even] entries of this worker, the rounding errors [P, even] of those it moved, and
    the words sent; entries without a free slot are in no result.
  """
  n = writer.codec.length
  all_owned = jnp.sum(owned, dtype=jnp.int32)
  mean = jnp.minimum(-(-all_owned // comm.size), even)
  magnitudes = jnp.where(entries.indices < n, jnp.abs(entries.values), -1.0)
  _, order = jax.lax.top_k(magnitudes, entries.indices.size)
  # the largest magnitude first, empty slots last
  ordered = Sparse(entries.indices[order], entries.values[order])
  # numbers 0, 1, … of this worker's surplus entries; negative for entries that stay
  beyond = iota(ordered.indices.size) - mean
  has_slot, worker, column = _free_slots(comm, owned, mean, even, beyond)
  # The smallest magnitudes move: if slots run out, they are what is lost.
  moves = (beyond >= 0) & (ordered.indices < n) & has_slot
  slots = comm.size * even
  # Slot `column` of the message to `worker`; `slots`, which `put` drops, if it stays.
  slot = jnp.where(moves, worker * even + column, slots)
  put_moved = lambda row, new: sparse.put(row, slot, new).reshape(comm.size, even)
  moved = jax.tree.map(put_moved, sparse.empty((slots,), n), ordered)
  # Message number 2, which seeds the noise of rounding: the split has 0, the all-gather
  # 1.
  received, lost, words = writer.exchange_rows(comm, moved, 2, even)
  stays = sparse.where(beyond < 0, ordered, n)
  together = sparse.concatenate([stays, jax.tree.map(jnp.ravel, received)])
  return sparse.compress(together, together.indices < n, even, n), lost, words


def _free_slots(
  comm: Comm, owned: jax.Array, mean: jax.Array, even: int, surplus: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Where surplus entries of this worker go.

  Args:
    comm: the workers.
    owned: i32[P], the number of entries of each worker.
    mean: i32[], the number of entries of a worker after balancing.
    even: the largest value of `mean`, known when compiling.
    surplus: i32[c], numbers of the surplus entries of this worker, from 0; the results
      for negative ones are not used.

  Returns:
    (has_slot, worker, column), [c] each: whether there is a free slot for the entry,
    the worker that has the slot, and the entry's slot in the message to that worker.
  """
  # surplus entries and free slots of each worker
  above = jnp.maximum(owned - mean, 0)
  below = jnp.maximum(mean - owned, 0)
  # the surplus entries of lower ranks
  start = (jnp.cumsum(above, dtype=jnp.int32) - above)[comm.rank]
  # round-robin: row t is the t-th free slot of each worker
  free = iota(even)[:, None] < below[None]
  slots = bitset.nonzero(bitset.pack(free.ravel()), free.size)
  slot_of = lambda entry: slots[jnp.clip(start + entry, 0, free.size - 1)]
  # Slot t · P + w is the t-th free slot of worker w, in turn t. Surplus entry 0 of this
  # rank moves to slot `first`.
  first = slot_of(0)
  slot = slot_of(surplus)
  turn = slot // comm.size
  worker = slot % comm.size
  # This rank fills slots from `first` on without a gap. So workers from `first % P` on
  # get its first entry in the turn of `first`, lower ones in the next turn; `column`
  # counts turns from there.
  is_lower = (worker < first % comm.size).astype(jnp.int32)
  column = turn - (first // comm.size + is_lower)
  has_slot = start + surplus < jnp.sum(below, dtype=jnp.int32)
  return has_slot, worker, column
