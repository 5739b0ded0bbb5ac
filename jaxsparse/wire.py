"""The wire: how the entries of a sparse message are written in fewer bytes than two words each.

In coordinate form an entry is an i32 index and an f32 value. Values have less to say than 32 bits, and so have indices
that are all different: c of the numbers below n are one of `(n choose c)` sets, `log₂(n/c) + 1.44` bits an index. The
quasi-succinct code of Elias and Fano comes close to it with plain arrays of a size that does not depend on the data.
It takes indices in the order of their high parts, `h = index >> low`, and writes

    low parts     `low` bits of each index, as they are
    high parts    in unary: bit `h_i + i` of a set of `c + (n >> low)` bits, for the i-th index

The places of the set ascend strictly, so that none is lost, and `place_i − i` is `h_i` again. `low + 1 + (n >> low)/c`
bits an index; 9.4 bits at a density of 1 %.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import packed
from jaxsparse.sums import rounded_up
from jaxsparse.types import Sparse

Wire = Literal["f32", "bf16", "int8"]

_LOWS = (4, 8, 16)  # bits of a low part that machines read with ease
_LEVELS = 127
_KEY_BITS = 31  # of an i32 that is not negative
_WORD = 4  # bytes
_VALUE_BYTES = {"bf16": 2, "int8": 1}


class Message(NamedTuple):
  """Rows of entries as they travel, in the order of the high parts of their indices, empty slots last.

  Attributes:
    low: u8 or u16[rows, capacity], the last bits of the indices; of 4 bits there are two in a byte, the first one low.
    high: u32[rows, ⌈(capacity + (length >> low)) / 32⌉], a packed set of bits.
    values: bf16 or i8[rows, capacity].
    size: f32[rows], what a level of i8 is worth; None for bf16.

  Example:
    >>> entries = Sparse(jnp.array([[7, 300]]), jnp.array([[0.5, -1.0]]))
    >>> encode(entries, 1000, "bf16", jnp.zeros((1, 2))).low
    Array([[ 7, 44]], dtype=uint8)
  """

  low: jax.Array
  high: jax.Array
  values: jax.Array
  size: jax.Array | None


def encode(entries: Sparse, length: int, wire: Wire, noise: jax.Array) -> Any:
  """Rows of entries as the pytree of arrays that is sent: of static shapes, whatever the entries are.

  "int8" sends levels `⌊v/s + noise⌋` of size `s = max |v| / 127`, made larger by a factor of `1 + 2⁻¹⁶` at most. Their
  mean is v/s where noise is uniform in [0, 1), and the error is less than s. Of a row with a value that is not finite,
  no decoded value is. "bf16" rounds to the nearest, ties to even; finite values stay finite, and others stay as they
  are.

  Args:
    entries: i32 and f32[rows, c]. An index in 0 … length − 1 occurs once in its row; any other is at least `length`,
      and its slot is empty: value 0. The order does not matter.
    length: of the block the entries are of.
    wire: "f32" sends `entries` as they are.
    noise: f32[rows, c] in [0, 1), of the slots of `entries`; read for "int8" only.

  Returns:
    `entries` for "f32", else a `Message`.

  Example:
    >>> entries = Sparse(jnp.array([[700, 9, 30]]), jnp.array([[1.27, 0.0, 0.5]]))
    >>> message = encode(entries, 1000, "int8", jnp.full((1, 3), 0.5))
    >>> message.values, message.high
    (Array([[  0,  50, 127]], dtype=int8), Array([[19]], dtype=uint32))
  """
  if wire == "f32":
    return entries
  low = low_bits(entries.indices.shape[1], length)
  last = length >> low
  indices = jnp.minimum(entries.indices, length)
  # `length` may share its high part with entries: empty slots have a bucket of their own, so that they come last.
  buckets = jnp.where(indices < length, indices >> low, last + 1)
  order = jax.vmap(lambda row: order_of(row, last + 1))(buckets)
  in_order = lambda x: jnp.take_along_axis(x, order, axis=1, mode="clip")
  values, size = _to_bf16(entries.values) if wire == "bf16" else _to_int8(entries.values, noise)
  indices = in_order(indices)
  return Message(_write_low(indices, low), _write_high(indices >> low, last), in_order(values), size)


def decode(message: Any, capacity: int, length: int, wire: Wire) -> Sparse:
  """Undoes `encode`: the same entries with rounded values, the same bits wherever they are decoded.

  Args:
    message: what `encode` made of [rows, capacity] entries.
    capacity: slots of a row.
    length: of the block.
    wire: that of `encode`.

  Returns:
    [rows, capacity] entries: those that were sent for "f32"; else in the order of the high parts of their indices and,
    where those agree, of their slots. Empty slots are last, their index is `length`.

  Example:
    >>> entries = Sparse(jnp.array([[700, 9, 30]]), jnp.array([[1.25, 0.0, 0.5]]))
    >>> decode(encode(entries, 1000, "bf16", jnp.zeros((1, 3))), 3, 1000, "bf16").indices
    Array([[  9,  30, 700]], dtype=int32)
  """
  if wire == "f32":
    return message
  low = low_bits(capacity, length)
  # Of a message of zeros, which stands for none in `Comm.permute`, all slots are empty: there are no high parts in it.
  highs = jnp.minimum(_read_high(message.high, capacity), (length >> low) + 1)
  indices = (highs << low) | _read_low(message.low, low, capacity)
  values = message.values.astype(jnp.float32)
  if message.size is not None:
    values = values * message.size[:, None]
  return sparse.where(indices < length, Sparse(indices, values), length)  # a size of NaN stays with what was sent


def words(rows: int, capacity: int, length: int, wire: Wire) -> int:
  """How many 4-byte words a message of [rows, capacity] entries of a block of `length` takes.

  Example:
    >>> [words(1, 10_000, 1_000_000, wire) for wire in ("f32", "bf16", "int8")]
    [20000, 7935, 5436]
  """
  if wire == "f32":
    return 2 * rows * capacity
  low = low_bits(capacity, length)
  padded = lambda count: math.ceil(count / _WORD)
  lows, values = padded(rows * math.ceil(capacity * low / 8)), padded(rows * capacity * _VALUE_BYTES[wire])
  return lows + rows * _high_words(capacity, length >> low) + values + (rows if wire == "int8" else 0)


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


def _to_bf16(values: jax.Array) -> tuple[jax.Array, None]:
  """Rounded to bf16, which is all that there is to it."""
  # Compilers may leave out a conversion there and back: a worker that decodes its own message would have values that
  # nobody else has. This they may not leave out.
  return jax.lax.reduce_precision(_clamped(values), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16), None


def _to_int8(values: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Levels i8[rows, c] and what one is worth, f32[rows].

  The size has so few bits that its product with a level is exact: adding it up gives the same bits with fused
  multiply-add and without it.
  """
  largest = _clamped(jnp.max(jnp.abs(values), axis=1))  # NaN where there is one
  size = rounded_up(largest * (1 / _LEVELS), bits=_LEVELS.bit_length())
  level = jnp.floor(values / jnp.where(size == 0, 1.0, size)[:, None] + noise)
  return jnp.clip(level, -_LEVELS, _LEVELS).astype(jnp.int8), size


