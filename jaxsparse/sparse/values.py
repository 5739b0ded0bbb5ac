"""Formats of the values of a message: as they are, 8 bits of mantissa, or levels.

A new format is a class here, and its name in `Wire` and `FORMATS`.
"""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from jaxsparse.sparse.sums import rounded_up

_LEVELS = 127


class Values(Protocol):
  """A format of values, in rows.

  Attributes:
    bytes: of a value.
    scaled: whether a row has a scale, one word more.
    rounds: whether anything is rounded off.
    draws: whether it rounds at random, with noise.
  """

  bytes: int
  scaled: bool
  rounds: bool
  draws: bool

  def write(self, values: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """f32[rows, c] values as they are sent, and their scale f32[rows] if they are levels."""
    ...


@dataclasses.dataclass(frozen=True)
class Float32:
  """Values as they are."""

  bytes, scaled, rounds, draws = 4, False, False, False

  def write(self, values: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """f32[rows, c]."""
    del noise
    return values, None


@dataclasses.dataclass(frozen=True)
class BFloat16:
  """The nearest bf16, ties to even; finite values stay finite, and others stay as they are."""

  bytes, scaled, rounds, draws = 2, False, True, False

  def write(self, values: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """bf16[rows, c]."""
    del noise
    # XLA may drop a conversion there and back: a worker that decodes its own message would have values that nobody else
    # has. It may not drop this.
    rounded = jax.lax.reduce_precision(_clamped(values), exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16), None


@dataclasses.dataclass(frozen=True)
class Int8:
  """Levels `⌊v/s + noise⌋` of scale `s = max |v| / 127` of the row, enlarged by a factor of at most `1 + 2⁻¹⁶`.

  Their mean is v/s where noise is uniform in [0, 1), and the error at most s. Of a row with a value that is not finite,
  no decoded value is. The scale has so few bits that its product with a level is exact: adding it up gives the same
  bits with fused multiply-add and without.
  """

  bytes, scaled, rounds, draws = 1, True, True, True

  def write(self, values: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """(i8[rows, c], f32[rows])."""
    assert noise is not None, "levels are rounded with noise"
    largest = _clamped(jnp.max(jnp.abs(values), axis=1))
    # Tested explicitly: XLA's maximum of thousands of values drops a NaN on CPU.
    largest = jnp.where(jnp.isfinite(values).all(axis=1), largest, jnp.nan)
    scale = rounded_up(largest * (1 / _LEVELS), bits=_LEVELS.bit_length())
    level = jnp.floor(values / jnp.where(scale == 0, 1.0, scale)[:, None] + noise)
    return jnp.clip(level, -_LEVELS, _LEVELS).astype(jnp.int8), scale


Wire = Literal["f32", "bf16", "int8"]
FORMATS: dict[str, Values] = {"f32": Float32(), "bf16": BFloat16(), "int8": Int8()}


def read(values: jax.Array, scale: jax.Array | None) -> jax.Array:
  """Sent values as f32[rows, c]."""
  values = values.astype(jnp.float32)
  return values if scale is None else values * scale[:, None]


def _clamped(x: jax.Array) -> jax.Array:
  """x, where it is finite within what rounds to a finite number."""
  bound = float(jnp.finfo(jnp.bfloat16).max)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -bound, bound), x)
