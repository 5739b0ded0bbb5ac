"""What selection reads: gradient + residual as a lazy sum in blocks, and the order of magnitudes.

The sum is never stored, which saves one pass over n entries: entries are added where they are read.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.types import Comm

_NAN = 0x7F80_0001
TOP = _NAN + 1
"""Every key of `keys_of` is smaller."""


def keys_of(x: jax.Array) -> jax.Array:
  """Integers that order as magnitudes do, i32 like x: the bits of |x|. Every NaN has one key, above that of infinity.

  Example:
    >>> keys_of(jnp.array([-1.0, 1.0, 0.0]))
    Array([1065353216, 1065353216,          0], dtype=int32)
  """
  return jnp.minimum(jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF, _NAN)


@dataclasses.dataclass(frozen=True)
class LazySum:
  """The sum of f32[n] vectors, added in their order where they are read.

  Example:
    >>> acc = LazySum((jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0])))
    >>> acc.read_at(jnp.array([0, 7]))
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

  def read_at(self, indices: jax.Array) -> jax.Array:
    """The entries at `indices`, f32 of their shape; 0 for an index beyond the end."""
    return functools.reduce(jnp.add, [sparse.read_at(part, indices) for part in self.parts])

  def slice(self, start: jax.Array, length: int) -> jax.Array:
    """The entries start … start + length − 1, f32[length]; all of them must exist."""
    return functools.reduce(jnp.add, [jax.lax.dynamic_slice(part, (start,), (length,)) for part in self.parts])


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
    >>> blocks = Blocks.for_workers(SoloComm(2), x, k=1)
    >>> flat = blocks.flat_indices(jnp.array([[0, 2], [0, 1]]))
    >>> flat, blocks.x.read_at(flat)
    (Array([[0, 3],
           [2, 3]], dtype=int32), Array([[1.5, 0. ],
           [3. , 0. ]], dtype=float32))
  """

  x: LazySum
  order: jax.Array
  length: int
  k: int

  @classmethod
  def for_workers(cls, comm: Comm, x: LazySum, k: int) -> Self:
    """One block for each worker of `comm`, in the home frame: row b is block (rank + b) mod P, row 0 the own one."""
    order = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
    return cls(x, order, length=-(-x.size // comm.size), k=k)

  @classmethod
  def single(cls, x: LazySum, k: int) -> Self:
    """One block of all entries."""
    return cls(x, jnp.zeros(1, jnp.int32), length=x.size, k=k)

  def flat_indices(self, indices: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Flat indices of block-relative ones, i32[r, c] of the rows from `first` on; n for empty slots and padding."""
    n, order = self.x.size, jax.lax.dynamic_slice_in_dim(self.order, first, len(indices))
    return jnp.where(indices < self.length, jnp.minimum(indices + self.length * order[:, None], n), n)
