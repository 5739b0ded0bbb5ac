"""Values as numbers of bins, of 2 or 4 bits; each row has a table of the values that its bins stand for.

A bin stands for the mean of its values, so that rounding changes no sum of a row beyond
rounding. Sums are added in a fixed order, and products are rounded before they are
added: every program has the same bits. If a value of a row is not finite, its table is
NaN.
"""

import jax
import jax.numpy as jnp

from jaxsparse.arrays.sums import round_mantissa, row_sums, unit_of

BINS = 4
_WIDTH = 6 / BINS  # standard deviations of a bin
_LARGEST = float(jnp.finfo(jnp.float32).max)
MAGNITUDES = 7  # bins; a code of 4 bits has a sign and one of these, or 0
_SIGN = 1 << 3


def quantize(values: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The bin of each value of each row, and the table of each row: the value that each of four bins decodes to.

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
  # Rounded, since XLA turns the quotient by a constant into a product, which might fuse
  # with the subtraction below.
  mean = round_mantissa(row_sums(scaled) / count)
  apart = scaled - mean[:, None]
  squares = round_mantissa(apart * apart)
  width = _WIDTH * jnp.sqrt(row_sums(squares) / max(1, count - 1))
  # For equal values, or one that is not finite, any width but 0 serves.
  width = jnp.where((width > 0) & jnp.isfinite(width), width, 1.0)
  nearest = jnp.round(apart / width[:, None] + BINS / 2)
  codes = jnp.clip(nearest, 0, BINS - 1).astype(jnp.int32)
  means = _bin_means(apart, codes, range(BINS))
  # Rounding may lift the mean of finite values above the largest finite number.
  table = jnp.clip(unit * (means + mean[:, None]), -_LARGEST, _LARGEST)
  is_finite = jnp.isfinite(values).all(axis=1, keepdims=True)
  return codes, jnp.where(is_finite, table, jnp.nan)


def quantize_magnitudes(values: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sign and the bin of the magnitude of each value, and the mean magnitude of each bin of a row.

  The k largest entries of a gradient have magnitudes from a threshold upwards: within a
  factor of two if the gradient is normal, over decades if it has heavy tails. Bins that
  are equally wide in the bits of a float (linear between powers of two) fit both; they
  span the non-zero magnitudes of a row.

  Args:
    values: f32[rows, N].

  Returns:
    (codes, table): i32[rows, N], 0 for the number 0, else 1 + its bin, with 8 added
      where the sign bit is set; and f32[rows, 7], the mean magnitude of each bin.

  Example:
    >>> codes, table = jax.jit(quantize_magnitudes)(jnp.array([[1.0, -8.0, 0.0, 1.1]]))
    >>> codes.tolist(), table[0, 0].item()
    ([[1, 15, 0, 1]], 1.0499999523162842)
  """
  magnitudes = jnp.abs(values)
  # The bits of floats ≥ 0, as integers, have the order of their values.
  keys = jax.lax.bitcast_convert_type(magnitudes, jnp.int32)
  is_zero = magnitudes == 0
  no_key = jnp.iinfo(jnp.int32).max
  least = jnp.min(jnp.where(is_zero, no_key, keys), axis=1, keepdims=True)
  most = jnp.max(keys, axis=1, keepdims=True)
  # + 1, so that the largest key falls into the last bin
  width = jnp.maximum(most - least, 0) // MAGNITUDES + 1
  bin_of_value = jnp.where(is_zero, 0, (keys - least) // width + 1)
  # Divided by the unit, magnitudes are below 4, so that their sums do not overflow.
  unit = unit_of(jnp.max(magnitudes, axis=1, keepdims=True))
  means = _bin_means(magnitudes / unit, bin_of_value, range(1, MAGNITUDES + 1))
  # Rounding may lift the mean of finite values above the largest finite number.
  table = jnp.minimum(unit * means, _LARGEST)
  is_finite = jnp.isfinite(values).all(axis=1, keepdims=True)
  sign = jnp.where(jnp.signbit(values), _SIGN, 0)
  return bin_of_value | sign, jnp.where(is_finite, table, jnp.nan)


def _bin_means(x: jax.Array, codes: jax.Array, bins: range) -> jax.Array:
  """The mean of the x in each bin of each row, f32[rows, bins], by codes i32[rows, N]; 0 for an empty bin."""
  numbers = jnp.array(bins, jnp.int32)[None, :, None]
  inside = codes[:, None] == numbers
  # At least 1, so that the mean of an empty bin is 0/1.
  members = jnp.maximum(jnp.sum(inside, axis=2, dtype=jnp.int32), 1)
  entries = jnp.where(inside, x[:, None], 0.0)
  sums = row_sums(entries.reshape(-1, x.shape[1])).reshape(-1, len(bins))
  return sums / members.astype(jnp.float32)
