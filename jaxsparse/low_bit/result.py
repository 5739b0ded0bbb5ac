"""The result of an exchange of codes: one pass over the vector writes the mean and the next residual."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.arrays import iota
from jaxsparse.comm import ordering
from jaxsparse.low_bit import scales as scaling
from jaxsparse.low_bit.blocks import ROWS, BitBlocks, cut
from jaxsparse.low_bit.chunked import CHUNK, Arrays, Pass
from jaxsparse.types import Commit, Deferred, Rounding


class Codes(NamedTuple):
  """The total in codes, and all that the next residual is computed from: a `Formula`.

  Attributes:
    blocks: the layout.
    grads: f32[n], of this worker.
    rank: of the worker, i32[].
    sums: f32[m], the sums of its region, with a margin of CHUNK blocks before and
      behind it, as `BitBlocks.sum_region` returns them.
    kept: f32[blocks, columns], for signs f32[blocks, 1]: the steps by which this worker
      rounded its blocks before it sent them; in the own region, those of the sums.
    codes: of the total, u32[blocks, width].
    values: the steps of the total, like `kept`; the total is linear in them.
  """

  blocks: BitBlocks
  grads: jax.Array
  rank: jax.Array
  sums: jax.Array
  kept: jax.Array
  codes: jax.Array
  values: jax.Array

  def finish(
    self,
    values: jax.Array,
    finite: jax.Array,
    residual: jax.Array,
    decay: float,
    error: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """The total and the next residual, f32[n] each, as `Formula.finish` returns them.

    Args:
      values: the steps of the total; for the mean divided by P, and perhaps rounded.
      finite: bool[], false in a step that all workers skip.
      residual: f32[n], before the step.
      decay: the factor of the next residual.
      error: what was rounded off `values`, of the same shape, which stays in the
        residual; None if they are not rounded.
    """
    blocks = self.blocks
    # Blocks with entries. With few entries the last regions may have none.
    used = -(-blocks.n // blocks.block)
    # factors from magnitudes to levels; not read for signs, which have no levels
    inverses = self.kept
    if blocks.bits > 1:
      inverses = scaling.inverses(self.kept, blocks.bits)

    def write(start: jax.Array | int, count: int, buffers: Arrays) -> Arrays:
      """(next residual, update) of `count` blocks from `start` on; `buffers` are the residual and the gradient."""
      # A GPU takes all blocks in one call, other devices only those of a short
      # vector, of fewer than 8 blocks without padding.
      at_once = isinstance(start, int) and count == used
      before, entered = self._read(start, count, buffers, at_once)
      shape = (count, ROWS, blocks.columns)
      # the step of each entry
      of_entries = lambda steps: blocks.trim(
        jnp.broadcast_to(cut(steps, start, count)[:, None], shape), start
      )
      # the entries of the total, decoded with given steps
      codes = cut(self.codes, start, count)
      decode = lambda steps: blocks.trim(
        blocks.decode(codes, cut(steps, start, count)), start
      )
      # in the own region the sum less Q of it, elsewhere gradient + residual less what
      # was sent
      after = entered - blocks.round(
        entered, of_entries(self.kept), of_entries(inverses)
      )
      if error is not None:
        after = after + decode(error)
      after = jnp.where(finite, after if decay == 1 else decay * after, before)
      apply = finite
      # The update is written over the gradient, from which the residual is computed:
      # the residual comes first.
      if at_once:
        after = jax.lax.optimization_barrier(after)
        apply = ordering.depend_on(after[:1], finite.astype(jnp.int32)) > 0
      return after, jnp.where(apply, decode(values), 0.0)

    # `n // block` blocks have no padding. Both results have `block` entries a block.
    last = Pass(write, blocks.n // blocks.block, used, (blocks.block,) * 2)
    after, update = last.run(residual, self.grads)
    return update, after

  def _read(
    self, start: jax.Array | int, count: int, buffers: Arrays, at_once: bool
  ) -> tuple[jax.Array, jax.Array]:
    """The residual of some blocks, and what was to be sent: the sums in the own region, else gradient + residual.

    Args:
      start: the first block; an int where the last blocks may have padding.
      count: number of blocks.
      buffers: residual and gradient, f32[n] each, over which the results are written;
        these blocks have not been written yet.
      at_once: whether these are all blocks.

    Returns:
      Two arrays f32[count, 32, columns]; flat, without padding, if `start` is an int.
    """
    blocks = self.blocks
    size = blocks.block
    # the first of these blocks, counted from the own region's first
    first = start - self.rank * blocks.region
    if at_once:
      residual, grads = buffers
      # Every region gets a copy of the sums of the own region, and `is_own` below keeps
      # the copy of the own region alone.
      own_region = self.sums[blocks.margin : -blocks.margin]
      region = jnp.tile(own_region, blocks.count // blocks.region)[: count * size]
    else:
      if isinstance(start, int):
        # By a gather in place of a slice: XLA stores its result, so that the buffer
        # that it reads can be written in place.
        rest = jnp.arange(start * size, blocks.n, dtype=jnp.int32)
        residual, grads = (x[rest] for x in buffers)
      else:
        flat = [cut(x, start * size, count * size) for x in buffers]
        residual, grads = (x.reshape(count, ROWS, -1) for x in flat)
      # The own region is behind the margin of CHUNK blocks. What is read for other
      # blocks is not used (`is_own`), so the slice is clipped to the array.
      inside = jnp.clip(first + CHUNK, 0, blocks.region + CHUNK)
      region = cut(self.sums, inside * size, count * size)
    region = region.reshape(count, ROWS, -1)
    block = first + iota(count)
    is_own = ((block >= 0) & (block < blocks.region))[:, None, None]
    is_own = blocks.trim(jnp.broadcast_to(is_own, region.shape), start)
    return residual, jnp.where(is_own, blocks.trim(region, start), grads + residual)


class CodesReduced(Deferred):
  """The result of an exchange of codes; its `total` is `Codes`."""

  def mean(self, divisor: int, rounding: Rounding | None) -> tuple[jax.Array, Commit]:
    """(mean, commit) as `Reduced.mean`: the mean of the steps, or of the entries if these have to be rounded.

    Signs of one dtype have their steps rounded in place of their entries.
    """
    codes: Codes = self.total
    # An entry of signs is plus or minus the step of its block, so that rounding the
    # step rounds the entries. With several dtypes, or more bits, it would not.
    are_signs = codes.blocks.bits == 1
    if not (rounding and rounding.is_uniform and are_signs):
      return super().mean(divisor, rounding)
    exact = codes.values / divisor
    mean = rounding(exact)
    return mean, functools.partial(codes.finish, mean, error=exact - mean)
