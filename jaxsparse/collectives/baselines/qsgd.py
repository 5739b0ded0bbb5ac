"""QSGD: sends every entry of the gradient, rounded at random to one of a few levels (Alistarh et al., "QSGD", §3).

An entry becomes ‖g‖ · sign · level / s with a level 0 … s, drawn so that the mean is
the entry. One of 2 s + 1 values takes b = ⌈log₂(2s + 1)⌉ bits, and a word contains ⌊32
/ b⌋ of them. Bruck's all-gather sends ⌈log₂P⌉ messages and P − 1 times the packed
levels and their scale. Long gradients are sent in up to 2 P pieces, each by an
all-gather of its own, so that the levels of all workers are never in memory at once.

The paper sends the levels in Elias' code (§3.2), which takes fewer bits where most
levels are 0. The length of that code depends on the data, and messages here have static
sizes, so each level has a fixed width.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.arrays import noise
from jaxsparse.arrays.sums import largest_magnitude, ordered_sum, round_mantissa_up
from jaxsparse.collectives._base import Collective, Traits
from jaxsparse.comm import all_gather, schedules
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Cost, Reduced, State

_BLOCK = 1 << 15  # words
_UNROLLED = 8  # workers whose levels one kernel adds: the compiler takes long for many
_SHARED = 1 << 16  # the number of a key that no row has


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(Collective):
  """Rounds each entry at random to a sign and one of a few levels, and gathers the levels of all workers (QSGD).

  With s levels, `q(g) = ‖g‖ · sign(g) · ⌊|g| / ‖g‖ · s + u⌋ / s` and u uniform in [0, 1), so that `E q(g) = g`, and the
  variance is at most `min(n/s², √n/s) ‖g‖²`. The total is `Σ_w q(g_w)`, added in rank order. The state is the number of
  the step and, with error feedback, a residual, f32[n] a worker.

  Args:
    levels: s; 127 takes 8 bits an entry, 7 takes 4 and 1 takes 2.
    error_feedback: an ablation: each worker keeps its rounding errors in a residual.
      Residuals stay bounded only if rounding is a contraction, s > √n: with fewer
      levels they grow without bound.
    seed: the seed of the rounding; every worker and step draws different random numbers
      from it.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("qsgd", jnp.array([[0.0, -4.0], [3.0, 0.0]]), levels=1).total
    Array([ 3., -4.], dtype=float32)
  """

  levels: int = 127
  error_feedback: Literal[False, True] = False
  seed: int = 0
  decay: float = 1.0
  ranges = (("levels", 1, 2**23), ("seed", 0, 2**32 - 1))

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(
      super().traits, scaled=True, conserves=self.error_feedback
    )

  @property
  def bits(self) -> int:
    """Bits of an entry on the wire."""
    return (2 * self.levels).bit_length()

  def init(self, n: int, size: int) -> State:
    residual = jnp.zeros(n, jnp.float32) if self.error_feedback else None
    return State(residual=residual, shared=jnp.zeros((), jnp.int32))

  def cost(self, n: int, size: int) -> Cost:
    layout = LevelLayout.of(n, self.bits, size)
    words = layout.pieces * (layout.head + layout.length) * (size - 1)
    return Cost(layout.pieces * len(schedules.strides(size)), words)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    layout = LevelLayout.of(n, self.bits, comm.size)
    acc = grads + state.residual if self.error_feedback else grads
    # q(acc_w), a scale ‖acc_w‖ / s and levels (§3.1)
    key = noise.fold(noise.fold(noise.key_of(self.seed), state.shared), comm.rank)
    rounding = LevelRounding(key, scale_of(acc, self.levels), self.levels, self.bits)
    order = (jnp.arange(comm.size, dtype=jnp.int32) - comm.rank) % comm.size
    # Behind a barrier: XLA for GPUs would keep a copy of `acc`, to count its levels
    # once more.
    head = jax.lax.optimization_barrier(rounding.encode_head(acc, layout))

    def exchange(
      x: jax.Array, piece: jax.Array | int
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
      """`acc` with the sums of this piece and of those before; what workers sent ahead of it, and the own levels."""
      words = rounding.encode(x, layout, piece)
      messages = all_gather(comm, jnp.concatenate([head, words]))
      ahead = messages[:, : layout.head]
      sums = put_sums(x, messages, order, layout, piece)
      return sums, (ahead, count_levels(words, self.bits))

    # total = Σ_w q(acc_w), where all levels arrive
    total, heads, used = _exchange_all(exchange, acc, layout.pieces)
    total = put_head_sums(total, heads, order, layout)
    residual = acc - rounding.rounded(acc, layout) if self.error_feedback else None
    used += count_levels(head[1:], self.bits)
    counters = self.count(
      comm, n, selected=used, delivered=bitset.count_true(total != 0)
    )
    return Reduced(
      total, state._replace(residual=residual, shared=state.shared + 1), counters
    )


def _exchange_all(
  exchange: Callable[..., tuple], acc: jax.Array, pieces: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of all pieces, what workers sent ahead of the last one, and the levels of all."""
  if pieces == 1:
    total, (heads, used) = exchange(acc, 0)
    return total, heads, used
  total, (heads, used) = varying.scan(
    exchange, acc, jnp.arange(pieces, dtype=jnp.int32)
  )
  return total, heads[-1], jnp.sum(used, dtype=jnp.int32)


