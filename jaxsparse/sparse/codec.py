"""How rows of sparse entries of blocks are written as messages: indices by one of three formats, values by another.

Values travel as they are ("f32"), rounded to 8 bits ("bf16"), or as one of 255 levels ("int8"). Indices travel as they
are; or, being a set, in Elias and Fano's quasi-succinct code: their low 4, 8 or 16 bits one by one, and their high
parts, in ascending order, as a bitset, about 9 bits an entry at 1 %; or, with one entry per chunk, as their position
within the chunk that is the slot's. Formats of values are in `values`.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.sparse import bitset
from jaxsparse.sparse.values import FORMATS, Values, Wire, read
from jaxsparse.types import Sparse

_LOWS = (4, 8, 16)  # bits of a low part that machines read with ease
_KEY_BITS = 31  # of an i32 that is not negative
_WORD = 4  # bytes


class Message(NamedTuple):
  """Rows of entries as they are sent.

  Attributes:
    low: u8, u16 or u32[rows, capacity], the low bits of each index; of 4 bits two are in a byte, the first one low.
    high: u32[rows, ⌈(capacity + (length >> low)) / 32⌉], the high parts as a bitset; None where the slot tells them.
    values: f32, bf16 or i8[rows, capacity].
    scale: f32[rows], the value of a level of i8; None for other formats.

  Example:
    >>> entries = Sparse(jnp.array([[7, 300]]), jnp.array([[0.5, -1.0]]))
    >>> codec_of("bf16", 1000).encode(entries)[0].low
    Array([[ 7, 44]], dtype=uint8)
  """

  low: jax.Array
  high: jax.Array | None
  values: jax.Array
  scale: jax.Array | None


class Codec(Protocol):
  """A wire format of rows of entries of blocks: arrays of static shapes, whatever the entries are.

  Example:
    >>> entries = Sparse(jnp.array([[700, 9, 30]]), jnp.array([[1.27, 0.0, 0.5]]))
    >>> codec: Codec = codec_of("int8", length=1000)
    >>> message, rounded = codec.encode(entries, noise=jnp.full((1, 3), 0.5))
    >>> message.values, codec.decode(message).indices
    (Array([[  0,  50, 127]], dtype=int8), Array([[  9,  30, 700]], dtype=int32))
  """

  @property
  def length(self) -> int:
    """Entries of a block."""
    ...

  @property
  def format(self) -> Values:
    """Of the values."""
    ...

  def encode(self, entries: Sparse, noise: jax.Array | None = None) -> tuple[Any, jax.Array]:
    """The pytree that is sent, and the values that it holds.

    Args:
      entries: i32 and f32[rows, c]. An index in 0 … length − 1 occurs once in its row; any other is at least `length`,
        and its slot is empty: value 0.
      noise: f32[rows, c] in [0, 1), of the slots of `entries`; for "int8" only.

    Returns:
      (message, rounded): `rounded` f32[rows, c] are the values that any worker will decode for the slots of `entries`.
    """
    ...

  def decode(self, message: Any) -> Sparse:
    """The same entries with rounded values, the same bits on every worker; empty slots have index `length`."""
    ...

  def words(self, rows: int, capacity: int) -> int:
    """The 4-byte words of a message of [rows, capacity] entries."""
    ...


def codec_of(wire: Wire, length: int, *, by_chunk: bool = False) -> Codec:
  """The codec for blocks of `length`.

  Args:
    wire: the format of values: "f32" sends them as they are, "bf16" rounds to the nearest (`BFloat16`), "int8" sends
      levels (`Int8`). The latter two write indices in fewer bits, too.
    length: of a block.
    by_chunk: whether slot j of a row of c slots is empty or one of the entries j, j + c, j + 2c, … of the block.

  Example:
    >>> [codec_of(wire, 1_000_000).words(1, 10_000) for wire in ("f32", "bf16", "int8")]
    [20000, 7935, 5436]
    >>> [codec_of(wire, 1_000_000, by_chunk=True).words(1, 10_000) for wire in ("f32", "bf16", "int8")]
    [12500, 7500, 5001]
  """
  if by_chunk:
    return _ByChunk(FORMATS[wire], length)
  return _Coordinates(length) if wire == "f32" else _QuasiSuccinct(FORMATS[wire], length)


@dataclasses.dataclass(frozen=True)
class _Coordinates:
  """Entries as they are, in their order."""

  length: int
  format = FORMATS["f32"]

  def encode(self, entries: Sparse, noise: jax.Array | None = None) -> tuple[Sparse, jax.Array]:
    del noise
    return entries, entries.values

  def decode(self, message: Sparse) -> Sparse:
    return message

  def words(self, rows: int, capacity: int) -> int:
    return 2 * rows * capacity


@dataclasses.dataclass(frozen=True)
class _QuasiSuccinct:
  """Elias and Fano's code. Decoded entries are in the order of high parts, then of slots; empty slots are last."""

  format: Values
  length: int

  def encode(self, entries: Sparse, noise: jax.Array | None = None) -> tuple[Message, jax.Array]:
    low = low_bits(entries.indices.shape[1], self.length)
    last = self.length >> low
    indices = jnp.minimum(entries.indices, self.length)
    # `length` may share its high part with entries: empty slots have a bucket of their own, so that they come last.
    buckets = jnp.where(indices < self.length, indices >> low, last + 1)
    order = jax.vmap(lambda row: order_of(row, last + 1))(buckets)
    in_order = lambda x: jnp.take_along_axis(x, order, axis=1, mode="clip")
    values, scale = self.format.write(entries.values, noise)
    indices = in_order(indices)
    message = Message(_write_low(indices, low), _write_high(indices >> low, last), in_order(values), scale)
    return message, read(values, scale)

  def decode(self, message: Message) -> Sparse:
    assert message.high is not None
    capacity = message.values.shape[1]
    low = low_bits(capacity, self.length)
    # Of a message of zeros, which stands for none in `Comm.permute`, all slots are empty: it has no high parts.
    highs = jnp.minimum(_read_high(message.high, capacity), (self.length >> low) + 1)
    indices = jnp.minimum((highs << low) | _read_low(message.low, low, capacity), self.length)
    # The scale of a row that is not finite makes its sent values NaN; empty slots stay 0.
    return sparse.where(indices < self.length, Sparse(indices, read(message.values, message.scale)), self.length)

  def words(self, rows: int, capacity: int) -> int:
    low = low_bits(capacity, self.length)
    high = rows * _high_words(capacity, self.length >> low)
    return _padded(rows * math.ceil(capacity * low / 8)) + high + _value_words(rows, capacity, self.format)


