"""The blocks of a vector that is sent in a few bits an entry: codes, sums of a region, the pass that writes results."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.arrays.sums import fold_rows
from jaxsparse.low_bit import scales as scaling
from jaxsparse.low_bit.chunked import CHUNK, Arrays, Pass

ROWS = 32  # rows of a block, one for each bit of a word
_COLUMNS = 128  # at most, the lanes of a TPU
_LONG = 1 << 16  # entries of a vector whose blocks are folded row by row
_UNROLLED = 8  # messages that are added without a loop

cut = jax.lax.dynamic_slice_in_dim  # (array, start, count) -> its rows from start on


@dataclasses.dataclass(frozen=True)
class BitBlocks:
  """The blocks of a vector: 32 rows of up to 128 consecutive entries each; the last ones are padded.

  The code of an entry has its sign as the highest of b bits, and as the others the
  number of its magnitude, as `scales.levels` returns it. A column has b words, a block
  `width` = b · columns: the first word has the codes of the first 32/b rows, and so on.
  So neighbours have neighbouring words, and all operations are on whole rows, which
  suits the vector units of CPUs and the lanes of TPUs.

  A region is the part of the vector that one of P workers owns. A block has a scale:
  u32 words for sending, from which f32 steps are decoded. With 1 bit a block has one
  step, the magnitude of its entries; with more bits each column has a step, and
  magnitudes are multiples of it.

  Attributes:
    n: entries of the vector.
    bits: b, of a code.
    columns: columns of a block, entries of a row.
    region: blocks of a worker's region.
    count: blocks of all regions.
    block: entries of a block, 32 · columns.
  """

  n: int
  bits: int
  columns: int
  region: int
  count: int

  @classmethod
  def of(cls, n: int, size: int, bits: int = 1) -> Self:
    """The layout of n entries that `size` workers share evenly."""
    needed = -(-n // (size * ROWS))  # columns of 32 entries that a region needs
    region = -(-needed // _COLUMNS)
    # Columns that are shared evenly by the blocks of a region need less padding. Blocks
    # of signs have 128 columns where the vector is long enough, as in earlier versions,
    # so that totals keep their bits.
    columns = -(-needed // region) if bits > 1 else min(_COLUMNS, needed)
    return cls(n, bits, columns, region, size * region)

  @property
  def block(self) -> int:
    """Entries of a block."""
    return ROWS * self.columns

  @property
  def margin(self) -> int:
    """Entries before and behind the sums of a region, in the result of `sum_region`: CHUNK blocks."""
    return CHUNK * self.block

  @property
  def width(self) -> int:
    """Words of the codes of a block."""
    return self.bits * self.columns

  @property
  def words(self) -> int:
    """Words of a message: those of the blocks of a region, and their scales."""
    return self.region * (self.width + scaling.words_of_block(self.bits, self.columns))

  def pack(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The messages of regions, u32[regions, words], of codes and scales as `encode` returns them."""
    regions = len(codes) // self.region
    return jnp.concatenate(
      [codes.reshape(regions, -1), scales.reshape(regions, -1)], axis=1
    )

  def unpack(self, messages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The codes u32[blocks, width] and the steps of the blocks in messages of regions, u32[regions, words].

    Steps are f32[blocks, columns], of signs f32[blocks, 1].
    """
    codes, scales = jnp.split(messages, [self.region * self.width], axis=1)
    codes = codes.reshape(-1, self.width)
    scales = scales.reshape(len(codes), -1)
    return codes, scaling.steps(scales, self.bits, self.columns)

  def encode(
    self,
    addends: Sequence[jax.Array],
    first: jax.Array,
    count: int,
    skip: int = 0,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Encodes `count` blocks of the sum of `addends`.

    Args:
      addends: f32[m] arrays whose sum is encoded, added where it is read.
      first: i32[], number of the first of these blocks in the vector, from which the
        padding is known.
      count: number of blocks.
      skip: blocks of `addends` before the first encoded one. CHUNK for a result of
        `sum_region`, which has this margin before and behind its blocks; else 0.

    Returns:
      (codes, scales, steps): u32[count, width]; u32[count, words], packed for sending;
      and the steps that receivers decode from the scales, f32[count, columns], or
      f32[count, 1] of signs.
    """
    # Blocks that reach beyond the end of `addends` are read with padding. With margins
    # none does: `addends` have count + 2 · skip blocks.
    unpadded = min(count, addends[0].size // self.block)
    entries = self._entries(first + iota(count))
    encode = self._encode_signs if self.bits == 1 else self._encode_levels
    return encode(addends, skip, unpadded, entries)

  def _encode_signs(
    self, addends: Sequence[jax.Array], skip: int, unpadded: int, entries: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `encode` returns of signs, in one pass, since they need no scale.

    Args:
      addends: as in `encode`.
      skip: as in `encode`.
      unpadded: number of leading blocks that lie whole in `addends`.
      entries: i32[count], entries of each block that are no padding.
    """
    # Long vectors are folded row by row, which XLA on CPU vectorizes; in short ones
    # halves of all rows, fewer operations to compile. The bits are the same.
    is_long = self.n >= _LONG

    def columns_of(start: jax.Array | int, count: int, _: Arrays) -> Arrays:
      # The signs of `count` blocks and the root of the mean square of each column. `_`:
      # the results so far, which are not needed.
      x = self._read(addends, skip + start, count)
      # Squares in three units, of which one neither over- nor underflows. Truncated
      # numbers have exact squares, so that sums have the same bits in every program.
      square = lambda unit: lambda x, _: scaling.truncate(x * unit) ** 2
      squares = [
        fold_rows(x, range(ROWS), square(unit), jnp.add, is_long)
        for unit in scaling.UNITS
      ]
      return self._codes(x), scaling.root_mean(squares, jnp.float32(1 / ROWS))

    passed = self._pass(columns_of, unpadded, len(entries), jnp.uint32, jnp.float32)
    # The barrier ends the pass, which is one kernel of a GPU.
    signs, roots = jax.lax.optimization_barrier(passed)
    # The weight of a column's mean square in the mean square of its block's entries: a
    # column has 32 entries, of which those of padding are 0.
    share = ROWS / jnp.maximum(entries, 1).astype(jnp.float32)
    scales = scaling.of_signs(roots, share)
    # 1 bit, and 1 step for all columns of a block
    return signs, scales, scaling.steps(scales, 1, 1)

  def _encode_levels(
    self, addends: Sequence[jax.Array], skip: int, unpadded: int, entries: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `encode` returns with more bits, in two passes: the largest magnitudes of columns, then the codes.

    The arguments are those of `_encode_signs`.
    """

    def maxima_of(start: jax.Array | int, count: int, _: Arrays) -> Arrays:
      x = self._read(addends, skip + start, count)
      # row by row in long vectors
      magnitude = lambda x, _: jnp.abs(x)
      return (fold_rows(x, range(ROWS), magnitude, jnp.maximum, self.n >= _LONG),)

    def codes_of(start: jax.Array | int, count: int, _: Arrays) -> Arrays:
      x = self._read(again, skip + start, count)
      return (self._codes(x, cut(inverses, start, count)),)

    count = len(entries)
    maxima = jax.lax.optimization_barrier(
      self._pass(maxima_of, unpadded, count, jnp.float32)
    )[0]
    # The columns that are not empty: a block's first entries are its first row, so
    # fewer entries than columns leave columns empty.
    used = jnp.minimum(entries, self.columns)
    scales, steps = scaling.of_columns(maxima, used, self.bits)
    # Read again behind a barrier: XLA for GPUs would store the sum for both passes.
    *again, scales, steps = jax.lax.optimization_barrier((*addends, scales, steps))
    # factors, since quotients by the steps would take longer
    inverses = scaling.inverses(steps, self.bits)
    return *self._pass(codes_of, unpadded, count, jnp.uint32), scales, steps

  def _pass(
    self, compute: Callable[..., Arrays], unpadded: int, count: int, *kinds: Any
  ) -> list[jax.Array]:
    """Computes one array of `count` blocks for each dtype of `kinds`, in passes over the vector.

    Args:
      compute: computes the arrays of some blocks, as in `Pass`.
      unpadded: the number of leading blocks without padding.
      count: the number of blocks.
      *kinds: uint32 for the words of codes [count, width], else a dtype for one number a
        column [count, columns].
    """
    sizes = tuple(self.width if kind == jnp.uint32 else self.columns for kind in kinds)
    encoding = Pass(compute, unpadded, count, sizes, padded_apart=True)
    empty = (
      jnp.zeros(count * size, kind) for size, kind in zip(sizes, kinds, strict=True)
    )
    return [x.reshape(count, -1) for x in encoding.run(*empty)]

  def _codes(
    self,
    x: jax.Array,
    inverses: jax.Array | None = None,
  ) -> jax.Array:
    """The words of the codes of f32[blocks, 32, columns], u32[blocks, width].

    `inverses` are the factors f32[blocks, columns] of `scaling.levels`; None for signs.
    """
    # A word of a column has the codes of `rows` rows, the first row in the lowest bits.
    rows = ROWS // self.bits

    def code(x: jax.Array, row: np.ndarray) -> jax.Array:
      # The code of each entry of a row, or of all rows, shifted to its bits of a word.
      bit = (self.bits * (row % rows)).astype(np.uint32)
      minus = np.uint32(1 << self.bits - 1) << bit
      sign = jnp.where(x < 0, minus, np.uint32(0))
      if inverses is None:
        return sign
      of_row = inverses if x.ndim == 2 else inverses[:, None]
      return sign | scaling.levels(x, of_row, self.bits) << bit

    # Rows whose codes share a word. In long vectors each row is an operation.
    each = [range(first, first + rows) for first in range(0, ROWS, rows)]
    words = [
      fold_rows(x, of_word, code, jnp.bitwise_or, self.n >= _LONG) for of_word in each
    ]
    return words[0] if self.bits == 1 else jnp.concatenate(words, axis=1)

  def sum_region(
    self, addends: Sequence[jax.Array], rank: jax.Array, received: jax.Array
  ) -> jax.Array:
    """The sums of the own region, of own entries and of messages; 0 where padded.

    Args:
      addends: f32[n] arrays whose sum is the own entries.
      rank: i32[], of this worker.
      received: u32[P, words], the message of each worker for this region; the own one
        is not read.

    Returns:
      f32[margin + region · block + margin], with zeros in the margins.
    """
    size = len(received)
    codes, steps = self.unpack(received)

    def add(start: jax.Array | int, count: int, _: Arrays) -> Arrays:
      # the first block as counted in the vector; `start` is counted in the region
      block = rank * self.region + start

      def add_message(by: jax.Array, x: jax.Array) -> jax.Array:
        # Adds the message of rank − by. The order need not be that of ranks: only the
        # owner adds, and all workers get its sums. `codes` has the blocks of rank 0's
        # message first, then those of rank 1, ….
        first = (rank - by) % size * self.region + start
        return x + self.decode(cut(codes, first, count), cut(steps, first, count))

      x = self._read_padded(addends, block, count)
      # A loop beyond 8 workers: XLA would compile 63 messages for half a minute.
      if size <= _UNROLLED:
        for by in range(1, size):
          x = add_message(jnp.int32(by), x)
      else:
        x = varying.fori_loop(1, size, add_message, x, unroll=_UNROLLED)
      entries = self._entries(block + iota(count))
      # Padding of messages may decode to numbers other than 0, which `encode` would
      # count in the scales of the sums: it becomes 0.
      position = iota(self.block).reshape(1, ROWS, self.columns)
      return (jnp.where(position < entries[:, None, None], x, 0.0),)

    empty = jnp.zeros(self.region * self.block + 2 * self.margin, jnp.float32)
    # Margins of one chunk, so that a chunk that overlaps the region's end can be read
    # whole.
    sums = Pass(add, self.region, self.region, (self.block,), skip=CHUNK)
    return sums.run(empty)[0]

  def decode(self, codes: jax.Array, steps: jax.Array) -> jax.Array:
    """Q: ± the magnitude of each code, a multiple of the step of its column, f32[blocks, 32, columns].

    Of signs the magnitude is the step.

    Args:
      codes: u32[blocks, width].
      steps: f32[blocks, columns], or f32[blocks, 1] of signs.

    Example:
      >>> BitBlocks.of(64, 1).decode(jnp.array([[1, 0]], jnp.uint32), jnp.array([[5.0]]))[0, :2]
      Array([[-5.,  5.],
             [ 5.,  5.]], dtype=float32)
    """
    rows = ROWS // self.bits
    row = jnp.arange(rows, dtype=jnp.uint32).reshape(1, 1, rows, 1)
    # [blocks, words of a column, codes of a word, columns]
    shifted = codes.reshape(-1, self.bits, 1, self.columns) >> self.bits * row
    code = shifted.reshape(-1, ROWS, self.columns)
    magnitudes = steps[:, None]
    # The highest of b bits is the sign, the others are the number of the magnitude.
    if self.bits > 1:
      levels = code & (1 << self.bits - 1) - 1
      magnitudes = scaling.magnitudes(levels, magnitudes, self.bits)
    # Flips the sign bit of the float where the code has a sign, which is cheaper than a
    # product or a choice. Steps of rounding errors (`Codes.finish`) may be negative.
    words = jax.lax.bitcast_convert_type(magnitudes, jnp.uint32)
    sign = code >> self.bits - 1 << 31
    return jax.lax.bitcast_convert_type(words ^ sign, jnp.float32)

  def round(
    self,
    x: jax.Array,
    steps: jax.Array,
    inverses: jax.Array,
  ) -> jax.Array:
    """Q(x), f32 like x: the same bits as `decode` returns for the codes of x, without reading codes.

    Args:
      x: f32 of any shape.
      steps: f32 like x, the step of each entry.
      inverses: f32 like x, `scaling.inverses` of the steps; not read for signs.
    """
    magnitudes = steps
    if self.bits > 1:
      levels = scaling.levels(x, inverses, self.bits)
      magnitudes = scaling.magnitudes(levels, steps, self.bits)
    return jnp.where(x < 0, -magnitudes, magnitudes)

  def trim(self, x: jax.Array, start: jax.Array | int) -> jax.Array:
    """Entries of blocks from `start` on, f32[blocks, 32, columns]; flat and without padding if `start` is an int.

    As in `Pass`, `start` is an int where the last of the blocks may be padded.
    """
    if isinstance(start, int):
      return x.reshape(-1)[: self.n - start * self.block]
    return x

  def _entries(self, block: jax.Array) -> jax.Array:
    """The number of entries of a block that are no padding, i32 like `block`, the number of a block in the vector."""
    unpadded, rest = divmod(self.n, self.block)
    # the first block with padding has `rest` entries, later blocks none
    of_later = jnp.where(block == unpadded, rest, 0)
    return jnp.where(block < unpadded, self.block, of_later)

  def _read(
    self, addends: Sequence[jax.Array], start: jax.Array | int, count: int
  ) -> jax.Array:
    """The sum of `addends` in `count` blocks from `start` on, f32[count, 32, columns].

    As in `Pass`, `start` is an int where blocks may reach beyond the end, and read 0.
    """
    length = count * self.block
    first = start * self.block
    if isinstance(start, int):
      cuts = [addend[first:][:length] for addend in addends]
    else:
      cuts = [cut(addend, first, length) for addend in addends]
    x = functools.reduce(jnp.add, cuts)
    if x.size < length:
      x = jnp.pad(x, (0, length - x.size))
    return x.reshape(count, ROWS, self.columns)

  def _read_padded(
    self, addends: Sequence[jax.Array], start: jax.Array, count: int
  ) -> jax.Array:
    """The sum of `addends` in blocks from `start`, i32[], on, f32[count, 32, columns]; zeros beyond their end."""
    length = count * self.block
    start = start * self.block
    missing = max(0, length - addends[0].size)
    size = addends[0].size + missing
    # `dynamic_slice` would move a slice that reaches beyond the end. This one starts
    # earlier, and a second one, of its entries and zeros, drops what comes before.
    inside = jnp.minimum(start, size - length)
    padded = [jnp.pad(addend, (0, missing)) for addend in addends]
    x = functools.reduce(jnp.add, [cut(addend, inside, length) for addend in padded])
    shifted = cut(jnp.pad(x, (0, length)), start - inside, length)
    return shifted.reshape(count, ROWS, self.columns)
