"""Selection by a threshold that is given: one pass, no sorting, a number of entries that varies."""

import jax
import jax.numpy as jnp

from jaxsparse.types import Sparse


def selected(x: jax.Array, threshold: jax.Array) -> jax.Array:
  """For each place how many entries of magnitude ≥ threshold lie up to there; zeros are never selected.

  Args:
    x: f32[n].
    threshold: f32[], at least 0.

  Returns:
    i32[n]; the last is the number of selected entries.

  Example:
    >>> selected(jnp.array([3.0, 0.0, -2.0, 1.0]), jnp.float32(2))
    Array([1, 1, 2, 2], dtype=int32)
  """
  return jnp.cumsum((jnp.abs(x) >= threshold) & (x != 0), dtype=jnp.int32)


def at_ordinals(upto: jax.Array, ordinals: jax.Array) -> jax.Array:
  """Where the selected entries of these ordinals (1 is the first) lie, i32 like `ordinals`; n where there are fewer.

  Example:
    >>> at_ordinals(jnp.array([1, 1, 2, 2]), jnp.array([2, 3]))
    Array([2, 4], dtype=int32)
  """
  return jnp.searchsorted(upto, ordinals).astype(jnp.int32)


def in_regions(x: jax.Array, upto: jax.Array, bounds: jax.Array, capacity: int) -> Sparse:
  """The first `capacity` selected entries of each region, in the order of their indices.

  Args:
    x: f32[n].
    upto: i32[n], of `selected`.
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
  before = counts_before(upto, bounds)
  slots = jnp.arange(1, capacity + 1, dtype=jnp.int32)
  ordinals = before[:-1, None] + slots[None]
  indices = jnp.where(ordinals <= before[1:, None], at_ordinals(upto, ordinals), x.size)
  return Sparse(indices, x.at[indices].get(mode="fill", fill_value=0.0))


def counts_before(upto: jax.Array, bounds: jax.Array) -> jax.Array:
  """How many selected entries lie before each of `bounds`, i32 like it.

  Example:
    >>> counts_before(jnp.array([1, 1, 2, 2]), jnp.array([0, 1, 4]))
    Array([0, 1, 2], dtype=int32)
  """
  return jnp.where(bounds > 0, upto[jnp.maximum(bounds - 1, 0)], 0)
