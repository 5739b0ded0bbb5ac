"""Gradient + residual without adding them up: a sum over n entries that is read where it is needed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxsparse.sparse import entries
from jaxsparse.types import Pending, Sparse


@dataclasses.dataclass(frozen=True)
class LazySum:
  """The sum of vectors, which is never stored: adding them up would read and write n entries more.

  Attributes:
    parts: f32[n] each, added in their order.

  Example:
    >>> home = LazySum((jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0])))
    >>> home.at(jnp.array([0, 7]))
    Array([1.5, 0. ], dtype=float32)
  """

  parts: tuple[jax.Array, ...]

  @property
  def size(self) -> int:
    """N."""
    return self.parts[0].size

  @property
  def values(self) -> jax.Array:
    """All entries f32[n], as an expression that XLA fuses with the pass that reads it."""
    return functools.reduce(jnp.add, self.parts)

  def at(self, indices: jax.Array) -> jax.Array:
    """The entries at some indices, f32 like them; 0 beyond the end."""
    return functools.reduce(jnp.add, [entries.at(part, indices) for part in self.parts])

  def slice(self, start: jax.Array, length: int) -> jax.Array:
    """The entries start … start + length − 1, which all exist, f32[length]."""
    return functools.reduce(jnp.add, [jax.lax.dynamic_slice(part, (start,), (length,)) for part in self.parts])

  def without(self, indices: jax.Array) -> Pending:
    """The residual after the entries at `indices` were delivered: this sum with zeros there, still to be written.

    Args:
      indices: i32 of any shape, each once, or at least n.
    """
    grads, residual = self.parts
    return Pending(grads, residual, Sparse(indices, jnp.zeros(indices.shape, jnp.float32)))
