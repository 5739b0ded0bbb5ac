"""A vector in blocks, as one worker sees them: the sum of gradient and residual, never stored."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Comm


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A lazily summed f32[n] in blocks of equal length, of which the last ones may reach beyond n.

  Attributes:
    x: the vector.
    order: i32[rows], the block of each row.
    length: entries of a block.
    k: entries to choose of each block.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> x = LazySum((jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.0, 0.0])))
    >>> blocks = Blocks.of(SoloComm(2), x, k=1)
    >>> flat = blocks.flat(jnp.array([[0, 2], [0, 1]]))
    >>> flat, blocks.x.at(flat)
    (Array([[0, 3],
           [2, 3]], dtype=int32), Array([[1.5, 0. ],
           [3. , 0. ]], dtype=float32))
  """

  x: LazySum
  order: jax.Array
  length: int
  k: int

  @classmethod
  def of(cls, comm: Comm, x: LazySum, k: int) -> Self:
    """One block for each worker of `comm`, in the home frame: row b is block (rank + b) mod P, row 0 the own one."""
    order = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
    return cls(x, order, length=-(-x.size // comm.size), k=k)

  @classmethod
  def whole(cls, x: LazySum, k: int) -> Self:
    """One block of all entries."""
    return cls(x, jnp.zeros(1, jnp.int32), length=x.size, k=k)

  @property
  def n(self) -> int:
    """Number of entries."""
    return self.x.size

  def flat(self, indices: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Flat indices of block-relative ones, i32[r, c] of the rows from `first` on; n for empty slots and padding."""
    order = jax.lax.dynamic_slice_in_dim(self.order, first, len(indices))
    return jnp.where(indices < self.length, jnp.minimum(indices + self.length * order[:, None], self.n), self.n)
