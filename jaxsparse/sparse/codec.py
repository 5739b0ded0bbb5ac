"""Wire formats: rows of sparse entries as the arrays of a message, one format for values and one for indices.

Values are sent unchanged ("f32"), rounded to 8 significant bits ("bf16"), as one of 255
levels ("int8"), or as one of 15 ("int4"): see `values` and `tables`. Indices are sent
in one of three formats:

- as a set, in the quasi-succinct code of Elias and Fano: the low bits of each index,
  and the high parts, in ascending order, as a bitset; 8.6 bits an index at a density of
  1 %, where the entropy is 8.1;
- where slot j contains an entry of chunk j, as the position within the chunk;
- unchanged, 32 bits an index, beside unchanged values ("coo"): the least arithmetic.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import sparse
from jaxsparse.arrays import iota
from jaxsparse.sparse import bitset, fields
from jaxsparse.sparse.values import FORMATS, Values, Wire
from jaxsparse.types import Sparse

# The bits of a bitset, whose numbers are i32.
_MOST_BITS = 2**31 - bitset.GROUP * bitset.BITS


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["low", "high", "values", "beside"],
  meta_fields=["capacity"],
)
@dataclasses.dataclass(frozen=True)
class Message:
  """Encoded rows of entries.

  Attributes:
    low: u32[rows, words], the low bits of each index, or its position within its chunk,
      packed (`fields`).
    high: u32[rows, ⌈(capacity + (length >> low)) / 32⌉], the high parts as a bitset;
      None with one entry per chunk.
    values: f32, bf16 or i8[rows, capacity], or u32[rows, words] of packed numbers.
    beside: f32[rows, m] of a format with words beside the values, such as a scale; else
      None.
    capacity: slots of a row.

  Example:
    >>> entries = Sparse(jnp.array([[7, 300]]), jnp.array([[0.5, -1.0]]))
    >>> jax.jit(codec_of("bf16", 1000).encode)(entries)[0].values
    Array([[0.5, -1]], dtype=bfloat16)
  """

  low: jax.Array
  high: jax.Array | None
  values: jax.Array
  beside: jax.Array | None
  capacity: int


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
    # an index and a value
    return 2 * rows * capacity


@dataclasses.dataclass(frozen=True)
class _Formatted:
  """A codec whose values have a format; a subclass writes and reads indices."""

  format: Values
  length: int

  @property
  def rounds(self) -> bool:
    return self.format.rounds

  def encode(
    self, entries: Sparse, noise: jax.Array | None = None
  ) -> tuple[Message, jax.Array]:
    """The message, and the values that its receivers decode, f32[rows, c] (`codec_of`)."""
    # The sender decodes its own codes, so that the errors are those of its receivers.
    # `beside`: f32 words of each row, such as a scale, or None
    codes, beside = self.format.write(entries.values, noise)
    rounded = self.format.read(codes, beside)
    if self._is_packed:
      codes = fields.pack(codes, self.format.bits)
    capacity = entries.indices.shape[1]
    low, high = self._write_indices(entries.indices)
    return Message(low, high, codes, beside, capacity), rounded

  def decode(self, message: Message) -> Sparse:
    """The entries [rows, c] of a message; empty slots have index `length` and value 0."""
    codes = message.values
    if self._is_packed:
      codes = fields.unpack(codes, self.format.bits, message.capacity)
    values = self.format.read(codes, message.beside)
    indices = self._read_indices(message)
    # A row whose scale is NaN has NaN in its empty slots, too.
    return sparse.where(indices < self.length, Sparse(indices, values), self.length)

  def words(self, rows: int, capacity: int) -> int:
    """The 4-byte words of a message of `rows` rows of `capacity` slots."""
    # Values of 8 bits or more are arrays of whole bytes, where rows may share a word.
    # Values of fewer bits are packed row by row, into whole words for each row.
    values = (
      rows * fields.words(self.format.bits, capacity)
      if self._is_packed
      else math.ceil(rows * capacity * self.format.bits / fields.BITS)
    )
    beside = rows * self.format.row_words
    return rows * self._index_words(capacity) + values + beside

  @property
  def _is_packed(self) -> bool:
    return self.format.bits < 8

  def _write_indices(self, indices: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    raise NotImplementedError

  def _read_indices(self, message: Message) -> jax.Array:
    raise NotImplementedError

  def _index_words(self, capacity: int) -> int:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _IndexSet(_Formatted):
  """The code of Elias and Fano: bit `high + j` of the bitset of a row is set for the high part of slot j.

  The high part of an index, without its low bits, is the number of its bucket. Indices
  ascend, so the j-th set bit of a row belongs to slot j.
  """

  def _write_indices(self, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(low bits, bitset of the high parts) of i32[rows, capacity] ascending indices, as `Message` has them."""
    rows, capacity = indices.shape
    low = low_bits(capacity, self.length)
    indices = jnp.minimum(indices, self.length)
    # Empty slots, which are last, have index `length`, which is in the last bucket.
    # `count`: words of the bitset of a row.
    count = high_words(low, capacity, self.length)
    bits = bitset.BITS * rows * count
    if bits > _MOST_BITS:
      raise ValueError(
        f"messages of {rows} rows of {capacity} entries take {bits} indices of bits, "
        "which have 31 bits: choose wire='coo', a smaller density or k, or groups of "
        "leaves (js.bucketed_transform)"
      )
    # All rows at once, as one bitset: first bit of the row + high part + slot.
    bit = (indices >> low) + _offsets(rows, count * bitset.BITS, capacity)
    flags = jnp.zeros(bits, jnp.bool_)
    high = bitset.pack(sparse.put(flags, bit.reshape(-1), True))
    # `pack` fills its last group of 8 words with zeros, which are not sent.
    high = high[: rows * count].reshape(rows, count)
    return fields.pack(indices & ((1 << low) - 1), low), high

  def _read_indices(self, message: Message) -> jax.Array:
    """The indices of a message, i32[rows, capacity]; `length` in empty slots."""
    assert message.high is not None
    rows, count = message.high.shape
    capacity = message.capacity
    # A valid row has as many set bits as slots. `Comm.permute` returns zeros where no
    # message arrives, and a faulty peer may send anything. An invalid row is read as
    # empty: its bitset is replaced by one with `capacity` set bits, since `_buckets`
    # finds the slots of later rows by counting bits.
    is_valid = (bitset.count(message.high) == capacity)[:, None]
    first_bits = bitset.of_indices(np.arange(capacity), count)
    high = jnp.where(is_valid, message.high, first_bits[None])
    # As many rows at a time as have bits that i32 can number.
    at_once = max(1, _MOST_BITS // (bitset.BITS * count))
    pieces = [high[first : first + at_once] for first in range(0, rows, at_once)]
    bucket = jnp.concatenate([_buckets(piece, capacity) for piece in pieces])
    low = low_bits(capacity, self.length)
    # A faulty row may have buckets beyond the last one, whose shift would overflow.
    bucket = jnp.minimum(bucket, self.length >> low)
    lows = fields.unpack(message.low, low, capacity).astype(jnp.int32)
    indices = jnp.minimum(bucket << low | lows, self.length)
    return jnp.where(is_valid, indices, self.length)

  def _index_words(self, capacity: int) -> int:
    return _set_words(low_bits(capacity, self.length), capacity, self.length)


@dataclasses.dataclass(frozen=True)
class _ByChunk(_Formatted):
  """The slot of an entry is its chunk, and its position within the chunk is sent. Entries keep their slots."""

  def _write_indices(self, indices: jax.Array) -> tuple[jax.Array, None]:
    """The packed positions of i32[rows, chunks] indices in their chunks, and no bitset."""
    chunks = indices.shape[1]
    # Chunk j has the entries j, j + c, j + 2c, …, so the quotient by c is the position.
    positions = jnp.where(
      indices < self.length, indices // chunks, self._no_position(chunks)
    )
    return fields.pack(positions, self._bits(chunks)), None

  def _read_indices(self, message: Message) -> jax.Array:
    """The indices of a message, i32[rows, chunks]; `length` or more in empty slots."""
    chunks = message.capacity
    positions = fields.unpack(message.low, self._bits(chunks), chunks)
    # A faulty peer may send larger numbers, which are empty slots, too.
    positions = jnp.minimum(positions.astype(jnp.int32), self._no_position(chunks))
    return positions * chunks + iota(chunks)[None]

  def _index_words(self, capacity: int) -> int:
    return fields.words(self._bits(capacity), capacity)

  def _no_position(self, chunks: int) -> int:
    """The number beyond the last position in a chunk, which an empty slot has."""
    return -(-self.length // chunks)

  def _bits(self, chunks: int) -> int:
    return self._no_position(chunks).bit_length()


Codec = _Coordinates | _IndexSet | _ByChunk


def codec_of(
  wire: Wire | Literal["2bit"], length: int, *, by_chunk: bool = False
) -> Codec:
  """The codec for blocks of `length`.

  Args:
    wire: the format of values: "f32" sends them unchanged, "bf16" rounds to the nearest
      (`BFloat16`), "int8" draws one of 255 levels (`Int8`), "int4" and "2bit" send the
      number of a bin (`tables`). "coo" sends indices and values unchanged, and is "f32"
      with one entry per chunk.
    length: number of entries of a block.
    by_chunk: whether slot j of a row of c slots is empty or one of the entries j, j +
      c, j + 2c, … of the block.

  Returns:
    A codec, with these attributes and methods; the shapes of a message do not depend on
    the entries.

    - `length` and `rounds`, whether values are rounded.
    - `encode(entries, noise)` returns the message, a pytree, and the values that its
      receivers decode, f32[rows, c] in the slots of `entries` [rows, c]. Indices ascend
      within a row, unless `by_chunk`. An empty slot has an index of at least `length`
      and value 0. The noise is f32[rows, c] in [0, 1), for formats that draw
      (`Values.draws`).
    - `decode(message)` returns the same entries with rounded values, the same bits on
      every worker; empty slots have index `length`.
    - `words(rows, capacity)` are the 4-byte words of a message.

  Example:
    >>> entries = Sparse(jnp.array([[9, 30, 700]]), jnp.array([[0.0, 0.5, 1.27]]))
    >>> codec = codec_of("int8", length=1000)
    >>> message, rounded = jax.jit(codec.encode)(entries, noise=jnp.full((1, 3), 0.5))
    >>> message.values, jax.jit(codec.decode)(message).indices
    (Array([[  0,  50, 127]], dtype=int8), Array([[  9,  30, 700]], dtype=int32))
    >>> [codec_of(wire, 1_000_000).words(1, 10_000) for wire in ("coo", "f32", "bf16", "int8", "int4")]
    [20000, 12676, 7676, 5177, 3933]
    >>> [codec_of(wire, 1_000_000, by_chunk=True).words(1, 10_000) for wire in ("f32", "int4")]
    [12188, 3445]
  """
  if wire == "coo" and not by_chunk:
    return _Coordinates(length)
  codec = _ByChunk if by_chunk else _IndexSet
  return codec(FORMATS[wire], length)


def low_bits(capacity: int, length: int) -> int:
  """The number of low bits of an index that minimizes the size of a row.

  Example:
    >>> low_bits(500, 1000), low_bits(10, 1000), low_bits(10_000, 1_000_000)
    (0, 6, 6)
  """
  # Each low bit more takes a bit an entry, and halves the buckets.
  sizes = [_set_words(low, capacity, length) for low in range(length.bit_length() + 1)]
  return sizes.index(min(sizes))


def _set_words(low: int, capacity: int, length: int) -> int:
  return fields.words(low, capacity) + high_words(low, capacity, length)


def high_words(low: int, capacity: int, length: int) -> int:
  """The words of the high parts of a row, without `low` bits of each index, as a bitset."""
  return math.ceil((capacity + (length >> low)) / bitset.BITS)


def _buckets(high: jax.Array, capacity: int) -> jax.Array:
  """The high part of each slot, i32[rows, capacity], of rows with `capacity` set bits."""
  rows, count = high.shape
  # `nonzero` reads whole groups of words.
  missing = -high.size % bitset.GROUP
  padded = jnp.pad(high.reshape(-1), (0, missing))
  bit = bitset.nonzero(padded, rows * capacity).reshape(rows, capacity)
  return bit - _offsets(rows, count * bitset.BITS, capacity)


def _offsets(rows: int, row_bits: int, capacity: int) -> jax.Array:
  """The first bit of each row of a bitset of all rows, plus the number of the slot, i32[rows, capacity]."""
  # Plus the slot, so that slots that share a high part have different bits.
  starts = row_bits * iota(rows)
  return starts[:, None] + iota(capacity)[None]
