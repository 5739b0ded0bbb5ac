"""Formats of the values of a message: what a value is rounded to, and its bits on the wire.

A new format is a class here, and its name in `Wire` and `FORMATS`; `codec` writes what
has fewer than 8 bits.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse.arrays.sums import round_mantissa_up
from jaxsparse.sparse.tables import (
  BINS,
  MAGNITUDES,
  quantize,
  quantize_magnitudes,
)

_LEVELS = 127


@dataclasses.dataclass(frozen=True)
class Values:
  """Unchanged values, and the base of formats that round.

  A format with fewer than 8 bits gives numbers of `bits` bits, which the codec packs.

  Attributes:
    bits: bits of a value on the wire.
    row_words: words beside the values of each row, such as a scale.
    rounds: whether values are rounded.
    draws: whether rounding is random and needs noise.
  """

  bits, row_words, rounds, draws = 32, 0, False, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Encodes f32[rows, c] values.

    Args:
      values: f32[rows, c].
      noise: f32[rows, c] in [0, 1) if the format draws, else ignored.

    Returns:
      (codes, beside): [rows, c] of any dtype, and f32[rows, row_words] or None.
    """
    return values, None

  def read(self, codes: jax.Array, beside: jax.Array | None) -> jax.Array:
    """Decoded values, f32[rows, c], the same bits at the sender and at receivers."""
    return codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class BFloat16(Values):
  """The nearest bf16, ties to even; finite values stay finite, NaN and Inf stay unchanged."""

  bits, row_words, rounds, draws = 16, 0, True, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """bf16[rows, c]."""
    # XLA may drop a conversion to bf16 and back, and the sender would then decode other
    # values than the receivers; it may not drop `reduce_precision`.
    rounded = jax.lax.reduce_precision(
      _clamped(values), exponent_bits=8, mantissa_bits=7
    )
    return rounded.astype(jnp.bfloat16), None


@dataclasses.dataclass(frozen=True)
class Int8(Values):
  """Levels `⌊v/s + noise⌋` with the scale `s = max |v| / 127` of the row, rounded up by a factor of at most `1 + 2⁻¹⁶`.

  With noise uniform in [0, 1) the mean of a level is v/s; the error of a value is at
  most s. If a value of a row is not finite, all its decoded values are NaN. The scale
  has so few significant bits that its product with a level is exact: sums of decoded
  values have the same bits with fused multiply-add and without.
  """

  bits, row_words, rounds, draws = 8, 1, True, True

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(i8[rows, c], f32[rows, 1])."""
    assert noise is not None, "levels are rounded with noise"
    # Clamped, so that 127 times the scale, which is rounded up, does not overflow.
    largest = _clamped(jnp.max(jnp.abs(values), axis=1, keepdims=True))
    # Tested explicitly: XLA's maximum of thousands of values drops a NaN on CPU.
    is_finite = jnp.isfinite(values).all(axis=1, keepdims=True)
    largest = jnp.where(is_finite, largest, jnp.nan)
    # Rounded up, so that the largest value is at most 127 times the scale. The last 7
    # bits of the scale are 0, so its product with a level, of 7 bits, is exact.
    scale = round_mantissa_up(largest * (1 / _LEVELS), bits=_LEVELS.bit_length())
    level = jnp.floor(values / jnp.where(scale == 0, 1.0, scale) + noise)
    return jnp.clip(level, -_LEVELS, _LEVELS).astype(jnp.int8), scale

  def read(self, codes: jax.Array, beside: jax.Array | None) -> jax.Array:
    """`level · scale`."""
    assert beside is not None
    return codes.astype(jnp.float32) * beside


@dataclasses.dataclass(frozen=True)
class TwoBit(Values):
  """Four bins by the standard deviation of a row (`quantize`), as published for SparseLoCo."""

  bits, row_words, rounds, draws = 2, BINS, True, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(i32[rows, c] in 0 … 3, f32[rows, 4])."""
    return quantize(values)

  def read(self, codes: jax.Array, beside: jax.Array | None) -> jax.Array:
    """The entry of the table that a code names."""
    return _look_up(beside, codes)


@dataclasses.dataclass(frozen=True)
class Int4(Values):
  """A sign, and 0 or one of 7 magnitudes (`quantize_magnitudes`): the nearest bin, not drawn."""

  bits, row_words, rounds, draws = 4, MAGNITUDES, True, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(i32[rows, c] in 0 … 15, f32[rows, 7])."""
    return quantize_magnitudes(values)

  def read(self, codes: jax.Array, beside: jax.Array | None) -> jax.Array:
    """`± table[number − 1]`, and 0 for number 0."""
    assert beside is not None
    # Numbers 0 … 7 stand for 0 and 7 magnitudes, 8 … 15 for the same with the sign. If
    # the table is NaN, 0 · NaN makes number 0 a NaN, too, and so the whole row.
    magnitudes = jnp.concatenate([0 * beside[:, :1], beside], axis=1)
    return _look_up(jnp.concatenate([magnitudes, -magnitudes], axis=1), codes)


Wire = Literal[
  "coo",
  "f32",
  "bf16",
  "int8",
  "int4",
]
FORMATS: dict[str, Values] = {
  # Its indices alone differ from those of "f32".
  "coo": Values(),
  "f32": Values(),
  "bf16": BFloat16(),
  "int8": Int8(),
  "int4": Int4(),
  "2bit": TwoBit(),
}


def _clamped(x: jax.Array) -> jax.Array:
  """Clips finite numbers to the largest finite bf16, so that rounding keeps them finite."""
  # Rounded to the nearest, larger numbers would be infinite.
  largest = float(jnp.finfo(jnp.bfloat16).max)
  clipped = jnp.clip(x, -largest, largest)
  return jnp.where(jnp.isfinite(x), clipped, x)


def _look_up(table: jax.Array | None, codes: jax.Array) -> jax.Array:
  """The entries of each row of a table that the codes of a row name, f32[rows, c]."""
  assert table is not None
  return jnp.take_along_axis(table, codes.astype(jnp.int32), axis=1, mode="clip")
