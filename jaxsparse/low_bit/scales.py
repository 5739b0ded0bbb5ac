"""Scales of blocks: of signs the root of the mean square, of 2, 4 or 8 bits a step for each column of 32 entries."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays.sums import round_mantissa, row_sums

# puts columns of normal entries, whose maxima are near their mean, between two ratios
_BASE = 0.84


UNITS = (2.0**80, 1.0, 2.0**-80)
"""Factors of small, usual and large numbers whose squares are added."""


class _Code(NamedTuple):
  """How 2, 4 or 8 bits encode an entry: its magnitude is a multiple of a step, share · ratio · mean.

  Attributes:
    smallest: the smallest magnitude, in steps.
    spacing: the distance of neighbouring magnitudes, in steps.
    share: c, a step divided by its column's ratio and by the mean of its block's maxima.
    first: the exponent j of the smallest ratio, 0.84 · √2ʲ.
    single: exponents up to that of ratio number `single` are 1 apart, later ones 2.
    ratio_count: the number of ratios. A column has the largest ratio that is at most
      its maximum divided by the mean of its block's maxima, or the smallest if none is.
  """

  smallest: int
  spacing: int
  share: float
  first: int
  single: int
  ratio_count: int

  @property
  def ratios(self) -> list[float]:
    """The ratios, ascending: 0.84 · √2ʲ."""
    exponents = [
      self.first + index + max(index - self.single, 0)
      for index in range(self.ratio_count)
    ]
    return [_BASE * 2 ** (exponent / 2) for exponent in exponents]

  @property
  def ratios_per_word(self) -> int:
    """How many numbers of ratios a word has, of 3 or 4 bits each."""
    return 32 // (self.ratio_count - 1).bit_length()


# The shares lose least of normal entries and gradients; with 8 bits the largest entry
# of a column must not be clipped. With 2 bits an entry a column has only 64 bits, and
# the number of its ratio 3, so larger ratios are further apart.
_CODES = {
  2: _Code(1, 3, 0.19, first=-2, single=4, ratio_count=8),
  4: _Code(0, 1, 0.175, first=-4, single=15, ratio_count=16),
  8: _Code(0, 1, 1 / 90, first=-4, single=15, ratio_count=16),
}


def words_of_block(bits: int, columns: int) -> int:
  """The words that the scale of a block takes: one of signs, else the mean and the packed numbers of ratios."""
  # 1 + ⌈columns / ratios a word⌉
  return 1 if bits == 1 else 1 - (-columns // _CODES[bits].ratios_per_word)


def of_signs(means: jax.Array, share: jax.Array) -> jax.Array:
  """Scales u32[blocks, 1] of signs: the bits of the root of the mean square of a block's entries.

  Args:
    means: f32[blocks, columns], the root of the mean square of each column; 0 for
      padding.
    share: f32[blocks]: share · Σ means² is the mean square of a block's entries. It is
      1 / columns without padding.
  """
  # Squares in three units, of which one neither over- nor underflows. Without the
  # rounding XLA may square the unit alone, which overflows.
  scaled = [round_mantissa(means * unit) for unit in UNITS]
  squares = [row_sums(round_mantissa(x**2)) for x in scaled]
  return jax.lax.bitcast_convert_type(root_mean(squares, share), jnp.uint32)[:, None]


def of_columns(
  maxima: jax.Array, used: jax.Array, bits: int
) -> tuple[jax.Array, jax.Array]:
  """Packed scales u32[blocks, words] and quantization steps f32[blocks, columns] of blocks with these maxima.

  A block stores the mean of the maxima of its columns, and of each column a code: the
  index of the largest ratio r with maximum ≥ r · mean, 0 where there is none.

  Args:
    maxima: f32[blocks, columns], the largest magnitude of each column; 0 for padding.
    used: i32[blocks], the number of columns that are no padding.
    bits: 2, 4 or 8.
  """
  # the mean over the columns that have entries
  counts = jnp.maximum(used, 1).astype(jnp.float32)
  mean = row_sums(maxima) / counts
  # A sum of large maxima overflows; one of small maxima would underflow if all were
  # scaled. A power of two changes no bits.
  scaled = row_sums(maxima * 2.0**-7) / counts
  mean = jnp.where(jnp.isfinite(mean), mean, scaled * 2.0**7)
  code = _CODES[bits]
  columns = maxima.shape[1]
  # The number of a column's ratio: how many ratios above the smallest its maximum
  # reaches.
  reached = [maxima >= mean[:, None] * ratio for ratio in code.ratios[1:]]
  numbers = functools.reduce(jnp.add, [flags.astype(jnp.uint32) for flags in reached])
  # how many numbers of 3 or 4 bits a word has
  per_word = code.ratios_per_word
  # one word of a block is its mean
  words = words_of_block(bits, columns) - 1
  padded = jnp.pad(numbers, ((0, 0), (0, words * per_word - columns)))
  # The number of column i is in packed word i % words.
  fields = padded.reshape(-1, per_word, words) << _shifts(code)
  # elementwise over rows, in place of a reduction along an axis
  rows = [fields[:, row] for row in range(per_word)]
  packed = functools.reduce(jnp.bitwise_or, rows)
  mean_words = jax.lax.bitcast_convert_type(mean, jnp.uint32)[:, None]
  scales = jnp.concatenate([mean_words, packed], axis=1)
  # From `numbers`, not from `packed`: XLA on CPU would compute all numbers of a word
  # again for each of them.
  return scales, _steps(mean[:, None], numbers, bits)


def steps(scales: jax.Array, bits: int, columns: int) -> jax.Array:
  """The steps of the columns of blocks, f32[blocks, columns], with scales u32[blocks, words]; of signs f32[blocks, 1].

  Example:
    >>> steps(of_columns(jnp.array([[1.0, 3.0]]), jnp.array([2]), bits=4)[0], 4, 2).round(3)
    Array([[0.147, 0.416]], dtype=float32)
  """
  mean = jax.lax.bitcast_convert_type(scales[:, :1], jnp.float32)
  if bits == 1:
    return mean
  # Undoes the packing of `of_columns`; the first word is the mean.
  code = _CODES[bits]
  mask = jnp.uint32((1 << 32 // code.ratios_per_word) - 1)
  fields = scales[:, None, 1:] >> _shifts(code) & mask
  numbers = fields.reshape(len(scales), -1)[:, :columns]
  return _steps(mean, numbers, bits)


def _steps(mean: jax.Array, numbers: jax.Array, bits: int) -> jax.Array:
  """The steps f32[blocks, columns]: share · ratio · mean, with the share c of `_Code`.

  Args:
    mean: f32[blocks, 1], the mean of the largest magnitudes of a block's columns.
    numbers: u32[blocks, columns], the number of each column's ratio.
    bits: 2, 4 or 8.
  """
  code = _CODES[bits]
  # Ratio number i is 0.84 · √2ʲ: j begins at `first`, and rises by 1 up to number
  # `single`, from there by 2. The power of 2 is written as the bits of a float.
  later = jnp.maximum(numbers, code.single) - code.single
  exponents = code.first + (numbers + later).astype(jnp.int32)
  even = code.share * _BASE
  factors = jnp.where(exponents % 2 == 1, even * math.sqrt(2), even)
  power_of_2 = jax.lax.bitcast_convert_type(127 + (exponents >> 1) << 23, jnp.float32)
  factors = factors.astype(jnp.float32) * power_of_2
  # So few significant bits that multiples up to 2ᵇ are exact; Inf if one overflows.
  steps = jax.lax.reduce_precision(mean * factors, 8, 23 - bits)
  return jnp.where(jnp.isfinite(steps * 2.0**bits), steps, jnp.inf)


def inverses(steps: jax.Array, bits: int) -> jax.Array:
  """1 / boundary between the two smallest magnitudes, for `levels`, f32 like steps; 0 for step 0."""
  code = _CODES[bits]
  # The boundary is `smallest + spacing / 2` steps. The quotient of a subnormal step may
  # be infinite, so such a step counts as 0.
  return jnp.where(
    steps >= 2.0**-126, 1 / (code.smallest + code.spacing / 2) / steps, 0.0
  )


def levels(x: jax.Array, inverses: jax.Array, bits: int) -> jax.Array:
  """The number of the magnitude to which each entry is rounded, u32 like x: the nearest, at most the largest.

  Args:
    x: f32 of any shape.
    inverses: f32 like x, 1 / boundary (`inverses`) of the step of each entry.
    bits: 2, 4 or 8.
  """
  # With 4 and 8 bits the boundary is half a step, so (halves + 1) >> 1 is the nearest
  # multiple of a step. With 2 bits the one boundary is at 1: 0 gives level 0, and 1 and
  # 2 give level 1.
  # The 1 is added to integers: 1/2 added to the product might become a fused
  # multiply-add, in some programs only.
  halves = jnp.minimum(jnp.abs(x) * inverses, 2**bits - 2).astype(jnp.uint32)
  return halves + 1 >> 1


def magnitudes(levels: jax.Array, steps: jax.Array, bits: int) -> jax.Array:
  """The magnitudes with these numbers, f32 like levels."""
  code = _CODES[bits]
  return steps * (code.smallest + code.spacing * levels).astype(jnp.float32)


def truncate(x: jax.Array) -> jax.Array:
  """Truncates x to 12 significant bits. Its square is exact, so that a fused multiply-add gives the same bits."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
  return jax.lax.bitcast_convert_type(words, jnp.float32)


def root_mean(
  squares: Sequence[jax.Array],
  share: jax.Array,
) -> jax.Array:
  """√(share · Σ x²), from Σ (unit · x)² for each of `UNITS`, by the unit whose squares neither over- nor underflow."""
  _, of_usual, _ = squares
  small, usual, large = (
    jnp.sqrt(share * of_unit) * (1 / unit)
    for of_unit, unit in zip(squares, UNITS, strict=True)
  )
  # Below 2⁻⁸⁰ usual squares may underflow, above 2¹⁰⁰ their sum may overflow.
  at_most_usual = jnp.where(of_usual < 2.0**-80, small, usual)
  return jnp.where(of_usual > 2.0**100, large, at_most_usual)


def _shifts(code: _Code) -> jax.Array:
  """The first bit of each number of a ratio in a word, u32[1, numbers, 1]."""
  per_word = code.ratios_per_word
  first_bits = 32 // per_word * jnp.arange(per_word, dtype=jnp.uint32)
  return first_bits.reshape(1, -1, 1)
