"""1-bit all-reduce: the sign of each entry and a scale for each block, before and after the sum (1-bit Adam, 2021).

Sending signs and adding the rounding errors to the next gradient is 1-bit SGD (Seide et al., 2014). Rounding the sums,
too, so that a worker receives one bit an entry and not P − 1, is the compressed all-reduce of 1-bit Adam (Tang et al.).
The messages of worker 0 of four:

    scatter      signs of its region 1 -> worker 1, of region 2 -> worker 2, of region 3 -> worker 3
    all-gather   stride 1, 2: the signs of the sums of regions, as in SparDL
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.collectives._base import Collective
from jaxsparse.comm import all_gather, exchange, in_rank_order, schedules
from jaxsparse.sparse.bitset import BITS
from jaxsparse.sparse.sums import round_mantissa, row_sums, unit_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, State

_BLOCK = 1024  # entries, so that scales add a bit to every 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(Collective):
  """Sends the sign of every entry and a scale for each block, and keeps the rounding errors in residuals (1-bit Adam).

  The gradient is divided into P regions, each owned by one worker, and regions into blocks of at most 1,024 entries.
  With `sgn(0) = 1`, the mean taken over a block b, and `acc_w = gradient_w + residual_w`,

      Q(x) = sgn(x) · √(mean x²)
      sum  = acc_owner + Σ_{w ≠ owner} Q(acc_w)                 at the owner of a region
      total = Q(sum)                                            on every worker
      next residual_w = acc_w − Q(acc_w),   of the owner  sum − Q(sum)

  so that `total + Σ_w residual_w` is what entered, to rounding. This is only the compressor of 1-bit Adam, without its
  dense warm-up, its frozen second moment and its momentum; and 1-bit Adam has one scale for a message, rounds the
  owner's own entries, too, and keeps the errors of sums apart. Q leaves 40 % of the energy of normal entries. The same
  gradient in every step leaves a residual of some three times its norm; with EF-SignSGD's scale, the mean of `|x|`, it
  would be more than ten times that.

  A step sends P − 1 + ⌈log₂P⌉ messages. They have a bit for each entry and a word for each block, both
  `2 (P − 1)/P` times: for n much larger than 1,024 P, 1/31 of the words of a dense all-reduce.

  Every entry of a block is delivered with the same magnitude, and none as zero. So Adam cannot learn from totals how
  much each gradient varies: exchange the **updates** of each worker's own optimizer, in `js.local_steps`. Parameters
  that must not move need `special={"their names": "dense"}`, and so do leaves with much smaller updates than those
  beside them, since blocks do not end where leaves do.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("onebit", jnp.array([[1.0, -7.0], [0.0, 0.0]]))
    >>> out.total, out.residuals[0]
    (Array([ 5., -5.], dtype=float32), Array([-4., -2.], dtype=float32))
  """

  decay: float = 1.0

  def init(self, n: int, size: int) -> State:
    return State(residual=jnp.zeros(n, jnp.float32))

  def cost(self, n: int, size: int) -> Cost:
    _, blocks, block = _shape(n, size)
    return Cost(size - 1 + len(schedules.strides(size)), 2 * (size - 1) * blocks * (block // BITS + 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, size = grads.size, comm.size
    shape = _shape(n, size)
    acc = jnp.pad(grads + state.residual, (0, math.prod(shape) - n)).reshape(shape)
    counts = _counts(n, shape)
    inverse_counts = jnp.asarray(1 / np.maximum(counts, 1), jnp.float32)
    is_owner = [comm.rank == worker for worker in range(size)]

    def own_region(regions: jax.Array) -> jax.Array:
      return jax.lax.dynamic_index_in_dim(regions, comm.rank, keepdims=False)

    message = encode(acc, inverse_counts)
    received = exchange(comm, message)
    added = [jnp.where(owner, own_region(acc), decode(row)) for owner, row in zip(is_owner, received, strict=True)]
    within = jnp.arange(shape[2], dtype=jnp.int32)[None] < own_region(jnp.asarray(counts))[:, None]
    region = jnp.where(within, functools.reduce(jnp.add, added), 0.0)
    sums = encode(region, own_region(inverse_counts))
    total = decode(in_rank_order(comm, all_gather(comm, sums))).reshape(-1)[:n]

    # Region by region: XLA on CPU takes three times as long for a select over all of them.
    left = [
      jnp.where(owner, region, acc[worker]) - decode(jnp.where(owner, sums, message[worker]))
      for worker, owner in enumerate(is_owner)
    ]
    ends = [min(end * region.size, n) for end in range(size + 1)]
    residual = [part.reshape(-1)[: end - start] for part, start, end in zip(left, ends[:-1], ends[1:], strict=True)]
    words = self.cost(n, size).words
    counters = Counters(words, words, selected=n, delivered=n)
    return Reduced(total, state._replace(residual=jnp.concatenate(residual)), counters)


def _shape(n: int, size: int) -> tuple[int, int, int]:
  """Regions, their blocks and the entries of one, whole words of signs: the last blocks of a vector are padded."""
  length = -(-n // size)
  blocks = max(1, -(-length // _BLOCK))
  return size, blocks, BITS * max(1, -(-length // (BITS * blocks)))


def _counts(n: int, shape: tuple[int, int, int]) -> np.ndarray:
  """The entries of each block that are no padding, i32[regions, blocks]."""
  regions, blocks, block = shape
  starts = block * np.arange(regions * blocks, dtype=np.int64)
  return np.clip(n - starts, 0, block).reshape(regions, blocks).astype(np.int32)


def encode(x: jax.Array, inverse_counts: jax.Array) -> jax.Array:
  """Signs and scales of blocks f32[..., block]: u32[..., block/32 + 1], the last word the scale.

  Args:
    x: the blocks; zeros where they are padded.
    inverse_counts: f32[...], 1 / the entries of each block that are no padding.

  Example:
    >>> words = encode(jnp.array([-7.0, 1.0] * 16), jnp.float32(1 / 32))
    >>> decode(words)[:3]
    Array([-5.,  5., -5.], dtype=float32)
  """
  flat = x.reshape(-1, x.shape[-1])
  unit = unit_of(jnp.max(jnp.abs(flat), axis=1))
  squares = row_sums(round_mantissa((flat / unit[:, None]) ** 2)).reshape(inverse_counts.shape)
  scale = round_mantissa(unit.reshape(inverse_counts.shape) * jnp.sqrt(squares * inverse_counts))
  signs = (x < 0).reshape(*inverse_counts.shape, -1, BITS)
  words = jnp.sum(jnp.where(signs, _bits(signs.ndim), jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
  return jnp.concatenate([words, jax.lax.bitcast_convert_type(scale, jnp.uint32)[..., None]], axis=-1)


def decode(words: jax.Array) -> jax.Array:
  """Q: the scale of a block with the signs of its entries, f32[..., block] of u32[..., block/32 + 1]."""
  signs = (words[..., :-1, None] & _bits(words.ndim + 1)) != 0
  scale = jax.lax.bitcast_convert_type(words[..., -1], jnp.float32)[..., None, None]
  return jnp.where(signs, -scale, scale).reshape(*words.shape[:-1], -1)


def _bits(axes: int) -> jax.Array:
  """The bits of a word along the last of so many axes."""
  return (jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)).reshape(*[1] * (axes - 1), BITS)
