"""Numbers of which most are 0, in few bits: an index set and the numbers at these indices.

The set is the Rice code of its gaps (Rice and Plaunt, 1971), which is some hundredths
of a bit above the entropy of an index: of the zeros before each index the low b bits
are packed (`sparse.fields`), the rest q is a bitset, of q zeros and a one for each
index; with b = 0 that is the set itself. A message of a collective has a fixed size, so
its set has another code (`sparse.codec`).

The numbers, less 1, are cut: the low w bits of each are packed, and what is above them
is again an array of which most are 0.

    [0 0 3 0 1 0 0 9] -> indices {2, 4, 7}, numbers - 1 = [2 0 8]
                      -> gaps [2 1 2], b = 1: low bits [0 1 0], rest [1 0 1] -> bits 01 1 01
                      -> w = 2: low bits [2 0 0], above [0 0 2]
                      -> indices {2}, numbers - 1 = [1] -> ...

Of the bit patterns of two arrays the numbers are the differences as integers: 1, 2, 3,
4, … for -1, 1, -2, 2, …
"""

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsparse.sparse import bitset, fields

_LOG_BITS = 5  # bits of the width in the word that begins a level, or a set
_BLOCK = 4096  # entries with two values, those of `low_bit`
_PIECE = 1 << 22  # entries that are packed together, by a thread: below 2^27


def pack(indices: np.ndarray, numbers: np.ndarray) -> list[np.ndarray]:
  """An array of which most entries are 0, as u32 words.

  Args:
    indices: i64[c], ascending, below 2^27 - 1, of the entries that are not 0.
    numbers: u32[c], the entries, at least 1.

  Example:
    >>> words = np.concatenate(pack(np.array([2, 4, 7]), np.uint32([3, 1, 9])))
    >>> unpack(words)[:2]
    (array([2, 4, 7]), array([3, 1, 9], dtype=uint32))
  """
  count = len(indices)
  if not count:
    return [np.zeros(1, np.uint32)]
  # None of the given entries is 0, so 1 less is no negative number, and may be shorter.
  numbers = numbers - np.uint32(1)
  width = _width(numbers)
  # The high bits are again an array of which most entries are 0: the next level.
  high = numbers >> width
  above = np.flatnonzero(high != 0)
  mask = np.uint32((1 << width) - 1)
  return [
    np.array([count << _LOG_BITS | width], np.uint32),
    *_pack_set(indices),
    fields.pack((numbers & mask)[None], width)[0],
    *pack(above, high[above]),
  ]


