"""The blocks of a vector whose signs are sent: encoding, sums of a region, and the pass that writes the results."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxsparse import _varying
from jaxsparse.select import ordering
from jaxsparse.sparse.sums import round_mantissa, row_sums

_ROWS = 32  # of a block, the bits of a word
_COLUMNS = 128  # at most, the lanes of a TPU
CHUNK = 8  # blocks at a time, few enough for the cache of a CPU


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The blocks of a vector: 32 rows of up to 128 consecutive entries each; the last ones are padded.

  Bit r of word c of a block is the sign in row r and column c. So 32 entries of a word are far apart, and neighbours
  have neighbouring words: all is done to whole rows, which suits the vector units of CPUs and the lanes of TPUs.

  Attributes:
    n: entries of the vector.
    columns: of a block.
    region: blocks of a worker's region.
    count: blocks of all regions.
  """

  n: int
  columns: int
  region: int
  count: int

  @classmethod
  def of(cls, n: int, size: int) -> Self:
    columns = min(_COLUMNS, -(-n // (size * _ROWS)))
    region = -(-n // (size * _ROWS * columns))
    return cls(n, columns, region, size * region)

  @property
  def block(self) -> int:
    """Entries of a block."""
    return _ROWS * self.columns

  @property
  def margin(self) -> int:
    """Entries before and after the sums of a region."""
    return CHUNK * self.block

  @property
  def words(self) -> int:
    """Words of a message: those of the blocks of a region, and their scales."""
    return self.region * (self.columns + 1)

  def pack(self, signs: jax.Array, scales: jax.Array) -> jax.Array:
    """The messages of regions, u32[regions, words], of u32[blocks, columns] and f32[blocks]."""
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint32).reshape(-1, self.region)
    return jnp.concatenate([signs.reshape(len(scales), -1), scales], axis=1)

  def unpack(self, messages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`."""
    signs, scales = jnp.split(messages, [self.region * self.columns], axis=1)
    return signs.reshape(-1, self.columns), jax.lax.bitcast_convert_type(scales, jnp.float32).reshape(-1)

  def encode(
    self, parts: Sequence[jax.Array], first: jax.Array, count: int, skip: int = 0
  ) -> tuple[jax.Array, jax.Array]:
    """The signs u32[count, columns] and the scales f32[count] of the sum of `parts` after `skip` blocks.

    Their blocks are blocks `first` and following of the vector.
    """

    def columns_of(start: jax.Array | int, count: int, _: Any) -> tuple[jax.Array, jax.Array]:
      x = self._read(parts, skip + start, count)
      rows = [x[:, row] for row in range(_ROWS)]
      signs = [jnp.where(row < 0, jnp.uint32(1 << bit), jnp.uint32(0)) for bit, row in enumerate(rows)]
      squares = lambda unit: _tree(jnp.add, [_truncate(row * unit) ** 2 for row in rows])
      return _tree(jnp.bitwise_or, signs), _root_mean(squares, jnp.float32(1 / _ROWS))

    size = count * self.columns
    empty = (jnp.zeros(size, jnp.uint32), jnp.zeros(size, jnp.float32))
    signs, means = _by_chunks(columns_of, min(count, parts[0].size // self.block), count, empty, (self.columns,) * 2)
    # One kernel of a GPU writes both.
    signs, means = jax.lax.optimization_barrier((signs.reshape(count, -1), means.reshape(count, -1)))
    entries = self._entries(first + jnp.arange(count, dtype=jnp.int32))
    squares = lambda unit: row_sums(round_mantissa(round_mantissa(means * unit) ** 2))
    return signs, _root_mean(squares, _ROWS / jnp.maximum(entries, 1).astype(jnp.float32))

  def sum_region(self, parts: Sequence[jax.Array], rank: jax.Array, received: Sequence[jax.Array]) -> jax.Array:
    """The sums of a region, f32[margin + region + margin], of own entries and messages; 0 where padded."""

    def add(start: jax.Array | int, count: int, _: Any) -> tuple[jax.Array]:
      block = rank * self.region + start
      x = self._read_padded(parts, block, count)
      for message in received:
        cut = functools.partial(_cut, message)
        signs = cut(start * self.columns, count * self.columns).reshape(count, -1)
        scales = cut(self.region * self.columns + start, count)
        x = x + decode(signs, jax.lax.bitcast_convert_type(scales, jnp.float32))
      entries = self._entries(block + jnp.arange(count, dtype=jnp.int32))
      position = jnp.arange(self.block, dtype=jnp.int32).reshape(1, _ROWS, self.columns)
      return (jnp.where(position < entries[:, None, None], x, 0.0),)

    empty = jnp.zeros(self.region * self.block + 2 * self.margin, jnp.float32)
    return _by_chunks(add, self.region, self.region, (empty,), (self.block,), CHUNK)[0]

  def finish(
    self,
    parts: Sequence[jax.Array],
    rank: jax.Array,
    sums: jax.Array,
    kept: tuple[jax.Array, jax.Array],
    signs: jax.Array,
    mean: jax.Array,
    error: jax.Array | None,
    finite: jax.Array,
    decay: float,
  ) -> tuple[jax.Array, jax.Array]:
    """The update and the next residual, as `Deferred.finish`, in one pass over the vector."""

    def finish(start: jax.Array | int, count: int, buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      cut = lambda x: _cut(x, start, count)
      shape = lambda x: x
      if isinstance(start, int):  # flat entries, of which the last block may have fewer
        shape = lambda x: x.reshape(-1)[: self.n - start * self.block]
      if count == self.count:
        residual, grads = buffers
        region = sums[self.margin : -self.margin].reshape(1, self.region, _ROWS, -1)
        region = jnp.broadcast_to(region, (count // self.region, *region.shape[1:]))
      else:
        if isinstance(start, int):  # a gather is stored, so that its buffer can be written in place
          rest = jnp.arange(start * self.block, self.n, dtype=jnp.int32)
          residual, grads = (x[rest] for x in buffers)
        else:
          read = lambda x: _cut(x, start * self.block, count * self.block).reshape(count, _ROWS, -1)
          residual, grads = map(read, buffers)
        inside = jnp.clip(start - rank * self.region + CHUNK, 0, self.region + CHUNK)
        region = _cut(sums, inside * self.block, count * self.block)
      region = region.reshape(count, _ROWS, -1)
      number = start - rank * self.region + jnp.arange(count, dtype=jnp.int32)
      owner = jnp.broadcast_to(((number >= 0) & (number < self.region))[:, None, None], region.shape)
      after = jnp.where(shape(owner), shape(region), grads + residual) - shape(decode(*map(cut, kept)))
      if error is not None:
        after = after + shape(decode(cut(signs), cut(error)))
      after = jnp.where(finite, after if decay == 1 else decay * after, residual)
      apply = finite
      if count == self.count:  # a GPU writes the update where the gradient is, after the residual
        after = jax.lax.optimization_barrier(after)
        apply = ordering.depend_on(after[:1], finite.astype(jnp.int32)) > 0
      return after, jnp.where(apply, shape(decode(cut(signs), cut(mean))), 0.0)

    grads, residual = parts
    after, update = _by_chunks(finish, self.n // self.block, self.count, (residual, grads), (self.block,) * 2)
    return update, after

  def _entries(self, block: jax.Array) -> jax.Array:
    """The entries of blocks that are no padding."""
    whole, rest = divmod(self.n, self.block)
    return jnp.where(block < whole, self.block, jnp.where(block == whole, rest, 0))

  def _read(self, parts: Sequence[jax.Array], start: jax.Array | int, count: int) -> jax.Array:
    """The sum of `parts` in blocks from `start` on, f32[count, 32, columns]; zeros beyond their end if it is an int."""
    length = count * self.block
    if isinstance(start, int):
      x = functools.reduce(jnp.add, [part[start * self.block :][:length] for part in parts])
      x = jnp.pad(x, (0, length - x.size))
    else:
      x = functools.reduce(jnp.add, [_cut(part, start * self.block, length) for part in parts])
    return x.reshape(count, _ROWS, self.columns)

  def _read_padded(self, parts: Sequence[jax.Array], start: jax.Array, count: int) -> jax.Array:
    """The sum of `parts` in blocks from `start` on, f32[count, 32, columns]; zeros beyond their end."""
    length, start = count * self.block, start * self.block
    parts = [jnp.pad(part, (0, max(0, length - part.size))) for part in parts]
    inside = jnp.minimum(start, parts[0].size - length)
    x = functools.reduce(jnp.add, [_cut(part, inside, length) for part in parts])
    return _cut(jnp.pad(x, (0, length)), start - inside, length).reshape(count, _ROWS, self.columns)


def decode(signs: jax.Array, scales: jax.Array) -> jax.Array:
  """Q: the scale of each block with the signs of its entries, f32[blocks, 32, columns].

  Args:
    signs: u32[blocks, columns].
    scales: f32[blocks].

  Example:
    >>> decode(jnp.array([[1, 0]], jnp.uint32), jnp.array([5.0]))[0, :2]
    Array([[-5.,  5.],
           [ 5.,  5.]], dtype=float32)
  """
  row = jnp.arange(_ROWS, dtype=jnp.uint32).reshape(1, _ROWS, 1)
  magnitudes = jax.lax.bitcast_convert_type(scales, jnp.uint32).reshape(-1, 1, 1)
  return jax.lax.bitcast_convert_type(magnitudes ^ (signs[:, None] >> row << 31), jnp.float32)


def _by_chunks(
  compute: Callable[..., tuple[jax.Array, ...]],
  whole: int,
  count: int,
  results: tuple[jax.Array, ...],
  sizes: tuple[int, ...],
  skip: int = 0,
) -> tuple[jax.Array, ...]:
  """`results`, flat, with what `compute(start, count, results)` returns of some blocks in place of theirs.

  A GPU computes all blocks at once. Others take eight at a time, and write them in the next step of the loop: XLA then
  stores them in the cache, and does not compute them entry by entry in the order of a flat vector, which does not
  vectorize.

  Args:
    compute: `start` is an int where blocks may be padded.
    whole: number of blocks that are not padded.
    count: number of all blocks.
    results: f32[...] or u32[...] each.
    sizes: entries of a block in each of the results.
    skip: blocks before the first in each of the results.
  """

  def write(
    results: tuple[jax.Array, ...], start: jax.Array | int, new: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    written = list[jax.Array]()
    for result, x, size in zip(results, new, sizes, strict=True):
      begin = jnp.int32((skip + start) * size)
      if written and isinstance(start, int):  # one after the other, since XLA may compute `new` where it is written
        begin = ordering.depend_on(written[-1][:1], begin)
      written.append(jax.lax.dynamic_update_slice(result, x.reshape(-1), (begin,)))
    return tuple(written)

  def run(chunk: int, *results: jax.Array) -> tuple[jax.Array, ...]:
    steps = whole // chunk

    def step(number: jax.Array, carry: Any) -> Any:
      results = write(carry[0], jnp.maximum(number - 1, 0) * chunk, carry[1])  # at first, what is there
      return results, compute(number * chunk, chunk, results)

    if steps:
      shapes = jax.eval_shape(lambda: compute(jnp.int32(0), chunk, results))
      first = [
        x[skip * size :][: shape.size].reshape(shape.shape)
        for x, size, shape in zip(results, sizes, shapes, strict=True)
      ]
      results, last = _varying.fori_loop(0, steps, step, (results, tuple(first)))
      results = write(results, (steps - 1) * chunk, last)
    rest = count - steps * chunk
    return write(results, steps * chunk, compute(steps * chunk, rest, results)) if rest else results

  at_once, by_chunks = functools.partial(run, count + 1), functools.partial(run, CHUNK)
  return jax.lax.platform_dependent(*results, cuda=at_once, rocm=at_once, default=by_chunks)


def _cut(x: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
  """`size` rows of x from `start` on."""
  return jax.lax.dynamic_slice_in_dim(x, start, size)


def _tree(combine: Callable[[jax.Array, jax.Array], jax.Array], terms: list[jax.Array]) -> jax.Array:
  """Combines 2ⁱ terms in pairs."""
  while len(terms) > 1:
    half = len(terms) // 2
    terms = [combine(*pair) for pair in zip(terms[:half], terms[half:], strict=True)]
  return terms[0]


def _truncate(x: jax.Array) -> jax.Array:
  """Truncates x to 12 significant bits. Its square is exact, so that a fused multiply-add gives the same bits."""
  words = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
  return jax.lax.bitcast_convert_type(words, jnp.float32)


def _root_mean(squares: Callable[[float], jax.Array], share: jax.Array) -> jax.Array:
  """√(share · Σ x²) of `squares(unit) = Σ (unit · x)²`, with the unit at which squares neither over- nor underflow."""
  # `squares` rounds products with the unit: XLA may square the unit alone, which overflows.
  low, middle, high = (squares(2.0**-unit) for unit in (-80, 0, 80))
  root = lambda squares, unit: unit * jnp.sqrt(share * squares)
  few = jnp.where(middle < 2.0**-80, root(low, 2.0**-80), root(middle, 1.0))
  return jnp.where(middle > 2.0**100, root(high, 2.0**80), few)
