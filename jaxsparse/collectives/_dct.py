"""The DCT of tiles of a gradient: an orthonormal basis in which few coefficients are large (DeMo).

A leaf is a matrix: its leading axes are merged into one, and a vector is one row. It is cut into tiles of `side` ×
`side` entries. Where `side` does not divide an axis, the last tiles along it are shorter, and their transform is that
of their own length; so no tile is padded, and axes of prime lengths need no rule of their own.

    Y = C_h · tile · C_wᵀ,    C_N[k, i] = √(2/N) cos(π k (2i + 1) / 2N), row 0 divided by √2

The coefficients are f32[n]: those of all full tiles, tile by tile, then those of the shorter ones by decreasing size.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import flatten
from jaxsparse.sparse.sums import rounded


class _Region(NamedTuple):
  """A part of a leaf, as a matrix, that consists of tiles of `height` × `width`."""

  height: int
  width: int
  leaf: int
  rows: slice
  columns: slice

  @property
  def tiles(self) -> tuple[int, int]:
    """The number of tiles along each axis."""
    of = lambda part, size: (part.stop - part.start) // size
    return of(self.rows, self.height), of(self.columns, self.width)


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
    leaves = [leaf.reshape(_matrix(shape)) for leaf, shape in zip(leaves, self.shapes, strict=True)]
    parts = []
    for (height, width), regions in self._sizes():
      tiles = jnp.concatenate([_cut(leaves[one.leaf][one.rows, one.columns], one) for one in regions])
      parts.append(_transformed(tiles, cosines(height), cosines(width)).reshape(-1))
    return jnp.concatenate(parts)

  def entries(self, coefficients: jax.Array) -> jax.Array:
    """The entries of f32[n] coefficients: the inverse."""
    leaves = [jnp.zeros(_matrix(shape), coefficients.dtype) for shape in self.shapes]
    start = 0
    for (height, width), regions in self._sizes():
      counts = [math.prod(one.tiles) for one in regions]
      end = start + sum(counts) * height * width
      tiles = coefficients[start:end].reshape(-1, height, width)
      tiles, start = _transformed(tiles, cosines(height).T, cosines(width).T), end
      for one, part in zip(regions, flatten.parts(tiles, counts), strict=True):
        leaves[one.leaf] = leaves[one.leaf].at[one.rows, one.columns].set(_joined(part, one))
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

  def _sizes(self) -> list[tuple[tuple[int, int], list[_Region]]]:
    """The regions of each size of tiles, the largest first."""
    regions = [
      _Region(height, width, number, rows, columns)
      for number, shape in enumerate(self.shapes)
      for (rows, height), (columns, width) in itertools.product(*(_parts(size, self.side) for size in _matrix(shape)))
    ]
    size = lambda one: (-one.height * one.width, one.height)
    of_tile = lambda one: (one.height, one.width)
    return [(key, list(found)) for key, found in itertools.groupby(sorted(regions, key=size), key=of_tile)]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
  return math.prod(shape[:-1]), shape[-1] if shape else 1


def _parts(length: int, side: int) -> list[tuple[slice, int]]:
  """The parts of an axis with tiles of one length each: those of `side`, and the rest."""
  whole = length - length % side
  parts = [(slice(0, whole), side), (slice(whole, length), length - whole)]
  return [(part, size) for part, size in parts if part.stop > part.start]


def _cut(region: jax.Array, one: _Region) -> jax.Array:
  """The tiles of a region, [tiles, height, width]."""
  down, across = one.tiles
  return region.reshape(down, one.height, across, one.width).swapaxes(1, 2).reshape(-1, one.height, one.width)


def _joined(tiles: jax.Array, one: _Region) -> jax.Array:
  """Undoes `_cut`."""
  down, across = one.tiles
  whole = tiles.reshape(down, across, one.height, one.width).swapaxes(1, 2)
  return whole.reshape(down * one.height, across * one.width)


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


def _transformed(tiles: jax.Array, left: np.ndarray, right: np.ndarray) -> jax.Array:
  """`left · tile · rightᵀ` of each tile."""
  tiles = _sum([tiles[:, :, j, None] * right[None, None, :, j] for j in range(len(right))])
  return _sum([tiles[:, j, None, :] * left[None, :, j, None] for j in range(len(left))])


def _sum(terms: list[jax.Array]) -> jax.Array:
  """The sum of products in their order, with the same bits in every program.

  The order of a matrix product depends on its sizes and on the machine, and the last bit of a sum near 0 is its sign.
  """
  return functools.reduce(jnp.add, map(rounded, terms))