class LevelLayout(NamedTuple):
  """Where the levels of f32[n] are in messages.

  With v = ⌊n / m⌋, word i < v has the levels of entries i, v + i, 2v + i and so on:
  rows of neighbours, which are read side by side. A message has a piece of the words,
  so that those of all workers are never in memory at once. Ahead of its words it has
  the scale, the words that are left, and one with the n mod m entries that are left.

  Attributes:
    bits: of a level.
    words: v.
    pieces: number of messages.
    length: words of a piece.
    rest: n mod m.

  Example:
    >>> LevelLayout.of(1003, bits=8, workers=2)
    LevelLayout(bits=8, words=250, pieces=1, length=250, rest=3)
  """

  bits: int
  words: int
  pieces: int
  length: int
  rest: int

  @classmethod
  def of(cls, n: int, bits: int, workers: int) -> Self:
    """The layout of n entries; P times a piece is at most n/2 levels, unless these are few."""
    words, rest = divmod(n, 32 // bits)
    pieces = max(1, min(2 * workers, words // _BLOCK))
    return cls(bits, words, pieces, words // pieces, rest)

  @property
  def rows(self) -> int:
    """m, the levels of a word."""
    return 32 // self.bits

  @property
  def head(self) -> int:
    """Words of a message ahead of those of a piece."""
    return 1 + self.words % self.pieces + (self.rest > 0)


def scale_of(x: jax.Array, levels: int) -> jax.Array:
  """‖x‖ / levels, f32[]; NaN if x is not finite.

  Factors are rounded up to so few significant bits that squares, and products with a
  level, are exact: every program adds the same bits, with fused multiply-add and
  without. The mean of scale · level is x for every scale that is large enough, so
  rounding the scale up does not bias it.

  Example:
    >>> scale_of(jnp.array([0.0, -2.0]), levels=4)
    Array(0.5, dtype=float32)
  """
  most = largest_magnitude(x)
  # so that squares neither overflow nor underflow
  divisor = jnp.where(most == 0, 1.0, most)
  norm = most * jnp.sqrt(
    ordered_sum(
      x, term=lambda part: round_mantissa_up(jnp.abs(part / divisor), bits=12) ** 2
    )
  )
  return round_mantissa_up(norm / levels, bits=levels.bit_length())


def quantize(
  drawn: jax.Array, x: jax.Array, scale: jax.Array, levels: int
) -> jax.Array:
  """Levels i32 like x, −levels … levels; for numbers `drawn` uniformly from [0, 1) the mean of `scale` times them is x.

  Example:
    >>> quantize(jnp.array([0.7, 0.7]), jnp.array([0.0, -2.0]), jnp.float32(0.5), levels=4)
    Array([ 0, -4], dtype=int32)
  """
  level = jnp.floor(jnp.abs(x) / jnp.where(scale == 0, 1.0, scale) + drawn)
  return (jnp.sign(x) * jnp.minimum(level, levels)).astype(jnp.int32)


def draw_noise(
  key: jax.Array, row: int, size: int, start: jax.Array | int = 0
) -> jax.Array:
  """f32[size], each uniform in [0, 1), for the levels in row `row` of the words from `start` on.

  The high 16 bits differ between entries, the lower bits are the same for all; two rows
  share the bits of a hash.
  """
  drawn = noise.bits(noise.fold(key, row // 2), size, start)
  high = (drawn >> 16 if row % 2 else drawn & 0xFFFF).astype(jnp.float32)
  shared = noise.uniform(noise.fold(key, _SHARED)[0])
  # high + shared may round up to 2¹⁶
  return jnp.minimum((high + shared) * 2.0**-16, 1 - 2.0**-24)


class LevelRounding(NamedTuple):
  """The rounding of one worker in one step.

  Attributes:
    key: u32[2], of the random numbers.
    scale: f32[], the difference of two levels.
    levels: the largest level.
    bits: of a level.
  """

  key: jax.Array
  scale: jax.Array
  levels: int
  bits: int

  def level(self, row: int, part: jax.Array, start: jax.Array | int) -> jax.Array:
    """The levels i32 of entries f32[size], which are in row `row` of the words from `start` on."""
    return quantize(
      draw_noise(self.key, row, part.size, start), part, self.scale, self.levels
    )

  def pack(self, parts: Sequence[jax.Array], start: jax.Array | int) -> jax.Array:
    """The words u32[size] from `start` on, of rows of entries f32[size]."""
    level = [self.level(row, part, start) for row, part in enumerate(parts)]
    words = [
      (one + (1 << (self.bits - 1))).astype(jnp.uint32) << (self.bits * row)
      for row, one in enumerate(level)
    ]
    return functools.reduce(jnp.bitwise_or, words)

  def encode(
    self, x: jax.Array, layout: LevelLayout, piece: jax.Array | int
  ) -> jax.Array:
    """The words u32[length] of a piece of f32[n]."""

    def fill(words: jax.Array, start: jax.Array | int, length: int) -> jax.Array:
      first = piece * layout.length + start
      return jax.lax.dynamic_update_slice(
        words, self.pack(_rows_of(x, layout, first, length), first), (start,)
      )

    return _by_blocks(fill, jnp.zeros(layout.length, jnp.uint32), layout.length)

  def encode_head(self, x: jax.Array, layout: LevelLayout) -> jax.Array:
    """What is ahead of the words of a message, u32[head]."""
    first = layout.pieces * layout.length
    size = layout.words % layout.pieces
    head = [jax.lax.bitcast_convert_type(self.scale, jnp.uint32)[None]]
    if size:
      head.append(self.pack(_rows_of(x, layout, first, size), first))
    if layout.rest:
      head.append(
        self.pack(
          [
            *x[x.size - layout.rest :, None],
            *jnp.zeros((layout.rows - layout.rest, 1), jnp.float32),
          ],
          layout.words,
        )
      )
    return jnp.concatenate(head)

  def rounded(self, x: jax.Array, layout: LevelLayout) -> jax.Array:
    """What receivers decode of f32[n]."""
    parts = [
      x[row * layout.words : (row + 1) * layout.words] for row in range(layout.rows)
    ]
    level = [self.level(row, part, 0) for row, part in enumerate(parts)]
    level += [
      self.level(row, x[x.size - layout.rest + row, None], layout.words)
      for row in range(layout.rest)
    ]
    return jnp.concatenate(level).astype(jnp.float32) * self.scale


def decode(words: jax.Array, row: int, bits: int) -> jax.Array:
  """One row of the levels of u32[w] words, i32[w].

  Example:
    >>> decode(jnp.array([0x7F81], jnp.uint32), 0, bits=8), decode(jnp.array([0x7F81], jnp.uint32), 1, bits=8)
    (Array([1], dtype=int32), Array([-1], dtype=int32))
  """
  return ((words >> (bits * row)) & jnp.uint32((1 << bits) - 1)).astype(jnp.int32) - (
    1 << (bits - 1)
  )


def count_levels(words: jax.Array, bits: int) -> jax.Array:
  """How many levels of u32[w] words are not 0, i32[]."""
  # a word whose levels are all 0
  zero = sum(1 << (bits * row + bits - 1) for row in range(32 // bits))
  different = words ^ jnp.uint32(zero)
  any_bit = functools.reduce(jnp.bitwise_or, [different >> bit for bit in range(bits)])
  return bitset.count(any_bit & jnp.uint32(zero >> (bits - 1)))


def put_sums(
  x: jax.Array,
  messages: jax.Array,
  order: jax.Array,
  layout: LevelLayout,
  piece: jax.Array | int,
) -> jax.Array:
  """f32[n] with the sums of a piece in the place of its entries: of messages u32[P, w], added in the order i32[P]."""

  def fill(x: jax.Array, start: jax.Array | int, length: int) -> jax.Array:
    for row, part in enumerate(
      _sum_rows(messages, order, layout, layout.head + start, length)
    ):
      x = jax.lax.dynamic_update_slice(
        x, part, (row * layout.words + piece * layout.length + start,)
      )
    return x

  return _by_blocks(fill, x, layout.length)


def put_head_sums(
  x: jax.Array, heads: jax.Array, order: jax.Array, layout: LevelLayout
) -> jax.Array:
  """f32[n] with the sums of what is ahead of the words of messages, u32[P, head]."""
  if layout.head == 1:
    return x
  # Behind barriers: XLA for GPUs would decode once for each row, and again wherever the
  # total is read.
  sums = jax.lax.optimization_barrier(
    jnp.stack(_sum_rows(heads, order, layout, 1, layout.head - 1))
  )
  first = layout.pieces * layout.length
  size = layout.words % layout.pieces
  for row in range(layout.rows if size else 0):
    x = jax.lax.dynamic_update_slice(x, sums[row, :size], (row * layout.words + first,))
  if layout.rest:
    x = x.at[x.size - layout.rest :].set(sums[: layout.rest, -1])
  return jax.lax.optimization_barrier(x)


def _sum_rows(
  messages: jax.Array,
  order: jax.Array,
  layout: LevelLayout,
  start: jax.Array | int,
  length: int,
) -> tuple[jax.Array, ...]:
  """The sums of all workers' levels of words start … start + length − 1, f32[length] of each row."""

  def add(
    sums: tuple[jax.Array, ...], number: jax.Array
  ) -> tuple[tuple[jax.Array, ...], None]:
    words = jax.lax.dynamic_slice(
      messages, (number, jnp.asarray(start, jnp.int32)), (1, length)
    )[0]
    scale = jax.lax.bitcast_convert_type(messages[number, 0], jnp.float32)
    return tuple(
      one + decode(words, row, layout.bits).astype(jnp.float32) * scale
      for row, one in enumerate(sums)
    ), None

  nothing = (jnp.full(length, -0.0, jnp.float32),) * layout.rows  # −0 + x is x
  return varying.scan(add, nothing, order, unroll=min(_UNROLLED, len(order)))[0]


def _rows_of(
  x: jax.Array, layout: LevelLayout, start: jax.Array | int, length: int
) -> list[jax.Array]:
  """The entries of words start … start + length − 1, f32[length] of each row."""
  return [
    jax.lax.dynamic_slice(x, (row * layout.words + start,), (length,))
    for row in range(layout.rows)
  ]


def _by_blocks(
  fill: Callable[[jax.Array, Any, int], jax.Array], into: jax.Array, size: int
) -> jax.Array:
  """`fill(into, start, length)` for all words: on GPUs at once, else for blocks that stay in the cache of a CPU.

  The last block overlaps the one before.
  """
  length = min(_BLOCK, size)
  step = lambda number, into: fill(
    into, jnp.minimum(number * length, size - length), length
  )
  loop = lambda into: varying.fori_loop(
    jnp.int32(0), jnp.int32(-(-size // max(length, 1))), step, into
  )
  # At once an update takes 1.7 times the CPU time; the loop 1.3 times the kernels.
  return _compat.by_platform(
    gpu=lambda into: jax.lax.optimization_barrier(fill(into, 0, size)), default=loop
  )(into)
