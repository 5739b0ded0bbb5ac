"""Scales of blocks: of signs the root of the mean square, of 2, 4 or 8 bits a step for each column of 32 entries."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays.sums import round_mantissa, row_sums

# puts columns of normal entries, whose maxima are near their mean, between two ratios
_BASE = 0.84


class _Code(NamedTuple):
  """How 2, 4 or 8 bits say an entry.

  Attributes:
    smallest: the smallest magnitude, in steps.
    spacing: the distance of neighbouring magnitudes, in steps.
    share: c, a step over the product of its column's ratio and the mean of its block's
      maxima.
    first: the exponent of √2 in the smallest ratio.
    single: ratios up to this number have exponents 1 apart, later ones 2 apart.
    ratio_count: the number of ratios, which approximate the maximum of a column over
      the mean of its block's maxima.
  """

  smallest: int
  spacing: int
  share: float
  first: int
  single: int
  ratio_count: int

  @property
  def ratios(self) -> list[float]:
    return [
      _BASE * 2 ** ((self.first + number + max(number - self.single, 0)) / 2)
      for number in range(self.ratio_count)
    ]

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
  """The words that scales of a block take."""
  return 1 if bits == 1 else 1 - (-columns // _CODES[bits].ratios_per_word)


def of_signs(means: jax.Array, share: jax.Array) -> jax.Array:
  """Scales u32[blocks, 1] of the roots of the mean squares of columns, f32[blocks, columns].

  Args:
    means: the roots, 0 of padding.
    share: of a column in the entries of its block, f32[blocks].
  """
  squares = lambda unit: row_sums(round_mantissa(round_mantissa(means * unit) ** 2))
  return jax.lax.bitcast_convert_type(root_mean(squares, share), jnp.uint32)[:, None]


def of_columns(
  maxima: jax.Array, used: jax.Array, bits: int
) -> tuple[jax.Array, jax.Array]:
  """Scales u32[blocks, words] and steps of the largest magnitudes of columns, f32[blocks, columns] both.

  A block has the mean of the maxima of its columns, and each column the number of the
  largest ratio to that mean that its maximum reaches, or of the smallest ratio.

  Args:
    maxima: 0 of columns that are padding.
    used: the number of columns that are not, i32[blocks].
    bits: 2, 4 or 8.
  """
  mean = row_sums(maxima) / jnp.maximum(used, 1).astype(jnp.float32)
  code = _CODES[bits]
  reached = [
    (maxima >= mean[:, None] * ratio).astype(jnp.uint32) for ratio in code.ratios[1:]
  ]
  numbers = functools.reduce(jnp.add, reached)
  words = words_of_block(bits, maxima.shape[1]) - 1
  padded = jnp.pad(
    numbers, ((0, 0), (0, words * code.ratios_per_word - maxima.shape[1]))
  )
  fields = padded.reshape(-1, code.ratios_per_word, words) << _shifts(code)
  packed = functools.reduce(
    jnp.bitwise_or, [fields[:, number] for number in range(code.ratios_per_word)]
  )
  scales = jnp.concatenate(
    [jax.lax.bitcast_convert_type(mean, jnp.uint32)[:, None], packed], axis=1
  )
  # The steps of the numbers, not of the words: XLA for CPUs would compute all numbers
  # of a word for each of them.
  return scales, _steps(mean[:, None], numbers, bits)


def steps(scales: jax.Array, bits: int, columns: int) -> jax.Array:
  """The steps of the columns of blocks f32[blocks, columns] with these scales; of signs f32[blocks, 1].

  Example:
    >>> steps(of_columns(jnp.array([[1.0, 3.0]]), jnp.array([2]), bits=4)[0], 4, 2).round(3)
    Array([[0.147, 0.416]], dtype=float32)
  """
  mean = jax.lax.bitcast_convert_type(scales[:, :1], jnp.float32)
  if bits == 1:
    return mean
  code = _CODES[bits]
  fields = scales[:, None, 1:] >> _shifts(code) & jnp.uint32(
    (1 << 32 // code.ratios_per_word) - 1
  )
  return _steps(mean, fields.reshape(len(scales), -1)[:, :columns], bits)


def _steps(mean: jax.Array, numbers: jax.Array, bits: int) -> jax.Array:
  """The steps of columns with the ratios of these numbers, of blocks with these means, f32[blocks, 1]."""
  code = _CODES[bits]
  # As in `_Code.ratios`.
  exponents = code.first + (
    numbers + jnp.maximum(numbers, code.single) - code.single
  ).astype(jnp.int32)
  halves = jnp.where(
    exponents % 2 == 1, code.share * _BASE * math.sqrt(2), code.share * _BASE
  ).astype(jnp.float32)
  # by a power of 2
  factors = halves * jax.lax.bitcast_convert_type(
    127 + (exponents >> 1) << 23, jnp.float32
  )
  # Of so few bits that all multiples are exact, and not finite where a multiple is not.
  found = jax.lax.reduce_precision(mean * factors, 8, 23 - bits)
  return jnp.where(jnp.isfinite(found * 2.0**bits), found, jnp.inf)


def inverses(steps: jax.Array, bits: int) -> jax.Array:
  """What `levels` multiplies magnitudes by: 1 over the boundary between the two smallest ones; 0 if the step is 0."""
  code = _CODES[bits]
  # Of subnormal steps the quotient may be infinite.
  return jnp.where(
    steps >= 2.0**-126, 1 / (code.smallest + code.spacing / 2) / steps, 0.0
  )


def levels(x: jax.Array, inverses: jax.Array, bits: int) -> jax.Array:
  """The number of the magnitude to which each entry is rounded, u32 like x."""
  # Rounded as whole numbers: a half added to the product might become a fused
  # multiply-add, in some programs only.
  return jnp.minimum(jnp.abs(x) * inverses, 2**bits - 2).astype(jnp.uint32) + 1 >> 1


def magnitudes(levels: jax.Array, steps: jax.Array, bits: int) -> jax.Array:
  """The magnitudes with these numbers, f32 like levels."""
  code = _CODES[bits]
  return steps * (code.smallest + code.spacing * levels).astype(jnp.float32)


def truncate(x: jax.Array) -> jax.Array:
  """Truncates x to 12 significant bits. Its square is exact, so that a fused multiply-add gives the same bits."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
  return jax.lax.bitcast_convert_type(words, jnp.float32)


def root_mean(squares: Callable[[float], jax.Array], share: jax.Array) -> jax.Array:
  """√(share · Σ x²) of `squares(unit) = Σ (unit · x)²`, with the unit at which squares neither over- nor underflow."""
  # `squares` rounds products with the unit: XLA may square the unit alone, which
  # overflows.
  low, middle, high = (squares(2.0**-unit) for unit in (-80, 0, 80))
  root = lambda squares, unit: unit * jnp.sqrt(share * squares)
  few = jnp.where(middle < 2.0**-80, root(low, 2.0**-80), root(middle, 1.0))
  return jnp.where(middle > 2.0**100, root(high, 2.0**80), few)


def _shifts(code: _Code) -> jax.Array:
  """Of the numbers of ratios in a word, u32[1, numbers, 1]."""
  return (
    32 // code.ratios_per_word * jnp.arange(code.ratios_per_word, dtype=jnp.uint32)
  ).reshape(1, -1, 1)
