"""Selection by a given threshold: one pass, no sort, and a number of entries that varies.

The selected entries are a bitset over the n entries of a lazily summed vector.
"""

import jax
import jax.numpy as jnp

from jaxsparse.select.blocks import TOP, Cut, LazySum, bisect, keys_of
from jaxsparse.select.exact import top_k
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse


def select_reaching(x: LazySum, threshold: jax.Array) -> jax.Array:
  """The bitset of the entries of magnitude ≥ threshold, and of every NaN; zeros are never selected.

  Args:
    x: f32[n].
    threshold: f32[], at least 0.

  Example:
    >>> bitset.count(select_reaching(LazySum((jnp.array([3.0, 0.0, -2.0, 1.0]),)), jnp.float32(2)))
    Array(2, dtype=int32)
  """
  values = x.values
  # Not |x| ≥ threshold, which is false for NaN: a NaN would stay in the residual unnoticed.
  return bitset.pack(~(jnp.abs(values) < threshold) & (values != 0))


def cut_to_largest(x: LazySum, members: jax.Array, most: int) -> jax.Array:
  """The bitset of the `most` largest selected entries, ties to the lowest index; `members` where there are no more.

  Args:
    x: f32[n].
    members: of `select_reaching`.
    most: at least 1.

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 4.0]),))
    >>> bitset.nonzero(cut_to_largest(x, select_reaching(x, jnp.float32(1)), 2), 2)
    Array([0, 3], dtype=int32)
  """
  if most >= x.size:
    return members
  largest = lambda: bitset.insert(jnp.zeros_like(members), top_k(x, most).indices, x.size)
  return jax.lax.cond(bitset.count(members) > most, largest, lambda: members)


def read_first(x: LazySum, members: jax.Array, capacity: int) -> Sparse:
  """The first `capacity` selected entries, in the order of their indices; empty slots have index n.

  Args:
    x: f32[n].
    members: of `select_reaching`.
    capacity: slots.

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 1.0]),))
    >>> read_first(x, select_reaching(x, jnp.float32(1)), 2).indices
    Array([0, 2], dtype=int32)
  """
  indices = jnp.minimum(bitset.nonzero(members, capacity), x.size)
  return Sparse(indices, x.read_at(indices))


def read_regions(x: LazySum, members: jax.Array, bounds: jax.Array, capacity: int, most: int) -> Sparse:
  """The selected entries of each region, in the order of their indices.

  Args:
    x: f32[n].
    members: of `cut_regions`.
    bounds: i32[r + 1], region i is bounds[i] … bounds[i + 1] − 1.
    capacity: slots of each region, at least the entries of any.
    most: the largest number of selected entries.

  Returns:
    [r, capacity] entries; empty slots have index n.

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 1.0]),))
    >>> read_regions(x, select_reaching(x, jnp.float32(1)), jnp.array([0, 1, 4]), 2, most=3).indices
    Array([[0, 4],
           [2, 3]], dtype=int32)
  """
  starts = bitset.rank(members, bounds)
  found = bitset.nonzero(members, min((bounds.size - 1) * capacity, most))
  slots = starts[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
  indices = jnp.where(slots < starts[1:, None], found[jnp.minimum(slots, found.size - 1)], x.size)
  return Sparse(indices, x.read_at(indices))


def cut_regions(x: LazySum, members: jax.Array, bounds: jax.Array, capacity: int, most: int) -> jax.Array:
  """The bitset of the `capacity` largest selected entries of each region, ties to the lowest index.

  Args:
    x: f32[n].
    members: of `select_reaching`, at most `most` entries.
    bounds: i32[r + 1], region i is bounds[i] … bounds[i + 1] − 1.
    capacity: the largest number of entries of a region.
    most: the largest number of selected entries.

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 1.0, 2.0]),))
    >>> bitset.nonzero(cut_regions(x, select_reaching(x, jnp.float32(1)), jnp.array([0, 1, 5]), 2, most=4), 3)
    Array([0, 2, 4], dtype=int32)
  """
  if capacity >= most:
    return members
  starts = bitset.rank(members, bounds)

  def largest() -> jax.Array:
    """By counting, all regions at once."""
    indices = jnp.minimum(bitset.nonzero(members, most), x.size)
    keys = jnp.where(indices < x.size, keys_of(x.read_at(indices)), -1)
    region = jnp.searchsorted(bounds[1:-1], indices, side="right")
    selects = lambda cut: Cut(cut.key[region], cut.last[region]).selects(keys, indices)
    low, most_of_each = jnp.zeros_like(starts[1:]), jnp.minimum(jnp.diff(starts), capacity)
    cut = bisect(selects, most_of_each, low, low + TOP, lambda words: jnp.diff(bitset.rank(words, starts)))
    return bitset.insert(jnp.zeros_like(members), jnp.where(selects(cut), indices, x.size), x.size)

  return jax.lax.cond((jnp.diff(starts) > capacity).any(), largest, lambda: members)
