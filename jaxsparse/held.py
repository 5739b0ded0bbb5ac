"""What a worker holds while it sends entries away and receives others: blocks of a vector that is never written out.

It is gradient + residual, but for a few places that have changed. Those lie in a vector of zeros, in which a place that
changed to 0 is marked by −0. Adding up gradient and residual first would read both and write as much, for nothing.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse import select, sparse
from jaxsparse.select import candidates, order, packed
from jaxsparse.select.candidates import Candidates
from jaxsparse.types import Comm, Sparse

_MARK = -(2**31)  # the bits of −0


@dataclasses.dataclass(frozen=True)
class Held:
  """The vector of one worker in P blocks; row b is block (rank + b) mod P, so that row 0 is its own.

  Attributes:
    parts: f32[n] each, gradient and residual; their sum is what it starts with.
    changed: f32[n], what is at the places that changed, −0 for 0, and 0 at all others.
    blocks: i32[P], the block of each row.
    length: of a block; the last ones may reach beyond n.
    share: entries that are taken out of a row at a time.
    among: where the largest entries of the rows that are left are; None where looking at everything is as fast.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> held = Held.of(SoloComm(2), jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0]), share=1)
    >>> held, bag = held.take(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> held.receive(Sparse(jnp.array([[1]]), jnp.array([[10.0]])), rows=1).at(jnp.arange(5))
    Array([ 1.5, 12. ,  0. ,  3. ,  0. ], dtype=float32)
  """

  parts: tuple[jax.Array, ...]
  changed: jax.Array
  blocks: jax.Array
  length: int
  share: int
  among: Candidates | None

  @classmethod
  def of(cls, comm: Comm, *parts: jax.Array, share: int) -> Self:
    """Starts with the sum of `parts`, in blocks for the workers of `comm`."""
    length = -(-parts[0].size // comm.size)
    blocks = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
    pays = candidates.worthwhile(length, share)
    among = candidates.candidates(parts, length, share, blocks) if pays else None
    return cls(parts, jnp.zeros_like(parts[0]), blocks, length, share, among)

  def places(self, indices: jax.Array) -> jax.Array:
    """Where indices [rows, c] within the first rows are among all n; n for empty slots and padding."""
    return self._places(indices, self.blocks[: len(indices)])

  def at(self, places: jax.Array) -> jax.Array:
    """What is at `places`, f32 like them; 0 beyond the end."""
    changed = _at(self.changed, places)
    start = functools.reduce(jnp.add, [_at(part, places) for part in self.parts])
    return jnp.where(_bits(changed) == 0, start, jnp.where(_bits(changed) == _MARK, 0.0, changed))

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
    among, places = self.among, self.places(got.indices)
    values = self.at(places)
    if among is not None:
      changed = _bits(_at(self.changed, places)) != 0
      known = changed | (order.keys_of(values) >= among.low[: len(places), None])
      new = jnp.where(known, self.length, got.indices)
      more = packed.aligned(self.share) - self.share
      new = jnp.pad(new, ((0, rows - len(new)), (0, more)), constant_values=self.length)
      among = Candidates(jnp.concatenate([among.indices[:rows], new], axis=1), among.low[:rows], among.hit[:rows])
      places = sparse.after(changed, places)
    return dataclasses.replace(self._put(places, values + got.values), among=among)

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
    n = self.changed.size
    return jnp.where(indices < self.length, jnp.minimum(indices + self.length * blocks[:, None], n), n)

  def _put(self, places: jax.Array, values: jax.Array) -> Self:
    bits = _bits(values)
    marked = jax.lax.bitcast_convert_type(jnp.where(bits == 0, _MARK, bits), jnp.float32)
    changed = self.changed.at[places].set(marked, mode="drop", unique_indices=True)
    return dataclasses.replace(self, changed=changed)


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
  return x.at[places].get(mode="fill", fill_value=0.0)


def _bits(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32)
