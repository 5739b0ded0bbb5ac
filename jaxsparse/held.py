"""What a worker holds while it sends entries away and receives others: blocks of a vector that is never written out.

It is gradient + residual; adding them up first would read both and write as much, for nothing. Where an entry changes,
what it becomes takes the place of the gradient's and −0 that of the residual's, in their own buffers where these are
donated: the sum stays the sum, and no third vector is needed. What was there before is remembered, and put back when
the next residual is written.
"""

import dataclasses
from typing import Self

import jax

from jaxsparse import selectors, sparse
from jaxsparse.blocks import Blocks
from jaxsparse.selectors import Selector, SelectorOf
from jaxsparse.types import Before, Kept, Sparse

_NEUTRAL = -0.0  # changes no bit of what it is added to


@dataclasses.dataclass(frozen=True)
class Held(Blocks):
  """`Blocks` that change, and the residual that they leave.

  Attributes:
    before: what was where entries have changed, from the first change to the last.
    selector: what chooses the entries of a row that are sent.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxsparse.comm import SoloComm
    >>> blocks = Blocks.of(SoloComm(2), jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0]), share=1)
    >>> held = Held.starting(blocks)
    >>> bag = held.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> held = held.left(bag._replace(values=jnp.zeros((1, 1))), first=1)
    >>> held.receive(Sparse(jnp.array([[1]]), jnp.array([[10.0]])), rows=1).remaining(jnp.array([[0, 1], [0, 1]]))
    Array([[ 1.5, 12. ],
           [ 0. ,  3. ]], dtype=float32)
  """

  before: tuple[Before, ...]
  selector: Selector

  @classmethod
  def starting(cls, start: Blocks, selector: SelectorOf = selectors.exact) -> Self:
    """Blocks that have not changed yet."""
    return cls(**vars(start), before=(), selector=selector(start))

  def keeping(self, entries: Sparse) -> Kept:
    """The next residual: what it was at the start, but `entries`, of places among all n."""
    return Kept(self.grads, self.residual, self.before, entries)

  def add(self, entries: Sparse) -> Self:
    """With [rows, c] entries added to the first rows."""
    places = self.places(entries.indices)
    return self._put(places, self.at(places) + entries.values)

  def remaining(self, indices: jax.Array) -> jax.Array:
    """What is at indices [rows, c] of the first rows now, f32 like them."""
    return self.at(self.places(indices))

  def largest(self, first: int, last: int) -> Sparse:
    """The `share` entries of each of rows first … last − 1 that the selector chooses, as the rows of a `Sparse`.

    Rows are asked for from the last to the first: what comes later is looked for in the first rows only.
    """
    indices = self.selector.choose(self, first, last)
    return Sparse(indices, self.at(self.places(indices, first)))

  def left(self, taken: Sparse, first: int) -> Self:
    """With `taken.values` in the place of the entries of rows first …: what is left of them."""
    places = self.places(taken.indices, first)
    return self._put(sparse.after(taken.values, places), taken.values)

  def receive(self, got: Sparse, rows: int) -> Self:
    """With [r, c] entries added to the first of the first `rows` rows, those that are left."""
    places = self.places(got.indices)
    values = self.at(places)
    selector, done = self.selector.told(self, got, places, values, rows)
    return dataclasses.replace(self._put(sparse.after(done, places), values + got.values), selector=selector)

  def _put(self, places: jax.Array, values: jax.Array) -> Self:
    residual = sparse.at(self.residual, places)
    before = Before(places, sparse.at(self.grads, places) + residual, residual)
    places = sparse.after(before.held, sparse.after(before.residual, places))
    return dataclasses.replace(
      self,
      grads=sparse.put(self.grads, places, values),
      residual=sparse.put(self.residual, places, _NEUTRAL),
      before=(*self.before, before),
    )
