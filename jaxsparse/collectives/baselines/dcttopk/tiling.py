"""The tiles of the leaves of a gradient, and their discrete cosine transforms.

A leaf is a matrix: its leading axes are merged into one, and a vector is one row. It is
cut into tiles of `side` × `side` entries. Where `side` does not divide an axis, the
last tiles along it are shorter, and their transform is that of their own length; so no
tile is padded, and axes of prime lengths need no rule of their own.

    Y = C_h · tile · C_wᵀ,    C_N[k, i] = √(2/N) cos(π k (2i + 1) / 2N), row 0 divided by √2

The coefficients are f32[n]: those of all full tiles, tile by tile, then those of the
shorter ones by decreasing size.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat, sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import flatten
from jaxsparse.arrays.sums import round_mantissa
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.chunks import top_k_of_chunks
from jaxsparse.types import Sparse

_PIECES = 16  # of the tiles, which a CPU transforms one after the other
_GPU_PIECES = 32  # of the vector, whose coefficients a GPU computes one after the other


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
    leaves = [
      leaf.reshape(_matrix_shape(shape))
      for leaf, shape in zip(leaves, self.shapes, strict=True)
    ]
    parts = []
    for group in self._groups():
      tiles = jnp.concatenate(
        [_cut(leaves[one.leaf][one.part], one) for one in group.regions]
      )
      parts.append(_transform(tiles, *group.cosines).reshape(-1))
    return jnp.concatenate(parts)

  def entries(self, coefficients: jax.Array) -> jax.Array:
    """The entries of f32[n] coefficients: the inverse."""
    leaves = [
      jnp.zeros(_matrix_shape(shape), coefficients.dtype) for shape in self.shapes
    ]
    for group in self._groups():
      tiles = coefficients[group.start :][: group.tiles * group.area].reshape(
        -1, group.height, group.width
      )
      left, right = group.cosines
      parts = flatten.parts(
        _transform(tiles, left.T, right.T),
        [one.down * one.across for one in group.regions],
      )
      for one, part in zip(group.regions, parts, strict=True):
        leaves[one.leaf] = leaves[one.leaf].at[one.part].set(_join(part, one))
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

  def largest(
    self, grads: jax.Array, residual: jax.Array, length: int, k: int
  ) -> Sparse:
    """The k largest coefficients of each chunk of `length` of f32[n] + f32[n], as `top_k_of_chunks`."""

    def by_pieces(*parts: jax.Array) -> Sparse:
      """Pieces of whole chunks of the largest tiles, which may be almost all, one after the other; then the rest."""
      groups = self._groups()
      rows = max(1, self.size // _GPU_PIECES // length)
      per_piece = 0 if length % groups[0].area else rows * length // groups[0].area
      pieces = groups[0].tiles // per_piece if per_piece else 0

      coefficients = functools.partial(self._coefficients_of, parts)

      def one(number: jax.Array) -> Sparse:
        tiles = number * per_piece + jnp.arange(per_piece, dtype=jnp.int32)
        return top_k_of_chunks(LazySum((coefficients(groups[0], tiles),)), length, k)

      found = []
      if pieces:
        by_piece = jax.lax.map(one, jnp.arange(pieces, dtype=jnp.int32))
        found.append(jax.tree.map(lambda x: x.reshape(-1, k), by_piece))
      firsts = [pieces * per_piece] + [0] * (len(groups) - 1)
      rest = [
        coefficients(group, jnp.arange(first, group.tiles, dtype=jnp.int32))
        for group, first in zip(groups, firsts, strict=True)
        if first < group.tiles
      ]
      if rest:
        found.append(top_k_of_chunks(LazySum((jnp.concatenate(rest),)), length, k))
      return sparse.concatenate(found)

    at_once = lambda *parts: top_k_of_chunks(
      LazySum((self.coefficients(parts[0] + parts[1]),)), length, k
    )
    # By pieces an update takes 4.5 times the CPU time; at once 1.1 times the bytes.
    return _compat.by_platform(gpu=by_pieces, default=at_once)(grads, residual)

  def _coefficients_of(
    self, parts: tuple[jax.Array, ...], group: "_Group", tiles: jax.Array
  ) -> jax.Array:
    """The coefficients of some tiles of the sum of `parts`, flat; behind barriers, so that a GPU stores them."""
    at = self._positions(group, tiles)
    entries = functools.reduce(jnp.add, [part[at] for part in parts])
    entries = jax.lax.optimization_barrier(entries)
    transformed = _transform_at_once(entries, *group.cosines)
    return jax.lax.optimization_barrier(transformed).reshape(-1)

  def put_entries(
    self, x: jax.Array, coefficients: Sparse, new: Callable[..., jax.Array]
  ) -> jax.Array:
    """f32[n] with `new(x, entries, at)` at flat indices `at`: of all entries of sparse coefficients, by pieces."""
    for group in self._groups():
      tiles = min(group.tiles, max(1, self.size // _GPU_PIECES // group.area))

      def put(
        number: jax.Array, x: jax.Array, group: _Group = group, tiles: int = tiles
      ) -> jax.Array:
        numbers = number * tiles + jnp.arange(tiles, dtype=jnp.int32)
        slots = coefficients.indices - (group.start + number * (tiles * group.area))
        size = tiles * group.area
        slots = jnp.where((slots >= 0) & (slots < size), slots, size)
        dense = sparse.put(jnp.zeros(size, jnp.float32), slots, coefficients.values)
        left, right = group.cosines
        at = self._positions(group, numbers)
        entries = _transform_at_once(
          dense.reshape(-1, group.height, group.width), left.T, right.T
        )
        return sparse.put(
          x,
          at,
          jax.lax.optimization_barrier(
            new(x, jax.lax.optimization_barrier(entries), at)
          ),
        )

      x = varying.fori_loop(0, -(-group.tiles // tiles), put, x)
    return x

  @property
  def size(self) -> int:
    """Number of entries n."""
    return sum(map(math.prod, self.shapes))

  def _positions(self, group: "_Group", tiles: jax.Array) -> jax.Array:
    """The flat indices of the entries of some tiles of a group, i32[tiles, height, width]; n beyond the last tile."""
    rows = [_matrix_shape(shape)[1] for shape in self.shapes]
    leaves = [0, *itertools.accumulate(map(math.prod, self.shapes))]
    starts = [0, *itertools.accumulate(one.down * one.across for one in group.regions)]
    corners = [
      leaves[one.leaf] + one.part[0].start * rows[one.leaf] + one.part[1].start
      for one in group.regions
    ]
    table = (
      starts[:-1],
      corners,
      [rows[one.leaf] for one in group.regions],
      [one.across for one in group.regions],
    )
    bounds = jnp.array(starts[1:-1], jnp.int32)
    region = jnp.searchsorted(bounds, tiles, side="right", method="compare_all")
    start, corner, row, across = (
      jnp.array(column, jnp.int32)[region] for column in table
    )
    down, right = jnp.divmod(tiles - start, across)
    first = corner + down * group.height * row + right * group.width
    inside = row[:, None] * jnp.arange(group.height, dtype=jnp.int32)[None]
    at = (first[:, None] + inside)[:, :, None] + jnp.arange(
      group.width, dtype=jnp.int32
    )[None, None]
    return jnp.where((tiles < group.tiles)[:, None, None], at, self.size)

  def _groups(self) -> list["_Group"]:
    """The tiles of each size, the largest first."""
    regions = []
    for number, shape in enumerate(self.shapes):
      axes = (_split_axis(size, self.side) for size in _matrix_shape(shape))
      for (rows, height, down), (columns, width, across) in itertools.product(*axes):
        regions.append(_Region(height, width, number, (rows, columns), down, across))
    regions.sort(key=lambda one: (-one.height * one.width, one.height))
    groups = list[_Group]()
    start = 0
    for (height, width), same in itertools.groupby(regions, key=lambda one: one[:2]):
      alike = list(same)
      groups.append(
        _Group(height, width, start, sum(one.down * one.across for one in alike), alike)
      )
      start += groups[-1].tiles * groups[-1].area
    return groups


class _Group(NamedTuple):
  """The tiles of `height` × `width`, whose coefficients begin at `start`."""

  height: int
  width: int
  start: int
  tiles: int
  regions: list[_Region]

  @property
  def area(self) -> int:
    """Entries of a tile."""
    return self.height * self.width

  @property
  def cosines(self) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of both axes."""
    return cosines(self.height), cosines(self.width)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
  return math.prod(shape[:-1]), shape[-1] if shape else 1


