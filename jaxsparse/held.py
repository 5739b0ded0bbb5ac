"""What a worker holds while it sends entries away and receives others: blocks of a vector that is never written out.

It is gradient + residual; adding them up first would read both and write as much, for nothing. Where something is
added, the sum takes the place of the gradient's entry, in its own buffer where that is donated, and a set of bits says
that it stands for both; the residual stays as it was. What leaves is only written down. The next residual is put
together from all that at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.blocks import Blocks
from jaxsparse.sparse import bitset
from jaxsparse.types import Kept, Sparse


class Added(NamedTuple):
  """Entries that something was added to, of the first rows.

  Attributes:
    indices: i32[rows, c], places within a block; its length where a slot is empty.
    before: f32[rows, c], what was there.
    now: f32[rows, c], what is there then.
    first: bool[rows, c], whether nothing had been added there before.
  """

  indices: jax.Array
  before: jax.Array
  now: jax.Array
  first: jax.Array


class Selector(Protocol):
  """Chooses entries of rows, each row once; `selectors` has some."""

  def choose(self, held: "Held", first: int, last: int) -> Sparse:
    """What is sent of rows first … last − 1, [last − first, share] of it; index `length` and value 0 in empty slots."""
    ...


SelectorOf = Callable[[Blocks], Selector]


@dataclasses.dataclass(frozen=True)
class Held(Blocks):
  """`Blocks` that change, and the residual that they leave.

  Attributes:
    touched: the packed set of the places that something was added to; `grads` alone says what is there.
    added: the first one first.
    taken: the entries that left, with what stayed of each, by places among all n.
    selector: what chooses the entries of a row that are sent.

  Example:
    >>> from jaxsparse import selectors
    >>> from jaxsparse.comm import SoloComm
    >>> blocks = Blocks.of(SoloComm(2), jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0]), share=1)
    >>> held = Held.starting(blocks, selectors.exact)
    >>> bag = held.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> held = held.left(bag._replace(values=jnp.zeros((1, 1))), first=1)
    >>> held = held.add(Sparse(jnp.array([[1]]), jnp.array([[10.0]])))
    >>> held.largest(0, 1)
    Sparse(indices=Array([[1]], dtype=int32), values=Array([[12.]], dtype=float32))
    >>> [kept.values for kept in held.kept(jnp.array([[1], [0]])).entries]
    [Array([[12.]], dtype=float32), Array([[0.]], dtype=float32)]
  """

  touched: jax.Array
  added: tuple[Added, ...]
  taken: tuple[Sparse, ...]
  selector: Selector

  @classmethod
  def starting(cls, start: Blocks, selector: SelectorOf) -> Self:
    """Blocks that have not changed yet."""
    return cls(**vars(start), touched=bitset.none(start.grads.size), added=(), taken=(), selector=selector(start))

  def at(self, places: jax.Array) -> jax.Array:
    """What is at `places` now but for what left, f32 like them; 0 beyond the end."""
    return jnp.where(bitset.contains(self.touched, places), sparse.at(self.grads, places), super().at(places))

  def largest(self, first: int, last: int) -> Sparse:
    """The `share` entries of each of rows first … last − 1 that the selector chooses, as the rows of a `Sparse`."""
    return self.selector.choose(self, first, last)

  def left(self, taken: Sparse, first: int) -> Self:
    """With `taken.values` in the place of the entries of rows first …, which are not asked for again."""
    return dataclasses.replace(self, taken=(*self.taken, Sparse(self.places(taken.indices, first), taken.values)))

  def add(self, entries: Sparse) -> Self:
    """With [r, c] entries added to the first r rows, of which nothing has left."""
    n, places = self.grads.size, self.places(entries.indices)
    before, first = self.at(places), ~bitset.contains(self.touched, places)
    added = Added(entries.indices, before, before + entries.values, first)
    return dataclasses.replace(
      self,
      grads=sparse.put(self.grads, places, added.now),
      touched=bitset.with_new(self.touched, jnp.where(first, places, n), n),
      added=(*self.added, added),
    )

  def kept(self, indices: jax.Array) -> Kept:
    """The next residual: what is there now at indices [P, c] of all rows, which are delivered, what was elsewhere."""
    n = self.grads.size
    delivered = bitset.with_new(bitset.none(n), self.places(indices), n)
    entries = []
    for added in self.added:
      places = self.places(added.indices)
      now = bitset.contains(delivered, places)
      entries.append(Sparse(jnp.where(now | added.first, places, n), jnp.where(now, added.now, added.before)))
    for taken in self.taken:
      entries.append(taken._replace(indices=jnp.where(bitset.contains(delivered, taken.indices), taken.indices, n)))
    return Kept(self.grads, self.residual, tuple(entries))

  def kept_but(self, entries: Sparse) -> Kept:
    """The next residual: what was there at the start, but `entries`, of places among all n."""
    n = self.grads.size
    start = [Sparse(jnp.where(x.first, self.places(x.indices), n), x.before) for x in self.added]
    return Kept(self.grads, self.residual, (*start, entries))
