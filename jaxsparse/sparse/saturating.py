"""Saturating arithmetic on counters: a result beyond the largest number of its type becomes that number.

The words of a step are u32, which needs no 64-bit mode of JAX: 2³² − 1 words, 16 GiB, stands for that many or more.
"""

import jax
import jax.numpy as jnp

_MOST = 2**32 - 1


def cast(value: jax.Array | float, dtype: jax.typing.DTypeLike) -> jax.Array:
  """`value` as `dtype`; for an integer type, saturated at its largest number.

  Args:
    value: a Python number or an array, at least 0 for an unsigned dtype.
    dtype: of the result.

  Example:
    >>> cast(10**10, jnp.uint32), cast(jnp.float32(1e10), jnp.int32)
    (Array(4294967295, dtype=uint32), Array(2147483647, dtype=int32))
  """
  if not jnp.issubdtype(dtype, jnp.integer):
    return jnp.asarray(value, dtype)
  most = int(jnp.iinfo(dtype).max)
  if not isinstance(value, jax.Array):
    return jnp.asarray(min(int(value), most), dtype)
  if jnp.issubdtype(value.dtype, jnp.integer) and jnp.iinfo(value.dtype).max <= most:
    return value.astype(dtype)
  return jnp.where(value >= jnp.asarray(most, value.dtype), jnp.asarray(most, dtype), value.astype(dtype))


def total(*counts: jax.Array | int) -> jax.Array:
  """The saturated sum of counts, u32[].

  Example:
    >>> total(1, jnp.int32(2)), total(2**31, 2**31)
    (Array(3, dtype=uint32), Array(4294967295, dtype=uint32))
  """
  result = jnp.uint32(0)
  for count in counts:
    added = result + cast(count, jnp.uint32)
    result = jnp.where(added < result, jnp.uint32(_MOST), added)
  return result


def times(count: jax.Array | int, by: int) -> jax.Array:
  """The saturated product of a count and a static factor, u32[].

  Example:
    >>> times(jnp.int32(3), 2), times(jnp.int32(3), 2**31), times(jnp.int32(3), 0)
    (Array(6, dtype=uint32), Array(4294967295, dtype=uint32), Array(0, dtype=uint32))
  """
  factor = min(by, _MOST)
  count = cast(count, jnp.uint32)
  return jnp.where(count > jnp.uint32(_MOST // max(1, factor)), jnp.uint32(_MOST), count * jnp.uint32(factor))
