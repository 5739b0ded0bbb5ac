"""The accumulator of a worker while blocks are reduced in rounds: entries are selected and sent, and others received.

Accumulators are lazy. Gradient and residual are added only where they are read, and sent entries are only logged. The
next residual is materialized once, at the end of the step, from `Pending`, which saves one pass over n entries.
"""

import dataclasses
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import candidates as found
from jaxsparse.select import exact
from jaxsparse.select.blocks import Blocks
from jaxsparse.select.kth_largest import keys_of
from jaxsparse.sparse import bitset
from jaxsparse.types import Pending, Sparse


class Accumulator(Protocol):
  """Blocks of a vector at one worker, of which entries are sent and to which entries are added.

  Rows are those of `Blocks`; each row is sent once, and nothing is added to it afterwards. Indices of entries are
  block-relative; index `length` and value 0 are an empty slot.
  """

  @property
  def blocks(self) -> Blocks:
    """The layout, and the vector at the start of the step."""
    ...

  def largest(self, first: int, last: int) -> Sparse:
    """The entries to send of rows first … last − 1, [last − first, k]."""
    ...

  def sent(self, kept: Sparse, first: int) -> Self:
    """Logs that entries of rows first … were sent: `kept` [r, k] is the unsent part of each."""
    ...

  def add(self, entries: Sparse) -> Self:
    """Adds [r, c] entries to the first r rows."""
    ...

  def pending(self, delivered: jax.Array) -> Pending:
    """The next residual: the current values at `delivered` i32[rows, c], and elsewhere the initial ones."""
    ...

  def pending_except(self, entries: Sparse) -> Pending:
    """The next residual: the initial values, except `entries` with flat indices."""
    ...


class Threshold(NamedTuple):
  """A threshold of the selection that is known beforehand.

  Attributes:
    least: i32[rows], at least 1: the smallest key (`keys_of`) of a selected entry.
    needed: i32[], the minimum number of candidates that reach `Candidates.low` to prove that they contain the top-k.
  """

  least: jax.Array
  needed: jax.Array


class _Added(NamedTuple):
  """Entries that were added to the first rows.

  Attributes:
    first: i32[rows, c], flat indices to which nothing had been added before; n elsewhere.
    before: f32[rows, c], the values before the addition.
    new: i32[rows, c], block-relative indices that are neither candidates nor were added to before; the block's length
      elsewhere.
  """

  first: jax.Array
  before: jax.Array
  new: jax.Array


