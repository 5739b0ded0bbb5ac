"""What a worker holds while it sends entries away and receives others: blocks of a vector that is never written out.

It is gradient + residual; adding them up first would read both and write as much, for nothing. Where an entry changes,
what it becomes takes the place of the gradient's and −0 that of the residual's, in their own buffers where these are
donated: the sum stays the sum, and no third vector is needed. What was there before is remembered, and put back when
the next residual is written.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse import select, sparse
from jaxsparse.select import candidates, order, packed
from jaxsparse.select.candidates import Candidates
from jaxsparse.types import Before, Comm, Kept, Sparse

_NEUTRAL = -0.0  # changes no bit of what it is added to


@dataclasses.dataclass(frozen=True)
class Held:
  """The vector of one worker in P blocks; row b is block (rank + b) mod P, so that row 0 is its own.

  Attributes:
    grads: f32[n], at first the gradient.
    residual: f32[n], at first the residual.
    before: what was where entries have changed, from the first change to the last.
    blocks: i32[P], the block of each row.
    length: of a block; the last ones may reach beyond n.
    share: entries that are taken out of a row at a time.
    among: where the largest entries of the rows that are left are; None where looking at everything is as fast.
    received: the packed set of the places that were received, while there is an `among`.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> held = Held.of(SoloComm(2), jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0]), share=1)
    >>> held, bag = held.take(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> held.receive(Sparse(jnp.array([[1]]), jnp.array([[10.0]])), rows=1).at(jnp.arange(5))
    Array([ 1.5, 12. ,  0. ,  3. ,  0. ], dtype=float32)
  """

  grads: jax.Array
  residual: jax.Array
  before: tuple[Before, ...]
  blocks: jax.Array
  length: int
  share: int
  among: Candidates | None
  received: jax.Array

  @classmethod
  def of(cls, comm: Comm, grads: jax.Array, residual: jax.Array, share: int) -> Self:
    """Starts with gradient + residual, in blocks for the workers of `comm`."""
    length = -(-grads.size // comm.size)
    blocks = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
    pays = candidates.worthwhile(length, share)
    among = candidates.candidates((grads, residual), length, share, blocks) if pays else None
    nothing = jnp.zeros(-(-grads.size // packed.BITS) if pays else 0, jnp.uint32)
    return cls(grads, residual, (), blocks, length, share, among, nothing)

  def keeping(self, entries: Sparse) -> Kept:
    """The next residual: what it was at the start, but `entries`, of places among all n."""
    return Kept(self.grads, self.residual, self.before, entries)

  def places(self, indices: jax.Array) -> jax.Array:
    """Where indices [rows, c] within the first rows are among all n; n for empty slots and padding."""
    return self._places(indices, self.blocks[: len(indices)])

  def at(self, places: jax.Array) -> jax.Array:
    """What is at `places`, f32 like them; 0 beyond the end."""
    return sparse.at(self.grads, places) + sparse.at(self.residual, places)

  def add(self, entries: Sparse) -> Self:
    """With [rows, c] entries added to the first rows."""
    places = self.places(entries.indices)
    return self._put(places, self.at(places) + entries.values)

  def take(self, first: int, last: int) -> tuple[Self, Sparse]:
    """Moves the `share` largest entries of each of rows first … last − 1 out, as the rows of a `Sparse`.

    Rows are taken from the last to the first: what comes later is looked for in the first rows only.
    """
    blocks = self.blocks[first:last]
    if self.among is None:
      indices = self._of_everything(blocks)
    else:
      among = jax.tree.map(lambda x: x[first:last], self.among)
      values = self.at(self._places(among.indices, blocks))
      keys = jnp.where(among.indices < self.length, order.keys_of(values), -1)
      reached = packed.count(packed.pack(keys >= among.low[:, None]))
      indices = jax.lax.cond(
        (among.hit & (reached >= self.share)).all(),
        lambda: self._of_candidates(among, keys, reached),
        lambda: self._of_everything(blocks),
      )
    places = self._places(indices, blocks)
    values = self.at(places)
    return self._put(sparse.after(values, places), jnp.zeros_like(values)), Sparse(indices, values)

  def receive(self, got: Sparse, rows: int) -> Self:
    """With [r, c] entries added to the first of the first `rows` rows, those that are left."""
    places = self.places(got.indices)
    values = self.at(places)
    if self.among is None:
      return self._put(places, values + got.values)
    among = self.among
    known = packed.contains(self.received, places) | (order.keys_of(values) >= among.low[: len(places), None])
    new = jnp.where(known, self.length, got.indices)
    more = packed.aligned(self.share) - self.share
    new = jnp.pad(new, ((0, rows - len(new)), (0, more)), constant_values=self.length)
    among = Candidates(jnp.concatenate([among.indices[:rows], new], axis=1), among.low[:rows], among.hit[:rows])
    received = packed.with_new(self.received, jnp.where(known, self.grads.size, places), self.grads.size)
    added = self._put(sparse.after(known, places), values + got.values)
    return dataclasses.replace(added, among=among, received=received)

  def _of_candidates(self, among: Candidates, keys: jax.Array, reached: jax.Array) -> jax.Array:
    """The `share` largest entries of each row, of which at least as many are among the candidates."""
    chosen = order.largest_of(keys, among.indices, self.share, among.low, reached)
    slots = packed.places(packed.pack(chosen).reshape(-1), len(keys) * self.share)
    return among.indices.reshape(-1)[slots].reshape(len(keys), self.share)

  def _of_everything(self, blocks: jax.Array) -> jax.Array:
    """The `share` largest entries of each block, found by looking at all of them."""
    everything = jnp.broadcast_to(jnp.arange(self.length, dtype=jnp.int32), (len(blocks), self.length))
    values = self.at(self._places(everything, blocks))
    # Where there are candidates this hardly ever runs, and is compiled for every round: a sort is the least to compile.
    return select.top_k(values, self.share, method=None if self.among is None else "sort").indices

  def _places(self, indices: jax.Array, blocks: jax.Array) -> jax.Array:
    n = self.grads.size
    return jnp.where(indices < self.length, jnp.minimum(indices + self.length * blocks[:, None], n), n)

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
