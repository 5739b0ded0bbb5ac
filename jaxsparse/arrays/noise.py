"""Random bits as a function of a key and an index, which are computed where they are used, and never stored."""

import jax
import jax.numpy as jnp


def fold(key: jax.Array, data: jax.Array | int) -> jax.Array:
  """A new key u32[2] from a key u32[2] and a number `data`, i32[] or u32[], like `jax.random.fold_in`."""
  data = jnp.asarray(data).astype(jnp.uint32)
  # Added so that 0 is mixed, too: `_mix` maps 0 to 0.
  apart = data + jnp.uint32(0x9E3779B9)
  first = _mix(key[0] ^ _mix(apart))
  second = _mix(key[1] + _mix(data ^ key[0]))
  return jnp.stack([first, second])


def key_of(seed: int) -> jax.Array:
  """The key u32[2] of a seed, 0 … 2³² − 1.

  Example:
    >>> bits(fold(key_of(0), 1), 2).shape
    (2,)
  """
  return fold(jnp.array([seed, ~seed & 0xFFFFFFFF], jnp.uint32), 0)


def bits(
  key: jax.Array,
  n: int,
  start: jax.Array | int = 0,
) -> jax.Array:
  """Random bits u32[n], each a function of the key and its index, start … start + n − 1: a part can be drawn alone."""
  first = jnp.asarray(start).astype(jnp.uint32)
  index = jnp.arange(n, dtype=jnp.uint32) + first
  return _mix(_mix(index ^ key[0]) + key[1])


def uniform(bits: jax.Array) -> jax.Array:
  """Numbers in [0, 1) of 24 bits, f32 like the random bits.

  Example:
    >>> uniform(jnp.uint32(2**31))
    Array(0.5, dtype=float32)
  """
  # float32 has 24 bits; with 32 a number near 1 would round up to 1.
  return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of u32 each of whose result bits depends on every bit of x: Wellons' `lowbias32`."""
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x ^ (x >> 16)
