"""1-bit all-reduce: the sign of each entry and a scale for each block, before and after the sum (1-bit Adam, 2021).

Sending signs and adding the rounding errors to the next gradient is 1-bit SGD (Seide et
al., 2014). Rounding the sums, too, so that a worker receives one bit an entry and not P
− 1, is the compressed all-reduce of 1-bit Adam (Tang et al.). The messages of worker 0
of four:

    scatter      signs of its region 1 -> worker 1, of region 2 -> worker 2, of region 3 -> worker 3
    all-gather   stride 1, 2: the signs of the sums of regions, as in SparDL

The layout of signs, and how they are computed in few passes over memory, is in
`jaxsparse/low_bit/blocks.py`.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from jaxsparse.collectives._base import Collective, Traits
from jaxsparse.comm import all_gather, in_rank_order, schedules
from jaxsparse.low_bit.blocks import BitBlocks
from jaxsparse.low_bit.chunked import CHUNK
from jaxsparse.low_bit.result import Codes, CodesReduced
from jaxsparse.types import Comm, Cost, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(Collective):
  """Sends the sign of every entry and a scale for each block, and keeps the rounding errors in residuals (1-bit Adam).

  The gradient is divided into P regions, each owned by one worker, and regions into
  blocks of at most 4,096 entries. With `sgn(0) = 1`, the mean taken over a block b, and
  `acc_w = gradient_w + residual_w`,

      Q(x) = sgn(x) · √(mean x²)
      sum  = acc_owner + Σ_{w ≠ owner} Q(acc_w)                 at the owner of a region
      total = Q(sum)                                            on every worker
      next residual_w = acc_w − Q(acc_w),   of the owner  sum − Q(sum)

  so that `total + Σ_w residual_w` is what entered, to rounding. The mean square is that of `x` to 12 significant bits.
  This is only the compressor of 1-bit Adam, without its dense warm-up, its frozen second moment and its momentum; and
  1-bit Adam has one scale for a message, rounds the owner's own entries, too, and keeps the errors of sums apart. Q
  leaves 40 % of the energy of normal entries. The same gradient in every step leaves a residual of some three times its
  norm; with EF-SignSGD's scale, the mean of `|x|`, it would be more than ten times that.

  A step sends P − 1 + ⌈log₂P⌉ messages. They have a bit for each entry and a word for
  each block, both `2 (P − 1)/P` times: for n much larger than 4,096 P, 1/32 of the
  words of a dense all-reduce.

  Every entry of a block is delivered with the same magnitude, and none as zero. So Adam
  cannot learn from totals how much each gradient varies: exchange the **updates** of
  each worker's own optimizer, in `js.local_steps`. Parameters that must not move need
  `special={"their names": "dense"}`, and so do leaves with much smaller updates than
  those beside them, since blocks do not end where leaves do.

  Args:
    decay: as in `js.SparseCollective`.

  Attributes:
    bits: of a code, 1; an option of the subclass `NBit` (`js.nbit_transform`).

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("onebit", jnp.array([[1.0, -7.0], [0.0, 0.0]]))
    >>> out.total, out.residuals[0]
    (Array([ 5., -5.], dtype=float32), Array([-4., -2.], dtype=float32))
  """

  bits: typing.ClassVar[int] = 1

  decay: float = 1.0

  @property
  def traits(self) -> Traits:
    # With 4 and 8 bits, 0 is among the magnitudes, so that zeros stay zeros.
    return dataclasses.replace(super().traits, scaled=True, moves_zeros=self.bits <= 2)

  def init(self, n: int, size: int) -> State:
    return State(residual=jnp.zeros(n, jnp.float32))

  def slots(self, n: int, size: int) -> int:
    layout = BitBlocks.of(n, size, self.bits)
    # entries of the blocks of all regions, with padding
    return layout.count * layout.block

  def cost(self, n: int, size: int) -> Cost:
    # The scatter sends a region to each other worker, and Bruck's all-gather P − 1
    # regions in ⌈log₂P⌉ messages; `words` are those of one region.
    return Cost(
      size - 1 + len(schedules.strides(size)),
      2 * (size - 1) * BitBlocks.of(n, size, self.bits).words,
    )

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    rank = comm.rank
    blocks = BitBlocks.of(n, comm.size, self.bits)
    # addends of acc_w, which `blocks` adds where it reads them
    acc = grads, state.residual
    # Q(acc_w) of all blocks, from block 0 on; region v goes to worker v. Codes and
    # scales are sent. `steps`, f32[blocks, 1] or [blocks, columns], are the decoded
    # scales, from which the residual is computed.
    codes, scales, steps = blocks.encode(acc, jnp.int32(0), blocks.count)
    received = comm.all_to_all(blocks.pack(codes, scales))
    # sum = acc_owner + Σ_{w ≠ owner} Q(acc_w)
    sums = blocks.sum_region(acc, rank, received)
    # total = Q(sum) of the own region, whose first block is `first`. `skip` passes over
    # the margin of CHUNK blocks before the region in `sums`; another one is behind it.
    first = rank * blocks.region
    *summed, steps_of_sums = blocks.encode((sums,), first, blocks.region, skip=CHUNK)
    # Steps of all that this worker rounded: acc_w, and in the own region the sum.
    kept = jax.lax.dynamic_update_slice(steps, steps_of_sums, (first, jnp.int32(0)))
    # `summed` are the codes and scales of one region: one message
    messages = all_gather(comm, blocks.pack(*summed)[0])
    # from here on the codes and the steps of the total, of all regions
    codes, steps = blocks.unpack(in_rank_order(comm, messages))
    # next residual_w = acc_w − Q(acc_w), of the owner  sum − Q(sum), by `Codes.finish`
    total = Codes(blocks, grads, rank, sums, kept, codes, steps)
    return CodesReduced(total, state, self.count(comm, n, selected=n, delivered=n))
