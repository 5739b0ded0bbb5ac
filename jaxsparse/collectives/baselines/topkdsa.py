"""TopkDSA: split all-reduce of the k largest entries of each worker (Renggli et al., "SparCML", §5.3.2, DSAR).

The gradient is divided into P equal regions, each owned by one worker. Workers send
their entries to the owners, which add them up. The sums are then gathered, as entries
while these take fewer words than the dense region. The messages that worker 0 of six
sends:

    split        its entries of region 1 -> worker 1, of region 2 -> worker 2, … of region 5 -> worker 5
    all-gather   stride 1, 2, 4: the sums of regions, as in SparDL

P − 1 + ⌈log₂P⌉ messages, our count; the published formula is P + 2 log₂P (SparDL, Table
1). On average a worker sends ⌈k/P⌉ entries of a region; the capacity grows towards k
where entries crowd into one region, as long as the words stay below (2k + n)(P − 1)/P,
those of dense regions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.arrays import iota
from jaxsparse.collectives._base import Traits
from jaxsparse.collectives._messages import (
  SelectingCollective,
  Writer,
  geometric,
  switch,
)
from jaxsparse.comm import all_gather, in_rank_order, schedules
from jaxsparse.select import threshold
from jaxsparse.select.accumulator import SparseReduced, pending_nonzero
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse import bitset
from jaxsparse.sparse.codec import codec_of
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Reduced,
  Sparse,
  State,
  saturated_product,
  saturated_sum,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkDSA(SelectingCollective):
  """Reduces the k largest entries of each worker by region (TopkDSA).

  With `acc_w = gradient_w + residual_w`, the total is `Σ_w top_k(acc_w)`, added in rank
  order. An entry that a worker did not send stays in its residual, and so does one that
  exceeds the capacity of a message, where a worker's entries crowd into one region:
  `js.metrics(state).overflow` counts these, and there is none while k P (2P + 2) ≤ 2k +
  n.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.make_transform("topkdsa", "workers", density=0.01), optax.sgd(0.1))
  """

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, sizes_vary=True)

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    length = math.ceil(n / size)
    # Published: (2 ⌈k/P⌉ + ⌈n/P⌉) (P − 1), with two words an entry. `more`: the words
    # beyond two of a message of one entry, of other formats, in the split (indices up
    # to n) and in the all-gather (up to `length`).
    words_of_one = [codec_of(self.wire, end).words(1, 1) for end in (n, length)]
    more = sum(max(0, words - 2) for words in words_of_one)
    even = math.ceil(self.entries(n) / size)
    words = (2 * even + length + more) * (size - 1)
    # One all-reduce finds the fullest message of the split, one the most sums of a
    # region.
    agreements = 2 * schedules.agreement_messages(size)
    return Cost(size - 1 + len(schedules.strides(size)), words, agreements)

  def capacities(self, n: int, size: int) -> tuple[int, ...]:
    """The capacities of a message of the split, in entries: so small that no step sends more words than `cost` says."""
    k = self.entries(n)
    even = math.ceil(k / size)
    # `budget`: the words to each other worker of even messages, then of dense regions.
    # With c slots, a message of the split takes 2 c words, and a region of up to P c
    # sums takes 2 P c.
    budget = 2 * even + math.ceil(n / size)
    most = min(k, budget // (2 * size + 2))
    return geometric(even, max(even, most), count=4)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    k = self.entries(n)
    size = comm.size
    length = -(-n // size)
    acc = LazySum((grads, state.residual))
    capacities = self.capacities(n, size)
    # Random rounding by `wire` has other noise in each step and at each rank. `shared`
    # is the number of the step; () where rounding is not random.
    writer = self.writer(codec_of(self.wire, n), state.shared, comm.rank)
    # top_k(acc_w), [1, k], how many slots are filled, and the selector's next memory
    picked, count, memory = self.choose(acc, state.worker)
    # Through a bitset, so that the entries ascend: chunked selection has them in the
    # order of chunks.
    members = bitset.insert(bitset.empty(n), picked.indices[0], n)
    chosen = threshold.read_first(acc, members, k)
    # split: each worker sends each region to its owner, which adds them. `fullest` is
    # the largest number of entries of a region at any worker, i32[].
    sent, fullest = _cut(comm, chosen, length, capacities[-1], n)
    region_sums, lost, split_words = _split(
      comm, writer, sent, capacities, fullest, length
    )
    # all-gather of the sums, as entries or, where these are too many, as a vector
    sums_writer = writer._replace(codec=codec_of(self.wire, length))
    # ⌈k/P⌉, the entries of a message if all regions have equally many
    even = -(-k // size)
    most = size * capacities[-1]
    total, rounded_off, words = _gather(
      comm, region_sums, sums_writer, most=most, even=even, slots=min(size * k, n)
    )
    # entries of each region that have a slot, i32[P]
    fitting = jnp.sum(sent.indices < n, axis=1, dtype=jnp.int32)
    kept = sparse.count(sent, n)
    counters = Counters(
      words_sent=saturated_sum(split_words, words),
      # Entries of the own region are not sent; the others take as many words each as in
      # a message of `even` slots.
      words_used=saturated_sum(
        writer.words_used(kept - fitting[comm.rank], even), words
      ),
      selected=count,
      delivered=jnp.count_nonzero(total.values),
      overflow=count - kept,
    )
    residual = pending_nonzero(acc, sent.indices, total, lost + rounded_off)
    return SparseReduced(total, State(residual, memory, writer.next_step), counters)


def _cut(
  comm: Comm, chosen: Sparse, length: int, capacity: int, n: int
) -> tuple[Sparse, jax.Array]:
  """The chosen entries of each region, [P, capacity], the largest where more are in it.

  Args:
    comm: the workers.
    chosen: [k] entries, ascending, empty slots last.
    length: entries of a region.
    capacity: slots of a region.
    n: length of the vector.

  Returns:
    (sent, fullest): the entries by region, and the largest number of chosen entries of
    a region at any worker, i32[], which may exceed `capacity`.
  """
  bounds = [min(region * length, n) for region in range(comm.size + 1)]
  starts = threshold.region_starts(chosen.indices, jnp.array(bounds, jnp.int32))
  # All workers must choose the same capacity.
  fullest = comm.all_reduce(jnp.diff(starts).max(), "max")
  return threshold.read_regions(chosen, starts, capacity, n), fullest


def _split(
  comm: Comm,
  writer: Writer,
  sent: Sparse,
  capacities: tuple[int, ...],
  fullest: jax.Array,
  length: int,
) -> tuple[jax.Array, list[Sparse], jax.Array]:
  """Sends each region to its owner.

  Args:
    comm: the workers.
    writer: encodes messages.
    sent: [P, capacities[-1]] entries of this worker, row r of region r.
    capacities: numbers of slots for which a message is compiled, ascending.
    fullest: i32[], the slots that a message needs, the same on every worker.
    length: entries of a region.

  Returns:
    The sums of the own region, f32[length], the rounding errors of the messages, and
    the words sent.
  """

  def split(capacity: int) -> tuple[jax.Array, list[Sparse], jax.Array]:
    row = sparse.resize(sent, capacity, writer.codec.length)
    rows, lost, words = writer.exchange_rows(comm, row, 0, capacities[-1])
    # indices relative to the own region
    inside = rows._replace(indices=rows.indices - comm.rank * length)
    return sparse.add_rows(inside, length), lost, words

  return switch(capacities, fullest, split)


def _gather(
  comm: Comm, region_sums: jax.Array, writer: Writer, most: int, even: int, slots: int
) -> tuple[Sparse, list[Sparse], jax.Array]:
  """The non-zero sums of all regions, [slots] entries, the rounding errors of the own region, and the words sent.

  Args:
    comm: the workers.
    region_sums: f32[length], the sums of the own region.
    writer: encodes entries of a region.
    most: the largest number of `region_sums` that are not 0.
    even: the smallest capacity of a message, unless `length // 2` is less.
    slots: slots of the result.
  """
  length = region_sums.size
  size = comm.size
  end = length * size
  # More than length // 2 entries, of two words each, take more words than the region.
  few = min(most, length // 2)
  capacities = geometric(min(few, even), few, count=4) if few else ()
  # The capacity `length` sends the dense region.
  if most > few:
    capacities += (length,)
  chosen = bitset.pack(region_sums != 0)
  fullest = comm.all_reduce(bitset.count(chosen), "max")

  def gather(capacity: int) -> tuple[Sparse, list[Sparse], jax.Array]:
    if capacity == length:
      words = saturated_product(length, size - 1)
      regions = in_rank_order(comm, all_gather(comm, region_sums)).reshape(-1)
      members = bitset.pack(regions != 0)
      total = threshold.read_first(LazySum((regions,)), members, slots)
      # A vector is not rounded. Empty slots have the shape of the other branches'
      # errors; [] if those do not round either.
      no_errors = [sparse.empty((1, few), end)] * writer.codec.rounds
      return total, no_errors, words
    sums = threshold.read_first(LazySum((region_sums,)), chosen, capacity)
    rows, lost, words = writer.gather_rows(comm, sparse.as_row(sums), 1, few)
    region = iota(size)[:, None]
    by_region = _flat(in_rank_order(comm, rows), region, length, end)
    entries = jax.tree.map(jnp.ravel, by_region)
    # `slots` are enough for all entries: drop empty slots between them.
    if size * capacity > slots:
      entries = sparse.compress(entries, entries.indices < end, slots, end)
    rounded_off = [_flat(errors, comm.rank, length, end) for errors in lost]
    return sparse.resize(entries, slots, end), rounded_off, words

  return switch(capacities, fullest, gather)


def _flat(entries: Sparse, region: jax.Array, length: int, end: int) -> Sparse:
  """Entries of regions with flat indices in place of those relative to the region; `end` is an empty slot.

  `region` is the number of the region, i32[], or i32[P, 1] of each row.
  """
  shifted = entries._replace(indices=entries.indices + length * region)
  return sparse.where(entries.indices < length, shifted, end)
