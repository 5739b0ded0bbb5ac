"""Numbers of a few bits, packed into words of 32.

A number of `width` bits is cut into parts of 16, 8, 4, 2 and 1 bits, as the binary form
of `width` says, and each part is packed by itself: 32 / b parts of b bits fill a word.
Slot j of a row of m words is in word j mod m, so that packing reads whole rows, which
vectorizes; neighbours in one word do not.
"""

import jax
import jax.numpy as jnp

BITS = 32
_PARTS = (16, 8, 4, 2, 1)


def words(width: int, count: int) -> int:
  """The words of a row of `count` numbers of `width` bits, at most 31.

  Example:
    >>> words(6, 100), words(4, 8), words(0, 5)
    (20, 1, 0)
  """
  return sum(_part_words(bits, count) for bits in _parts(width))


def pack(numbers: jax.Array, width: int) -> jax.Array:
  """Rows of packed numbers, u32[rows, words(width, c)].

  Args:
    numbers: i32 or u32[rows, c], below 2^width.
    width: bits of a number.

  Example:
    >>> pack(jnp.array([[1, 2, 3]]), 4)
    Array([[801]], dtype=uint32)
  """
  rows, count = numbers.shape
  numbers = numbers.astype(jnp.uint32)
  packed = []
  below = 0
  for bits in _parts(width):
    part = (numbers >> below) & ((1 << bits) - 1)
    columns = _part_words(bits, count)
    part = jnp.pad(part, ((0, 0), (0, columns * (BITS // bits) - count)))
    shifted = part.reshape(rows, BITS // bits, columns) << _shifts(bits)[None]
    packed.append(jnp.sum(shifted, axis=1, dtype=jnp.uint32))
    below += bits
  return jnp.concatenate([jnp.zeros((rows, 0), jnp.uint32), *packed], axis=1)


def unpack(packed: jax.Array, width: int, count: int) -> jax.Array:
  """The `count` numbers of each row, u32[rows, count]: the inverse of `pack`.

  Example:
    >>> unpack(jnp.array([[801]], dtype=jnp.uint32), 4, count=3)
    Array([[1, 2, 3]], dtype=uint32)
  """
  rows = len(packed)
  numbers = jnp.zeros((rows, count), jnp.uint32)
  start = 0
  below = 0
  for bits in _parts(width):
    columns = _part_words(bits, count)
    words_of_part = packed[:, None, start : start + columns]
    part = (words_of_part >> _shifts(bits)[None]) & ((1 << bits) - 1)
    numbers |= part.reshape(rows, columns * (BITS // bits))[:, :count] << below
    start += columns
    below += bits
  return numbers


def _parts(width: int) -> list[int]:
  return [bits for bits in _PARTS if width & bits]


def _part_words(bits: int, count: int) -> int:
  return -(-count * bits // BITS)


def _shifts(bits: int) -> jax.Array:
  """The shift of each slot of a word, u32[32 / bits, 1]."""
  return jnp.arange(0, BITS, bits, dtype=jnp.uint32)[:, None]
