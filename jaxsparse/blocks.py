"""The blocks that a vector is reduced in, as one worker sees them."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.types import Comm


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A vector of one worker, the sum of two, in P blocks; row b is block (rank + b) mod P, so that row 0 is its own.

  Attributes:
    grads: f32[n], at first the gradient.
    residual: f32[n], at first the residual.
    blocks: i32[P], the block of each row.
    length: of a block; the last ones may reach beyond n.
    share: entries that are chosen of a row at a time.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> blocks = Blocks.of(SoloComm(2), jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.0, 0.0]), share=1)
    >>> places = blocks.places(jnp.array([[0, 2], [0, 1]]))
    >>> places, blocks.at(places)
    (Array([[0, 3],
           [2, 3]], dtype=int32), Array([[1.5, 0. ],
           [3. , 0. ]], dtype=float32))
  """

  grads: jax.Array
  residual: jax.Array
  blocks: jax.Array
  length: int
  share: int

  @classmethod
  def of(cls, comm: Comm, grads: jax.Array, residual: jax.Array, share: int) -> Self:
    """Gradient + residual, in blocks for the workers of `comm`."""
    order = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
    return cls(grads, residual, order, length=-(-grads.size // comm.size), share=share)

  def places(self, indices: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Where indices [rows, c] within rows first … are among all n; n for empty slots and padding."""
    n, blocks = self.grads.size, jax.lax.dynamic_slice_in_dim(self.blocks, first, len(indices))
    return jnp.where(indices < self.length, jnp.minimum(indices + self.length * blocks[:, None], n), n)

  def at(self, places: jax.Array) -> jax.Array:
    """What is at `places` of the two vectors together, f32 like them; 0 beyond the end."""
    return sparse.at(self.grads, places) + sparse.at(self.residual, places)
