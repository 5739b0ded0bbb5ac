"""What a worker holds while one entry of each chunk travels: blocks as they were, and what happened to a few entries.

Slot j of everything that is sent or received is an entry of chunk j, so what became of an entry is found by comparing
slots: nothing is looked up, and nothing written, before the next residual is.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse.blocks import Blocks
from jaxsparse.select import kth_largest as order
from jaxsparse.select import per_chunk as chunks
from jaxsparse.types import Kept, Sparse


class Change(NamedTuple):
  """Something that happened to one entry of each chunk of some rows.

  Attributes:
    first: the first of the rows.
    entries: [rows, chunks].
    adds: whether the values were added, or took the place of what was there.
  """

  first: int
  entries: Sparse
  adds: bool


@dataclasses.dataclass(frozen=True)
class Chunked:
  """`held.Held` for the largest known entry of each of `share` chunks of a row.

  Known are the largest of each chunk at the start, and what was received since.

  Attributes:
    start: the blocks, which do not change.
    best: the largest known entries of the rows that are left.
    changes: the first one first.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> blocks = Blocks.of(SoloComm(2), jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0]), share=1)
    >>> held = Chunked.of(blocks)
    >>> bag = held.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> held = held.left(bag._replace(values=jnp.zeros((1, 1))), first=1)
    >>> held = held.add(Sparse(jnp.array([[0]]), jnp.array([[10.0]])))
    >>> held.largest(0, 1).values, held.kept(jnp.array([[1], [0]])).entries[0].values
    (Array([[11.5]], dtype=float32), Array([[2.],
           [0.]], dtype=float32))
  """

  start: Blocks
  best: Sparse
  changes: tuple[Change, ...] = ()

  @classmethod
  def of(cls, start: Blocks) -> Self:
    """Finds the largest entry of each chunk, in one pass."""
    indices = chunks.champions((start.grads, start.residual), start.length, start.share, start.blocks)
    return cls(start, Sparse(indices, start.at(start.places(indices))))

  @property
  def length(self) -> int:
    """Of a block."""
    return self.start.length

  def places(self, indices: jax.Array) -> jax.Array:
    """Where indices [rows, chunks] within the first rows are among all n."""
    return self.start.places(indices)

  def largest(self, first: int, last: int) -> Sparse:
    """The largest known entry of each chunk of rows first … last − 1."""
    return Sparse(*(x[first:last] for x in self.best))

  def left(self, taken: Sparse, first: int) -> Self:
    """With `taken.values` in the place of the entries of rows first …, which are not asked for again."""
    best = Sparse(*(x[:first] for x in self.best))
    return dataclasses.replace(self, best=best, changes=(*self.changes, Change(first, taken, adds=False)))

  def add(self, entries: Sparse) -> Self:
    """With [r, chunks] entries added to the first r rows, of which nothing has left."""
    rows = len(entries.indices)
    values = self._now(entries.indices) + entries.values
    known, others = (Sparse(*(x[part] for x in self.best)) for part in (slice(rows), slice(rows, None)))
    larger = self._rank(values) > self._rank(known.values)
    wins = (entries.indices < self.length) & ((entries.indices == known.indices) | larger)
    best = Sparse(jnp.where(wins, entries.indices, known.indices), jnp.where(wins, values, known.values))
    best = Sparse(*(jnp.concatenate(pair) for pair in zip(best, others, strict=True)))
    return dataclasses.replace(self, best=best, changes=(*self.changes, Change(0, entries, adds=True)))

  def kept(self, indices: jax.Array) -> Kept:
    """The next residual: what is there now at indices [P, chunks] of all rows, which are delivered, what was elsewhere.

    Slot j holds an entry of chunk j, or none.
    """
    return self.kept_but(Sparse(self.places(indices), self._now(indices)))

  def kept_but(self, entries: Sparse) -> Kept:
    """The next residual: what was there at the start, but `entries`, of places among all n."""
    return Kept(self.start.grads, self.start.residual, (entries,))

  def _now(self, indices: jax.Array) -> jax.Array:
    values = self.start.at(self.places(indices))
    for first, entries, adds in self.changes:
      last = min(first + len(entries.indices), len(indices))
      if first < last:
        here, there = values[first:last], jax.tree.map(lambda x, to=last - first: x[:to], entries)
        new = here + there.values if adds else there.values
        changed = jnp.where(indices[first:last] == there.indices, new, here)
        values = jnp.concatenate([values[:first], changed, values[last:]])
    return values

  def _rank(self, values: jax.Array) -> jax.Array:
    return chunks.coarse(order.keys_of(values), self.length, self.start.share)
