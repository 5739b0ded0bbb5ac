"""The largest entry of each of many small chunks: no bound to find, one pass, and the place within a chunk is a byte.

A block of m entries has c chunks, dealt out like cards: chunk j is entries j, j + c, j + 2c, … So a pass over rows of c
entries compares whole rows, and neighbours, which tend to be large together, are in different chunks.

The last bits of a magnitude make room for the row it is in, so that all a pass does is take the maximum of one number
for each chunk. Magnitudes that differ in those bits only count as equal: 7 of the 23 bits of a mantissa at 1 %.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import sparse
from jaxsparse.select import kth_largest as order

_WIDE = 4096  # entries that are compared at a time, so that short rows are not read one by one
_ROWS = 4  # compared at a time, so that the maximum is not read and written for each


def champions(parts: Sequence[jax.Array], length: int, chunks: int, blocks: jax.Array) -> jax.Array:
  """Where the largest entry of each chunk of each block of the sum of `parts` is.

  Args:
    parts: f32[n] each; their sum is never written out.
    length: of a block; block b starts at b · length, and ends at n at the latest.
    chunks: of a block, at most `length`.
    blocks: i32[rows], the block of each row of the result.

  Returns:
    i32[rows, chunks], places within the block; its length where a chunk is empty. The lowest of those whose magnitudes
    agree up to their last ⌈log₂(length / chunks + 1)⌉ bits.

  Example:
    >>> champions([jnp.array([1.0, -5.0, 2.0, 3.0, 4.0, 0.5])], length=4, chunks=2, blocks=jnp.array([1, 0]))
    Array([[0, 1],
           [2, 1]], dtype=int32)
  """
  parts = [jnp.asarray(part) for part in parts]
  of_block = lambda block: _of_block(parts, length, chunks, block * length)
  return jax.lax.map(of_block, blocks)  # one after the other: compilers do worse with a batch of slices


def coarse(keys: jax.Array, length: int, chunks: int) -> jax.Array:
  """`order.keys_of` some entries, without the bits that do not count.

  Example:
    >>> coarse(jnp.array([0x12345678]), length=100, chunks=1).item() == 0x12345600
    True
  """
  return keys & ~_mask(length, chunks)


def _mask(length: int, chunks: int) -> int:
  """As many ones as the number of a row takes."""
  return (1 << (-(-length // chunks)).bit_length()) - 1


def _of_block(parts: Sequence[jax.Array], length: int, chunks: int, start: jax.Array) -> jax.Array:
  mask = _mask(length, chunks)
  filled = jnp.clip(parts[0].size - start, 0, length)
  width = chunks * min(-(-_WIDE // chunks), -(-length // chunks), parts[0].size // chunks)
  column = np.arange(width, dtype=np.int32)
  row_of = jnp.array(column // chunks if width > chunks else 0)  # not to be divided again for each entry
  total = functools.partial(functools.reduce, jnp.add)

  def ranked(values: jax.Array, first: jax.Array) -> jax.Array:
    """Larger for larger entries, and for those of lower rows; `first` is where in the block the values start."""
    return coarse(order.keys_of(values), length, chunks) | (mask - first // chunks - row_of)

  def whole(first: jax.Array) -> jax.Array:
    """Entries all of which are in the block; the compiler makes reading them part of the comparison."""
    return ranked(total(jax.lax.dynamic_slice(part, (start + first,), (width,)) for part in parts), first)

  def several(count: int) -> Callable:
    rows = lambda i: [whole((count * i + number) * width) for number in range(count)]
    return lambda i, best: functools.reduce(jnp.maximum, rows(i), best)

  best = jnp.full(width, -1, jnp.int32)
  best = jax.lax.fori_loop(0, filled // (_ROWS * width), several(_ROWS), best)
  best = jax.lax.fori_loop(filled // (_ROWS * width) * _ROWS, filled // width, several(1), best)
  first = filled // width * width
  rest = ranked(total(sparse.at(part, start + first + column) for part in parts), first)
  best = jnp.maximum(best, jnp.where(first + column < filled, rest, -1))
  best = best.reshape(-1, chunks).max(axis=0)
  places = (mask - (best & mask)) * chunks + jnp.arange(chunks, dtype=jnp.int32)
  return jnp.where(best < 0, length, places)
