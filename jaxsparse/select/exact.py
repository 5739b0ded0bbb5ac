"""Exact top-k by magnitude."""

import jax
import jax.numpy as jnp

from jaxsparse.types import Sparse


def top_k(x: jax.Array, k: int) -> Sparse:
  """The k entries of largest magnitude of each row, largest first.

  Ties go to the lowest index, and NaN ranks above everything, so that it is never left behind unseen.

  Args:
    x: f32[..., n].
    k: number of entries to select from each row, 1 … n.

  Returns:
    `Sparse` of i32[..., k] indices into the row and f32[..., k] values.

  Raises:
    ValueError: if k is not in 1 … n.

  Example:
    >>> import jax.numpy as jnp
    >>> top_k(jnp.array([1.0, -3.0, 0.0, 3.0]), 2)
    Sparse(indices=Array([1, 3], dtype=int32), values=Array([-3.,  3.], dtype=float32))
  """
  if not 1 <= k <= x.shape[-1]:
    raise ValueError(f"k={k}, choose a number of entries from 1 to the {x.shape[-1]} of a row")
  # lax.top_k is stable and compares as a total order, in which a positive NaN lies above infinity.
  _, indices = jax.lax.top_k(jnp.abs(x), k)
  return Sparse(indices, jnp.take_along_axis(x, indices, axis=-1))
