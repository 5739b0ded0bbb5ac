"""How SparDL chooses what to send of each block: the largest entries, or those of them above a known bound.

What a worker holds changes while parts of the sum arrive, so a selector is asked again in every round, and told what
arrived. It is a value: what it is told makes another one of it.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxsparse import select
from jaxsparse.blocks import Blocks
from jaxsparse.select import candidates, order, packed
from jaxsparse.select.candidates import Candidates
from jaxsparse.types import Sparse


class Selector(Protocol):
  """Chooses entries of rows, the last rows first."""

  def choose(self, held: Blocks, first: int, last: int) -> jax.Array:
    """Which entries of rows first … last − 1 are sent, i32[last − first, share] in each; `length` in empty slots."""
    ...

  def told(
    self, held: Blocks, got: Sparse, places: jax.Array, values: jax.Array, rows: int
  ) -> tuple["Selector", jax.Array]:
    """After `got` [r, c] arrives in the first of the first `rows` rows, those that are left.

    Args:
      held: as it was before.
      got: what arrives.
      places: where its entries are among all n.
      values: what was there.
      rows: that are left.

    Returns:
      The selector, and an array that is there when it has read all it needs of what was there.
    """
    ...


SelectorOf = Callable[[Blocks], Selector]


def exact(held: Blocks) -> Selector:
  """The `share` entries of largest magnitude of each row, ties to the lowest index.

  They are looked for among candidates, found in one pass over all rows, and what was received since; where these cannot
  hold the largest, in the whole block. The same bits either way.
  """
  if not candidates.worthwhile(held.length, held.share):
    return _Everything(None)
  return _among(held, _candidates_of(held), jnp.int32(held.share), None)


def above(bounds: jax.Array) -> SelectorOf:
  """Those of the `share` largest entries of each row whose magnitude is at least its bound: no bound is to be found.

  A row whose bound is 0 gets all `share`, of entries that are not 0. Where more entries reach a bound than there is
  room for among the candidates, these are found as by `exact`.

  Args:
    bounds: f32[P], by row.
  """

  def selector(held: Blocks) -> Selector:
    floor = jnp.maximum(order.keys_of(bounds), 1)
    if not candidates.worthwhile(held.length, held.share):
      return _Everything(floor)
    known = _candidates_of(held, floor)
    hit = known.hit.all()
    found = jax.lax.cond(hit, lambda: known, lambda: _candidates_of(held))
    return _among(held, found, jnp.where(hit, 0, held.share), floor)

  return selector


class Reused(NamedTuple):
  """What thresholds are known from the last step.

  Attributes:
    bounds: f32[P], that entries of each row are to reach; 0 before the first step.
    levels: f32[P], the L-th magnitude that was chosen of each row; 0 where it was not full.
  """

  bounds: jax.Array
  levels: jax.Array


def following(reused: Reused, chosen: Sparse, length: int) -> Reused:
  """The bounds for the next step: the least of what was chosen, and half-way on where it grows; less if not full.

  What is held grows while residuals fill up, by √(t + 1)/√t in step t if gradients are noise, and bounds that stay
  behind are reached by too many. The root of the last growth is less than the next one there.

  Args:
    reused: what this step had.
    chosen: [P, L] entries that it left.
    length: of a block.

  Example:
    >>> chosen = Sparse(jnp.array([[0, 1], [3, 9]]), jnp.array([[5.0, -4.0], [6.0, 0.0]]))
    >>> following(Reused(jnp.array([1.0, 6.0]), jnp.array([3.24, 6.0])), chosen, length=9)
    Reused(bounds=Array([4.444..., 5.25     ], dtype=float32), levels=Array([4., 0.], dtype=float32))
  """
  valid = chosen.indices < length
  count, share = jnp.sum(valid, axis=1, dtype=jnp.int32), valid.shape[1]
  least = jnp.min(jnp.where(valid, jnp.abs(chosen.values), jnp.inf), axis=1)
  full = count == share
  growth = jnp.where(reused.levels > 0, jnp.clip(least / reused.levels, 1.0, 2.0), 1.0)
  lower = reused.bounds * (0.75 + count.astype(jnp.float32) / (4 * share))
  return Reused(jnp.where(full, least * jnp.sqrt(growth), lower), jnp.where(full, least, 0.0))


class _Everything(NamedTuple):
  """Looks at whole blocks.

  Attributes:
    floor: i32[P], which keys of a row must reach; None for all.
  """

  floor: jax.Array | None

  def choose(self, held: Blocks, first: int, last: int) -> jax.Array:
    return _of_everything(held, first, last, self.floor, None)

  def told(
    self, held: Blocks, got: Sparse, places: jax.Array, values: jax.Array, rows: int
  ) -> tuple[Selector, jax.Array]:
    del held, got, places, rows
    return self, values


class _Among(NamedTuple):
  """Looks among candidates.

  Attributes:
    among: candidates of the rows that are left.
    arrived: the packed set of the places that something was received for; all of them are candidates since.
    wanted: i32[], how many must reach the candidates' bound for them to hold all that may be chosen.
    floor: i32[P], which keys of a row must reach; None for all.
  """

  among: Candidates
  arrived: jax.Array
  wanted: jax.Array
  floor: jax.Array | None

  def choose(self, held: Blocks, first: int, last: int) -> jax.Array:
    among = jax.tree.map(lambda x: x[first:last], self.among)
    keys = jnp.where(among.indices < held.length, order.keys_of(held.at(held.places(among.indices, first))), -1)
    reached = packed.count(packed.pack(keys >= among.low[:, None]))
    floor = None if self.floor is None else self.floor[first:last]
    return jax.lax.cond(
      (among.hit & (reached >= self.wanted)).all(),
      lambda: _of_candidates(among, keys, reached, held.share, held.length, floor),
      # This hardly ever runs, and is compiled for every round: a sort is the least to compile.
      lambda: _of_everything(held, first, last, self.floor, "sort"),
    )

  def told(
    self, held: Blocks, got: Sparse, places: jax.Array, values: jax.Array, rows: int
  ) -> tuple[Selector, jax.Array]:
    among, end, n = self.among, held.length, held.grads.size
    # What nothing has come to yet is as it was at the start: a candidate if it reaches the bound.
    before = packed.contains(self.arrived, places)
    known = before | (order.keys_of(values) >= among.low[: len(places), None])
    new = jnp.where(known, end, got.indices)
    more = packed.aligned(held.share) - held.share
    new = jnp.pad(new, ((0, rows - len(new)), (0, more)), constant_values=end)
    among = Candidates(jnp.concatenate([among.indices[:rows], new], axis=1), among.low[:rows], among.hit[:rows])
    return self._replace(among=among, arrived=packed.with_new(self.arrived, jnp.where(before, n, places), n)), known


def _candidates_of(held: Blocks, known: jax.Array | None = None) -> Candidates:
  return candidates.candidates((held.grads, held.residual), held.length, held.share, held.blocks, known)


def _among(held: Blocks, found: Candidates, wanted: jax.Array, floor: jax.Array | None) -> Selector:
  return _Among(found, jnp.zeros(-(-held.grads.size // packed.BITS), jnp.uint32), wanted, floor)


def _of_candidates(
  among: Candidates, keys: jax.Array, reached: jax.Array, share: int, length: int, floor: jax.Array | None
) -> jax.Array:
  """The `share` largest of all that reach the candidates' bound, or all of those, and of them what reaches `floor`."""
  rows, flat = len(keys), among.indices.reshape(-1)
  if floor is None:
    chosen = order.largest_of(keys, among.indices, share, among.low, reached)
    return flat[packed.places(packed.pack(chosen).reshape(-1), rows * share)].reshape(rows, share)
  chosen = order.largest_of(keys, among.indices, jnp.minimum(share, reached), among.low, reached)
  words = packed.pack(chosen & (keys >= floor[:, None]))
  filled = packed.count(words)[:, None]
  slot = jnp.arange(share, dtype=jnp.int32)[None]
  found = packed.places(words.reshape(-1), rows * share)[jnp.cumsum(filled, axis=0) - filled + slot]
  return jnp.where(slot < filled, flat[jnp.minimum(found, flat.size - 1)], length)


def _of_everything(
  held: Blocks, first: int, last: int, floor: jax.Array | None, method: Literal["sort"] | None
) -> jax.Array:
  """The `share` largest entries of each block, found by looking at all of them, and of these what reaches `floor`."""
  everything = jnp.broadcast_to(jnp.arange(held.length, dtype=jnp.int32), (last - first, held.length))
  largest = select.top_k(held.at(held.places(everything, first)), held.share, method=method)
  if floor is None:
    return largest.indices
  return jnp.where(order.keys_of(largest.values) >= floor[first:last, None], largest.indices, held.length)
