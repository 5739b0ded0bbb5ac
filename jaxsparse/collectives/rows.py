"""Rows of matrices: the sum of those rows of each worker that are not zero, for embeddings (Parallax, 2019).

All workers gather the numbers of all rows that are sent, and so know which form of the
exchange of values takes fewer words. The messages that worker 0 of six sends:

    numbers      stride 1, 2, 4: the numbers of its rows, and those that it has received
    all-gather   stride 1, 2, 4: the values of the same rows; every worker adds them

or, where many workers send the same rows,

    split        its rows of region 1 -> worker 1, of region 2 -> worker 2, … of region 5 -> worker 5, their owners
    all-gather   stride 1, 2, 4: the sums of regions

Of the rows that any worker sends, in the order of their numbers, every P-th belongs to
the same region. So regions differ by one row at most, and the numbers of the sums are
known.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.collectives._base import ByLeaf, Traits
from jaxsparse.comm import all_gather, in_rank_order, schedules
from jaxsparse.select.accumulator import SparseReduced, pending_zeros
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State, saturated

# The sums of an owner, over the rows of a worker; with Zipf's ids 0.4 … 0.8 at 64
# workers, 0.6 … 0.9 at 16.
_SHARES = (0.4, 0.5, 0.6, 0.7, 0.8)
# The most words of the form with owners, over those of the other form. Fewer saved
# words would not be worth the P − 1 messages more.
_WORTH = 0.9


class _RowLeaf(NamedTuple):
  """A leaf of `rows` rows of `width` entries.

  Attributes:
    start: its first flat index.
    rows: number of rows.
    width: entries of a row.
    sent: rows of it that each worker sends.
  """

  start: int
  rows: int
  width: int
  sent: int

  def entries(self, rows: jax.Array, n: int) -> jax.Array:
    """The flat indices i32[count, width] of the entries of rows i32[count]; n for numbers of rows beyond the last."""
    first = jnp.where(rows < self.rows, self.start + rows * self.width, n)
    return jnp.minimum(first[:, None] + iota(self.width)[None], n)


class _Capacities(NamedTuple):
  """The rows of each leaf in a message of the split, and in one of the sums of a region."""

  split: tuple[int, ...]
  sums: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(ByLeaf):
  """Sends whole rows of each leaf, one index for a row: for gradients of embeddings, most rows of which are zero.

  A leaf of shape (a, ...) has a rows; of a vector each entry is one. With `acc_w =
  gradient_w + residual_w`, each worker sends the `capacity` rows of each leaf with the
  largest mean magnitude:

      total = Σ_w rows(acc_w), added in rank order,    next residual_w = acc_w − rows(acc_w)

  So where no worker has more than `capacity` rows that are not zero, the total is exact
  and the residual zero. A row that no worker has sent is zero in the total: `optax.sgd`
  and `optax.adagrad` leave it as it is; Adam goes on moving it by the momentum that it
  has, and lets its moments decay.

  A step sends at most (P − 1) (width + 1) words for each row, in 2 ⌈log₂P⌉ messages.
  Where many workers send the same rows, owners of regions add them, in rank order too,
  so that the bits are the same: P − 1 messages more, and fewer words. Each step takes
  this form where it saves a tenth of the words or more, as
  `js.metrics(state).words_sent` shows. As the words depend on the shapes of leaves,
  `js.costs.count`, `js.costs.predict` and `js.costs.fit` need the parameters; they give
  the words of a step without owners.

  Args:
    capacity: rows of each leaf that a worker sends, 1 or more; at most all.
    decay: as in `js.SparseCollective`.

  Example:
    Two workers with one row each, of the same embedding:

    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = jnp.zeros((2, 5, 3)).at[0, 1].set(1.0).at[1, 4].set(2.0)
    >>> out = js.simulate("rows", {"embedding": grads}, capacity=1)
    >>> out.total["embedding"][:, 0], int(out.metrics.words_sent)
    (Array([0., 1., 0., 0., 2.], dtype=float32), 4)
  """

  capacity: int = 4096
  decay: float = 1.0
  ranges = (("capacity", 1, None),)

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, sizes_vary=True)

  def is_partial(self, n: int, state: State) -> bool:
    return any(leaf.sent < leaf.rows for leaf in self._leaves(n))

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    words = sum(leaf.sent * (leaf.width + 1) for leaf in self._leaves(n))
    # Whether a step may take the form with owners; the choice is then an all-reduce.
    by_region = bool(self._capacities(n, size))
    messages = 2 * len(schedules.strides(size)) + (size - 1) * by_region
    agreements = schedules.agreement_messages(size) * by_region
    return Cost(messages, (size - 1) * words, agreements)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    acc = LazySum((grads, state.residual))
    leaves = list(self._leaves(n))
    # rows(acc_w): numbers i32[sent] of rows, flat indices and values [sent, width]
    chosen = [_largest(acc, leaf) for leaf in leaves]
    sent = [leaf.entries(rows, n) for leaf, rows in zip(leaves, chosen, strict=True)]
    values = list(map(acc.read_at, sent))
    # `numbers`, i32[P, sent] of each leaf: the rows that each worker sends. `touched`:
    # all these rows as a bitset, and the ordinals among them of each worker's rows.
    numbers = in_rank_order(comm, all_gather(comm, chosen))
    touched = [
      _touch(rows, leaf.rows) for rows, leaf in zip(numbers, leaves, strict=True)
    ]
    # total = Σ_w rows(acc_w): of each leaf the sums of the rows that any worker sends,
    # by all-gather or by the owners of regions
    sums, words = self._add(comm, n, [ordinals for _, ordinals in touched], values)
    # Ordinals count the members of the bitset, so row i of the sums is its i-th member.
    delivered = [
      leaf.entries(bitset.nonzero(members, len(rows)), n)
      for leaf, (members, _), rows in zip(leaves, touched, sums, strict=True)
    ]
    join = lambda arrays: jnp.concatenate([x.reshape(-1) for x in arrays])
    # next residual_w = acc_w − rows(acc_w)
    after = state._replace(residual=pending_zeros(acc, join(sent)))
    total = Sparse(join(delivered), join(sums))
    # entries of rows that are not zero
    count = lambda arrays: sum(
      jnp.any(rows != 0, 1).sum() * rows.shape[1] for rows in arrays
    )
    counters = Counters(words, words, selected=count(values), delivered=count(sums))
    return SparseReduced(total, after, counters)

  def _add(
    self,
    comm: Comm,
    n: int,
    ordinals: list[jax.Array],
    values: list[jax.Array],
  ) -> tuple[list[jax.Array], jax.Array]:
    """The sums of the rows that any worker sends, of each leaf, in the order of their ordinals; the words of the step.

    Args:
      comm: the workers.
      n: number of entries of all leaves.
      ordinals: i32[P, sent] of each leaf: which of these rows each worker sends, as
        `_touch` returns them.
      values: f32[sent, width] of each leaf, of the rows that this worker sends.

    Returns:
      (sums, words): f32[min(P · sent, rows), width] of each leaf, zeros behind the last
      row that is sent; and u32[].
    """
    size = comm.size
    leaves = list(self._leaves(n))

    def gather() -> list[jax.Array]:
      received = in_rank_order(comm, all_gather(comm, values))
      return _sum_rows(
        ordinals, received, [min(size * leaf.sent, leaf.rows) for leaf in leaves]
      )

    forms = self._capacities(n, size)
    # words of the form without owners
    words = saturated(self.cost(n, size).words, jnp.uint32)
    if not forms:
      return gather(), words
    # Capacities ascend: if a form fits, all after it fit. So the number of misfits is
    # the index of the first form that fits, or of `gather`, the last branch.
    misfits = jnp.stack([~_fits(form, ordinals) for form in forms])
    # The number is the same on all workers already. The all-reduce only makes its type
    # in a shard_map replicated.
    form_index = comm.all_reduce(misfits.sum(dtype=jnp.int32), "max")
    by_region = [
      functools.partial(_add_by_region, comm, form, leaves, ordinals, values)
      for form in forms
    ]
    words_of_forms = [
      saturated(_words(form, leaves, size), jnp.uint32) for form in forms
    ]
    sums = varying.switch(form_index, [*by_region, gather])
    return sums, jnp.stack([*words_of_forms, words])[form_index]

  def _capacities(self, n: int, size: int) -> list[_Capacities]:
    """The capacities for the form with owners that save enough words, the fewest words first; [] if none do.

    Each has `split`, rows of each leaf in a message to an owner, and `sums`, rows of
    each leaf in a region.
    """
    leaves = list(self._leaves(n))
    regions = [-(-leaf.rows // size) for leaf in leaves]
    # About m = sent / P rows of a worker are in one region, with a standard deviation
    # of √m: room for 4 of these more, m + 4 √m + 4 = (√m + 2)².
    roots = (math.sqrt(leaf.sent / size) for leaf in leaves)
    likely = (math.ceil((root + 2) ** 2) for root in roots)
    split = tuple(map(min, regions, likely))
    forms = {}  # by the sums, so that none occurs twice
    # How many rows of workers coincide is not known before the step. So each form has
    # room for another number of different rows of a region: `share` times `sent`.
    for share in _SHARES:
      sums = tuple(
        min(region, math.ceil(share * leaf.sent))
        for region, leaf in zip(regions, leaves, strict=True)
      )
      forms[sums] = _Capacities(split, sums)
    # words of the form without owners
    of_gather = sum(leaf.sent * (leaf.width + 1) for leaf in leaves) * (size - 1)
    # A form that saves less than a tenth is not worth its P − 1 messages more.
    most = _WORTH * of_gather
    return [form for form in forms.values() if _words(form, leaves, size) < most]

  def _leaves(self, n: int) -> Iterator[_RowLeaf]:
    """The leaves that have entries."""
    start = 0
    for shape in self.shapes(n):
      # A scalar is one row; a row of a vector is one entry.
      count = (shape or (1,))[0]
      width = math.prod(shape[1:])
      if count * width:
        yield _RowLeaf(start, count, width, min(self.capacity, count))
      start += count * width


def _words(form: _Capacities, leaves: list[_RowLeaf], size: int) -> int:
  """The words of a step with owners, by the capacities of `form`, as `Rows._capacities` describes them."""
  of_leaves = zip(leaves, form.split, form.sums, strict=True)
  # to each other worker: the numbers of `sent` rows, `split` rows to their owner, and
  # the `sums` rows of this worker's region
  return (size - 1) * sum(
    leaf.sent + (split + sums) * leaf.width for leaf, split, sums in of_leaves
  )


def _largest(acc: LazySum, leaf: _RowLeaf) -> jax.Array:
  """The numbers of the rows of largest mean magnitude, i32[sent]; NaN counts as Inf.

  The leaf is `leaf.rows` rows of `leaf.width` entries of f32[n] `acc`, from the flat
  index `leaf.start` on; a worker sends up to `leaf.sent` of them, no row of zeros.
  Empty slots have the number `leaf.rows` or more.
  """
  # Functions, so that each use computes the sum anew: XLA would store an array that is
  # read both here, for `members`, and in a branch of `cond`.
  flat = lambda: acc.values[leaf.start :][: leaf.rows * leaf.width]
  matrix = lambda: flat().reshape(leaf.rows, leaf.width)
  members = bitset.pack(jnp.any(matrix() != 0, 1))

  def by_magnitude() -> jax.Array:
    # divided first: a sum of large magnitudes would overflow
    means = (jnp.abs(matrix()) / leaf.width).sum(1)
    # A row with NaN is sent, so that every worker sees it; top_k ranks NaN last on
    # some platforms.
    means = jnp.where(jnp.isnan(means), jnp.inf, means)
    _, rows = jax.lax.top_k(means, leaf.sent)
    return rows

  # Most steps of an embedding touch fewer rows than a message holds: no sort then.
  few = bitset.count(members) <= leaf.sent
  return varying.cond(few, lambda: bitset.nonzero(members, leaf.sent), by_magnitude)


def _touch(numbers: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
  """The set of the rows that any worker sends, a bitset, and the ordinals in it of each worker's rows, i32[P, sent].

  A row of `numbers`, i32[P, sent], has the rows of a worker. Numbers from `rows` on are
  empty slots, with ordinal P · sent.
  """
  is_sent = jnp.zeros(rows, bool).at[numbers].set(True, mode="drop")
  members = bitset.pack(is_sent)
  ordinals = bitset.rank(members, numbers)
  return members, jnp.where(numbers < rows, ordinals, numbers.size)


def _fits(form: _Capacities, ordinals: list[jax.Array]) -> jax.Array:
  """Whether messages of these capacities hold the rows of all workers, bool[], the same on every worker.

  Args:
    form: for each leaf `split`, the rows that a worker can send to an owner, and
      `sums`, the rows that an owner can send.
    ordinals: i32[P, sent] of each leaf, of `_touch`; P · sent in empty slots.
  """
  fits = []
  for of_leaf, split, sums in zip(ordinals, form.split, form.sums, strict=True):
    size = len(of_leaf)
    is_sent = of_leaf < of_leaf.size
    # ordinal o is row o // P of region o % P
    regions = jnp.where(is_sent, of_leaf % size, size)
    # counts[w, r]: rows of worker w in region r; index P, of empty slots, is dropped
    none = jnp.zeros((size, size), jnp.int32)
    counts = none.at[jnp.arange(size)[:, None], regions].add(1, mode="drop")
    last_row = jnp.where(is_sent, of_leaf // size, -1).max()
    fits += [counts.max() <= split, last_row < sums]
  return jnp.stack(fits).all()


def _add_by_region(
  comm: Comm,
  form: _Capacities,
  leaves: list[_RowLeaf],
  ordinals: list[jax.Array],
  values: list[jax.Array],
) -> list[jax.Array]:
  """The sums of the rows that any worker sends, as `Rows._add` returns them, by the owners of regions.

  Args:
    comm: the workers.
    form: capacities that hold all rows (`_fits`): `split` of messages to owners, `sums`
      of the all-gather.
    leaves: the leaves.
    ordinals: i32[P, sent] of each leaf, of `_touch`.
    values: f32[sent, width] of each leaf, the rows of this worker.
  """
  size = comm.size
  workers = iota(size)
  sent = []
  owned = []
  for of_leaf, rows, capacity in zip(ordinals, values, form.split, strict=True):
    # slots of this worker's rows for each owner, i32[P, capacity]
    to_owners = jax.vmap(_in_region, (None, 0, None, None))
    slots = to_owners(of_leaf[comm.rank], workers, size, capacity)
    sent.append(sparse.read_at(rows, slots))
    # slots of each worker's rows for this owner, and from them the rows of its region
    from_workers = jax.vmap(_in_region, (0, None, None, None))
    slots = from_workers(of_leaf, comm.rank, size, capacity)
    # Ordinal o is row o // P of its region; empty slots become row `sent`, beyond
    # the sums.
    arriving = of_leaf.at[workers[:, None], slots]
    owned.append(arriving.get(mode="fill", fill_value=of_leaf.size) // size)
  of_region = _sum_rows(owned, comm.all_to_all(sent), list(form.sums))
  gathered = in_rank_order(comm, all_gather(comm, of_region))
  sums = []
  # Ordinal o is row o // P of region o % P: with axes swapped, rows are in this order.
  for rows, leaf in zip(gathered, leaves, strict=True):
    flat = jnp.swapaxes(rows, 0, 1).reshape(-1, leaf.width)
    # no more different rows than all workers send, or than there are
    most = min(size * leaf.sent, leaf.rows)
    missing = max(0, most - len(flat))
    sums.append(jnp.pad(flat, ((0, missing), (0, 0)))[:most])
  return sums


def _in_region(
  ordinals: jax.Array, region: jax.Array, size: int, capacity: int
) -> jax.Array:
  """The slots, i32[capacity], of the i32[sent] `ordinals` of a worker that are in a region, ascending, then `sent`."""
  # ordinal o is in region o % P; P · sent or more is an empty slot
  is_sent = ordinals < size * ordinals.size
  inside = is_sent & (ordinals % size == region)
  return jnp.nonzero(inside, size=capacity, fill_value=ordinals.size)[0]


def _sum_rows(
  ordinals: list[jax.Array], rows: list[jax.Array], lengths: list[int]
) -> list[jax.Array]:
  """The sums f32[length, width] of each leaf, added in rank order.

  Args:
    ordinals: i32[P, c] of each leaf: row s of worker w is added to row ordinals[w, s]
      of the sums, or dropped if that is `length` or more.
    rows: f32[P, c, width] of each leaf.
    lengths: rows of the sums of each leaf.
  """

  def add(
    worker: jax.Array,
    sums: list[jax.Array],
  ) -> list[jax.Array]:
    # A worker sends a row once, so only the order of workers matters for the bits.
    leaves = zip(sums, ordinals, rows, strict=True)
    return [
      sparse.add(total, slots[worker], sent[worker]) for total, slots, sent in leaves
    ]

  empty = [
    jnp.zeros((length, x.shape[-1]), jnp.float32)
    for length, x in zip(lengths, rows, strict=True)
  ]
  return varying.fori_loop(0, len(ordinals[0]), add, empty)
