"""Wire formats: rows of sparse entries as the arrays of a message, one format for values and one for indices.

Values are sent unchanged ("f32"), rounded to 8 significant bits ("bf16"), or as one of
255 levels ("int8"): see `values`. Indices are sent in one of three formats:

- unchanged, 32 bits an index;
- as a set, in the quasi-succinct code of Elias and Fano: the low 4, 8 or 16 bits of
  each index, and the high parts, in ascending order, as a bitset; about 9 bits an index
  at a density of 1 %;
- where slot j contains an entry of chunk j, as the position within the chunk, 8 or 16
  bits an index.

Short blocks of few entries have a format of their own, 16 bits for index and value
together ("2bit"): see `two_bit`.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.sparse import bitset
from jaxsparse.sparse.two_bit import TwoBit
from jaxsparse.sparse.values import FORMATS, Values, Wire, read
from jaxsparse.types import Sparse

_LOWS = (4, 8, 16)  # bits of a low part: two to a byte, one byte, two bytes
_KEY_BITS = 31  # of a non-negative i32
_MOST_BITS = 2**31 - bitset.GROUP * bitset.BITS  # of a bitset, whose numbers are i32
_WORD = 4  # bytes


class Message(NamedTuple):
  """Encoded rows of entries.

  Attributes:
    low: u8, u16 or u32[rows, capacity], the low bits of each index; two low parts of 4
      bits share a byte, the first one in its low half.
    high: u32[rows, ⌈(capacity + (length >> low)) / 32⌉], the high parts as a bitset;
      None with one entry per chunk.
    values: f32, bf16 or i8[rows, capacity].
    scale: f32[rows], of a format that has one, such as the difference of neighbouring
      i8 levels; else None.

  Example:
    >>> entries = Sparse(jnp.array([[7, 300]]), jnp.array([[0.5, -1.0]]))
    >>> jax.jit(codec_of("bf16", 1000).encode)(entries)[0].low
    Array([[ 7, 44]], dtype=uint8)
  """

  low: jax.Array
  high: jax.Array | None
  values: jax.Array
  scale: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Coordinates:
  """Indices and values unchanged, in their order."""

  length: int
  rounds = False

  def encode(
    self, entries: Sparse, noise: jax.Array | None = None
  ) -> tuple[Sparse, jax.Array]:
    return entries, entries.values

  def decode(self, message: Sparse) -> Sparse:
    return message

  def words(self, rows: int, capacity: int) -> int:
    return 2 * rows * capacity


@dataclasses.dataclass(frozen=True)
class _Formatted:
  """A codec whose values have a format."""

  format: Values
  length: int

  @property
  def rounds(self) -> bool:
    return self.format.rounds


@dataclasses.dataclass(frozen=True)
class _QuasiSuccinct(_Formatted):
  """The code of Elias and Fano. Decoded entries are ordered by high part, then by slot; empty slots are last."""

  def encode(
    self, entries: Sparse, noise: jax.Array | None = None
  ) -> tuple[Message, jax.Array]:
    low = low_bits(entries.indices.shape[1], self.length)
    last = self.length >> low
    indices = jnp.minimum(entries.indices, self.length)
    # Empty slots have index `length`, which may share its high part with entries; a
    # bucket of their own puts them last.
    buckets = jnp.where(indices < self.length, indices >> low, last + 1)
    order = jax.vmap(lambda row: order_of(row, last + 1))(buckets)
    in_order = lambda x: jnp.take_along_axis(x, order, axis=1, mode="clip")
    values, scale = self.format.write(entries.values, noise)
    indices = in_order(indices)
    message = Message(
      _write_low(indices, low),
      _write_high(indices >> low, last),
      in_order(values),
      scale,
    )
    return message, read(values, scale)

  def decode(self, message: Message) -> Sparse:
    assert message.high is not None
    capacity = message.values.shape[1]
    low = low_bits(capacity, self.length)
    # `Comm.permute` returns zeros where no message arrives. Such a message has no high
    # parts: all its slots are empty.
    highs = jnp.minimum(_read_high(message.high, capacity), (self.length >> low) + 1)
    indices = jnp.minimum(
      (highs << low) | _read_low(message.low, low, capacity), self.length
    )
    # A NaN scale makes all values of its row NaN, so empty slots are set to 0 again.
    return sparse.where(
      indices < self.length,
      Sparse(indices, read(message.values, message.scale)),
      self.length,
    )

  def words(self, rows: int, capacity: int) -> int:
    low = low_bits(capacity, self.length)
    lows = math.ceil(rows * math.ceil(capacity * low / 8) / _WORD)
    return (
      lows
      + rows * _high_words(capacity, self.length >> low)
      + _value_words(rows, capacity, self.format)
    )


@dataclasses.dataclass(frozen=True)
class _ByChunk(_Formatted):
  """The slot of an entry is its chunk; one or two bytes are the position within the chunk. Entries keep their slots."""

  def encode(
    self, entries: Sparse, noise: jax.Array | None = None
  ) -> tuple[Message, jax.Array]:
    chunks = entries.indices.shape[1]
    empty = -(-self.length // chunks)  # beyond the last position of a chunk
    positions = jnp.where(
      entries.indices < self.length, entries.indices // chunks, empty
    )
    values, scale = self.format.write(entries.values, noise)
    return Message(positions.astype(self._position(chunks)), None, values, scale), read(
      values, scale
    )

  def decode(self, message: Message) -> Sparse:
    chunks = message.values.shape[1]
    indices = (
      message.low.astype(jnp.int32) * chunks + jnp.arange(chunks, dtype=jnp.int32)[None]
    )
    indices = jnp.minimum(indices, self.length)
    return sparse.where(
      indices < self.length,
      Sparse(indices, read(message.values, message.scale)),
      self.length,
    )

  def words(self, rows: int, capacity: int) -> int:
    positions = rows * capacity * jnp.dtype(self._position(capacity)).itemsize
    return math.ceil(positions / _WORD) + _value_words(rows, capacity, self.format)

  def _position(self, chunks: int) -> Any:
    sizes = (jnp.uint8, jnp.uint16, jnp.uint32)
    return next(
      size for size in sizes if -(-self.length // chunks) <= jnp.iinfo(size).max
    )


Codec = _Coordinates | _QuasiSuccinct | _ByChunk | TwoBit


def codec_of(
  wire: Wire | Literal["2bit"], length: int, *, by_chunk: bool = False
) -> Codec:
  """The codec for blocks of `length`.

  Args:
    wire: the format of values: "f32" sends them unchanged, "bf16" rounds to the nearest
      (`BFloat16`), "int8" sends levels (`Int8`). "bf16" and "int8" also encode indices
      in fewer bits. "2bit" sends 16 bits an entry (`TwoBit`).
    length: number of entries of a block.
    by_chunk: whether slot j of a row of c slots is empty or one of the entries j, j +
      c, j + 2c, … of the block.

  Returns:
    A codec has these attributes and methods; the shapes of a message do not depend on
    the entries.

    - `length` and `rounds`, whether values are rounded.
    - `encode(entries, noise)` returns the message, a pytree, and the values that its
      receivers decode, f32[rows, c] in the slots of `entries` [rows, c]. An index in 0
      … length − 1 occurs once in its row; an empty slot has an index of at least
      `length` and value 0. The noise is f32[rows, c] in [0, 1), for formats that draw
      (`Values.draws`).
    - `decode(message)` returns the same entries with rounded values, the same bits on
      every worker; empty slots have index `length`.
    - `words(rows, capacity)` are the 4-byte words of a message.

  Example:
    >>> entries = Sparse(jnp.array([[700, 9, 30]]), jnp.array([[1.27, 0.0, 0.5]]))
    >>> codec = codec_of("int8", length=1000)
    >>> message, rounded = jax.jit(codec.encode)(entries, noise=jnp.full((1, 3), 0.5))
    >>> message.values, jax.jit(codec.decode)(message).indices
    (Array([[  0,  50, 127]], dtype=int8), Array([[  9,  30, 700]], dtype=int32))
    >>> [codec_of(wire, 1_000_000).words(1, 10_000) for wire in ("f32", "bf16", "int8")]
    [20000, 7935, 5436]
    >>> [codec_of(wire, 1_000_000, by_chunk=True).words(1, 10_000) for wire in ("f32", "bf16", "int8")]
    [12500, 7500, 5001]
  """
  if wire == "2bit":
    return TwoBit(length)
  if by_chunk:
    return _ByChunk(FORMATS[wire], length)
  return (
    _Coordinates(length) if wire == "f32" else _QuasiSuccinct(FORMATS[wire], length)
  )


def low_bits(capacity: int, length: int) -> int:
  """The number of low bits of an index that minimizes the size of a row.

  Example:
    >>> low_bits(500, 1000), low_bits(10, 1000), low_bits(10, 1_000_000)
    (4, 8, 16)
  """
  return min(_LOWS, key=lambda low: low * capacity + (length >> low))


def order_of(buckets: jax.Array, last: int) -> jax.Array:
  """The slots ordered by bucket and, within a bucket, by slot: a stable argsort of small numbers.

  On CPU a sort of i32 keys is several times as fast as one of keys with a payload. So a
  key consists of the slot in its low bits and as many low bits of the bucket as fit
  above. Up to 2³¹ buckets × slots that takes one pass; beyond, further passes sort by
  the higher bits, as in a radix sort.

  Args:
    buckets: i32[c], 0 … last.
    last: the largest possible bucket.

  Returns:
    i32[c].

  Example:
    >>> order_of(jnp.array([2, 0, 2, 1]), last=2)
    Array([1, 3, 0, 2], dtype=int32)
  """
  slots = jnp.arange(buckets.size, dtype=jnp.int32)
  slot_bits = (buckets.size - 1).bit_length()
  digit_bits = _KEY_BITS - slot_bits
  order = slots
  for shift in range(0, last.bit_length(), digit_bits):
    digits = (buckets if shift == 0 else buckets[order] >> shift) & (
      (1 << digit_bits) - 1
    )
    sorted_slots = jnp.sort(digits << slot_bits | slots) & ((1 << slot_bits) - 1)
    order = sorted_slots if shift == 0 else order[sorted_slots]
  return order


def _value_words(rows: int, capacity: int, values: Values) -> int:
  return math.ceil(rows * capacity * values.bytes / _WORD) + rows * values.scaled


def _write_low(indices: jax.Array, low: int) -> jax.Array:
  if low > 4:
    return (indices & ((1 << low) - 1)).astype(jnp.uint16 if low == 16 else jnp.uint8)
  rows, capacity = indices.shape
  pairs = jnp.pad(indices & 15, ((0, 0), (0, capacity % 2))).reshape(rows, -1, 2)
  return (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8)


def _read_low(lows: jax.Array, low: int, capacity: int) -> jax.Array:
  if low == 4:
    lows = jnp.stack([lows & 15, lows >> 4], axis=2).reshape(lows.shape[0], -1)[
      :, :capacity
    ]
  return lows.astype(jnp.int32)


def _high_words(capacity: int, last: int) -> int:
  """Words of the bitset of `capacity` high parts, at most `last` each: slot j sets the bit high + j."""
  return math.ceil((capacity + last) / bitset.BITS)


def _write_high(highs: jax.Array, last: int) -> jax.Array:
  """The bitset of the ascending high parts of each row, u32[rows, words]; all rows are packed at once as one bitset."""
  rows, capacity = highs.shape
  count = _high_words(capacity, last)
  flags = jnp.zeros(rows * count * bitset.BITS, jnp.bool_)
  words = bitset.pack(
    sparse.put(flags, (highs + _bit_offsets(rows, capacity, count)).reshape(-1), True)
  )
  return words[: rows * count].reshape(rows, count)


def _read_high(words: jax.Array, capacity: int) -> jax.Array:
  """The high parts, the inverse of `_write_high`.

  Each row has one set bit per slot, so one `nonzero` of the concatenated bitsets finds
  the bits of all rows in order. In a message of zeros, which has no set bits, the
  results exceed every high part.
  """
  rows, count = words.shape
  if (bits := bitset.BITS * words.size) > _MOST_BITS:
    raise ValueError(
      f"messages of {rows} rows of {capacity} entries take {bits} indices of bits, which have 31 bits: "
      "choose wire='f32', a smaller density or k, or groups of leaves (js.bucketed_transform)"
    )
  whole = jnp.pad(words.reshape(-1), (0, -words.size % bitset.GROUP))
  return bitset.nonzero(whole, rows * capacity).reshape(rows, capacity) - _bit_offsets(
    rows, capacity, count
  )


def _bit_offsets(rows: int, capacity: int, count: int) -> jax.Array:
  """The offset from the high part of a slot to its bit in the concatenated bitset of all rows, i32[rows, capacity].

  The bit of slot j of row r is 32 · count · r + j + high, with `count` words in a row.
  """
  start = jnp.arange(rows, dtype=jnp.int32) * (count * bitset.BITS)
  return start[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
