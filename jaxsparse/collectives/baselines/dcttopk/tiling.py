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
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat, sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import flatten, iota
from jaxsparse.arrays.sums import round_mantissa
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.chunks import top_k_of_chunks
from jaxsparse.types import Sparse

_CPU_PIECES = 16  # pieces of the tiles, which a CPU transforms one after the other
_GPU_PIECES = 32  # pieces of the vector, whose coefficients a GPU computes in turn


class _Region(NamedTuple):
  """A part of a leaf, as a matrix, that consists of tiles of `height` × `width`: `down` · `across` of them.

  Attributes:
    height: rows of a tile.
    width: columns of a tile.
    leaf: the number of the leaf.
    slices: the rows and the columns of the leaf's matrix.
    down: tiles below each other.
    across: tiles beside each other.
  """

  height: int
  width: int
  leaf: int
  slices: tuple[slice, slice]
  down: int
  across: int

  @property
  def tiles(self) -> int:
    return self.down * self.across


class Tiling(NamedTuple):
  """The leaves of a flat gradient, and the largest side of their tiles.

  Attributes:
    shapes: the shapes of the leaves, in the order of the flat vector.
    side: rows and columns of a full tile.

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
    """The coefficients, f32[n], of the f32[n] entries `flat`."""
    leaves = flatten.parts(flat, list(map(math.prod, self.shapes)))
    leaves = [
      leaf.reshape(_matrix_shape(shape))
      for leaf, shape in zip(leaves, self.shapes, strict=True)
    ]
    parts = []
    for group in self._groups():
      # [tiles, height, width] of all leaves; a region is the part of a leaf with tiles
      # of this size, at the rows and columns `slices`.
      tiles = jnp.concatenate(
        [_cut(leaves[region.leaf][region.slices], region) for region in group.regions]
      )
      # Tiles of one size, of all leaves, are transformed together; `cosines` are C_h
      # and C_w.
      parts.append(_transform(tiles, *group.cosines).reshape(-1))
    return jnp.concatenate(parts)

  def entries(self, coefficients: jax.Array) -> jax.Array:
    """The entries, f32[n], of f32[n] coefficients: the inverse of `coefficients`."""
    leaves = [
      jnp.zeros(_matrix_shape(shape), coefficients.dtype) for shape in self.shapes
    ]
    for group in self._groups():
      tiles = coefficients[group.start :][: group.tiles * group.area].reshape(
        -1, group.height, group.width
      )
      # Cosines are orthogonal matrices, so the transposed ones invert the transform.
      left, right = group.cosines
      parts = flatten.parts(
        _transform(tiles, left.T, right.T),
        [region.tiles for region in group.regions],
      )
      for region, region_tiles in zip(group.regions, parts, strict=True):
        leaf = leaves[region.leaf]
        leaves[region.leaf] = leaf.at[region.slices].set(_join(region_tiles, region))
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])

  def largest(
    self, grads: jax.Array, residual: jax.Array, length: int, k: int
  ) -> Sparse:
    """The k largest coefficients of each chunk of `length` coefficients of gradient + residual, f32[n] each.

    Returns [chunks, k] entries with indices relative to the chunk.
    """

    def by_pieces(*parts: jax.Array) -> Sparse:
      """Selects from the largest tiles in pieces of about n/32 coefficients, in turn; then from all that remains."""
      groups = self._groups()
      # A piece is `rows` chunks, or `per_piece` tiles of groups[0], the largest ones.
      # If a chunk does not consist of whole tiles, there are no pieces.
      rows = max(1, self.size // _GPU_PIECES // length)
      per_piece = 0 if length % groups[0].area else rows * length // groups[0].area
      pieces = groups[0].tiles // per_piece if per_piece else 0

      coefficients = functools.partial(self._coefficients_of, parts)

      def select_piece(piece: jax.Array) -> Sparse:
        tiles = piece * per_piece + iota(per_piece)
        return top_k_of_chunks(LazySum((coefficients(groups[0], tiles),)), length, k)

      largest = []
      if pieces:
        by_piece = jax.lax.map(select_piece, iota(pieces))
        largest.append(jax.tree.map(lambda x: x.reshape(-1, k), by_piece))
      # for each group, the number of its first tile that is in no piece
      firsts = [pieces * per_piece] + [0] * (len(groups) - 1)
      rest = [
        coefficients(group, jnp.arange(first, group.tiles, dtype=jnp.int32))
        for group, first in zip(groups, firsts, strict=True)
        if first < group.tiles
      ]
      if rest:
        # Remaining largest tiles, then shorter ones: a chunk may have both.
        largest.append(top_k_of_chunks(LazySum((jnp.concatenate(rest),)), length, k))
      return sparse.concatenate(largest)

    at_once = lambda *parts: top_k_of_chunks(
      LazySum((self.coefficients(parts[0] + parts[1]),)), length, k
    )
    # An update by `by_pieces` takes 4.5 times the CPU time. Compiled for an H100, one
    # by `at_once` moves 1.4 times the bytes, and stores 1.4 arrays f32[n], not 0.4.
    return _compat.by_platform(gpu=by_pieces, default=at_once)(grads, residual)

  def _coefficients_of(
    self, parts: tuple[jax.Array, ...], group: "_Group", tiles: jax.Array
  ) -> jax.Array:
    """The coefficients, f32[t · area], of the tiles i32[t] of a group, in the sum of the f32[n] `parts`."""
    # The leaves are not cut into tiles before: that would copy them.
    at = self._positions(group, tiles)
    entries = functools.reduce(jnp.add, [term[at] for term in parts])
    # Barriers make a GPU store the tiles, which it would compute again for each use.
    entries = jax.lax.optimization_barrier(entries)
    transformed = _transform_at_once(entries, *group.cosines)
    return jax.lax.optimization_barrier(transformed).reshape(-1)

  def put_entries(
    self, x: jax.Array, coefficients: Sparse, new: Callable[..., jax.Array]
  ) -> jax.Array:
    """`x` with every entry replaced by that of `new(x, entries, at)`, piece by piece.

    Args:
      x: f32[n].
      coefficients: sparse coefficients, whose inverse transform are the `entries`.
      new: computes a piece, f32[tiles, height, width], from `x` as replaced so far, the
        `entries` of the piece, in the same shape, and their flat indices `at`.
    """
    for group in self._groups():
      # Pieces bound what is in memory at once: a 32nd of the vector.
      tiles = min(group.tiles, max(1, self.size // _GPU_PIECES // group.area))

      def put(
        piece: jax.Array, x: jax.Array, group: _Group = group, tiles: int = tiles
      ) -> jax.Array:
        tile_numbers = piece * tiles + iota(tiles)
        # the index of each coefficient in this piece; `size`, which `sparse.put` drops,
        # for one of another piece
        slots = coefficients.indices - (group.start + piece * (tiles * group.area))
        size = tiles * group.area
        slots = jnp.where((slots >= 0) & (slots < size), slots, size)
        dense = sparse.put(jnp.zeros(size, jnp.float32), slots, coefficients.values)
        left, right = group.cosines
        # The last piece may reach beyond the last tile: index n, which `put` drops.
        at = self._positions(group, tile_numbers)
        coefficient_tiles = dense.reshape(-1, group.height, group.width)
        entries = _transform_at_once(coefficient_tiles, left.T, right.T)
        # Barriers make a GPU store the tiles: it would compute them again for each use,
        # and copy x.
        values = new(x, jax.lax.optimization_barrier(entries), at)
        return sparse.put(x, at, jax.lax.optimization_barrier(values))

      x = varying.fori_loop(0, -(-group.tiles // tiles), put, x)
    return x

  @property
  def size(self) -> int:
    """Number of entries n."""
    return sum(map(math.prod, self.shapes))

  def _positions(self, group: "_Group", tiles: jax.Array) -> jax.Array:
    """The flat indices of the entries of some tiles of a group, i32[tiles, height, width]; n beyond the last tile."""
    # the length of a row of each leaf
    rows = [_matrix_shape(shape)[1] for shape in self.shapes]
    # the first flat index of each leaf
    leaves = [0, *itertools.accumulate(map(math.prod, self.shapes))]
    starts = [0, *itertools.accumulate(region.tiles for region in group.regions)]
    # the flat index of the first entry of each region, its upper left one
    corners = []
    for region in group.regions:
      top, left = (span.start for span in region.slices)
      corners.append(leaves[region.leaf] + top * rows[region.leaf] + left)
    table = (
      starts[:-1],
      corners,
      [rows[region.leaf] for region in group.regions],
      [region.across for region in group.regions],
    )
    # region i has tiles starts[i] … starts[i + 1] − 1 of the group
    bounds = jnp.array(starts[1:-1], jnp.int32)
    region_of_tile = jnp.searchsorted(bounds, tiles, side="right", method="compare_all")
    start, corner, row, across = (
      jnp.array(column, jnp.int32)[region_of_tile] for column in table
    )
    # row and column of a tile among the tiles of its region
    down, right = jnp.divmod(tiles - start, across)
    first = corner + down * group.height * row + right * group.width
    rows_of_tile = first[:, None] + row[:, None] * iota(group.height)[None]
    at = rows_of_tile[:, :, None] + iota(group.width)[None, None]
    exists = (tiles < group.tiles)[:, None, None]
    return jnp.where(exists, at, self.size)

  def _groups(self) -> list["_Group"]:
    """The tiles of each size, the largest first."""
    regions = []
    for leaf_index, shape in enumerate(self.shapes):
      # up to four regions a leaf: full tiles, shorter ones below, beside, and in the
      # corner
      axes = (_split_axis(size, self.side) for size in _matrix_shape(shape))
      for (rows, height, down), (columns, width, across) in itertools.product(*axes):
        regions.append(
          _Region(height, width, leaf_index, (rows, columns), down, across)
        )
    # Larger tiles first, so that chunks of full tiles come before those of shorter
    # ones; by height, too, so that tiles of one shape are neighbours for `groupby`.
    regions.sort(key=lambda region: (-region.height * region.width, region.height))
    groups = list[_Group]()
    start = 0
    for (height, width), same in itertools.groupby(
      regions, key=lambda region: region[:2]
    ):
      alike = list(same)
      groups.append(
        _Group(height, width, start, sum(region.tiles for region in alike), alike)
      )
      start += groups[-1].tiles * groups[-1].area
    return groups


class _Group(NamedTuple):
  """The tiles of one size of all leaves, which are transformed together.

  Attributes:
    height: rows of a tile.
    width: columns of a tile.
    start: the index of the first of their coefficients, which follow each other.
    tiles: number of tiles.
    regions: the parts of leaves that consist of these tiles, in their order.
  """

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
  """(indices, length of a tile, number of tiles) of each part of an axis: tiles of `side`, and one shorter tile."""
  count, rest = divmod(length, side)
  parts = [
    (slice(0, length - rest), side, count),
    (slice(length - rest, length), rest, 1),
  ]
  # No shorter tile if `side` divides the axis, no tile of `side` in a shorter axis.
  return [part for part in parts if part[0].stop > part[0].start]


def _cut(entries: jax.Array, region: _Region) -> jax.Array:
  """The tiles of a region, [tiles, height, width]."""
  return (
    entries.reshape(region.down, region.height, region.across, region.width)
    .swapaxes(1, 2)
    .reshape(-1, region.height, region.width)
  )


def _join(tiles: jax.Array, region: _Region) -> jax.Array:
  """Undoes `_cut`: from the tiles of a region, [tiles, height, width], to its matrix."""
  shape = region.down, region.across, region.height, region.width
  rows = tiles.reshape(shape).swapaxes(1, 2)
  return rows.reshape(region.down * region.height, region.across * region.width)


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
  # so that all rows have norm 1
  matrix[0] /= np.sqrt(2)
  return matrix.astype(np.float32)


def _transform(
  tiles: jax.Array,
  left: np.ndarray,
  right: np.ndarray,
) -> jax.Array:
  """`left · tile · rightᵀ` of each tile, f32[tiles, height, width], in place.

  A 16th of the tiles at a time, so that their products stay in the cache of a CPU.
  """
  count = len(tiles) // _CPU_PIECES

  def replace(piece: jax.Array, tiles: jax.Array) -> jax.Array:
    transformed = _transform_at_once(
      jax.lax.dynamic_slice_in_dim(tiles, piece * count, count), left, right
    )
    return jax.lax.dynamic_update_slice_in_dim(tiles, transformed, piece * count, 0)

  # the rest, fewer than 16 tiles, at once
  in_pieces = count * _CPU_PIECES
  if in_pieces < len(tiles):
    rest = _transform_at_once(tiles[in_pieces:], left, right)
    tiles = tiles.at[in_pieces:].set(rest)
  return varying.fori_loop(0, _CPU_PIECES, replace, tiles) if count else tiles


def _transform_at_once(
  tiles: jax.Array, left: np.ndarray, right: np.ndarray
) -> jax.Array:
  """`left · tile · rightᵀ` of each tile."""
  # No matrix product, whose order of additions may vary: term j of the sum is column j
  # of each tile times column j of `right`, as an outer product.
  by_column = lambda j: tiles[:, :, j, None] * right[None, None, :, j]
  rows = _sum_in_order(map(by_column, range(len(right))))
  by_row = lambda j: rows[:, j, None, :] * left[None, :, j, None]
  return _sum_in_order(map(by_row, range(len(left))))


def _sum_in_order(terms: Iterable[jax.Array]) -> jax.Array:
  """The sum of products in their order, with the same bits in every program.

  The order of a matrix product depends on its sizes and on the machine, and the last
  bit of a sum near 0 is its sign.
  """
  return functools.reduce(jnp.add, map(round_mantissa, terms))
