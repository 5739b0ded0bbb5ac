"""A float sum whose bits do not depend on the program it is part of."""

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
