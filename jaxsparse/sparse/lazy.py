"""Gradient + residual as a lazy sum: entries are added where they are read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxsparse.sparse import entries
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
    grads, residual = self.parts
    return Pending(grads, residual, Sparse(indices, jnp.zeros(indices.shape, jnp.float32)))
