"""Floating-point arithmetic with the same bits in every compiled program.

A vector is given as addends, f32[n] each, that are added where they are read, so that
their sum is never stored.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat
from jaxsparse._compat import varying

# Pieces that are read side by side, in one vectorized loop on a CPU and in one kernel
# on a GPU.
_PIECES = 32


def ordered_sum(
  *addends: jax.Array,
  term: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
  """The sum of the terms of the sum of `addends`, f32[], in a fixed order.

  32 contiguous pieces are added one after the other, entry by entry, then 32 pieces of
  their sum, until one entry is left. The compiler chooses the order of `jnp.sum`, and
  another one under vmap, so thresholds and norms of the simulator and of a mesh would
  differ in their last bits.

  Args:
    *addends: f32[n] each.
    term: elementwise.

  Example:
    >>> ordered_sum(jnp.arange(4.0), term=lambda x: x**2)
    Array(14., dtype=float32)
  """
  return _fold(addends, term, jnp.add)


def row_sums(x: jax.Array) -> jax.Array:
  """The sum of each row of f32[rows, m], f32[rows], in a fixed order that vectorizes: half is added to half.

  Example:
    >>> row_sums(jnp.array([[1.0, 2.0, 4.0]]))
    Array([7.], dtype=float32)
  """
  while (width := x.shape[1]) > 1:
    half = -(-width // 2)
    second = jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - width)))
    x = x[:, :half] + second
  return x[:, 0]


def largest_magnitude(x: jax.Array) -> jax.Array:
  """The largest magnitude of f32[n], f32[]; NaN if one entry is, unlike `jnp.max` of a thousand entries on CPU.

  Example:
    >>> largest_magnitude(jnp.array([1.0, -3.0]))
    Array(3., dtype=float32)
  """
  return _fold((x,), jnp.abs, jnp.maximum)


def _fold(
  addends: Sequence[jax.Array],
  term: Callable[[jax.Array], jax.Array],
  combine: Callable,
) -> jax.Array:
  """Combines term(Σ addends) over all entries, f32[], in a fixed order: 32 pieces entry by entry until one is left.

  Args:
    addends: f32[n] each.
    term: elementwise, of the sum of the addends.
    combine: elementwise, of two arrays: `jnp.add`, or `jnp.maximum` of magnitudes.
  """
  size = addends[0].size
  if size <= _PIECES:
    return _fold_few(term(functools.reduce(jnp.add, addends)), combine)
  length = -(-size // _PIECES)
  # fewer than 32 pieces where a vector is short
  count = -(-size // length)
  shorter = size - (count - 1) * length  # entries of the last piece

  def fold(first: int, end: int, pieces: int) -> jax.Array:
    """Combines the entries first … end − 1 of the first `pieces` pieces, all of which have these entries.

    A comparison of indices with the end of the vector would take a GPU four times as
    long.
    """

    def cut(piece: int) -> jax.Array:
      start = piece * length
      entries = [addend[start + first : start + end] for addend in addends]
      return term(functools.reduce(jnp.add, entries))

    return functools.reduce(combine, map(cut, range(pieces)))

  # The entries that all pieces have, then those that the last one lacks.
  folded = fold(0, shorter, count)
  if shorter < length:
    zeros = jnp.zeros(length - shorter, folded.dtype)
    # Zeros replace the entries that the last piece lacks; they turn a sum of −0 into 0.
    rest = combine(fold(shorter, length, count - 1), zeros)
    folded = jnp.concatenate(jax.lax.optimization_barrier((folded, rest)))
  return _fold((folded,), lambda x: x, combine)


def _fold_few(terms: jax.Array, combine: Callable) -> jax.Array:
  """Combines the entries of f32[m], at most 32, one after the other, f32[]."""

  def loop() -> jax.Array:
    # Without this loop XLA on CPU would sum the last terms, up to 1,024, anew for each
    # entry that uses the result: it computes all that is not a loop where it is used.
    step = lambda index, total: combine(total, terms[index])
    return varying.fori_loop(1, terms.size, step, terms[0])

  def unrolled() -> jax.Array:
    one_by_one = [terms[index : index + 1] for index in range(terms.size)]
    return functools.reduce(combine, one_by_one)[0]

  # On CPU, unrolled, the norm of 14.7 M entries, each divided by the largest magnitude,
  # takes 7 times the time.
  return _compat.by_platform(cpu=loop, default=unrolled)()


def fold_rows(
  x: jax.Array,
  rows: range,
  term: Callable[[jax.Array, np.ndarray], jax.Array],
  combine: Callable[[jax.Array, jax.Array], jax.Array],
  one_by_one: bool,
) -> jax.Array:
  """Combines `term(x[:, row], row)` of 2ⁱ consecutive rows in pairs, to [blocks, columns].

  Args:
    x: the blocks, [blocks, rows, columns].
    rows: the rows to combine.
    term: elementwise, takes one row [blocks, columns] and its number, or several rows
      [blocks, rows, columns] and their numbers [1, rows, 1].
    combine: elementwise, takes two arrays.
    one_by_one: True for an operation for each row, which XLA on CPU vectorizes; False
      for operations on halves of all rows, which are few to compile. The bits are the
      same if products in `term` are exact.

  Example:
    >>> x = jnp.array([[[1.0], [2.0], [3.0], [4.0]]])
    >>> fold_rows(x, range(2, 4), lambda x, row: x**2, jnp.add, one_by_one=False)
    Array([[25.]], dtype=float32)
  """
  numbers = np.array(rows)
  if not one_by_one:
    chosen = x[:, rows.start : rows.stop]
    folded = term(chosen, numbers[None, :, None])
    while folded.shape[1] > 1:
      folded = combine(*jnp.split(folded, 2, axis=1))
    return folded[:, 0]
  terms = [term(x[:, row], row) for row in numbers]
  while len(terms) > 1:
    # term i with term i + half, as halves of an array are combined
    half = len(terms) // 2
    terms = list(map(combine, terms[:half], terms[half:]))
  return terms[0]


def round_mantissa(x: jax.Array) -> jax.Array:
  """Rounds x to 22 bits of mantissa, for a product that a sum follows.

  Such a product may become a part of a fused multiply-add, in some programs only, and
  then has other bits.

  Example:
    >>> bool(round_mantissa(jnp.float32(1 + 2.0**-23)) == 1)
    True
  """
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=22)


def round_mantissa_up(x: jax.Array, bits: int) -> jax.Array:
  """The smallest f32 that is at least x ≥ 0 and whose last `bits` bits are 0.

  Products of numbers with few significant bits are exact, and so the same with fused
  multiply-add and without: for the scales of int8 values and of QSGD, which are
  multiplied by a level of `bits` bits, and with 12 bits for the squares of QSGD. With
  23 bits, the whole mantissa, the result is 0 or a power of two (`unit_of`). It may be
  infinite; Inf and NaN stay unchanged.

  Args:
    x: f32 of any shape, at least 0.
    bits: number of the lowest bits of the mantissa, 1 … 23.

  Example:
    >>> float(round_mantissa_up(jnp.float32(1.1), bits=22))
    1.5
  """
  # Positive floats order as their bits: a carry rounds the mantissa up into the
  # exponent.
  words = jax.lax.bitcast_convert_type(x, jnp.uint32)
  rest = jnp.uint32((1 << bits) - 1)
  return jnp.where(
    jnp.isfinite(x),
    jax.lax.bitcast_convert_type((words + rest) & ~rest, jnp.float32),
    x,
  )


def unit_of(largest: jax.Array) -> jax.Array:
  """The power of two to divide numbers of magnitudes up to `largest` by, so that squares neither over- nor underflow.

  It is the least one that is at least `largest`, but 1 for 0, and at most 2¹²⁶, whose
  reciprocal is no subnormal number. Quotients are exact, so sums, products and roots of
  them have the mantissas of those of the numbers.

  Args:
    largest: f32 of any shape, at least 0; NaN stays NaN.

  Example:
    >>> unit_of(jnp.array([0.0, 3.0, 3e38])) == jnp.array([1.0, 4.0, 2.0**126])
    Array([ True,  True,  True], dtype=bool)
  """
  return jnp.minimum(
    jnp.where(largest == 0, 1.0, round_mantissa_up(largest, bits=23)), 2.0**126
  )
