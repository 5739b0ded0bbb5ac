"""How SparDL chooses what to send of each block: the largest entries, or those of them above a known bound.

What a worker holds changes while parts of the sum arrive, so a selector is asked again in every round.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import select, sparse
from jaxsparse.blocks import Blocks
from jaxsparse.held import Held, Selector, SelectorOf
from jaxsparse.select import candidates
from jaxsparse.select import kth_largest as order
from jaxsparse.select.candidates import Candidates
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse


def exact(held: Blocks) -> Selector:
  """The `share` entries of largest magnitude of each row, ties to the lowest index.

  They are looked for among candidates, found in one pass over all rows, and what was added to since; where these cannot
  hold the largest, in the whole block. The same bits either way.
  """
  if not candidates.worthwhile(held.length, held.share):
    return _Everything(None)
  return _Among(_candidates_of(held), jnp.int32(held.share), None)


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
    return _Among(found, jnp.where(hit, 0, held.share), floor)

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
  """The thresholds for the next step: the L-th magnitude chosen, raised where it grows; lower where fewer were chosen.

  Where a row is full, the threshold is its smallest chosen magnitude times the root of that magnitude's growth since
  the last step, 1 … 2. Magnitudes grow while residuals fill up, by √(t + 1)/√t in step t if gradients are noise, and a
  threshold that stays behind is reached by too many entries. Where c of L slots are filled, the threshold falls by the
  factor 3/4 + c/(4 L). Where fewer than half are, it says nothing of the entries below it, as after a spike: it is 0,
  and the next step selects as `exact` does.

  Args:
    reused: the thresholds of this step.
    chosen: [P, L] entries, chosen in this step.
    length: length of a block.

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
  lower = jnp.where(2 * count < share, 0.0, reused.bounds * (0.75 + count.astype(jnp.float32) / (4 * share)))
  # At most the largest finite number: no entry would reach infinity.
  raised = jnp.minimum(least * jnp.sqrt(growth), jnp.finfo(jnp.float32).max)
  return Reused(jnp.where(full, raised, lower), jnp.where(full, least, 0.0))


class _Everything(NamedTuple):
  """Looks at whole blocks.

  Attributes:
    floor: i32[P], which keys of a row must reach; None for all.
  """

  floor: jax.Array | None

  def choose(self, held: Held, first: int, last: int) -> Sparse:
    return _of_everything(held, first, last - first, self.floor, None)


class _Among(NamedTuple):
  """Looks among candidates, and all that something was added to.

  Attributes:
    among: candidates at the start.
    wanted: i32[], how many must reach the candidates' bound for them to hold all that may be chosen.
    floor: i32[P], which keys of a row must reach; None for all.
  """

  among: Candidates
  wanted: jax.Array
  floor: jax.Array | None

  def choose(self, held: Held, first: int, last: int) -> Sparse:
    known = _known(held, self.among, first, last)
    low, hit = self.among.low[first:last], self.among.hit[first:last]
    keys = jnp.where(known.indices < held.length, order.keys_of(known.values), -1)
    reached = bitset.count(bitset.pack(keys >= low[:, None]))
    floor = None if self.floor is None else self.floor[first:last]
    return jax.lax.cond(
      (hit & (reached >= self.wanted)).all(),
      lambda: _of_known(held, known, keys, low, reached, floor),
      lambda: _row_by_row(held, first, last, self.floor),
    )


def _candidates_of(held: Blocks, known: jax.Array | None = None) -> Candidates:
  return candidates.candidates((held.grads, held.residual), held.length, held.share, held.blocks, known)


def _known(held: Held, among: Candidates, first: int, last: int) -> Sparse:
  """What may be among the largest of rows first … last − 1: [last − first, c] entries, each place once.

  Where something was added to a candidate, it is known from there.
  """
  indices = among.indices[first:last]
  moved = bitset.contains(held.touched, held.places(indices, first))
  known = [sparse.where(~moved, Sparse(indices, among.values[first:last]), held.length)]
  for added in held.added:
    rows = slice(first, min(last, len(added.indices)))
    new = jnp.where(added.first[rows], added.indices[rows], held.length)
    if new.size:
      count, capacity = new.shape
      more = ((0, last - first - count), (0, bitset.aligned(capacity) - capacity))
      new = jnp.pad(new, more, constant_values=held.length)
      known.append(Sparse(new, sparse.at(held.grads, held.places(new, first))))
  return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *known)


def _of_known(
  held: Held, known: Sparse, keys: jax.Array, low: jax.Array, reached: jax.Array, floor: jax.Array | None
) -> Sparse:
  """The `share` largest of all that reach `low`, or all of those, and of them what reaches `floor`."""
  rows, share, flat = len(keys), held.share, jax.tree.map(lambda x: x.reshape(-1), known)
  if floor is None:
    chosen = order.largest_of(keys, known.indices, share, low, reached)
    slots = bitset.places(bitset.pack(chosen).reshape(-1), rows * share).reshape(rows, share)
    return jax.tree.map(lambda x: x[slots], flat)
  chosen = order.largest_of(keys, known.indices, jnp.minimum(share, reached), low, reached)
  words = bitset.pack(chosen & (keys >= floor[:, None]))
  filled = bitset.count(words)[:, None]
  slot = jnp.arange(share, dtype=jnp.int32)[None]
  found = bitset.places(words.reshape(-1), rows * share)[jnp.cumsum(filled, axis=0) - filled + slot]
  entries = jax.tree.map(lambda x: x[jnp.minimum(found, flat.indices.size - 1)], flat)
  return sparse.where(slot < filled, entries, held.length)


def _row_by_row(held: Held, first: int, last: int, floor: jax.Array | None) -> Sparse:
  """`_of_everything` where it hardly ever runs, but is compiled for every round and has memory set aside for it.

  So blocks are taken one by one, and by a sort, which is the least to compile.
  """
  of_row = lambda row: jax.tree.map(lambda x: x[0], _of_everything(held, row, 1, floor, "sort"))
  return jax.lax.map(of_row, jnp.arange(first, last, dtype=jnp.int32))


def _of_everything(
  held: Held, first: jax.Array | int, rows: int, floor: jax.Array | None, method: Literal["sort"] | None
) -> Sparse:
  """The `share` largest entries of each of some rows, found by looking at all, and of these what reaches `floor`."""
  everything = jnp.broadcast_to(jnp.arange(held.length, dtype=jnp.int32), (rows, held.length))
  largest = select.top_k(held.at(held.places(everything, first)), held.share, method=method)
  if floor is None:
    return largest
  low = jax.lax.dynamic_slice_in_dim(floor, first, rows)[:, None]
  return sparse.where(order.keys_of(largest.values) >= low, largest, held.length)
