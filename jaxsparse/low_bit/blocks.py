"""The blocks of a vector that is sent in a few bits an entry: codes, sums of a region, the pass that writes results."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.arrays.sums import fold_rows
from jaxsparse.comm import ordering
from jaxsparse.low_bit import scales as scaling

_ROWS = 32  # of a block, the bits of a word
_COLUMNS = 128  # at most, the lanes of a TPU
_LONG = 1 << 16  # entries of a vector whose blocks are folded row by row
_UNROLLED = 8  # messages that are added without a loop
CHUNK = 8  # blocks at a time, few enough for the cache of a CPU

_cut = jax.lax.dynamic_slice_in_dim  # of an array, from a start on, so many rows


class Exchanged(NamedTuple):
  """What a worker has after the messages of a step.

  Attributes:
    rank: of the worker.
    sums: of its region, as `Blocks.sum_region` returns them.
    kept: the steps of all blocks, like those of `Blocks.encode`: as sent; in the own
      region, of the sums.
    codes: of the total, u32[blocks, width].
  """

  rank: jax.Array
  sums: jax.Array
  kept: jax.Array
  codes: jax.Array


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The blocks of a vector: 32 rows of up to 128 consecutive entries each; the last ones are padded.

  The code of an entry has its sign as the highest of b bits, and as the others the
  number of its magnitude, as `scales.levels` returns it. A column has b words: the
  first has the codes of the first 32/b rows, and so on. So the entries of a word are
  far apart, and neighbours have neighbouring words: all is done to whole rows, which
  suits the vector units of CPUs and the lanes of TPUs.

  Attributes:
    n: entries of the vector.
    bits: b, of a code.
    columns: of a block.
    region: blocks of a worker's region.
    count: blocks of all regions.
  """

  n: int
  bits: int
  columns: int
  region: int
  count: int

  @classmethod
  def of(cls, n: int, size: int, bits: int = 1) -> Self:
    """The layout of n entries that `size` workers share evenly."""
    needed = -(-n // (size * _ROWS))  # columns of a region
    region = -(-needed // _COLUMNS)
    # Even blocks need less padding. Those of signs are as they always were, for the
    # same bits.
    columns = -(-needed // region) if bits > 1 else min(_COLUMNS, needed)
    return cls(n, bits, columns, region, size * region)

  @property
  def block(self) -> int:
    """Entries of a block."""
    return _ROWS * self.columns

  @property
  def margin(self) -> int:
    """Entries before and after the sums of a region."""
    return CHUNK * self.block

  @property
  def width(self) -> int:
    """Words of a block."""
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
    """The codes u32[blocks, width] and the steps of blocks that are in messages of regions."""
    codes, scales = jnp.split(messages, [self.region * self.width], axis=1)
    codes = codes.reshape(-1, self.width)
    return codes, scaling.steps(scales.reshape(len(codes), -1), self.bits, self.columns)

  def encode(
    self, parts: Sequence[jax.Array], first: jax.Array, count: int, skip: int = 0
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes u32[count, width], scales u32[count, words], steps f32[count, columns] of the sum of `parts`.

    Their blocks are those after `skip` blocks of it, and blocks `first` and following
    of the vector. Signs have one step for a block, f32[count, 1].
    """

    def columns_of(start: jax.Array | int, count: int, _: Any) -> tuple[jax.Array, ...]:
      x = self._read(parts, skip + start, count)
      fold = lambda term, combine: fold_rows(
        x, range(_ROWS), lambda x, _: term(x), combine, self.n >= _LONG
      )
      if self.bits > 1:
        return (fold(jnp.abs, jnp.maximum),)
      squares = lambda unit: fold(lambda x: scaling.truncate(x * unit) ** 2, jnp.add)
      # signs need no scale: one pass
      return self._codes(x), scaling.root_mean(squares, jnp.float32(1 / _ROWS))

    def codes_of(start: jax.Array | int, count: int, _: Any) -> tuple[jax.Array]:
      return (
        self._codes(
          self._read(again, skip + start, count), _cut(inverses, start, count)
        ),
      )

    whole = min(count, parts[0].size // self.block)
    kinds = (jnp.uint32, jnp.float32)[self.bits > 1 :]
    empty = tuple(jnp.zeros(count * self.columns, kind) for kind in kinds)
    found = _by_chunks(
      columns_of, whole, count, empty, (self.columns,) * len(kinds), padded_apart=True
    )
    # by one kernel of a GPU
    *signs, sizes = jax.lax.optimization_barrier([x.reshape(count, -1) for x in found])
    entries = self._entries(first + jnp.arange(count, dtype=jnp.int32))
    if self.bits == 1:
      scales = scaling.of_signs(
        sizes, _ROWS / jnp.maximum(entries, 1).astype(jnp.float32)
      )
      return signs[0], scales, scaling.steps(scales, 1, 1)
    scales, steps = scaling.of_columns(
      sizes, jnp.minimum(entries, self.columns), self.bits
    )
    # Read again behind a barrier: XLA for GPUs would store the sum for both passes.
    *again, scales, steps = jax.lax.optimization_barrier((*parts, scales, steps))
    inverses = scaling.inverses(steps, self.bits)
    empty = (jnp.zeros(count * self.width, jnp.uint32),)
    (codes,) = _by_chunks(
      codes_of, whole, count, empty, (self.width,), padded_apart=True
    )
    return codes.reshape(count, -1), scales, steps

  def _codes(self, x: jax.Array, inverses: jax.Array | None = None) -> jax.Array:
    """The words of the codes of f32[blocks, 32, columns], u32[blocks, width]; `inverses` of the steps if bits > 1."""
    rows = _ROWS // self.bits

    def code(x: jax.Array, row: np.ndarray) -> jax.Array:
      bit = (self.bits * (row % rows)).astype(np.uint32)
      sign = jnp.where(x < 0, np.uint32(1 << self.bits - 1) << bit, np.uint32(0))
      if inverses is None:
        return sign
      of_row = inverses if x.ndim == 2 else inverses[:, None]
      return sign | scaling.levels(x, of_row, self.bits) << bit

    each = [range(first, first + rows) for first in range(0, _ROWS, rows)]
    words = [
      fold_rows(x, of_word, code, jnp.bitwise_or, self.n >= _LONG) for of_word in each
    ]
    return words[0] if self.bits == 1 else jnp.concatenate(words, axis=1)

  def sum_region(
    self, parts: Sequence[jax.Array], rank: jax.Array, received: jax.Array
  ) -> jax.Array:
    """The sums of a region, f32[margin + region + margin], of own entries and messages [P, words]; 0 where padded."""
    size = len(received)
    codes, steps = self.unpack(received)

    def add(start: jax.Array | int, count: int, _: Any) -> tuple[jax.Array]:
      block = rank * self.region + start

      def add_message(by: jax.Array, x: jax.Array) -> jax.Array:
        first = (rank - by) % size * self.region + start
        return x + self.decode(_cut(codes, first, count), _cut(steps, first, count))

      # the loop: XLA would compile 63 messages for half a minute
      x = self._read_padded(parts, block, count)
      if size <= _UNROLLED:
        for by in range(1, size):
          x = add_message(jnp.int32(by), x)
      else:
        x = varying.fori_loop(1, size, add_message, x, unroll=_UNROLLED)
      entries = self._entries(block + jnp.arange(count, dtype=jnp.int32))
      position = jnp.arange(self.block, dtype=jnp.int32).reshape(1, _ROWS, self.columns)
      return (jnp.where(position < entries[:, None, None], x, 0.0),)

    empty = jnp.zeros(self.region * self.block + 2 * self.margin, jnp.float32)
    return _by_chunks(add, self.region, self.region, (empty,), (self.block,), CHUNK)[0]

  def finish(
    self,
    parts: Sequence[jax.Array],
    exchanged: Exchanged,
    mean: jax.Array,
    error: jax.Array | None,
    finite: jax.Array,
    decay: float,
  ) -> tuple[jax.Array, jax.Array]:
    """The update and the next residual, as `Deferred.finish`, in one pass over the vector."""
    rank, sums, kept, codes = exchanged
    # blocks; with few entries a worker the regions of the last workers may have none
    used = -(-self.n // self.block)
    inverses = kept if self.bits == 1 else scaling.inverses(kept, self.bits)

    def finish(
      start: jax.Array | int, count: int, buffers: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
      cut = lambda x: _cut(x, start, count)
      # the last block may have fewer entries, so entries are flat
      has_last = isinstance(start, int)
      shape = lambda x: x.reshape(-1)[: self.n - start * self.block] if has_last else x
      at_once = has_last and count == used
      if at_once:
        residual, grads = buffers
        region = jnp.tile(sums[self.margin : -self.margin], self.count // self.region)[
          : count * self.block
        ]
      else:
        if has_last:  # a gather is stored, so that its buffer can be written in place
          rest = jnp.arange(start * self.block, self.n, dtype=jnp.int32)
          residual, grads = (x[rest] for x in buffers)
        else:
          read = lambda x: _cut(x, start * self.block, count * self.block).reshape(
            count, _ROWS, -1
          )
          residual, grads = map(read, buffers)
        inside = jnp.clip(start - rank * self.region + CHUNK, 0, self.region + CHUNK)
        region = _cut(sums, inside * self.block, count * self.block)
      region = region.reshape(count, _ROWS, -1)
      number = start - rank * self.region + jnp.arange(count, dtype=jnp.int32)
      owner = jnp.broadcast_to(
        ((number >= 0) & (number < self.region))[:, None, None], region.shape
      )
      entered = jnp.where(shape(owner), shape(region), grads + residual)
      of_entries = lambda x: shape(jnp.broadcast_to(cut(x)[:, None], region.shape))
      after = entered - self._round(entered, of_entries(kept), of_entries(inverses))
      if error is not None:
        after = after + shape(self.decode(cut(codes), cut(error)))
      after = jnp.where(finite, after if decay == 1 else decay * after, residual)
      apply = finite
      if at_once:  # a GPU writes the update where the gradient is, after the residual
        after = jax.lax.optimization_barrier(after)
        apply = ordering.depend_on(after[:1], finite.astype(jnp.int32)) > 0
      return after, jnp.where(apply, shape(self.decode(cut(codes), cut(mean))), 0.0)

    grads, residual = parts
    after, update = _by_chunks(
      finish, self.n // self.block, used, (residual, grads), (self.block,) * 2
    )
    return update, after

  def decode(self, codes: jax.Array, steps: jax.Array) -> jax.Array:
    """Q: ± the magnitude of each code, a multiple of the step of its column, f32[blocks, 32, columns].

    Args:
      codes: u32[blocks, width].
      steps: f32[blocks, columns], or f32[blocks, 1] of signs.

    Example:
      >>> Blocks.of(64, 1).decode(jnp.array([[1, 0]], jnp.uint32), jnp.array([[5.0]]))[0, :2]
      Array([[-5.,  5.],
             [ 5.,  5.]], dtype=float32)
    """
    rows = _ROWS // self.bits
    bit = self.bits * jnp.arange(rows, dtype=jnp.uint32).reshape(1, 1, rows, 1)
    code = (codes.reshape(-1, self.bits, 1, self.columns) >> bit).reshape(
      -1, _ROWS, self.columns
    )
    magnitudes = steps[:, None]
    if self.bits > 1:
      magnitudes = scaling.magnitudes(
        code & (1 << self.bits - 1) - 1, magnitudes, self.bits
      )
    words = jax.lax.bitcast_convert_type(magnitudes, jnp.uint32)
    return jax.lax.bitcast_convert_type(
      words ^ (code >> self.bits - 1 << 31), jnp.float32
    )

  def _round(self, x: jax.Array, steps: jax.Array, inverses: jax.Array) -> jax.Array:
    """Q(x), as `decode` returns it, with the steps of the entries."""
    found = (
      steps
      if self.bits == 1
      else scaling.magnitudes(scaling.levels(x, inverses, self.bits), steps, self.bits)
    )
    return jnp.where(x < 0, -found, found)

  def _entries(self, block: jax.Array) -> jax.Array:
    """The entries of blocks that are no padding."""
    whole, rest = divmod(self.n, self.block)
    return jnp.where(block < whole, self.block, jnp.where(block == whole, rest, 0))

  def _read(
    self, parts: Sequence[jax.Array], start: jax.Array | int, count: int
  ) -> jax.Array:
    """The sum of `parts` in blocks from `start` on, f32[count, 32, columns]; zeros beyond their end if it is an int."""
    length = count * self.block
    if isinstance(start, int):
      x = functools.reduce(
        jnp.add, [part[start * self.block :][:length] for part in parts]
      )
      x = jnp.pad(x, (0, length - x.size))
    else:
      x = functools.reduce(
        jnp.add, [_cut(part, start * self.block, length) for part in parts]
      )
    return x.reshape(count, _ROWS, self.columns)

  def _read_padded(
    self, parts: Sequence[jax.Array], start: jax.Array, count: int
  ) -> jax.Array:
    """The sum of `parts` in blocks from `start` on, f32[count, 32, columns]; zeros beyond their end."""
    length = count * self.block
    start = start * self.block
    parts = [jnp.pad(part, (0, max(0, length - part.size))) for part in parts]
    inside = jnp.minimum(start, parts[0].size - length)
    x = functools.reduce(jnp.add, [_cut(part, inside, length) for part in parts])
    return _cut(jnp.pad(x, (0, length)), start - inside, length).reshape(
      count, _ROWS, self.columns
    )


def _by_chunks(
  compute: Callable[..., tuple[jax.Array, ...]],
  whole: int,
  count: int,
  results: tuple[jax.Array, ...],
  sizes: tuple[int, ...],
  skip: int = 0,
  padded_apart: bool = False,
) -> tuple[jax.Array, ...]:
  """`results`, flat, with what `compute(start, count, results)` returns of some blocks in place of theirs.

  A GPU computes all blocks at once. Others take eight at a time, and write them in the
  next step of the loop, so that XLA stores them in the cache: in the order of a flat
  vector it would not vectorize.

  Args:
    compute: `start` is an int where blocks may be padded.
    whole: number of blocks that are not padded.
    count: number of all blocks.
    results: f32[...] or u32[...] each.
    sizes: entries of a block in each of the results.
    skip: blocks before the first in each of the results.
    padded_apart: whether a GPU computes blocks that may be padded apart, and copies the
      results: a pass that compares each entry with the end of the vector takes it four
      times as long.
  """

  def write(
    results: tuple[jax.Array, ...], start: jax.Array | int, new: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    written = list[jax.Array]()
    for result, x, size in zip(results, new, sizes, strict=True):
      begin = jnp.int32((skip + start) * size)
      # one after the other, since XLA may compute `new` where it is written
      if written and isinstance(start, int):
        begin = ordering.depend_on(written[-1][:1], begin)
      written.append(jax.lax.dynamic_update_slice(result, x.reshape(-1), (begin,)))
    return tuple(written)

  def run(chunk: int, *results: jax.Array) -> tuple[jax.Array, ...]:
    steps = whole // chunk

    def step(number: jax.Array, carry: Any) -> Any:
      # at first, what is there
      results = write(carry[0], jnp.maximum(number - 1, 0) * chunk, carry[1])
      return results, compute(number * chunk, chunk, results)

    if steps:
      shapes = jax.eval_shape(lambda: compute(jnp.int32(0), chunk, results))
      first = [
        x[skip * size :][: shape.size].reshape(shape.shape)
        for x, size, shape in zip(results, sizes, shapes, strict=True)
      ]
      results, last = varying.fori_loop(0, steps, step, (results, tuple(first)))
      results = write(results, (steps - 1) * chunk, last)
    rest = count - steps * chunk
    return (
      write(results, steps * chunk, compute(steps * chunk, rest, results))
      if rest
      else results
    )

  def at_once(*results: jax.Array) -> tuple[jax.Array, ...]:
    apart = padded_apart and 0 < whole < count
    for start, end in ((0, whole), (whole, count)) if apart else ((0, count),):
      new = compute(start, end - start, results)
      results = write(
        results, start, jax.lax.optimization_barrier(new) if apart else new
      )
    return results

  return _compat.by_platform(gpu=at_once, default=functools.partial(run, CHUNK))(
    *results
  )
