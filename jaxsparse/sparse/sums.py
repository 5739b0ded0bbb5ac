"""Floating-point arithmetic with the same bits in every compiled program."""

import jax
import jax.numpy as jnp

_COLUMNS = 256


def ordered_sum(x: jax.Array) -> jax.Array:
  """The sum of f32[n], f32[], in a fixed order: the rows of [n / 256, 256] one after the other, then pairwise.

  The compiler chooses the order of `jnp.sum`, and another one under vmap, so thresholds and norms of the simulator and
  of a mesh would differ in their last bits.

  Example:
    >>> ordered_sum(jnp.arange(1000.0))
    Array(499500., dtype=float32)
  """
  columns = jnp.pad(x, (0, -x.size % _COLUMNS)).reshape(-1, _COLUMNS).sum(0)
  while columns.size > 1:
    half = columns.size // 2
    columns = columns[:half] + columns[half:]
  return columns[0]


def rounded_up(x: jax.Array, bits: int) -> jax.Array:
  """The smallest f32 that is at least x ≥ 0 and whose last `bits` bits are 0.

  Products of numbers with few significant bits are exact, and so the same with fused multiply-add and without.

  Example:
    >>> float(rounded_up(jnp.float32(1.1), bits=22))
    1.5
  """
  words, rest = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32((1 << bits) - 1)
  return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type((words + rest) & ~rest, jnp.float32), x)
