"""DctTopk: an all-gather of the largest DCT coefficients of each tile of the gradient (the exchange of DeMo).

Gradients of neighbouring weights are alike, so that few coefficients of their cosine transform hold most of them. The
transform is orthonormal and linear: to send coefficients, and to keep as a residual what they do not deliver, is the
same in both bases.

A leaf is a matrix: its leading axes are merged into one, and a vector is one row. It is cut into tiles of `side` ×
`side` entries. Where `side` does not divide an axis, the last tiles along it are shorter, and their transform is that
of their own length; so no tile is padded, and axes of prime lengths need no rule of their own.

    Y = C_h · tile · C_wᵀ,    C_N[k, i] = √(2/N) cos(π k (2i + 1) / 2N), row 0 divided by √2

The coefficients are f32[n]: those of all full tiles, tile by tile, then those of the shorter ones by decreasing size.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import sparse
from jaxsparse.collectives._base import replace_fields
from jaxsparse.collectives.chunktopk import ChunkTopk
from jaxsparse.comm import varying
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse import flatten
from jaxsparse.sparse.sums import round_mantissa
from jaxsparse.types import Comm, Reduced, State

_PIECES = 16  # of the tiles, which are transformed one after the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class DctTopk(ChunkTopk):
  """Sends the largest DCT coefficients of each tile of each worker to all others (the exchange of DeMo).

  A leaf of the gradient is a matrix, leading axes merged into one, and a vector is one row. It is cut into tiles of
  64 × 64 entries, the last ones along an axis shorter, and C is the orthonormal DCT-II of each tile. With
  `acc_w = gradient_w + residual_w` and q the rounding of `wire`,

      sent_w = q(top_k of each chunk of C acc_w)    total = Cᵀ Σ_w sent_w    next residual = acc_w − Cᵀ sent_w

  A full tile is a chunk of its own; the coefficients of shorter ones are put together in chunks as large. The
  residual is in the basis of the gradient. Of each chunk ⌈ρ · chunk⌉ coefficients are sent, by DeMo 32 of 4,096
  (density 1/128). Ablation: `combine="contributors"`. Entries of the total are rounded, as all sums over 64
  cosines are. Where a worker has several devices, each of them transforms its own pieces of the leaves.

  The published code gives tiles the largest divisor of an axis that is at most 64 as their side, which is 1 for a prime
  axis, and sends half of each vector.

  Args:
    chunk: entries of a full tile, a square number 1 … 16384: 4096 makes tiles of 64 × 64.
    wire: the format of a coefficient, "f32" or "2bit", as of `js.chunktopk_transform`.
    combine: "workers" is the sum over workers. "contributors", of the authors' code, is P times the mean over the
      workers that sent a coefficient: it does **not** conserve (Law C), and even the signs of entries may differ.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> grads = {"w": jnp.array([[[5.0, 1.0], [1.0, 1.0]]])}  # of one worker
    >>> js.simulate("dcttopk", grads, k=1, chunk=4).total["w"].round(3).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
  """

  leaves: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), init=False)
  mixes_entries = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if math.isqrt(self.chunk) ** 2 != self.chunk:
      raise ValueError(f"{self.name}: chunk={self.chunk!r}, choose a square number, 4096 for tiles of 64 × 64")

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return replace_fields(self, leaves=shapes)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, acc = grads.size, grads + state.residual
    tiling = Tiling(self.leaves or ((n,),), math.isqrt(self.chunk))
    total, sent, _, counters = self.exchange(comm, LazySum((tiling.coefficients(acc),)))
    inverse = lambda entries: tiling.entries(sparse.put(jnp.zeros_like(acc), entries.indices, entries.values))
    return Reduced(inverse(total), state._replace(residual=acc - inverse(sent)), counters)


class _Region(NamedTuple):
  """A part of a leaf, as a matrix, that consists of tiles of `height` × `width`: `down` · `across` of them."""

  height: int
  width: int
  leaf: int
  part: tuple[slice, slice]
  down: int
  across: int


class Tiling(NamedTuple):
  """The leaves of a flat gradient, and the largest side of their tiles.

  Example:
    >>> tiling = Tiling(((2, 2),), side=2)
    >>> tiling.coefficients(jnp.array([5.0, 1.0, 1.0, 1.0])).round(3)
    Array([4., 2., 2., 2.], dtype=float32)
    >>> tiling.entries(jnp.array([4.0, 0.0, 0.0, 0.0])).round(3)
    Array([2., 2., 2., 2.], dtype=float32)
  """

  shapes: tuple[tuple[int, ...], ...]
  side: int

  def coefficients(self, flat: jax.Array) -> jax.Array:
    """The coefficients of f32[n] entries."""
    leaves = flatten.parts(flat, list(map(math.prod, self.shapes)))
    leaves = [leaf.reshape(_matrix_shape(shape)) for leaf, shape in zip(leaves, self.shapes, strict=True)]
    parts = []
    for (height, width), regions in self._sizes():
      tiles = jnp.concatenate([_cut(leaves[one.leaf][one.part], one) for one in regions])
      parts.append(_transform(tiles, cosines(height), cosines(width)).reshape(-1))
    return jnp.concatenate(parts)

  def entries(self, coefficients: jax.Array) -> jax.Array:
    """The entries of f32[n] coefficients: the inverse."""
    leaves = [jnp.zeros(_matrix_shape(shape), coefficients.dtype) for shape in self.shapes]
    start = 0
    for (height, width), regions in self._sizes():
      counts = [one.down * one.across for one in regions]
      end = start + sum(counts) * height * width
      tiles = coefficients[start:end].reshape(-1, height, width)
      tiles, start = _transform(tiles, cosines(height).T, cosines(width).T), end
      for one, part in zip(regions, flatten.parts(tiles, counts), strict=True):
        leaves[one.leaf] = leaves[one.leaf].at[one.part].set(_join(part, one))
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

  def _sizes(self) -> list[tuple[tuple[int, int], list[_Region]]]:
    """The regions of each size of tiles, the largest first."""
    regions = []
    for number, shape in enumerate(self.shapes):
      axes = (_split_axis(size, self.side) for size in _matrix_shape(shape))
      for (rows, height, down), (columns, width, across) in itertools.product(*axes):
        regions.append(_Region(height, width, number, (rows, columns), down, across))
    regions.sort(key=lambda one: (-one.height * one.width, one.height))
    return [(key, list(group)) for key, group in itertools.groupby(regions, key=lambda one: one[:2])]


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
  return math.prod(shape[:-1]), shape[-1] if shape else 1


def _split_axis(length: int, side: int) -> list[tuple[slice, int, int]]:
  """The parts of an axis, the length of their tiles, and how many there are: those of `side`, and one of the rest."""
  count, rest = divmod(length, side)
  parts = [(slice(0, length - rest), side, count), (slice(length - rest, length), rest, 1)]
  return [part for part in parts if part[0].stop > part[0].start]


def _cut(region: jax.Array, one: _Region) -> jax.Array:
  """The tiles of a region, [tiles, height, width]."""
  return region.reshape(one.down, one.height, one.across, one.width).swapaxes(1, 2).reshape(-1, one.height, one.width)


def _join(tiles: jax.Array, one: _Region) -> jax.Array:
  """Undoes `_cut`."""
  rows = tiles.reshape(one.down, one.across, one.height, one.width).swapaxes(1, 2)
  return rows.reshape(one.down * one.height, one.across * one.width)


@functools.cache
def cosines(length: int) -> np.ndarray:
  """The orthonormal matrix C of the DCT-II, f32[length, length].

  Example:
    >>> cosines(2).round(3).tolist()
    [[0.707..., 0.707...], [0.707..., -0.707...]]
  """
  frequency, index = np.mgrid[:length, :length]
  matrix = np.sqrt(2 / length) * np.cos(np.pi * frequency * (2 * index + 1) / (2 * length))
  matrix[0] /= np.sqrt(2)
  return matrix.astype(np.float32)


def _transform(tiles: jax.Array, left: np.ndarray, right: np.ndarray) -> jax.Array:
  """`left · tile · rightᵀ` of each tile, in place: a few tiles at a time, so that their terms stay in a cache."""

  def transform(tiles: jax.Array) -> jax.Array:
    tiles = _sum_in_order([tiles[:, :, j, None] * right[None, None, :, j] for j in range(len(right))])
    return _sum_in_order([tiles[:, j, None, :] * left[None, :, j, None] for j in range(len(left))])

  count = len(tiles) // _PIECES

  def replace(piece: jax.Array, tiles: jax.Array) -> jax.Array:
    # Between barriers XLA on GPUs makes one kernel of a transform; it would store the products else.
    part = jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(tiles, piece * count, count))
    part = jax.lax.optimization_barrier(transform(part))
    return jax.lax.dynamic_update_slice_in_dim(tiles, part, piece * count, 0)

  if count * _PIECES < len(tiles):
    tiles = tiles.at[count * _PIECES :].set(transform(tiles[count * _PIECES :]))
  return varying.fori_loop(0, _PIECES, replace, tiles) if count else tiles


def _sum_in_order(terms: list[jax.Array]) -> jax.Array:
  """The sum of products in their order, with the same bits in every program.

  The order of a matrix product depends on its sizes and on the machine, and the last bit of a sum near 0 is its sign.
  """
  return functools.reduce(jnp.add, map(round_mantissa, terms))
