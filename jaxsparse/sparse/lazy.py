"""Gradient + residual as a lazy sum: entries are added where they are read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxsparse.sparse import bitset, entries
from jaxsparse.types import Pending, Sparse


@dataclasses.dataclass(frozen=True)
class LazySum:
  """A sum of vectors that is never materialized, which saves one pass over n entries.

  Attributes:
    parts: f32[n] each, added in their order.

  Example:
    >>> acc = LazySum((jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0])))
    >>> acc.at(jnp.array([0, 7]))
    Array([1.5, 0. ], dtype=float32)
  """

  parts: tuple[jax.Array, ...]

  @property
  def size(self) -> int:
    """Number of entries n."""
    return self.parts[0].size

  @property
  def values(self) -> jax.Array:
    """All entries, f32[n], as an expression that XLA fuses into the operation that reads it."""
    return functools.reduce(jnp.add, self.parts)

  def at(self, indices: jax.Array) -> jax.Array:
    """The entries at `indices`, f32 of their shape; 0 for an index beyond the end."""
    return functools.reduce(jnp.add, [entries.at(part, indices) for part in self.parts])

  def slice(self, start: jax.Array, length: int) -> jax.Array:
    """The entries start … start + length − 1, f32[length]; all of them must exist."""
    return functools.reduce(jnp.add, [jax.lax.dynamic_slice(part, (start,), (length,)) for part in self.parts])

  def without(self, indices: jax.Array) -> Pending:
    """The residual after the entries at `indices` were delivered: this sum with zeros there, not materialized yet.

    Args:
      indices: i32 of any shape; each index below n occurs once, others are ignored.
    """
    return self.replaced(Sparse(indices, jnp.zeros(indices.shape, jnp.float32)))

  def replaced(self, values: Sparse) -> Pending:
    """The residual with these values at their indices and this sum elsewhere, not materialized yet.

    Args:
      values: entries of any shape; each index below n occurs once, others are ignored.
    """
    grads, residual = self.parts
    return Pending(grads, residual, values)

  def undelivered(self, indices: jax.Array, sent: Sparse, *returned: Sparse) -> Pending:
    """The residual of a reduction that drops or rounds entries on their way, not materialized yet.

    At the indices of the total: what this worker did not send, plus what was returned to it. Elsewhere: this sum, also
    where an entry was sent, since those who sent entries that were dropped everywhere keep them.

    Args:
      indices: i32[c], of the total, ascending; empty slots (n) last.
      sent: the indices that this worker sent, with the unsent part of each value.
      *returned: entries that this worker dropped or rounded off, added in their order; each index once.
    """
    members = bitset.insert(bitset.empty(self.size), indices, self.size)

    def slots(of: Sparse) -> jax.Array:
      flat = of.indices.reshape(-1)
      return jnp.where(bitset.contains(members, flat), bitset.rank(members, flat), indices.size)

    values = entries.put(self.at(indices), slots(sent), sent.values.reshape(-1))
    for part in returned:
      values = values.at[slots(part)].add(part.values.reshape(-1), mode="drop", unique_indices=True)
    return self.replaced(Sparse(indices, values))
