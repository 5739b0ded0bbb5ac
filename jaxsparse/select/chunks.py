"""The largest entry of each of many small chunks: no bound to find, one pass, and the place within a chunk is a byte.

A block of m entries has c chunks, dealt out like cards: chunk j is entries j, j + c, j + 2c, … So a pass over rows of c
entries compares whole rows, and neighbours, which tend to be large together, are in different chunks.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import order

_WIDE = 4096  # entries that are compared at a time, so that short rows are not read one by one


class Champions(NamedTuple):
  """The largest entry of each chunk of each block.

  Attributes:
    indices: i32[rows, chunks], place within the block; the block's length where a chunk is empty.
    keys: i32[rows, chunks], `order.keys_of` its value; −1 where a chunk is empty.
  """

  indices: jax.Array
  keys: jax.Array


def champions(parts: Sequence[jax.Array], length: int, chunks: int, blocks: jax.Array) -> Champions:
  """The entry of largest magnitude of each chunk of each block of the sum of `parts`; ties to the lowest index.

  Args:
    parts: f32[n] each; their sum is never written out.
    length: of a block; block b starts at b · length, and ends at n at the latest.
    chunks: of a block, at most `length`.
    blocks: i32[rows], the block of each row of the result.

  Example:
    >>> champions([jnp.array([1.0, -5.0, 2.0, 3.0, 4.0, 0.5])], length=4, chunks=2, blocks=jnp.array([1, 0])).indices
    Array([[0, 1],
           [2, 1]], dtype=int32)
  """
  parts = [jnp.asarray(part) for part in parts]
  of_block = lambda block: _of_block(parts, length, chunks, block * length)
  return jax.lax.map(of_block, blocks)  # one after the other: compilers do worse with a batch of slices


def _of_block(parts: Sequence[jax.Array], length: int, chunks: int, start: jax.Array) -> Champions:
  n = parts[0].size
  width = min(chunks * -(-_WIDE // chunks), chunks * -(-length // chunks), n // chunks * chunks)
  filled = jnp.clip(n - start, 0, length)
  total = functools.partial(functools.reduce, jnp.add)
  column = jnp.arange(width, dtype=jnp.int32)

  def better(best: Champions, values: jax.Array, indices: jax.Array, valid: jax.Array | bool) -> Champions:
    keys = order.keys_of(values)
    wins = valid & (keys > best.keys)
    return Champions(jnp.where(wins, indices, best.indices), jnp.where(wins, keys, best.keys))

  def row(i: jax.Array, best: Champions) -> Champions:
    values = total(jax.lax.dynamic_slice(part, (start + i * width,), (width,)) for part in parts)
    return better(best, values, i * width + column, True)

  nothing = Champions(jnp.full(width, length, jnp.int32), jnp.full(width, -1, jnp.int32))
  best = jax.lax.fori_loop(0, filled // width, row, nothing)
  rest = filled // width * width + column
  values = total(sparse.at(part, start + rest) for part in parts)
  best = better(best, values, rest, rest < filled)

  # Several columns of one chunk, if rows were widened.
  indices, keys = (x.reshape(-1, chunks) for x in best)
  largest = keys.max(axis=0)
  return Champions(jnp.where(keys == largest[None], indices, length).min(axis=0), largest)