def _clamped(x: jax.Array) -> jax.Array:
  """x, where it is finite within what rounds to a finite number."""
  bound = float(jnp.finfo(jnp.bfloat16).max)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -bound, bound), x)


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
  return math.ceil((capacity + last) / packed.BITS)


def _write_high(highs: jax.Array, last: int) -> jax.Array:
  """The sets of rows of high parts, u32[rows, words]; all rows are one long set while they are written."""
  rows, capacity = highs.shape
  count = _high_words(capacity, last)
  flags = jnp.zeros(rows * count * packed.BITS, jnp.bool_)
  words = packed.pack(sparse.put(flags, (highs + _in_rows(rows, capacity, count)).reshape(-1), True))
  return words[: rows * count].reshape(rows, count)


def _read_high(words: jax.Array, capacity: int) -> jax.Array:
  """Undoes `_write_high`. Every row has as many places as slots: those of all rows are found at once, and are in order.

  Where there are none, as in a message of zeros, it is more than any high part.
  """
  rows, count = words.shape
  whole = jnp.pad(words.reshape(-1), (0, -words.size % packed.GROUP))
  return packed.places(whole, rows * capacity).reshape(rows, capacity) - _in_rows(rows, capacity, count)


def _in_rows(rows: int, capacity: int, count: int) -> jax.Array:
  """How far the place of a slot is beyond its high part where rows of `count` words are one set, i32[rows, capacity].

  A place is that of its row, and one for every slot before it there.
  """
  start = jnp.arange(rows, dtype=jnp.int32) * (count * packed.BITS)
  return start[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
