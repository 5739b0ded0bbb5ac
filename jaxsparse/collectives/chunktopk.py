"""ChunkTopk: an all-gather of the largest entries of each chunk, in 2 bits a value if wanted (SparseLoCo).

Every chunk of 4,096 entries sends equally many, so that no layer with small gradients
starves, and the index of an entry is its position in a chunk. Bruck's all-gather sends
⌈log₂P⌉ messages, and the words of one worker P − 1 times.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.arrays import iota
from jaxsparse.collectives._base import SparseCollective, Traits
from jaxsparse.collectives._messages import Writer, count_real, words_of
from jaxsparse.comm import in_rank_order, schedules
from jaxsparse.select.accumulator import Pending, SparseReduced
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.chunks import top_k_of_chunks
from jaxsparse.select.exact import SHORT
from jaxsparse.sparse.codec import codec_of
from jaxsparse.sparse.values import FORMATS
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTopk(SparseCollective):
  """Sends the largest entries of each chunk of each worker to all others (the exchange of SparseLoCo).

  The gradient, all leaves one after the other, is cut into chunks. With `acc_w =
  gradient_w + residual_w` and q the rounding of `wire`, the total is `Σ_w q(top_k of
  each chunk of acc_w)`, added in rank order, and the next residual is what was not sent
  or rounded off. Of each chunk ⌈ρ · chunk⌉ or ⌈k · chunk / n⌉ entries are sent.
  Ablation: `combine="contributors"`.

  The published code cuts each matrix into tiles of 64 × 64 and rounds the values of a
  whole leaf together; here chunks are consecutive entries, and each is rounded by
  itself, which takes four more words a chunk and is more precise.

  Args:
    chunk: entries of a chunk, 1 … 16384.
    wire: the format of a value; indices are sent as a set, in 8 bits each at 64 of
      4,096. "f32" sends values unchanged. "2bit" sends the number of one of four
      values, the means of bins of 1.5 standard deviations of the values that the chunk
      sends (SparseLoCo); "int4" sends a sign and the number of one of 7 magnitudes.
    combine: "workers" is the sum over workers. "contributors", of the authors' codes,
      is P times the mean over the workers that sent an index: it does **not** conserve
      (Law C), where few send it, it is up to P times as large.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("chunktopk", jnp.array([[1.0, 2.0, 0.3, 0.1]]), k=2, chunk=2).total
    Array([0. , 2. , 0.3, 0. ], dtype=float32)
  """

  chunk: int = 4096
  wire: Literal["f32", "int4", "2bit"] = "f32"
  combine: Literal["workers", "contributors"] = "workers"
  ranges = (("chunk", 1, SHORT),)

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(
      super().traits,
      conserves=self.combine == "workers",
      scaled=FORMATS[self.wire].row_words > 0,
      # A chunk of fewer non-zero entries than slots sends zeros, too.
      moves_zeros=self.wire == "2bit",
    )

  def chunks(self, n: int) -> tuple[int, int, int]:
    """The number of chunks, their length, and the entries that each sends."""
    length = min(self.chunk, n)
    # `entries(m)` is ⌈ρ m⌉, or k if k ≤ m. So this is ⌈ρ · length⌉ by a density, else
    # ⌈k · length / n⌉.
    m = length if self.k is None else n
    k_chunk = -(-self.entries(m) * length // m)
    return -(-n // length), length, k_chunk

  def cost(self, n: int, size: int) -> Cost:
    rows, length, k_chunk = self.chunks(n)
    return Cost(
      len(schedules.strides(size)),
      words_of(codec_of(self.wire, length), size, k_chunk, rows),
    )

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    _, length, k_chunk = self.chunks(grads.size)
    chosen = top_k_of_chunks(LazySum((grads, state.residual)), length, k_chunk)
    # total = Σ_w q(top_k of each chunk of acc_w). The pending residual is acc_w, with
    # the errors of q in place of the sent entries.
    total, _, errors, counters = self.exchange(comm, chosen, grads.size)
    return SparseReduced(
      total, state._replace(residual=Pending(grads, state.residual, errors)), counters
    )

  def exchange(
    self, comm: Comm, chosen: Sparse, n: int
  ) -> tuple[Sparse, Sparse, Sparse, Counters]:
    """Sends the chosen entries of each chunk of a vector of n, and adds those of all workers.

    Args:
      comm: the workers.
      chosen: [chunks, k_chunk] entries of this worker, with indices relative to their
        chunk.
      n: length of the vector.

    Returns:
      (total, sent, errors, counters): the entries of the total; those of this worker as
      receivers decode them, and what was rounded off of each, in the same slots. All
      three have flat indices, [c]; n is an empty slot.
    """
    rows, length, k_chunk = self.chunks(n)
    # the flat index of the first entry of each chunk
    starts = length * iota(rows)[:, None]
    writer = Writer(codec_of(self.wire, length))
    # A message has all chunks of a worker as its rows, and is number 0 of the step.
    message, errors = writer.encode(chosen, 0)

    def flat(entries: Sparse) -> Sparse:
      """Entries [rows, k_chunk] with flat indices, [rows · k_chunk]; those of padding are empty slots."""
      shifted = entries._replace(indices=entries.indices + starts)
      inside = sparse.where(shifted.indices < n, shifted, n)
      return jax.tree.map(jnp.ravel, inside)

    shape = comm.size, rows, k_chunk
    gathered = writer.gather(comm, message)
    received = jax.tree.map(lambda x: x.reshape(shape), gathered)
    # in rank order, so that each worker adds in the same order (Law R)
    by_worker = jax.vmap(flat)(in_rank_order(comm, received))
    total = sparse.merge(by_worker, n)
    if self.combine == "contributors":
      # The number of workers that sent each index of the total, in its slots: the sum
      # of ones in place of values. Empty slots have 0, which must not be divided by.
      ones = by_worker._replace(values=jnp.ones_like(by_worker.values))
      counts = jnp.maximum(sparse.merge(ones, n).values, 1.0)
      # Not P · (sum / count): XLA may merge the factor P with the later division by P,
      # in some programs only.
      total = total._replace(values=total.values * (comm.size / counts))
    counters = self.count(
      comm,
      n,
      selected=count_real(n, length, k_chunk),
      delivered=jnp.count_nonzero(total.values),
      slots=rows * k_chunk,
    )
    return total, flat(writer.codec.decode(message)), flat(errors), counters
