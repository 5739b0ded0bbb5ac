"""Digests of 62 bits, and their chain: versions with the same id have the same versions before them, all of them."""

import hashlib
from collections.abc import Iterable
from typing import Any

BYTES = 8


def digest(pieces: Iterable[Any]) -> int:
  """The first 62 bits of the SHA-256 of concatenated buffers: of bytes, or contiguous numpy arrays.

  Example:
    >>> digest([b"ab", b"c"]) == digest([b"abc"]) < 2**62
    True
  """
  sha256 = hashlib.sha256()  # many processors have instructions for it
  for piece in pieces:
    sha256.update(piece)
  # 62 bits fit signed 64-bit integers, as messages have them.
  return int.from_bytes(sha256.digest()[:BYTES]) >> 2


def chained(before: int, content: int) -> int:
  """The id of a version: the digest of `before`, the id of the version before, and `content`, a number for its content.

  Example:
    >>> chained(chained(0, 5), 6) == chained(chained(0, 6), 5)
    False
  """
  # Both have a fixed width, so no two pairs are the same bytes.
  return digest(number.to_bytes(BYTES) for number in (before, content))
