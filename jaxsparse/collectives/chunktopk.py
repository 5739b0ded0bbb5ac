"""ChunkTopk: an all-gather of the largest entries of each chunk, in 2 bits a value if wanted (SparseLoCo).

Every chunk of 4,096 entries sends equally many, so that no layer with small gradients starves, and the index of an
entry is its position in a chunk. Bruck's all-gather sends ⌈log₂P⌉ messages, and the words of one worker P − 1 times.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective, check_whole
from jaxsparse.comm import all_gather, in_rank_order, topology
from jaxsparse.select import top_k
from jaxsparse.sparse.two_bit import BINS, quantized
from jaxsparse.types import Comm, Cost, Counters, Pending, Reduced, Sparse, State

_LONGEST = 1 << 14  # entries of a chunk: a position takes the upper 14 of 16 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTopk(SparseCollective):
  """Sends the largest entries of each chunk of each worker to all others (the exchange of SparseLoCo).

  The gradient, all leaves one after the other, is cut into chunks. With `acc_w = gradient_w + residual_w` and q the
  rounding of `wire`, the total is `Σ_w q(top_k of each chunk of acc_w)`, added in rank order, and the next residual is
  what was not sent or rounded off. The state is the residual, f32[n] a worker.

  The published code cuts each matrix into tiles of 64 × 64 and rounds the values of a whole leaf together; here chunks
  are consecutive entries, and each is rounded by itself, which takes four more words a chunk and is more precise.

  Args:
    density: ρ in (0, 1]; each worker sends ⌈ρ · chunk⌉ entries of each chunk.
    k: the number of entries of all chunks instead, 1 … n; of each chunk it is ⌈k · chunk / n⌉.
    chunk: entries of a chunk, 1 … 16384.
    wire: the format of an entry. "f32" is an index and a value, two words. "2bit" is half a word: a position and the
      number of one of four values, the means of bins of 1.5 standard deviations of the values that the chunk sends
      (SparseLoCo).
    combine: "workers" is the sum over workers. "contributors", of the authors' codes, is P times the mean over the
      workers that sent an index: it does **not** conserve (Law C), where few send it, it is up to P times as large.

  Raises:
    ValueError: for a density, k, chunk or another option outside their choices.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("chunktopk", jnp.array([[1.0, 2.0, 0.3, 0.1]]), k=2, chunk=2).total
    Array([0. , 2. , 0.3, 0. ], dtype=float32)
  """

  chunk: int = 4096
  wire: Literal["f32", "2bit"] = "f32"
  combine: Literal["workers", "contributors"] = "workers"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_whole(self.name, 1, _LONGEST, chunk=self.chunk)

  @property
  def conserves(self) -> bool:
    return self.combine == "workers"

  def chunks(self, n: int) -> tuple[int, int, int]:
    """The number of chunks, their length, and the entries that each sends."""
    length = min(self.chunk, n)
    share = self.entries(length) if self.k is None else -(-self.entries(n) * length // n)
    return -(-n // length), length, share

  def slots(self, n: int, size: int) -> int:
    rows, length, share = self.chunks(n)
    return max(super().slots(n, size), rows * length, size * rows * share)

  def cost(self, n: int, size: int) -> Cost:
    rows, _, share = self.chunks(n)
    strides = topology.strides(size)
    chunks = [rows * min(stride, size - stride) for stride in strides]  # of a message
    words = (2 * each * share if self.wire == "f32" else -(-each * share // 2) + BINS * each for each in chunks)
    return Cost(len(strides), sum(words))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, (rows, length, share) = grads.size, self.chunks(grads.size)
    acc = jnp.pad(grads + state.residual, (0, rows * length - n)).reshape(rows, length)
    chosen = top_k(acc, share)
    message = self._encoded(chosen)
    received = in_rank_order(comm, all_gather(comm, message))
    bags = jax.vmap(lambda one: self._decoded(one, n, length))(received)
    total = sparse.merge(bags, n)
    if self.combine == "contributors":
      senders = sparse.merge(bags._replace(values=jnp.ones_like(bags.values)), n).values
      total = total._replace(values=comm.size * (total.values / jnp.maximum(senders, 1.0)))
    mine = self._decoded(message, n, length)
    errors = mine._replace(values=chosen.values.reshape(-1) - mine.values)
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=rows * share, delivered=jnp.count_nonzero(total.values))
    return Reduced(total, state._replace(residual=Pending(grads, state.residual, errors)), counters)

  def _encoded(self, chosen: Sparse) -> Any:
    """The message of the entries [rows, share] of all chunks."""
    if self.wire == "f32":
      return chosen
    codes, table = quantized(chosen.values)
    return (chosen.indices << 2 | codes).astype(jnp.uint16), table

  def _decoded(self, message: Any, n: int, length: int) -> Sparse:
    """The entries [rows · share] of a message, with flat indices; those of padding are empty slots."""
    if self.wire == "f32":
      chosen = message
    else:
      both, table = message[0].astype(jnp.int32), message[1]
      chosen = Sparse(both >> 2, jnp.take_along_axis(table, both & 3, axis=1))
    flat = chosen.indices + length * jnp.arange(len(chosen.indices), dtype=jnp.int32)[:, None]
    return jax.tree.map(jnp.ravel, sparse.where(flat < n, Sparse(flat, chosen.values), n))
