"""A pass over blocks of long vectors, a few at a time, whose results are written one after the other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.comm import ordering

CHUNK = 8  # blocks at a time, few enough for the cache of a CPU
Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Pass:
  """Computes blocks by `compute`, some at a time, and writes them in place into flat arrays, the results.

  Attributes:
    compute: takes (start, count, results) and returns an array for each of the results,
      of `count` blocks from block `start` on; `start` is an int where blocks may be
      padded, else i32[]. `results` are the flat arrays as they are so far.
    unpadded: number of blocks that are not padded.
    count: number of all blocks.
    sizes: entries of a block in each of the results.
    skip: blocks before the first in each of the results.
    padded_apart: whether a GPU computes the blocks that may be padded in a pass of
      their own, and copies the results: one pass would compare each entry with the end
      of the vector, and take four times as long.
  """

  compute: Callable[[jax.Array | int, int, Arrays], Arrays]
  unpadded: int
  count: int
  sizes: tuple[int, ...]
  skip: int = 0
  padded_apart: bool = False

  @property
  def run(self) -> Callable[..., Arrays]:
    """The function of flat results, f32[...] or u32[...] each, that returns them written.

    A GPU computes all blocks at once. Others take eight at a time, and write them in
    the next step of the loop, so that XLA stores them in the cache: in the order of a
    flat vector it would not vectorize.
    """
    # At once signs take 4.6 times the CPU time; the loop 3 times the kernels and 1.8
    # times the bytes.
    return _compat.by_platform(gpu=self._at_once, default=self._in_loop)

  def _in_loop(self, *results: jax.Array) -> Arrays:
    """The results after all blocks: whole chunks of 8 blocks without padding in a loop, then the rest at once."""
    steps = self.unpadded // CHUNK

    # A chunk is written in the next step of the loop, from the cache (see `run`).
    def step(chunk: jax.Array, carry: Any) -> Any:
      before, computed = carry
      # The first block of the chunk that the last step computed, written now. In the
      # first step `computed` is chunk 0 of the results themselves: nothing changes.
      last = jnp.maximum(chunk - 1, 0) * CHUNK
      written = self._write(before, last, computed)
      return written, self.compute(chunk * CHUNK, CHUNK, written)

    if steps:
      shapes = jax.eval_shape(lambda: self.compute(jnp.int32(0), CHUNK, results))
      first = tuple(
        x[self.skip * size :][: shape.size].reshape(shape.shape)
        for x, size, shape in zip(results, self.sizes, shapes, strict=True)
      )
      results, last = varying.fori_loop(0, steps, step, (results, first))
      results = self._write(results, (steps - 1) * CHUNK, last)
    start = steps * CHUNK
    rest = self.count - start
    if not rest:
      return results
    # `start` is an int: some of these blocks may be padded.
    return self._write(results, start, self.compute(start, rest, results))

  def _at_once(self, *results: jax.Array) -> Arrays:
    """The results after all blocks, computed at once; with `padded_apart`, blocks without padding first."""
    if not (self.padded_apart and 0 < self.unpadded < self.count):
      return self._write(results, 0, self.compute(0, self.count, results))
    for start, end in ((0, self.unpadded), (self.unpadded, self.count)):
      new = jax.lax.optimization_barrier(self.compute(start, end - start, results))
      results = self._write(results, start, new)
    return results

  def _write(self, results: Arrays, start: jax.Array | int, new: Arrays) -> Arrays:
    """`results` with `new`, what `compute` returns for blocks from `start` on, written in place."""
    written = list[jax.Array]()
    for result, x, size in zip(results, new, self.sizes, strict=True):
      begin = jnp.int32((self.skip + start) * size)
      # Outside of the loop `start` is an int, and XLA may fuse the computation of `new`
      # with the writes. So each write waits for the one before.
      if written and isinstance(start, int):
        begin = ordering.depend_on(written[-1][:1], begin)
      flat = x.reshape(-1)
      written.append(jax.lax.dynamic_update_slice(result, flat, (begin,)))
    return tuple(written)
