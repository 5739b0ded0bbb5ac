"""Formats of the values of a message: unchanged, rounded to bf16, or rounded at random to one of 255 levels.

A new format is a class here, and its name in `Wire` and `FORMATS`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse.sparse.sums import round_mantissa_up

_LEVELS = 127


@dataclasses.dataclass(frozen=True)
class Values:
  """Unchanged values, and the base of formats that round.

  Attributes:
    bytes: size of a value, a whole number.
    scaled: whether each row has a scale, one more word.
    rounds: whether values are rounded.
    draws: whether rounding is random and needs noise.
  """

  bytes, scaled, rounds, draws = 4, False, False, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Encodes f32[rows, c] values.

    Returns:
      (values, scale): [rows, c] of any dtype, which codecs reorder and `read` converts
      to f32; f32[rows], by which `read` multiplies, or None.
    """
    return values, None


@dataclasses.dataclass(frozen=True)
class BFloat16(Values):
  """The nearest bf16, ties to even; finite values stay finite, NaN and Inf stay unchanged."""

  bytes, scaled, rounds, draws = 2, False, True, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """bf16[rows, c]."""
    # XLA may drop a conversion to bf16 and back, so that the sender decodes other
    # values than the receivers. It may not drop `reduce_precision`.
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

  bytes, scaled, rounds, draws = 1, True, True, True

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(i8[rows, c], f32[rows])."""
    assert noise is not None, "levels are rounded with noise"
    largest = _clamped(jnp.max(jnp.abs(values), axis=1))
    # Tested explicitly: XLA's maximum of thousands of values drops a NaN on CPU.
    largest = jnp.where(jnp.isfinite(values).all(axis=1), largest, jnp.nan)
    scale = round_mantissa_up(largest * (1 / _LEVELS), bits=_LEVELS.bit_length())
    level = jnp.floor(values / jnp.where(scale == 0, 1.0, scale)[:, None] + noise)
    return jnp.clip(level, -_LEVELS, _LEVELS).astype(jnp.int8), scale


Wire = Literal[
  "f32",
  "bf16",
  "int8",
]
FORMATS: dict[str, Values] = {
  "f32": Values(),
  "bf16": BFloat16(),
  "int8": Int8(),
}


def read(values: jax.Array, scale: jax.Array | None) -> jax.Array:
  """Decoded values, f32[rows, c]."""
  values = values.astype(jnp.float32)
  return values if scale is None else values * scale[:, None]


def _clamped(x: jax.Array) -> jax.Array:
  """Clips finite numbers to the largest finite bf16, so that rounding keeps them finite."""
  largest = float(jnp.finfo(jnp.bfloat16).max)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
