"""Entries in 16 bits: a position, and the number of one of four bins, read as the mean of its values (SparseLoCo).

Sums are added in a fixed order, and products are rounded before they are added: every
program has the same bits.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.sparse.sums import round_mantissa, row_sums, unit_of
from jaxsparse.types import Sparse

BINS = 4
LONGEST = 1 << 14  # entries of a block: a position takes the upper 14 of 16 bits
_WIDTH = 6 / BINS  # standard deviations of a bin
_LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class TwoBit:
  """A codec (`codec_of`) of blocks of at most 16,384 entries. A row takes four more words, those of its bins.

  Example:
    >>> entries = Sparse(jnp.array([[700, 9, 30, 2]]), jnp.array([[5.0, 4.0, -4.0, -5.0]]))
    >>> message, rounded = jax.jit(TwoBit(length=1000).encode)(entries)
    >>> message[0].dtype.name, rounded.tolist(), TwoBit(length=1000).words(rows=100, capacity=64)
    ('uint16', [[4.5, 4.5, -4.5, -4.5]], 3600)
  """

  length: int
  rounds = True

  def encode(
    self, entries: Sparse, noise: jax.Array | None = None
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """u16[rows, c] and the tables f32[rows, 4]; and the values that receivers decode."""
    codes, table = quantize(entries.values)
    return (
      (entries.indices << 2 | codes).astype(jnp.uint16),
      table,
    ), jnp.take_along_axis(table, codes, axis=1)

  def decode(self, message: tuple[jax.Array, jax.Array]) -> Sparse:
    """The entries, in their slots."""
    both = message[0].astype(jnp.int32)
    table = message[1]
    return Sparse(both >> 2, jnp.take_along_axis(table, both & 3, axis=1))

  def words(self, rows: int, capacity: int) -> int:
    """The 4-byte words of a message."""
    return -(-rows * capacity // 2) + BINS * rows


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
  inside = codes[:, None] == jnp.arange(BINS, dtype=jnp.int32)[None, :, None]
  members = jnp.maximum(jnp.sum(inside, axis=2, dtype=jnp.int32), 1).astype(jnp.float32)
  sums = row_sums(jnp.where(inside, apart[:, None], 0.0).reshape(-1, count)).reshape(
    -1, BINS
  )
  # a mean of finite values is finite
  table = jnp.clip(unit * (sums / members + mean[:, None]), -_LARGEST, _LARGEST)
  return codes, jnp.where(jnp.isfinite(values).all(axis=1)[:, None], table, jnp.nan)
