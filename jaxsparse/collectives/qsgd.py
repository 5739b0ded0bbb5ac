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
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import Collective
from jaxsparse.comm import all_gather, in_rank_order, schedules
from jaxsparse.sparse import bitset
from jaxsparse.sparse.sums import largest_magnitude, ordered_sum, round_mantissa_up
from jaxsparse.types import Comm, Cost, Counters, Reduced, State

_BLOCK = 1 << 15  # words


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
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), state.shared), comm.rank)
    message, used = encode(key, acc, self.levels, self.bits)
    rows = all_gather(comm, message)
    total = decode_sum(rows, self.bits, n, in_rank_order(comm, jnp.arange(comm.size, dtype=jnp.int32)))
    own = lambda: decode_sum(message[None], self.bits, n, jnp.zeros(1, jnp.int32))
    residual = acc - own() if self.error_feedback else None
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=used, delivered=bitset.count(bitset.pack(total != 0)))
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


def quantize(key: jax.Array, x: jax.Array, scale: jax.Array, levels: int) -> jax.Array:
  """Random levels i32[n], −levels … levels, whose mean times `scale` is x.

  Example:
    >>> quantize(jax.random.key(0), jnp.array([0.0, -2.0]), jnp.float32(0.5), levels=4)
    Array([ 0, -4], dtype=int32)
  """
  level = jnp.floor(jnp.abs(x) / jnp.where(scale == 0, 1.0, scale) + draw_noise(key, x.size))
  return (jnp.sign(x) * jnp.minimum(level, levels)).astype(jnp.int32)


def draw_noise(key: jax.Array, n: int) -> jax.Array:
  """f32[n], each uniform in [0, 1): the high 16 bits differ between entries, the lower bits are the same for all.

  Drawing 32 bits for each entry would take as long as the rest of QSGD.
  """
  own, shared = jax.random.split(key)
  # An even number of them: on CPU JAX takes several times as long for an odd one.
  pairs = jax.random.bits(own, (bitset.align(-(-n // 2)),), jnp.uint32)
  high = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(-1)[:n].astype(jnp.float32)
  noise = (high + jax.random.uniform(shared, (), jnp.float32)) * 2.0**-16
  return jnp.minimum(noise, 1 - 2.0**-24)  # high + shared may round up to 2¹⁶


def encode(key: jax.Array, x: jax.Array, levels: int, bits: int) -> tuple[jax.Array, jax.Array]:
  """The message u32[1 + w] of f32[n], its scale and its packed levels, and how many levels are not 0, i32[].

  Each block of 2¹⁵ words is drawn and packed before the next: its random numbers stay in the cache.
  """
  scale, span = scale_of(x, levels), 32 // bits * _BLOCK
  blocks = x.size // span

  def pack(block: jax.Array | int, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    drawn = quantize(jax.random.fold_in(key, block), part, scale, levels)
    return pack_levels(drawn, bits), bitset.count(bitset.pack(drawn != 0))

  def fill(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    message, used = carry
    words, more = pack(block, jax.lax.dynamic_slice(x, (block * span,), (span,)))
    return jax.lax.dynamic_update_slice(message, words, (1 + block * _BLOCK,)), used + more

  last, used = pack(blocks, x[blocks * span :])
  first = jax.lax.bitcast_convert_type(scale, jnp.uint32)[None]
  message = jnp.concatenate([first, jnp.zeros(blocks * _BLOCK, jnp.uint32), last])
  return jax.lax.fori_loop(0, blocks, fill, (message, used)) if blocks else (message, used)


def decode_sum(messages: jax.Array, bits: int, n: int, order: jax.Array) -> jax.Array:
  """The sum f32[n] of the messages of `encode`, u32[P, 1 + w], added in the order i32[P] of their rows.

  Block by block, so that a block of the sum stays in the cache while the entries of all messages are added, and that
  only blocks are put in order.
  """
  span, scales = 32 // bits * _BLOCK, jax.lax.bitcast_convert_type(messages[:, 0], jnp.float32)
  blocks = n // span

  def add_rows(rows: jax.Array) -> jax.Array:
    levels = [unpack_levels(row, bits).astype(jnp.float32) for row in rows[order]]
    return functools.reduce(jnp.add, [level * scale for level, scale in zip(levels, scales[order], strict=True)])

  def fill(block: jax.Array, total: jax.Array) -> jax.Array:
    rows = jax.lax.dynamic_slice(messages, (0, 1 + block * _BLOCK), (len(messages), _BLOCK))
    return jax.lax.dynamic_update_slice(total, add_rows(rows), (block * span,))

  last = add_rows(messages[:, 1 + blocks * _BLOCK :])[: n - blocks * span]
  total = jnp.pad(last, (blocks * span, 0))
  return jax.lax.fori_loop(0, blocks, fill, total) if blocks else total


def pack_levels(levels: jax.Array, bits: int) -> jax.Array:
  """Signed levels of `bits` bits each as u32[w], ⌊32 / bits⌋ in a word: word i has levels i, w + i, 2w + i and so on.

  Example:
    >>> unpack_levels(pack_levels(jnp.array([-3, 0, 3]), bits=3), bits=3)[:3]
    Array([-3,  0,  3], dtype=int32)
  """
  per_word = 32 // bits
  offset = (levels + (1 << (bits - 1))).astype(jnp.uint32)
  parts = jnp.pad(offset, (0, -levels.size % per_word)).reshape(per_word, -1)
  return jnp.bitwise_or.reduce(parts << _shifts(bits), axis=0)


def unpack_levels(words: jax.Array, bits: int) -> jax.Array:
  """The levels of u32[w] words, i32[⌊32 / bits⌋ · w], in the order before `pack_levels`, and its padding."""
  offset = (words[None] >> _shifts(bits)) & jnp.uint32((1 << bits) - 1)
  return (offset.astype(jnp.int32) - (1 << (bits - 1))).reshape(-1)


def _shifts(bits: int) -> jax.Array:
  return (jnp.arange(32 // bits, dtype=jnp.uint32) * bits)[:, None]
