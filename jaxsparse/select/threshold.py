"""Selection by a threshold that is given: one pass, no sorting, a number of entries that varies.

What is selected is a set of `select.packed` words, which other questions are put to.
"""

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import kth_largest as order
from jaxsparse.select.exact import top_k
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse


def selected(x: jax.Array, threshold: jax.Array) -> jax.Array:
  """The packed set of the entries of magnitude ≥ threshold, and of every NaN; zeros are never selected.

  Args:
    x: f32[n].
    threshold: f32[], at least 0.

  Example:
    >>> bitset.count(selected(jnp.array([3.0, 0.0, -2.0, 1.0]), jnp.float32(2)))
    Array(2, dtype=int32)
  """
  # Not |x| ≥ threshold, which is false for NaN: it would stay behind unseen.
  return bitset.pack(~(jnp.abs(x) < threshold) & (x != 0))


def at_most(x: jax.Array, words: jax.Array, most: int) -> jax.Array:
  """The packed set of the `most` largest selected entries, ties to the lowest index; `words` where there are no more.

  Args:
    x: f32[n].
    words: of `selected`.
    most: at least 1.

  Example:
    >>> x = jnp.array([3.0, 0.0, -2.0, 4.0])
    >>> bitset.places(at_most(x, selected(x, jnp.float32(1)), 2), 2)
    Array([0, 3], dtype=int32)
  """
  if most >= x.size:
    return words
  largest = lambda: bitset.with_new(jnp.zeros_like(words), top_k(x, most).indices, x.size)
  return jax.lax.cond(bitset.count(words) > most, largest, lambda: words)


def counts_before(words: jax.Array, bounds: jax.Array) -> jax.Array:
  """How many selected entries lie before each of `bounds`, i32 like it.

  Example:
    >>> counts_before(bitset.pack(jnp.array([True, False, True, True])), jnp.array([0, 1, 4]))
    Array([0, 1, 3], dtype=int32)
  """
  return jax.vmap(lambda bound: bitset.before(words, bound))(bounds)


def at_ordinals(words: jax.Array, ordinals: jax.Array) -> jax.Array:
  """Where the selected entries of these ordinals (0 is the first) lie, i32 like them; for a few of them.

  Example:
    >>> at_ordinals(bitset.pack(jnp.array([True, False, True])), jnp.array([1]))
    Array([2], dtype=int32)
  """
  return jax.vmap(lambda ordinal: bitset.place(words, ordinal))(ordinals)


def first(x: jax.Array, words: jax.Array, capacity: int) -> Sparse:
  """The first `capacity` selected entries, in the order of their indices.

  Args:
    x: f32[n].
    words: of `selected`.
    capacity: slots.

  Returns:
    [capacity] entries; empty slots have index n.

  Example:
    >>> x = jnp.array([3.0, 0.0, -2.0, 1.0])
    >>> first(x, selected(x, jnp.float32(1)), 2).indices
    Array([0, 2], dtype=int32)
  """
  indices = jnp.minimum(bitset.places(words, capacity), x.size)
  return Sparse(indices, sparse.at(x, indices))


def in_regions(x: jax.Array, words: jax.Array, bounds: jax.Array, capacity: int, most: int) -> Sparse:
  """The selected entries of each region, in the order of their indices; of more than `capacity` the largest.

  Args:
    x: f32[n].
    words: of `selected`, at most `most` entries.
    bounds: i32[r + 1], region i is bounds[i] … bounds[i + 1] − 1.
    capacity: slots of each region.
    most: the largest number of selected entries.

  Returns:
    [r, capacity] entries; empty slots have index n. Ties go to the lowest index.

  Example:
    >>> x = jnp.array([3.0, 0.0, -2.0, 1.0, 2.0])
    >>> in_regions(x, selected(x, jnp.float32(1)), jnp.array([0, 1, 5]), 2, most=4).indices
    Array([[0, 5],
           [2, 4]], dtype=int32)
  """
  starts = counts_before(words, bounds)
  crowd = jnp.diff(starts)
  fit = jnp.minimum(crowd, capacity)
  trimmed = lambda: _largest_in_regions(x, words, bounds, starts, capacity, most)
  kept = jax.lax.cond((crowd > capacity).any(), trimmed, lambda: words)
  found = bitset.places(kept, crowd.size * capacity)
  slot = jnp.arange(capacity, dtype=jnp.int32)[None]
  first = jnp.cumsum(fit, dtype=jnp.int32) - fit
  places = found[jnp.minimum(first[:, None] + slot, found.size - 1)]
  indices = jnp.where(slot < fit[:, None], places, x.size)
  return Sparse(indices, sparse.at(x, indices))


def _largest_in_regions(
  x: jax.Array, words: jax.Array, bounds: jax.Array, starts: jax.Array, capacity: int, most: int
) -> jax.Array:
  """The packed set of the `capacity` largest selected entries of each region; the arguments are those of `in_regions`.

  One sort by region, then by magnitude; `starts` says where in that order a region begins.
  """
  regions = bounds.size - 1
  indices = jnp.minimum(bitset.places(words, most), x.size)
  region = jnp.searchsorted(bounds[1:], indices, side="right").astype(jnp.int32)
  smallness = order.TOP - order.keys_of(sparse.at(x, indices))
  region, _, indices = jax.lax.sort((region, smallness, indices), num_keys=2, is_stable=True)
  ordinal = jnp.arange(most, dtype=jnp.int32) - starts[region]
  kept = (region < regions) & (ordinal < capacity)
  return bitset.with_new(jnp.zeros_like(words), jnp.where(kept, indices, x.size), x.size)
