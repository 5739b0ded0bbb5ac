"""Values as numbers of bins, 2 or 4 bits; each row has a table of the values that its bins stand for.

A bin stands for the mean of its values, so that rounding changes no sum of a row beyond
rounding. Sums are added in a fixed order, and products are rounded before they are
added: every program has the same bits. If a value of a row is not finite, its table is
NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.sparse.sums import round_mantissa, row_sums, unit_of
from jaxsparse.sparse.values import Values

BINS = 4
_WIDTH = 6 / BINS  # standard deviations of a bin
_LARGEST = float(jnp.finfo(jnp.float32).max)
_MAGNITUDES = 7  # and 0
_SIGN = 1 << 3


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
    assert beside is not None
    return jnp.take_along_axis(beside, codes.astype(jnp.int32), axis=1, mode="clip")


@dataclasses.dataclass(frozen=True)
class FourBit(Values):
  """A sign, and 0 or one of 7 bins of magnitudes whose bounds are in about geometric progression.

  The k largest entries of a gradient have magnitudes from a threshold upwards: within a
  factor of two if the gradient is normal, over decades if it has heavy tails. Bins
  between the smallest and the largest of a row that are equally wide in the bits of a
  float (linear between powers of two) fit both. Decoded values are the nearest known,
  not drawn: the error stays in the residual.
  """

  bits, row_words, rounds, draws = 4, _MAGNITUDES, True, False

  def write(
    self, values: jax.Array, noise: jax.Array | None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(i32[rows, c] in 0 … 15, f32[rows, 7])."""
    magnitudes = jnp.abs(values)
    keys = jax.lax.bitcast_convert_type(magnitudes, jnp.int32)
    is_zero = magnitudes == 0
    no_key = jnp.iinfo(jnp.int32).max
    least = jnp.min(jnp.where(is_zero, no_key, keys), axis=1, keepdims=True)
    most = jnp.max(keys, axis=1, keepdims=True)
    width = jnp.maximum(most - least, 0) // _MAGNITUDES + 1
    number = jnp.where(is_zero, 0, (keys - least) // width + 1)
    unit = unit_of(jnp.max(magnitudes, axis=1, keepdims=True))
    means = _bin_means(magnitudes / unit, number, range(1, _MAGNITUDES + 1))
    # A mean of finite values is finite.
    table = jnp.minimum(unit * means, _LARGEST)
    is_finite = jnp.isfinite(values).all(axis=1, keepdims=True)
    sign = jnp.where(jnp.signbit(values), _SIGN, 0)
    return number | sign, jnp.where(is_finite, table, jnp.nan)

  def read(self, codes: jax.Array, beside: jax.Array | None) -> jax.Array:
    """`± table[number − 1]`, and 0 for number 0."""
    assert beside is not None
    codes = codes.astype(jnp.int32)
    number = codes & (_SIGN - 1)
    magnitude = jnp.take_along_axis(
      beside, jnp.maximum(number - 1, 0), axis=1, mode="clip"
    )
    # A NaN shows in the whole row, also where it is 0 or empty.
    magnitude = jnp.where(number == 0, 0.0 * beside[:, :1], magnitude)
    return jnp.where(codes >= _SIGN, -magnitude, magnitude)


def quantize(values: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The bin of each value of each row, and the four values of each row that bins stand for.

      μ = mean v,  c = v − μ,  σ² = Σ c²/(N − 1),  code = clip(round(c / (1.5 σ) + 2), 0, 3)
      table[b] = μ + (mean of c in bin b)

  Σ table[code] is Σ v, to rounding. Bins are lopsided, as published: bin 2 is around
  the mean. If a value of a row is not finite, its table is NaN. Everything is computed
  of v divided by a power of two (`unit_of`), so that squares neither overflow nor
  underflow: codes of normal float32 numbers do not depend on the scale of a row, and
  finite values have a finite table.

  Args:
    values: f32[rows, N].

  Returns:
    (codes, table): i32[rows, N] in 0 … 3, and f32[rows, 4], 0 for a bin without a
      value.

  Example:
    >>> codes, table = jax.jit(quantize)(jnp.array([[10.0, -4.0, 6.0, -5.0, 4.0, -6.0, 5.0, -4.0]]))
    >>> codes.tolist(), table.tolist()
    ([[3, 1, 3, 1, 2, 1, 2, 1]], [[0.75, -4.75, 4.5, 8.0]])
  """
  count = values.shape[1]
  unit = unit_of(jnp.max(jnp.abs(values), axis=1))[:, None]
  scaled = values / unit
  # XLA makes a quotient by a constant a product
  mean = round_mantissa(row_sums(scaled) / count)
  apart = scaled - mean[:, None]
  squares = round_mantissa(apart * apart)
  width = _WIDTH * jnp.sqrt(row_sums(squares) / max(1, count - 1))
  width = jnp.where((width > 0) & jnp.isfinite(width), width, 1.0)
  codes = jnp.clip(jnp.round(apart / width[:, None] + BINS / 2), 0, BINS - 1).astype(
    jnp.int32
  )
  means = _bin_means(apart, codes, range(BINS))
  # a mean of finite values is finite
  table = jnp.clip(unit * (means + mean[:, None]), -_LARGEST, _LARGEST)
  return codes, jnp.where(jnp.isfinite(values).all(axis=1)[:, None], table, jnp.nan)


def _bin_means(x: jax.Array, codes: jax.Array, bins: range) -> jax.Array:
  """The mean of the entries of each of `bins` of each row of f32[rows, N], f32[rows, bins]; 0 for an empty bin."""
  numbers = jnp.array(bins, jnp.int32)[None, :, None]
  inside = codes[:, None] == numbers
  members = jnp.maximum(jnp.sum(inside, axis=2, dtype=jnp.int32), 1)
  entries = jnp.where(inside, x[:, None], 0.0).reshape(-1, x.shape[1])
  sums = row_sums(entries).reshape(-1, len(bins))
  return sums / members.astype(jnp.float32)