@dataclasses.dataclass(frozen=True)
class _ByChunk:
  """The slot is the chunk, and a byte or two the position within it. Entries keep their slots."""

  format: Values
  length: int

  def encode(self, entries: Sparse, noise: jax.Array | None = None) -> tuple[Message, jax.Array]:
    chunks = entries.indices.shape[1]
    empty = -(-self.length // chunks)  # a position that no chunk has
    positions = jnp.where(entries.indices < self.length, entries.indices // chunks, empty)
    values, scale = self.format.write(entries.values, noise)
    return Message(positions.astype(self._position(chunks)), None, values, scale), read(values, scale)

  def decode(self, message: Message) -> Sparse:
    chunks = message.values.shape[1]
    indices = message.low.astype(jnp.int32) * chunks + jnp.arange(chunks, dtype=jnp.int32)[None]
    indices = jnp.minimum(indices, self.length)
    return sparse.where(indices < self.length, Sparse(indices, read(message.values, message.scale)), self.length)

  def words(self, rows: int, capacity: int) -> int:
    positions = rows * capacity * jnp.dtype(self._position(capacity)).itemsize
    return _padded(positions) + _value_words(rows, capacity, self.format)

  def _position(self, chunks: int) -> Any:
    sizes = (jnp.uint8, jnp.uint16, jnp.uint32)
    return next(size for size in sizes if -(-self.length // chunks) <= jnp.iinfo(size).max)


def low_bits(capacity: int, length: int) -> int:
  """How many bits of an index are its low part: the fewest bits in all.

  Example:
    >>> low_bits(500, 1000), low_bits(10, 1000), low_bits(10, 1_000_000)
    (4, 8, 16)
  """
  return min(_LOWS, key=lambda low: low * capacity + (length >> low))


def order_of(buckets: jax.Array, last: int) -> jax.Array:
  """The slots in the order of their buckets and, within a bucket, in their own: a stable argsort of small numbers.

  A sort of single i32 keys is several times as fast as one that carries a payload, on CPU. So the slot is part of the
  key, below as many bits of the bucket as there is room for: one pass up to 2³¹ buckets × slots, and as in any radix
  sort further ones for the bits above.

  Args:
    buckets: i32[c], 0 … last.
    last: the largest bucket there may be.

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
    digits = (buckets if shift == 0 else buckets[order] >> shift) & ((1 << digit_bits) - 1)
    sorted_slots = jnp.sort(digits << slot_bits | slots) & ((1 << slot_bits) - 1)
    order = sorted_slots if shift == 0 else order[sorted_slots]
  return order


def _padded(count: int) -> int:
  return math.ceil(count / _WORD)


def _value_words(rows: int, capacity: int, values: Values) -> int:
  return _padded(rows * capacity * values.bytes) + rows * values.scaled


def _write_low(indices: jax.Array, low: int) -> jax.Array:
  if low > 4:
    return (indices & ((1 << low) - 1)).astype(jnp.uint16 if low == 16 else jnp.uint8)
  rows, capacity = indices.shape
  pairs = jnp.pad(indices & 15, ((0, 0), (0, capacity % 2))).reshape(rows, -1, 2)
  return (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8)


def _read_low(lows: jax.Array, low: int, capacity: int) -> jax.Array:
  if low == 4:
    lows = jnp.stack([lows & 15, lows >> 4], axis=2).reshape(lows.shape[0], -1)[:, :capacity]
  return lows.astype(jnp.int32)


def _high_words(capacity: int, last: int) -> int:
  """Words of the set of `capacity` high parts that ascend to `last` at most: its last place is last + capacity − 1."""
  return math.ceil((capacity + last) / bitset.BITS)


def _write_high(highs: jax.Array, last: int) -> jax.Array:
  """The sets of rows of high parts, u32[rows, words]; all rows are one long set while they are written."""
  rows, capacity = highs.shape
  count = _high_words(capacity, last)
  flags = jnp.zeros(rows * count * bitset.BITS, jnp.bool_)
  words = bitset.pack(sparse.put(flags, (highs + _in_rows(rows, capacity, count)).reshape(-1), True))
  return words[: rows * count].reshape(rows, count)


def _read_high(words: jax.Array, capacity: int) -> jax.Array:
  """Undoes `_write_high`. Every row has as many places as slots: those of all rows are found at once, and are in order.

  Where there are none, as in a message of zeros, it is more than any high part.
  """
  rows, count = words.shape
  whole = jnp.pad(words.reshape(-1), (0, -words.size % bitset.GROUP))
  return bitset.nonzero(whole, rows * capacity).reshape(rows, capacity) - _in_rows(rows, capacity, count)


def _in_rows(rows: int, capacity: int, count: int) -> jax.Array:
  """How far the place of a slot is beyond its high part where rows of `count` words are one set, i32[rows, capacity].

  A place is that of its row, and one for every slot before it there.
  """
  start = jnp.arange(rows, dtype=jnp.int32) * (count * bitset.BITS)
  return start[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
