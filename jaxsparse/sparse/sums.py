"""Float arithmetic whose bits do not depend on the program it is part of."""

import jax
import jax.numpy as jnp

_COLUMNS = 256


def ordered_sum(x: jax.Array) -> jax.Array:
  """The sum of f32[n], f32[]: 256 columns from the first row to the last, then halves onto halves.

  `jnp.sum` leaves the order to the compiler, which picks another one under vmap: simulator and mesh would differ in
  the last bits of every threshold and norm.

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
  """The next f32 at least x ≥ 0 whose last `bits` bits are 0: a product of two such numbers can be exact.

  Example:
    >>> float(rounded_up(jnp.float32(1.1), bits=22))
    1.5
  """
  words, rest = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32((1 << bits) - 1)
  return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type((words + rest) & ~rest, jnp.float32), x)
