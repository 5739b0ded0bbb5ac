"""Numbers of a few bits, packed into words of 32.

A number of `width` bits is cut into parts of 16, 8, 4, 2 and 1 bits, as the binary form
of `width` says, and each part is packed by itself: 32 / b parts of b bits fill a word.
Slot j of a row of m words is in word j mod m, so that packing reads whole rows, which
vectorizes; neighbours in one word do not.
"""

from typing import Any, TypeVar

import jax
import numpy as np

BITS = 32
_PARTS = (16, 8, 4, 2, 1)
_Array = TypeVar("_Array", jax.Array, np.ndarray)


def words(width: int, count: int) -> int:
  """The words of a row of `count` numbers of `width` bits, at most 31.

  A number is cut into parts of 16, 8, 4, 2 and 1 bits, and each part of a row is
  rounded up to words: few numbers of 6 bits take more words than of 8.

  Example:
    >>> words(6, 100), words(4, 8), words(0, 5)
    (20, 1, 0)
  """
  return sum(_part_words(bits, count) for bits in _parts(width))


def pack(numbers: _Array, width: int) -> _Array:
  """Rows of packed numbers, u32[rows, words(width, c)].

  Args:
    numbers: i32 or u32[rows, c], below 2^width; of JAX or of numpy, as the result is.
    width: bits of a number.

  Example:
    >>> import jax.numpy as jnp
    >>> pack(jnp.array([[1, 2, 3]]), 4)
    Array([[801]], dtype=uint32)
  """
  xp = numbers.__array_namespace__()  # jax.numpy or numpy
  rows, count = numbers.shape
  numbers = numbers.astype(np.uint32)
  packed: list[Any] = []
  below = 0  # bits of a number below the part, which earlier parts hold
  for bits in _parts(width):
    part = (numbers >> below) & ((1 << bits) - 1)
    columns = _part_words(bits, count)
    missing = columns * (BITS // bits) - count
    part = xp.pad(part, ((0, 0), (0, missing)))
    # Columns are words: slot s of every word is row s, shifted to the bits of the slot.
    shifted = part.reshape(rows, BITS // bits, columns) << _shifts(xp, bits)
    packed.append(xp.sum(shifted, axis=1, dtype=np.uint32))
    below += bits
  nothing = xp.zeros((rows, 0), np.uint32)  # the only array where `width` is 0
  return xp.concatenate([nothing, *packed], axis=1)


def unpack(packed: _Array, width: int, count: int) -> _Array:
  """The `count` numbers of each row, u32[rows, count]: the inverse of `pack`.

  Example:
    >>> import jax.numpy as jnp
    >>> unpack(jnp.array([[801]], dtype=jnp.uint32), 4, count=3)
    Array([[1, 2, 3]], dtype=uint32)
  """
  xp = packed.__array_namespace__()
  rows = len(packed)
  numbers = xp.zeros((rows, count), np.uint32)
  start = 0  # first word of the part in each row
  below = 0  # bits of a number below the part
  for bits in _parts(width):
    columns = _part_words(bits, count)
    # one row of words for all 32 / b slots, by shifts
    words_of_part = packed[:, None, start : start + columns]
    part = (words_of_part >> _shifts(xp, bits)) & ((1 << bits) - 1)
    numbers |= part.reshape(rows, columns * (BITS // bits))[:, :count] << below
    start += columns
    below += bits
  return numbers


def _parts(width: int) -> list[int]:
  """The sizes in bits of the parts of a number of `width` bits, the lowest part first."""
  return [bits for bits in _PARTS if width & bits]


def _part_words(bits: int, count: int) -> int:
  """The words of `count` parts of `bits` bits."""
  return -(-count * bits // BITS)


def _shifts(xp: Any, bits: int) -> Any:
  """The shift of each slot of a word, u32[1, 32 / bits, 1]."""
  return xp.arange(0, BITS, bits, dtype=np.uint32)[None, :, None]
