"""The largest entry of each of many small chunks: one pass and no threshold, and an index within a chunk is a byte.

Chunk j of c chunks of a block is entries j, j + c, j + 2c, …: a pass over rows of c
entries compares whole rows, and neighbours, which tend to be large together, are in
different chunks.

The last bits of a magnitude are replaced by the number of its row, so that a pass takes
the maximum of one number per chunk. Magnitudes that differ in these bits only count as
equal: 7 of the 23 bits of a mantissa at 1 %.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat, sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.select.accumulator import Pending
from jaxsparse.select.blocks import Blocks, keys_of
from jaxsparse.types import Sparse

# entries that are compared at a time, so that short rows are not read one by one
_WIDE = 4096
_STRIPS = 4  # compared at a time, so that the maximum is not read and written for each


def largest_of_chunks(blocks: Blocks) -> jax.Array:
  """The index of the largest entry of each of k chunks of each block.

  Returns:
    i32[rows, k], block-relative; the block's length where a chunk is empty. The lowest
    of those whose magnitudes agree up to their last ⌈log₂(length / k + 1)⌉ bits.

  Example:
    >>> from jaxsparse.select.blocks import LazySum
    >>> x = LazySum((jnp.array([1.0, -5.0, 2.0, 3.0, 4.0, 0.5]),))
    >>> largest_of_chunks(Blocks(x, order=jnp.array([1, 0]), length=4, k=2))
    Array([[0, 1],
           [2, 1]], dtype=int32)
  """
  # One block after the other: XLA on CPU compiles a batch of slices to slower code.
  in_loops = lambda blocks: jax.lax.map(
    functools.partial(_largest_of_block, blocks), blocks.order
  )
  # All blocks at once take 1.8 times the CPU time of an update; on a GPU loops run 1.5
  # times the kernels.
  return _compat.by_platform(gpu=largest_of_chunks_at_once, default=in_loops)(blocks)


def coarse(keys: jax.Array, length: int, chunks: int) -> jax.Array:
  """Keys of entries (`keys_of`) with zeros in their low bits, in which the search writes the number of a row.

  Example:
    >>> coarse(jnp.array([0x12345678]), length=100, chunks=1).item() == 0x12345600
    True
  """
  return keys & ~_mask(length, chunks)


def _mask(length: int, chunks: int) -> int:
  """The bits of a key that hold the number of a row."""
  return (1 << (-(-length // chunks)).bit_length()) - 1


def largest_of_chunks_at_once(blocks: Blocks) -> jax.Array:
  """`largest_of_chunks` by one reduction: loops whose length depends on a block would make a GPU wait for the host."""
  length = blocks.length
  chunks = blocks.k
  count = blocks.order.size
  mask = _mask(length, chunks)
  rows = -(-length // chunks)
  # −1 is below the key of every entry
  pad = functools.partial(jnp.pad, constant_values=-1)
  keys = pad(keys_of(blocks.x.values), (0, count * length - blocks.x.size))
  # [count, rows, chunks]: a chunk is a column. The first padding filled the last block,
  # in the order of the vector; the second one fills the last row of each block.
  keys = pad(keys.reshape(count, length), ((0, 0), (0, rows * chunks - length)))
  magnitudes = coarse(keys, length, chunks).reshape(count, rows, chunks)
  # The first row has the largest number, so that ties go to the lowest index.
  best = (magnitudes | (mask - iota(rows)[None, :, None])).max(axis=1)
  return _indices_of(best, length, chunks)[blocks.order]


def _indices_of(best: jax.Array, length: int, chunks: int) -> jax.Array:
  """The block-relative indices of the largest entries, i32 like `best`; `length` for an empty chunk.

  Args:
    best: i32[..., chunks], the largest key of each chunk, whose low bits are `_mask`
      minus the row of the entry; negative for an empty chunk.
    length: entries of a block.
    chunks: chunks of a block.
  """
  mask = _mask(length, chunks)
  chunk = jax.lax.broadcasted_iota(jnp.int32, best.shape, best.ndim - 1)
  return jnp.where(best < 0, length, (mask - (best & mask)) * chunks + chunk)


def _largest_of_block(blocks: Blocks, block: jax.Array) -> jax.Array:
  """The block-relative index of the largest entry of each chunk, i32[chunks].

  The block is a matrix with a chunk in each column. The key of an entry has its
  magnitude in the high bits and its row, from the last to the first, in the low bits,
  so one maximum of keys finds both; magnitudes that differ in the low bits alone tie.
  """
  length = blocks.length
  chunks = blocks.k
  start = block * length
  mask = _mask(length, chunks)
  # entries of the block that the vector has
  filled = jnp.clip(blocks.x.size - start, 0, length)
  # A strip is read at once: as many whole rows as have 4,096 entries, but no more than
  # a block or the vector has.
  width = chunks * min(
    -(-_WIDE // chunks), -(-length // chunks), blocks.x.size // chunks
  )
  column = np.arange(width, dtype=np.int32)
  # The row of each entry of a strip is a constant: no division for each entry.
  row_of = jnp.array(column // chunks if width > chunks else 0)

  def key_of(values: jax.Array, first: jax.Array) -> jax.Array:
    """Keys that ascend with the magnitude, and of equal ones descend with the row; values start at index `first`."""
    return coarse(keys_of(values), length, chunks) | (mask - first // chunks - row_of)

  def compare(count: int) -> Callable:
    """A loop's step: the maximum of `best` and of `count` strips; XLA fuses reading with the comparison."""

    def step(i: jax.Array, best: jax.Array) -> jax.Array:
      firsts = [(count * i + strip) * width for strip in range(count)]
      keys = [key_of(blocks.x.slice(start + first, width), first) for first in firsts]
      return functools.reduce(jnp.maximum, keys, best)

    return step

  best = jnp.full(width, -1, jnp.int32)
  # four strips at a time, then up to three single ones, then the entries that are left
  fours = filled // (_STRIPS * width)
  best = varying.fori_loop(0, fours, compare(_STRIPS), best)
  best = varying.fori_loop(fours * _STRIPS, filled // width, compare(1), best)
  first = filled // width * width
  # The last strip may be cut by the end of the block; entries beyond it read 0, and do
  # not count.
  rest = key_of(blocks.x.read_at(start + first + column), first)
  best = jnp.maximum(best, jnp.where(first + column < filled, rest, -1))
  best = best.reshape(-1, chunks).max(axis=0)
  return _indices_of(best, length, chunks)


@dataclasses.dataclass(frozen=True)
class ChunkAccumulator:
  """Blocks of which the largest known entry of each of k chunks of a row is sent; methods as in `TopKAccumulator`.

  The known entries are the initially largest one of each chunk, and received ones. Slot
  j of a sent or received row is an entry of chunk j, so the current value of an entry
  is found by comparing indices slot by slot: there are no lookups and no writes before
  the next residual is materialized.

  Attributes:
    blocks: the layout, and the initial vector, which does not change.
    best: [rows, k], the largest known entries.
    added: [r, k] entries that were added to the first r rows, in order.

  Example:
    >>> from jaxsparse.comm import SoloComm
    >>> from jaxsparse.select.blocks import LazySum
    >>> x = LazySum((jnp.array([1.0, 2.0, 4.0, 3.0]), jnp.array([0.5, 0.0, 0.0, 0.0])))
    >>> acc = ChunkAccumulator.start(Blocks.for_workers(SoloComm(2), x, k=1))
    >>> bag = acc.largest(1, 2)
    >>> bag.indices, bag.values
    (Array([[0]], dtype=int32), Array([[4.]], dtype=float32))
    >>> acc = acc.add(Sparse(jnp.array([[0]]), jnp.array([[10.0]])))
    >>> sent = Sparse(jnp.array([[2], [0]]), jnp.zeros((2, 1)))  # nothing of block 0, all of entry 0 of block 1
    >>> acc.largest(0, 1).values, acc.pending(jnp.array([[1], [0]]), sent).entries.values
    (Array([[11.5]], dtype=float32), Array([[2.],
           [0.]], dtype=float32))
  """

  blocks: Blocks
  best: Sparse
  added: tuple[Sparse, ...] = ()

  @classmethod
  def start(cls, blocks: Blocks) -> Self:
    """Finds the largest entry of each chunk, in one pass."""
    indices = largest_of_chunks(blocks)
    return cls(blocks, Sparse(indices, blocks.x.read_at(blocks.flat_indices(indices))))

  def largest(self, first: int, last: int) -> Sparse:
    """The largest known entry of each chunk of rows first … last − 1."""
    return _rows(self.best, first, last)

  def add(self, entries: Sparse) -> Self:
    """Adds received [r, k] entries to the first r rows; those that are larger become the known entry of their chunk."""
    rows = len(entries.indices)
    length = self.blocks.length
    k = self.blocks.k
    values = self._current_values(entries.indices) + entries.values
    known = _rows(self.best, 0, rows)
    # compared without the low bits, as in `largest_of_chunks`
    magnitudes = lambda values: coarse(keys_of(values), length, k)
    larger = magnitudes(values) > magnitudes(known.values)
    # An entry that was known already is replaced by its sum, whatever its size.
    wins = (entries.indices < length) & ((entries.indices == known.indices) | larger)
    best = Sparse(
      jnp.where(wins, entries.indices, known.indices),
      jnp.where(wins, values, known.values),
    )
    # None: up to the last row
    best = sparse.concatenate([best, _rows(self.best, rows, None)])
    return dataclasses.replace(self, best=best, added=(*self.added, entries))

  def pending(self, delivered: jax.Array, sent: Sparse) -> Pending:
    """The next residual: the current value less what was sent where delivered, elsewhere the initial value.

    Args:
      delivered: i32[rows, k], the block-relative index that the total delivers of each
        chunk; the block's length or more for none.
      sent: [rows, k] entries that were sent, with the rounding error of each value.
    """
    # Where this worker sent the delivered entry, it keeps only the rounding error.
    values = jnp.where(
      delivered == sent.indices, sent.values, self._current_values(delivered)
    )
    entries = Sparse(self.blocks.flat_indices(delivered), values)
    grads, residual = self.blocks.x.parts
    return Pending(grads, residual, entries)

  def _current_values(self, indices: jax.Array) -> jax.Array:
    """The values at i32[r, k] indices of the first r rows, with what was received; sent entries are not subtracted."""
    values = self.blocks.x.read_at(self.blocks.flat_indices(indices))
    # Adds what was received at these very indices.
    for added in self.added:
      rows = min(len(added.indices), len(indices))
      old = values[:rows]
      more = _rows(added, 0, rows)
      new = jnp.where(indices[:rows] == more.indices, old + more.values, old)
      values = jnp.concatenate([new, values[rows:]])
    return values


def _rows(entries: Sparse, first: int, last: int | None) -> Sparse:
  return Sparse(entries.indices[first:last], entries.values[first:last])