def _split_axis(length: int, side: int) -> list[tuple[slice, int, int]]:
  """The parts of an axis, the length of their tiles, and how many there are: those of `side`, and one of the rest."""
  count, rest = divmod(length, side)
  parts = [
    (slice(0, length - rest), side, count),
    (slice(length - rest, length), rest, 1),
  ]
  return [part for part in parts if part[0].stop > part[0].start]


def _cut(region: jax.Array, one: _Region) -> jax.Array:
  """The tiles of a region, [tiles, height, width]."""
  return (
    region.reshape(one.down, one.height, one.across, one.width)
    .swapaxes(1, 2)
    .reshape(-1, one.height, one.width)
  )


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
  matrix = np.sqrt(2 / length) * np.cos(
    np.pi * frequency * (2 * index + 1) / (2 * length)
  )
  matrix[0] /= np.sqrt(2)
  return matrix.astype(np.float32)


def _transform(tiles: jax.Array, left: np.ndarray, right: np.ndarray) -> jax.Array:
  """`left · tile · rightᵀ` of each tile, in place: a few tiles at a time, so that their terms stay in a cache."""
  count = len(tiles) // _PIECES

  def replace(piece: jax.Array, tiles: jax.Array) -> jax.Array:
    part = _transform_at_once(
      jax.lax.dynamic_slice_in_dim(tiles, piece * count, count), left, right
    )
    return jax.lax.dynamic_update_slice_in_dim(tiles, part, piece * count, 0)

  if count * _PIECES < len(tiles):
    tiles = tiles.at[count * _PIECES :].set(
      _transform_at_once(tiles[count * _PIECES :], left, right)
    )
  return varying.fori_loop(0, _PIECES, replace, tiles) if count else tiles


def _transform_at_once(
  tiles: jax.Array, left: np.ndarray, right: np.ndarray
) -> jax.Array:
  tiles = _sum_in_order(
    [tiles[:, :, j, None] * right[None, None, :, j] for j in range(len(right))]
  )
  return _sum_in_order(
    [tiles[:, j, None, :] * left[None, :, j, None] for j in range(len(left))]
  )


def _sum_in_order(terms: list[jax.Array]) -> jax.Array:
  """The sum of products in their order, with the same bits in every program.

  The order of a matrix product depends on its sizes and on the machine, and the last
  bit of a sum near 0 is its sign.
  """
  return functools.reduce(jnp.add, map(round_mantissa, terms))
