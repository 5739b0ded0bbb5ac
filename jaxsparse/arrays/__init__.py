"""Arrays and pytrees of arrays, without workers: nothing here sends a message.

flatten    gradient pytree <-> one f32[n]
sums       sums whose order is fixed, so that all platforms have the same bits
noise      random numbers without state, from a counter
low_rank   factors of matrices (PowerSGD)
"""

import functools

import jax.numpy as jnp

iota = functools.partial(jnp.arange, dtype=jnp.int32)
"""The integers from 0 below a number, i32 also where 64-bit numbers are enabled."""
