"""Floating-point arithmetic with the same bits in every compiled program, block by block of a vector.

A vector is given as parts, f32[n] each, that are added where they are read, so that their sum is never stored.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

_COLUMNS = 256
_BLOCK = 1 << 17  # entries, few enough for the cache


def ordered_sum(*parts: jax.Array, term: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
  """The sum of the terms of the sum of `parts`, f32[], in a fixed order.

  Blocks of 2¹⁷ entries are added one after the other, in each of them the rows of [·, 256]; then the columns pairwise.
  The compiler chooses the order of `jnp.sum`, and another one under vmap, so thresholds and norms of the simulator and
  of a mesh would differ in their last bits. It would also store their sum, and all terms.

  Args:
    *parts: f32[n] each.
    term: elementwise.

  Example:
    >>> ordered_sum(jnp.arange(4.0), term=lambda x: x**2)
    Array(14., dtype=float32)
  """

  def sum_columns(block: jax.Array) -> jax.Array:
    return jnp.pad(term(block), (0, -block.size % _COLUMNS)).reshape(-1, _COLUMNS).sum(0)

  columns = _reduce_blocks(parts, sum_columns, jnp.add)
  while columns.size > 1:
    half = columns.size // 2
    columns = columns[:half] + columns[half:]
  return columns[0]


def row_sums(x: jax.Array) -> jax.Array:
  """The sum of each row of f32[rows, m], by halves.

  Example:
    >>> row_sums(jnp.array([[1.0, 2.0, 4.0]]))
    Array([7.], dtype=float32)
  """
  while x.shape[1] > 1:
    half = -(-x.shape[1] // 2)
    x = x[:, :half] + jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - x.shape[1])))
  return x[:, 0]


def largest_magnitude(x: jax.Array) -> jax.Array:
  """The largest magnitude of f32[n], f32[]; NaN if there is one.

  Example:
    >>> largest_magnitude(jnp.array([1.0, -3.0]))
    Array(3., dtype=float32)
  """
  return _reduce_blocks((x,), lambda block: jnp.max(jnp.abs(block), initial=0.0), jnp.maximum)


def _reduce_blocks(parts: Sequence[jax.Array], reduce: Callable, combine: Callable) -> jax.Array:
  """Combines `reduce(block)` of the last entries with that of each block of 2¹⁷ entries before them."""
  blocks, rest = divmod(parts[0].size, _BLOCK)

  def read(start: jax.Array, length: int) -> jax.Array:
    return functools.reduce(jnp.add, [jax.lax.dynamic_slice(part, (start,), (length,)) for part in parts])

  last = reduce(read(jnp.int32(blocks * _BLOCK), rest))
  step = lambda block, result: combine(result, reduce(read(block * _BLOCK, _BLOCK)))
  return jax.lax.fori_loop(0, blocks, step, last) if blocks else last


def round_mantissa(x: jax.Array) -> jax.Array:
  """Rounds x to 22 bits of mantissa, for a product that a sum follows.

  Such a product may become a part of a fused multiply-add, in some programs only, and then has other bits.

  Example:
    >>> bool(round_mantissa(jnp.float32(1 + 2.0**-23)) == 1)
    True
  """
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=22)


def round_mantissa_up(x: jax.Array, bits: int) -> jax.Array:
  """The smallest f32 that is at least x ≥ 0 and whose last `bits` bits are 0.

  Products of numbers with few significant bits are exact, and so the same with fused multiply-add and without.

  Example:
    >>> float(round_mantissa_up(jnp.float32(1.1), bits=22))
    1.5
  """
  words, rest = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32((1 << bits) - 1)
  return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type((words + rest) & ~rest, jnp.float32), x)


def unit_of(largest: jax.Array) -> jax.Array:
  """The power of two to divide numbers of magnitudes up to `largest` by, so that squares neither over- nor underflow.

  It is the least one that is at least `largest`, but 1 for 0, and at most 2¹²⁶, whose reciprocal is no subnormal
  number. Quotients are exact, so sums, products and roots of them have the mantissas of those of the numbers.

  Args:
    largest: f32 of any shape, at least 0; NaN stays NaN.

  Example:
    >>> unit_of(jnp.array([0.0, 3.0, 3e38])) == jnp.array([1.0, 4.0, 2.0**126])
    Array([ True,  True,  True], dtype=bool)
  """
  return jnp.minimum(jnp.where(largest == 0, 1.0, round_mantissa_up(largest, bits=23)), 2.0**126)