@dataclasses.dataclass(frozen=True)
class TopKAccumulator:
  """An `Accumulator` that sends the k largest entries of a row, or those of them that reach a known threshold.

  Received values are added in the buffer of the gradient, in place if it is donated. An entry there is the sum of
  gradient, residual and received values where `touched`, elsewhere the gradient alone; the residual does not change.

  Attributes:
    blocks: the layout, and the initial vector.
    grads: f32[n], the current values where `touched`, elsewhere the gradient.
    touched: the bitset of flat indices to which received values were added.
    candidates: the candidates of the initial vector; None for short blocks, which are searched whole.
    threshold: the threshold of the selection; None to select the k largest.
    added: the additions, in their order.
    log: the entries that were sent, with flat indices and the unsent part of each value.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> from jaxsparse.sparse.lazy import LazySum
    >>> x = LazySum((jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0])))
    >>> acc = TopKAccumulator.of(Blocks.of(SoloComm(2), x, k=1))
    >>> bag = acc.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> acc = acc.sent(bag._replace(values=jnp.zeros((1, 1))), first=1)
    >>> acc = acc.add(Sparse(jnp.array([[1]]), jnp.array([[10.0]])))
    >>> acc.largest(0, 1)
    Sparse(indices=Array([[1]], dtype=int32), values=Array([[12.]], dtype=float32))
    >>> acc.pending(jnp.array([[1], [0]])).entries
    Sparse(indices=Array([2, 1], dtype=int32), values=Array([ 0., 12.], dtype=float32))
  """

  blocks: Blocks
  grads: jax.Array
  touched: jax.Array
  candidates: found.Candidates | None
  threshold: Threshold | None = None
  added: tuple[_Added, ...] = ()
  log: tuple[Sparse, ...] = ()

  @classmethod
  def of(cls, blocks: Blocks, least: jax.Array | None = None) -> Self:
    """Blocks to which nothing has been added.

    Args:
      blocks: the blocks.
      least: i32[rows], at least 1: the smallest key of a selected entry of a row.
    """
    candidates, threshold = None, None
    if found.worthwhile(blocks.length, blocks.k):
      if least is None:
        candidates = found.candidates(blocks)
      else:
        known = found.candidates(blocks, least)
        fit = known.fits.all()
        candidates = jax.lax.cond(fit, lambda: known, lambda: found.candidates(blocks))
        threshold = Threshold(least, jnp.where(fit, 0, blocks.k))
    elif least is not None:
      threshold = Threshold(least, jnp.int32(blocks.k))
    return cls(blocks, blocks.x.parts[0], bitset.empty(blocks.n), candidates, threshold)

  def largest(self, first: int, last: int) -> Sparse:
    """The k largest entries of rows first … last − 1, or those of them that reach the threshold."""
    least = None if self.threshold is None else self.threshold.least[first:last]
    if self.candidates is None:
      indices = self._of_whole(first, last - first, least)
    else:
      some = self._known(first, last)
      keys = jnp.where(some < self.blocks.length, keys_of(self._at(self.blocks.flat(some, first))), -1)
      low, fits = self.candidates.low[first:last], self.candidates.fits[first:last]
      needed = self.blocks.k if self.threshold is None else self.threshold.needed
      proven = lambda reached: (fits & (reached >= needed)).all()

      def otherwise(row: jax.Array) -> jax.Array:
        """By a sort: it rarely runs, and compiles fastest."""
        own = None if least is None else least[row][None]
        return self._of_whole(first + row, 1, own, "sort")[0]

      indices = exact.among(keys, some, self.blocks, low, proven, otherwise, least)
    return Sparse(indices, self._at(self.blocks.flat(indices, first)))

  def sent(self, kept: Sparse, first: int) -> Self:
    """Logs that entries of rows first … were sent, with the unsent part of each value."""
    return dataclasses.replace(self, log=(*self.log, Sparse(self.blocks.flat(kept.indices, first), kept.values)))

  def add(self, entries: Sparse) -> Self:
    """Adds [r, c] entries to the first r rows."""
    n, flat = self.blocks.n, self.blocks.flat(entries.indices)
    before, first = self._at(flat), ~bitset.contains(self.touched, flat)
    new = first & ~bitset.contains(self.candidates.members, flat) if self.candidates else first
    added = _Added(jnp.where(first, flat, n), before, jnp.where(new, entries.indices, self.blocks.length))
    return dataclasses.replace(
      self,
      grads=sparse.put(self.grads, flat, before + entries.values),
      touched=bitset.insert(self.touched, added.first, n),
      added=(*self.added, added),
    )

  def pending(self, delivered: jax.Array) -> Pending:
    """The next residual: the current values where delivered, and elsewhere the initial ones."""
    n, log = self.blocks.n, _joined(self.log)
    members = bitset.insert(bitset.empty(n), self.blocks.flat(delivered), n)
    kept = log._replace(indices=jnp.where(bitset.contains(members, log.indices), log.indices, n))
    return self._replaced(kept, members)

  def pending_except(self, entries: Sparse) -> Pending:
    """The next residual: the initial values, except `entries`."""
    return self._replaced(_joined((entries,)), bitset.empty(self.blocks.n))

  def _replaced(self, entries: Sparse, current: jax.Array) -> Pending:
    """The current values at the bitset `current`, elsewhere the initial ones, except `entries`."""
    n = self.blocks.n
    added = _joined(tuple(Sparse(added.first, added.before) for added in self.added))
    # Where nothing was added, the sum of gradient and residual is both.
    values = jnp.where(bitset.contains(current, added.indices), sparse.at(self.grads, added.indices), added.values)
    given = bitset.insert(bitset.empty(n), entries.indices, n)
    others = Sparse(jnp.where(bitset.contains(given, added.indices), n, added.indices), values)
    return Pending(self.grads, self.blocks.x.parts[1], _joined((entries, others)))

  def _at(self, flat: jax.Array) -> jax.Array:
    """The current values, from which sent entries are not subtracted; 0 beyond the end."""
    grads, residual = sparse.at(self.grads, flat), sparse.at(self.blocks.x.parts[1], flat)
    return jnp.where(bitset.contains(self.touched, flat), grads, grads + residual)  # −0 + 0 would be 0

  def _of_whole(
    self, first: jax.Array | int, rows: int, least: jax.Array | None, method: exact.Method | None = None
  ) -> jax.Array:
    """The indices of the entries to send of rows first … first + rows − 1, i32[rows, k], from all entries of a row."""
    everything = jnp.arange(self.blocks.length, dtype=jnp.int32)
    values = self._at(self.blocks.flat(jnp.broadcast_to(everything, (rows, everything.size)), first))
    chosen = exact.top_k(values, self.blocks.k, method=method)
    if least is None:
      return chosen.indices
    return jnp.where(keys_of(chosen.values) >= least[:, None], chosen.indices, self.blocks.length)

  def _known(self, first: int, last: int) -> jax.Array:
    """The indices of candidates and of received entries, i32[last − first, c], each index once."""
    assert self.candidates is not None
    known = [self.candidates.indices[first:last]]
    for added in self.added:
      new = added.new[first:last]
      count, slots = new.shape
      if count:
        more = ((0, last - first - count), (0, bitset.aligned(slots) - slots))
        known.append(jnp.pad(new, more, constant_values=self.blocks.length))
    return jnp.concatenate(known, axis=1)


def _joined(parts: tuple[Sparse, ...]) -> Sparse:
  """All slots of several arrays of entries, [c]."""
  flat = [jax.tree.map(jnp.ravel, part) for part in parts]
  if not flat:
    return Sparse(jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *flat)
