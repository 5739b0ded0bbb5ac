"""Selection by a threshold that is given: one pass, no sorting, a number of entries that varies.

What is selected is a set of `select.packed` words, which other questions are put to.
"""

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import packed
from jaxsparse.types import Sparse


def selected(x: jax.Array, threshold: jax.Array) -> jax.Array:
  """The packed set of the entries of magnitude ≥ threshold; zeros are never selected.

  Args:
    x: f32[n].
    threshold: f32[], at least 0.

  Example:
    >>> packed.count(selected(jnp.array([3.0, 0.0, -2.0, 1.0]), jnp.float32(2)))
    Array(2, dtype=int32)
  """
  return packed.pack((jnp.abs(x) >= threshold) & (x != 0))


def counts_before(words: jax.Array, bounds: jax.Array) -> jax.Array:
  """How many selected entries lie before each of `bounds`, i32 like it.

  Example:
    >>> counts_before(packed.pack(jnp.array([True, False, True, True])), jnp.array([0, 1, 4]))
    Array([0, 1, 3], dtype=int32)
  """
  return jax.vmap(lambda bound: packed.before(words, bound))(bounds)


def at_ordinals(words: jax.Array, ordinals: jax.Array) -> jax.Array:
  """Where the selected entries of these ordinals (0 is the first) lie, i32 like them; for a few of them.

  Example:
    >>> at_ordinals(packed.pack(jnp.array([True, False, True])), jnp.array([1]))
    Array([2], dtype=int32)
  """
  return jax.vmap(lambda ordinal: packed.place(words, ordinal))(ordinals)


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
  indices = jnp.minimum(packed.places(words, capacity), x.size)
  return Sparse(indices, sparse.at(x, indices))


def in_regions(x: jax.Array, words: jax.Array, bounds: jax.Array, capacity: int) -> Sparse:
  """The first `capacity` selected entries of each region, in the order of their indices.

  Args:
    x: f32[n].
    words: of `selected`.
    bounds: i32[r + 1], region i is bounds[i] … bounds[i + 1] − 1.
    capacity: slots of each region.

  Returns:
    [r, capacity] entries; empty slots have index n.

  Example:
    >>> x = jnp.array([3.0, 0.0, -2.0, 1.0])
    >>> in_regions(x, selected(x, jnp.float32(1)), jnp.array([0, 1, 4]), 2).indices
    Array([[0, 4],
           [2, 3]], dtype=int32)
  """
  starts = counts_before(words, bounds)
  crowd = jnp.diff(starts)
  fit = jnp.minimum(crowd, capacity)

  def trimmed() -> jax.Array:
    """Without what finds no room in its region, so that others keep theirs."""
    ends = at_ordinals(words, starts[:-1] + fit)
    ends = jnp.where(crowd > capacity, ends, bounds[1:])
    return jax.lax.fori_loop(0, crowd.size, lambda i, kept: packed.without(kept, ends[i], bounds[i + 1]), words)

  kept = jax.lax.cond((crowd > capacity).any(), trimmed, lambda: words)
  found = packed.places(kept, crowd.size * capacity)
  slot = jnp.arange(capacity, dtype=jnp.int32)[None]
  first = jnp.cumsum(fit, dtype=jnp.int32) - fit
  places = found[jnp.minimum(first[:, None] + slot, found.size - 1)]
  indices = jnp.where(slot < fit[:, None], places, x.size)
  return Sparse(indices, sparse.at(x, indices))
