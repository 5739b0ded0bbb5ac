"""QSGD: sends every entry of the gradient, rounded at random to one of a few levels (Alistarh et al., "QSGD", §3).

An entry becomes ‖g‖ · sign · level / s with a level 0 … s, drawn so that the mean is the entry. One of 2 s + 1 values
takes b = ⌈log₂(2s + 1)⌉ bits, and a word contains ⌊32 / b⌋ of them. Bruck's all-gather sends ⌈log₂P⌉ messages and P − 1
times the packed levels and their scale.

The paper sends the levels in Elias' code (§3.2), which takes fewer bits where most levels are 0. The length of that
code depends on the data, and messages here have static sizes, so each level has a fixed width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import Collective
from jaxsparse.comm import all_gather, schedules, varying
from jaxsparse.sparse import bitset, noise
from jaxsparse.sparse.sums import largest_magnitude, ordered_sum, round_mantissa_up
from jaxsparse.types import Comm, Cost, Counters, Reduced, State

_BLOCK = 1 << 15  # words
_SHARED = 1 << 16  # the number of a key that no row has


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(Collective):
  """Rounds each entry at random to a sign and one of a few levels, and gathers the levels of all workers (QSGD).

  With s levels, `q(g) = ‖g‖ · sign(g) · ⌊|g| / ‖g‖ · s + u⌋ / s` and u uniform in [0, 1), so that `E q(g) = g`, and the
  variance is at most `min(n/s², √n/s) ‖g‖²`. The total is `Σ_w q(g_w)`, added in rank order. The state is the number of
  the step and, with error feedback, a residual, f32[n] a worker.

  Args:
    levels: s; 127 takes 8 bits an entry, 7 takes 4 and 1 takes 2.
    error_feedback: an ablation: each worker keeps its rounding errors in a residual. Residuals stay bounded only if
      rounding is a contraction, s > √n: with fewer levels they grow without bound.
    seed: the seed of the rounding; every worker and step draws different random numbers from it.

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
  def conserves(self) -> bool:
    return self.error_feedback

  @property
  def bits(self) -> int:
    """Bits of an entry on the wire."""
    return (2 * self.levels).bit_length()

  def init(self, n: int, size: int) -> State:
    residual = jnp.zeros(n, jnp.float32) if self.error_feedback else None
    return State(residual=residual, shared=jnp.zeros((), jnp.int32))

  def cost(self, n: int, size: int) -> Cost:
    packed = math.ceil(n / (32 // self.bits))
    return Cost(len(schedules.strides(size)), (1 + packed) * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    acc = grads + state.residual if self.error_feedback else grads
    key = noise.fold(noise.fold(noise.key_of(self.seed), state.shared), comm.rank)
    message = encode(key, acc, self.levels, self.bits)
    order = (jnp.arange(comm.size, dtype=jnp.int32) - comm.rank) % comm.size
    total = decode_sum(all_gather(comm, message), self.bits, n, order)
    residual = acc - decode_sum(message[None], self.bits, n, jnp.zeros(1, jnp.int32)) if self.error_feedback else None
    words = self.cost(n, comm.size).words
    used = count_levels(message, self.bits)
    counters = Counters(words, words, selected=used, delivered=bitset.count_true(total != 0))
    return Reduced(total, state._replace(residual=residual, shared=state.shared + 1), counters)


def scale_of(x: jax.Array, levels: int) -> jax.Array:
  """‖x‖ / levels, f32[]; NaN if x is not finite.

  Factors are rounded up to so few significant bits that squares, and products with a level, are exact: every program
  adds the same bits, with fused multiply-add and without. The mean of scale · level is x for every scale that is large
  enough, so rounding the scale up does not bias it.

  Example:
    >>> scale_of(jnp.array([0.0, -2.0]), levels=4)
    Array(0.5, dtype=float32)
  """
  most = largest_magnitude(x)
  divisor = jnp.where(most == 0, 1.0, most)  # so that squares neither overflow nor underflow
  norm = most * jnp.sqrt(ordered_sum(x, term=lambda part: round_mantissa_up(jnp.abs(part / divisor), bits=12) ** 2))
  return round_mantissa_up(norm / levels, bits=levels.bit_length())


def quantize(drawn: jax.Array, x: jax.Array, scale: jax.Array, levels: int) -> jax.Array:
  """Levels i32 like x, −levels … levels; for numbers `drawn` uniformly from [0, 1) the mean of `scale` times them is x.

  Example:
    >>> quantize(jnp.array([0.7, 0.7]), jnp.array([0.0, -2.0]), jnp.float32(0.5), levels=4)
    Array([ 0, -4], dtype=int32)
  """
  level = jnp.floor(jnp.abs(x) / jnp.where(scale == 0, 1.0, scale) + drawn)
  return (jnp.sign(x) * jnp.minimum(level, levels)).astype(jnp.int32)


def draw_noise(key: jax.Array, row: int, size: int, start: jax.Array | int = 0) -> jax.Array:
  """f32[size], each uniform in [0, 1), for the levels in row `row` of the words from `start` on.

  The high 16 bits differ between entries, the lower bits are the same for all; two rows share the bits of a hash.
  """
  drawn = noise.bits(noise.fold(key, row // 2), size, start)
  high = (drawn >> 16 if row % 2 else drawn & 0xFFFF).astype(jnp.float32)
  shared = noise.uniform(noise.fold(key, _SHARED)[0])
  return jnp.minimum((high + shared) * 2.0**-16, 1 - 2.0**-24)  # high + shared may round up to 2¹⁶


def encode(key: jax.Array, x: jax.Array, levels: int, bits: int) -> jax.Array:
  """The message u32[1 + w] of f32[n]: its scale, and words with m = ⌊32 / bits⌋ levels of `bits` bits each.

  With v = ⌊n / m⌋, word i < v has the levels of entries i, v + i, 2v + i and so on: rows of neighbours, which are read
  side by side. The last word has those of the n mod m entries that are left.
  """
  scale, (rows, size, rest) = scale_of(x, levels), _layout(x.size, bits)

  def pack(parts: Sequence[jax.Array], start: jax.Array | int) -> jax.Array:
    drawn = [draw_noise(key, row, part.size, start) for row, part in enumerate(parts)]
    level = [quantize(one, part, scale, levels) for one, part in zip(drawn, parts, strict=True)]
    words = [(one + (1 << (bits - 1))).astype(jnp.uint32) << (bits * row) for row, one in enumerate(level)]
    return functools.reduce(jnp.bitwise_or, words)

  def fill(message: jax.Array, start: jax.Array | int, length: int) -> jax.Array:
    parts = [jax.lax.dynamic_slice(x, (row * size + start,), (length,)) for row in range(rows)]
    return jax.lax.dynamic_update_slice(message, pack(parts, start), (1 + start,))

  message = jnp.zeros(1 + size + (rest > 0), jnp.uint32).at[0].set(jax.lax.bitcast_convert_type(scale, jnp.uint32))
  if rest:
    message = message.at[-1:].set(pack([*x[x.size - rest :, None], *jnp.zeros((rows - rest, 1), jnp.float32)], size))
  return _by_blocks(fill, message, size)


def decode(words: jax.Array, row: int, bits: int) -> jax.Array:
  """One row of the levels of u32[w] words, i32[w].

  Example:
    >>> message = encode(noise.key_of(0), jnp.array([-3.0, 0.0, 4.0]), levels=5, bits=4)
    >>> [decode(message[1:], row, bits=4).tolist() for row in range(3)]
    [[-3], [0], [4]]
  """
  return ((words >> (bits * row)) & jnp.uint32((1 << bits) - 1)).astype(jnp.int32) - (1 << (bits - 1))


def count_levels(message: jax.Array, bits: int) -> jax.Array:
  """How many levels of a message are not 0, i32[]."""
  zero = sum(1 << (bits * row + bits - 1) for row in range(32 // bits))  # a word whose levels are all 0
  different = message[1:] ^ jnp.uint32(zero)
  any_bit = functools.reduce(jnp.bitwise_or, [different >> bit for bit in range(bits)])
  return bitset.count(any_bit & jnp.uint32(zero >> (bits - 1)))


def decode_sum(messages: jax.Array, bits: int, n: int, order: jax.Array) -> jax.Array:
  """The sum f32[n] of messages u32[P, 1 + w], added in the order i32[P] of their rows."""
  rows, size, rest = _layout(n, bits)
  scales = jax.lax.bitcast_convert_type(messages[:, 0], jnp.float32)[order]

  def add(start: jax.Array | int, length: int) -> list[jax.Array]:
    """All rows of the levels of some words."""
    words = [jax.lax.dynamic_slice(messages, (number, jnp.int32(1) + start), (1, length))[0] for number in order]
    each = lambda row: [decode(one, row, bits).astype(jnp.float32) * s for one, s in zip(words, scales, strict=True)]
    return [functools.reduce(jnp.add, each(row)) for row in range(rows)]

  def fill(total: jax.Array, start: jax.Array | int, length: int) -> jax.Array:
    for row, part in enumerate(add(start, length)):
      total = jax.lax.dynamic_update_slice(total, part, (row * size + start,))
    return total

  total = jnp.zeros(n, jnp.float32)
  if rest:
    total = total.at[n - rest :].set(jnp.concatenate(add(size, 1)[:rest]))
  return _by_blocks(fill, total, size)


def _layout(n: int, bits: int) -> tuple[int, int, int]:
  """(levels of a word, whole words, other entries)."""
  rows = 32 // bits
  return rows, n // rows, n % rows


def _by_blocks(fill: Callable[[jax.Array, Any, int], jax.Array], into: jax.Array, size: int) -> jax.Array:
  """`fill(into, start, length)` for all words: on GPUs at once, else for blocks that stay in the cache of a CPU.

  The last block overlaps the one before.
  """
  length = min(_BLOCK, size)
  step = lambda number, into: fill(into, jnp.minimum(number * length, size - length), length)
  loop = lambda into: varying.fori_loop(jnp.int32(0), jnp.int32(-(-size // max(length, 1))), step, into)
  return bitset.by_platform(into, gpu=lambda into: jax.lax.optimization_barrier(fill(into, 0, size)), default=loop)
