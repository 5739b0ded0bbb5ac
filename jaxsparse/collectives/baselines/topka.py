"""TopkA: an all-gather of the k largest entries of each worker (Renggli et al., "SparCML").

Bruck's all-gather sends ⌈log₂P⌉ messages and 2 k (P − 1) words. The total has up to P k
entries and no sent entry is dropped, but the words grow with P.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._messages import SelectingCollective, words_of
from jaxsparse.comm import in_rank_order, schedules
from jaxsparse.select.accumulator import Pending, SparseReduced
from jaxsparse.select.blocks import LazySum
from jaxsparse.types import Comm, Cost, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkA(SelectingCollective):
  """Sends the k largest entries of each worker to all others (TopkA).

  With `acc_w = gradient_w + residual_w`, the total is `Σ_w top_k(acc_w)`, added in rank
  order. The next residual is `acc_w − top_k(acc_w)`, the entries that were not sent,
  and what `wire` rounds off.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.make_transform("topka", "workers", density=0.01), optax.sgd(0.1))
  """

  def cost(self, n: int, size: int) -> Cost:
    return Cost(
      len(schedules.strides(size)),
      words_of(self.chosen_codec(n), size, self.entries(n)),
    )

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    k = self.entries(n)
    acc = LazySum((grads, state.residual))
    chosen, selected, memory = self.choose(acc, state.worker)
    # Random rounding by `wire` has other noise in each step and at each rank. `shared`
    # is the number of the step; () where rounding is not random.
    writer = self.writer(self.chosen_codec(n), state.shared, comm.rank)
    # top_k(acc_w), as `wire` rounds it
    message, errors = writer.encode(chosen, 0)
    # total = Σ_w top_k(acc_w), in rank order (Law R)
    total = sparse.merge(in_rank_order(comm, writer.gather(comm, message)), n)
    counters = self.count(comm, n, selected, jnp.count_nonzero(total.values))._replace(
      words_used=writer.words_used(selected, k, comm.size)
    )
    return SparseReduced(
      total,
      State(Pending(grads, state.residual, errors), memory, writer.next_step),
      counters,
    )