def unpack(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Indices, numbers and the words behind them: the inverse of `pack`."""
  # The first word of a level has the number of entries, and in 5 bits the width.
  count, width = divmod(int(words[0]), 1 << _LOG_BITS)
  words = words[1:]
  if not count:
    return np.zeros(0, np.int64), np.zeros(0, np.uint32), words
  indices, words = _unpack_set(words, count)
  size = fields.words(width, count)
  numbers = fields.unpack(words[None, :size], width, count)[0]
  # `above`: positions in `numbers` of those of more than `width` bits
  above, high, words = unpack(words[size:])
  numbers[above] += high << width
  return indices, numbers + np.uint32(1), words


def difference(
  old: Sequence[np.ndarray],
  new: Sequence[np.ndarray],
) -> np.ndarray:
  """The words that turn the patterns of old arrays into those of new ones.

  Args:
    old: u8, u16 or u32[n] each.
    new: of the same shapes and dtypes.

  Example:
    >>> old, new = np.uint16([[1, 2, 3], [1, 65535, 3]])
    >>> after([old], difference([old], [new]))
    [array([    1, 65535,     3], dtype=uint16)]
  """
  pieces = each_piece(_pack_difference, old, new)
  words = itertools.chain.from_iterable(pieces)
  return np.concatenate([np.zeros(0, np.uint32), *words])


def after(
  old: Sequence[np.ndarray],
  words: np.ndarray,
) -> list[np.ndarray]:
  """New arrays: the inverse of `difference`."""
  new = [array.copy() for array in old]
  # The pieces that `difference` packed; they are views, so this writes into `new`.
  for piece in _pieces(new):
    changed, numbers, words = unpack(words)
    # undoes the zigzag: 1, 2, 3, 4 are −1, 1, −2, 2
    differences = (numbers >> 1) ^ -(numbers & 1)
    piece[changed] += differences.astype(piece.dtype)
  return new


def each_piece(
  function: Callable[..., Any], *arrays: Sequence[np.ndarray]
) -> list[Any]:
  """The results of `function` for each piece of the arrays, in their order; in threads if a piece is large.

  Args:
    function: takes a piece of each of `arrays`; a piece has at most 2²² entries.
    *arrays: sequences of equally many arrays; arrays at one position have one length.
  """
  pieces = list(map(_pieces, arrays))
  # Large pieces run in parallel, since numpy and hashlib release the GIL on large
  # arrays. On small ones threads would wait for the GIL longer than they compute.
  if all(piece.size < _PIECE for piece in pieces[0]):
    return list(map(function, *pieces))
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return list(pool.map(function, *pieces))


def compress(words: np.ndarray) -> np.ndarray:
  """Words in the smallest of three forms: unchanged, for mostly zeros, or for two values in a block, as signs have.

  Args:
    words: u32[n].

  Returns:
    u32[m], the number of the form, then the form; `expand` also needs n.

  Example:
    >>> signs = np.where(np.arange(8192) % 3 == 0, np.float32(0.5), np.float32(-0.5)).view(np.uint32)
    >>> packed = compress(signs)
    >>> packed.size, np.array_equal(expand(packed, 8192), signs)
    (261, True)
  """
  # each form by its number
  forms = {0: words}
  if 2 * np.count_nonzero(words) < words.size:
    forms[1] = difference([np.zeros_like(words)], [words])
  if (pairs := _pack_pairs(words)) is not None:
    forms[2] = pairs
  form = min(forms, key=lambda form: forms[form].size)
  return np.concatenate([np.array([form], np.uint32), forms[form]])


def expand(words: np.ndarray, length: int) -> np.ndarray:
  """The inverse of `compress`.

  Raises:
    ValueError: for other words; forged ones may raise an IndexError or RecursionError.
  """
  form, rest = words[0], words[1:]
  if form == 1:
    return after([np.zeros(length, np.uint32)], rest)[0]
  if form == 2:
    # The first value of each block, the second ones, then a bit for each word: 1 where
    # it is the first value.
    values, bits = np.split(rest, [2 * math.ceil(length / _BLOCK)])
    first, second = values.reshape(2, -1, 1)
    flags = np.unpackbits(bits.view(np.uint8)).view(np.bool_)
    blocks = np.where(flags.reshape(len(first), _BLOCK), first, second)
    return blocks.reshape(-1)[:length]
  if form or rest.size != length:
    raise ValueError(f"{words.size} words are no form of {length}")
  return rest


def _pack_pairs(words: np.ndarray) -> np.ndarray | None:
  """The two values of each block and a bit for each word; None where a block has more."""
  if not words.size:
    return None
  # The padding repeats the last word, and so adds no value to its block.
  blocks = np.pad(words, (0, -words.size % _BLOCK), "edge").reshape(-1, _BLOCK)
  first = blocks[:, :1]
  are_first = blocks == first
  # the first word of another value; the first value again where there is none
  second = np.take_along_axis(blocks, are_first.argmin(axis=1)[:, None], axis=1)
  if not (are_first | (blocks == second)).all():
    return None
  bits = np.packbits(are_first).view(np.uint32)
  return np.concatenate([first.ravel(), second.ravel(), bits])


def _pieces(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Views of at most 2²² consecutive entries, array by array."""
  return [
    array[start : start + _PIECE]
    for array in arrays
    for start in range(0, array.size, _PIECE)
  ]


def _pack_difference(old: np.ndarray, new: np.ndarray) -> list[np.ndarray]:
  """The words of one piece of `difference`: changed indices and zigzag-coded differences."""
  changed = np.flatnonzero(old != new)
  # Unsigned differences wrap around; the view reads them as signed integers.
  signed = (new[changed] - old[changed]).view(f"i{new.itemsize}").astype(np.int32)
  # Zigzag: −1, 1, −2, 2 become 1, 2, 3, 4, so that small differences are small numbers.
  numbers = (signed << 1) ^ (signed >> 31)
  return pack(changed, numbers.view(np.uint32))


def _width(numbers: np.ndarray) -> int:
  """w, the number of low bits to pack of each number: the one for which the estimated size of all levels is least."""
  count = len(numbers)
  # the bit length of each number, 0 of 0: the exponent of a float64
  bits = np.frexp(numbers.astype(np.float64))[1]
  # above[w] numbers have more than w bits
  with_bits = np.bincount(bits, minlength=fields.BITS)[: fields.BITS]
  above = count - np.cumsum(with_bits)
  # about the bits of an index in a random subset of `above` of `count` numbers
  index_bits = 2 + np.log2(count / np.maximum(above, 1))
  # estimate for deeper levels: one bit for each bit of a number above w
  rest = np.cumsum(above[::-1])[::-1]
  # size[w]: bits of all levels where the low w bits are packed here
  size = count * np.arange(fields.BITS) + above * index_bits + rest
  # overhead of a further level: its first word, and words that are not full
  size += 2 * fields.BITS * (above > 0)
  # Of equal sizes the largest width: 0 is then chosen only where some numbers are 0,
  # and drop out. So the next level has fewer numbers, or numbers of fewer bits.
  return fields.BITS - 1 - int(np.argmin(size[::-1]))


def _pack_set(indices: np.ndarray) -> list[np.ndarray]:
  """The words of ascending indices: one with the bitset's size and b, b low bits of each gap, a bitset of the rests."""
  # b of the shortest code of geometric gaps, as random sets have (Kiely, 2004): the
  # largest b with 2^b ≤ 0.96 (μ + 1/2), for μ zeros before an index in the mean.
  middle = 0.96 * ((indices[-1] + 1) / len(indices) - 0.5)
  low = int(math.log2(max(1.0, middle)))
  # With b = 0 the bitset is the set itself, and no low bits are packed.
  lows = ones = indices.astype(np.int32)
  if low:
    # zeros before each index
    gaps: np.ndarray = np.diff(ones, prepend=np.int32(-1))
    gaps -= 1
    lows = gaps & ((1 << low) - 1)
    # The rests, in place: new arrays would take longer than the arithmetic.
    gaps >>= low
    # The bit of each index comes after q zeros for the rest q of each gap up to its
    # own, and a one for each earlier index.
    gaps += 1
    ones = np.cumsum(gaps, out=gaps)
    ones -= 1
  # words of the bitset
  size = int(ones[-1]) // fields.BITS + 1
  return [
    np.array([size << _LOG_BITS | low], np.uint32),
    fields.pack(lows[None], low)[0],
    bitset.of_indices(ones, size),
  ]


def _unpack_set(words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """The `count` indices, and the words behind their set: the inverse of `_pack_set`."""
  size, low = divmod(int(words[0]), 1 << _LOG_BITS)
  start = 1 + fields.words(low, count)
  rest = words[start : start + size]
  # Else a few forged words could ask for much memory, with a large `count`.
  if np.bitwise_count(rest).sum() != count:
    raise ValueError(f"no set of {count} indices")
  lows = fields.unpack(words[None, 1:start], low, count)[0]
  bits = np.unpackbits(rest.view(np.uint8), bitorder="little")
  indices = np.flatnonzero(bits.view(np.bool_))
  if low:
    # The bit of the i-th index is at i + the rests of its gap and of all earlier gaps;
    # the index is i + the sum of these gaps. A gap is rest · 2^low + its low bits.
    order = np.arange(count)
    indices -= order
    indices <<= low
    indices += np.cumsum(lows, dtype=np.int64)
    indices += order
  return indices, words[start + size :]
