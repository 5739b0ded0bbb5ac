"""QSGD: sends every entry of the gradient, rounded at random to one of a few levels (Alistarh et al., "QSGD", §3).

An entry becomes ‖g‖ · sign · level / s with a level 0 … s, drawn so that the mean is
the entry. One of 2 s + 1 values takes b = ⌈log₂(2s + 1)⌉ bits (`sparse.fields`).
Bruck's all-gather sends ⌈log₂P⌉ messages and P − 1 times the packed levels and their
scale. Long gradients are sent in up to 2 P pieces, each by an all-gather of its own, so
that the levels of all workers are never in memory at once.

The paper sends the levels in Elias' code (§3.2), which takes fewer bits where most
levels are 0. The length of that code depends on the data, and messages here have static
sizes, so each level has a fixed width.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse._compat import varying
from jaxsparse.arrays import iota, noise
from jaxsparse.arrays.sums import largest_magnitude, ordered_sum, round_mantissa_up
from jaxsparse.collectives._base import Collective, Traits
from jaxsparse.comm import all_gather, in_rank_order, schedules
from jaxsparse.sparse import bitset, fields
from jaxsparse.types import Comm, Cost, Reduced, State

_LONG = 1 << 17  # entries from which a gradient is sent in pieces


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

  def pieces(self, n: int, size: int) -> tuple[int, int]:
    """(count, length): the pieces in which a gradient is sent, and the entries of each; zeros fill the last one."""
    # 2 P pieces, or fewer of at least 2¹⁷ entries each; a shorter gradient is one piece
    count = max(1, min(2 * size, n // _LONG))
    return count, -(-n // count)

  def cost(self, n: int, size: int) -> Cost:
    """Messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    count, length = self.pieces(n, size)
    # A message has a scale of one word, and the packed levels of a piece.
    words = 1 + fields.words(self.bits, length)
    messages = count * len(schedules.strides(size))
    return Cost(messages, count * words * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    count, length = self.pieces(n, comm.size)
    acc = grads + state.residual if self.error_feedback else grads
    # ‖acc_w‖ / s, f32[]: one scale for all pieces
    scale = scale_of(acc, self.levels)
    # `shared` is the number of the step
    key_of_step = noise.fold(noise.key_of(self.seed), state.shared)
    key = noise.fold(key_of_step, comm.rank)

    def exchange(x: jax.Array, piece: jax.Array) -> tuple[jax.Array, tuple]:
      """A step of the scan over pieces.

      Args:
        x: f32[count · length], acc_w; in pieces that were sent, the sums over workers.
        piece: i32[], the number of the piece.

      Returns:
        `x` with the sums of the piece in its place; how many of this worker's levels
        are not 0, and its rounding errors, f32[length], None without error feedback.
      """
      start = piece * length
      entries = jax.lax.dynamic_slice_in_dim(x, start, length)
      # q(acc_w) is scale · level (§3.1); the noise belongs to the flat indices from
      # `start` on
      drawn = noise.uniform(noise.bits(key, length, start))
      level = quantize(drawn, entries, scale, self.levels)
      # level + s, 0 … 2 s
      packed = fields.pack((level + self.levels)[None], self.bits)[0]
      gathered = in_rank_order(comm, all_gather(comm, (scale, packed)))
      # Σ_w q(acc_w) of this piece
      sums = self._add(*gathered, length)
      # The sums overwrite the piece, which is not read again.
      after = jax.lax.dynamic_update_slice_in_dim(x, sums, start, 0)
      errors = entries - _rounded(level, scale) if self.error_feedback else None
      return after, (bitset.count_true(level != 0), errors)

    # A zero of the padding has level ⌊0 + u⌋ = 0.
    padded = jnp.pad(acc, (0, count * length - n))
    total, (selected, errors) = varying.scan(exchange, padded, iota(count))
    total = total[:n]
    counters = self.count(
      comm,
      n,
      selected=jnp.sum(selected, dtype=jnp.int32),
      delivered=bitset.count_true(total != 0),
    )
    residual = errors.reshape(-1)[:n] if self.error_feedback else None
    return Reduced(
      total, state._replace(residual=residual, shared=state.shared + 1), counters
    )

  def _add(
    self,
    scales: jax.Array,
    packed: jax.Array,
    length: int,
  ) -> jax.Array:
    """Σ_w scale_w · level_w, f32[length], of f32[P] scales and u32[P, words] packed levels."""

    def add(total: jax.Array, worker: tuple) -> tuple[jax.Array, None]:
      scale, words = worker
      codes = fields.unpack(words[None], self.bits, length)[0]
      return total + _rounded(codes.astype(jnp.int32) - self.levels, scale), None

    # Starts from −0: −0 + x is x for every x, but 0 + −0 is 0.
    nothing = jnp.full(length, -0.0, jnp.float32)
    return varying.scan(add, nothing, (scales, packed))[0]


def scale_of(x: jax.Array, levels: int) -> jax.Array:
  """‖x‖ / levels, f32[]; NaN or Inf if x is not finite.

  Magnitudes are rounded up to so few significant bits that their squares are exact, and
  the scale so that its product with a level is: every program adds the same bits, with
  fused multiply-add and without. The mean of scale · level is x for every scale that is
  large enough, so rounding the scale up does not bias it.

  Args:
    x: f32[n].
    levels: s, the largest level.

  Example:
    >>> scale_of(jnp.array([0.0, -2.0]), levels=4)
    Array(0.5, dtype=float32)
  """
  largest = largest_magnitude(x)
  # Entries are divided by the largest, so that squares neither overflow nor underflow.
  # XLA may multiply by the reciprocal, and reciprocals below 2⁻¹²⁶ are flushed to 0.
  divisor = jnp.minimum(jnp.where(largest == 0, 1.0, largest), 2.0**126)
  # `round_mantissa_up` rounds up so that the last `bits` of 24 significant bits are 0.
  # A number of 12 significant bits has an exact square.
  square = lambda entries: round_mantissa_up(jnp.abs(entries / divisor), bits=12) ** 2
  norm = divisor * jnp.sqrt(ordered_sum(x, term=square))
  # A level has up to b = `levels.bit_length()` bits: its product with a scale of 24 − b
  # significant bits is exact.
  return round_mantissa_up(norm / levels, bits=levels.bit_length())


def quantize(
  drawn: jax.Array, x: jax.Array, scale: jax.Array, levels: int
) -> jax.Array:
  """Levels i32 like x, −levels … levels: `sign(x) ⌊|x| / scale + drawn⌋`, so that the mean of scale · level is x.

  Args:
    drawn: f32 like x, random numbers, uniform in [0, 1).
    x: f32, of any shape.
    scale: f32[], at least the largest `|x|` divided by `levels`; 0 if all x are 0.
    levels: the largest level.

  Example:
    >>> quantize(jnp.array([0.7, 0.7]), jnp.array([0.0, -2.0]), jnp.float32(0.5), levels=4)
    Array([ 0, -4], dtype=int32)
  """
  # Scale 0 means x = 0, whose levels are 0 for any divisor.
  divisor = jnp.where(scale == 0, 1.0, scale)
  level = jnp.floor(jnp.abs(x) / divisor + drawn)
  # Rounding in f32 may give levels + 1 for the largest `|x|`.
  return (jnp.sign(x) * jnp.minimum(level, levels)).astype(jnp.int32)


def _rounded(level: jax.Array, scale: jax.Array) -> jax.Array:
  """The products of levels, i32, and a scale, f32 like the levels; exact, since the scale has few significant bits."""
  return level.astype(jnp.float32) * scale
