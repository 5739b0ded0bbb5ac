"""MiCRO: each worker selects in a part of the gradient of its own, and all workers deliver there (Yoon & Oh, 2023).

An all-gather of the indices, no two of which are equal, and an all-reduce of the
values: 3⌈log₂P⌉ messages and 3 k (P − 1)/P words. Selection reads n/P entries; nothing
that a worker has accumulated at a selected index is left.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.arrays.flatten import all_finite
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather, all_reduce_cost, in_rank_order, schedules
from jaxsparse.select.accumulator import SparseReduced, pending_zeros
from jaxsparse.select.blocks import LazySum
from jaxsparse.select.exact import top_k
from jaxsparse.types import Comm, Cost, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Micro(SparseCollective):
  """Delivers the entries of all workers at indices that each selects in a part of its own (MiCRO).

  The vector has P parts of ⌈n/P⌉ entries. In step t worker w selects the ⌈k/P⌉ largest
  of `acc_w = gradient_w + residual_w` in part (t + w) mod P. At these indices I, of all
  workers, the total is `Σ_w acc_w`, and the next residual of every worker is 0;
  elsewhere it is `acc_w`. The state is the residual, f32[n] a worker, and the number of
  the step.

  The paper selects what reaches a threshold, which it raises or lowers by at most 0.5 %
  a step; here it is the largest entries, so that each message has the same size.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("micro", jnp.array([[0.9, 0.1, 0.7, 0.0], [0.2, 0.6, 0.3, 0.4]]), k=2)
    >>> out.total, out.residuals[1]
    (Array([1.1, 0. , 0. , 0.4], dtype=float32), Array([0. , 0.6, 0.3, 0. ], dtype=float32))
  """

  def init(self, n: int, size: int) -> State:
    return super().init(n, size)._replace(shared=jnp.int32(0))

  def each(self, n: int, size: int) -> int:
    """The number of entries that a worker selects."""
    return -(-self.entries(n) // size)

  def cost(self, n: int, size: int) -> Cost:
    """Messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    quota = self.each(n, size)
    # an all-gather of the indices, one word each, and an all-reduce of the values
    values = all_reduce_cost(quota * size, size)
    return Cost(
      len(schedules.strides(size)) + values.messages, (size - 1) * quota + values.words
    )

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    quota = self.each(n, comm.size)
    acc = LazySum((grads, state.residual))
    length = -(-n // comm.size)
    # part (t + w) mod P; `shared` is the number t of the step
    start = (state.shared + comm.rank) % comm.size * length
    # Indices relative to the part, which is padded with zeros where it ends beyond n.
    largest = top_k(acc.window(start, length), quota).indices
    # flat indices; n where padding was selected
    chosen = jnp.minimum(start + largest, n)
    # no index twice, since parts do not overlap
    indices = jnp.sort(in_rank_order(comm, all_gather(comm, chosen)).reshape(-1))
    # A NaN or Inf that no worker selects would stay in the residual, so the worker then
    # sends NaN only.
    values = jnp.where(indices < n, acc.read_at(indices), 0.0)
    values = comm.all_reduce(jnp.where(all_finite(acc.values), values, jnp.nan))
    state = state._replace(
      residual=pending_zeros(acc, indices), shared=state.shared + 1
    )
    counters = self.count(
      comm,
      n,
      selected=jnp.count_nonzero(chosen < n),
      delivered=jnp.count_nonzero(indices < n),
      slots=quota,
    )
    return SparseReduced(Sparse(indices, values), state, counters)
