"""TopkA: an all-gather of the k largest entries of each worker (Renggli et al., "SparCML").

Bruck's all-gather sends ⌈log₂P⌉ messages and 2 k (P − 1) words. The total has up to P k entries and no sent entry is
dropped, but the words grow with P.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather, in_rank_order, topology
from jaxsparse.select import top_k
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Comm, Cost, Counters, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkA(SparseCollective):
  """Sends the k largest entries of each worker to all others (TopkA).

  With `acc_w = gradient_w + residual_w`, the total is `Σ_w top_k(acc_w)`, added in rank order. The next residual is
  `acc_w − top_k(acc_w)`, the entries that were not sent. The state is the residual, f32[n] a worker.

  Args:
    density: ρ in (0, 1]; each worker sends k = ⌈ρ n⌉ entries.
    k: the number of entries instead, 1 … n.

  Raises:
    ValueError: for a density or k outside their choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.topka_transform("workers", density=0.01), optax.sgd(0.1))
  """

  def cost(self, n: int, size: int) -> Cost:
    return Cost(len(topology.strides(size)), 2 * self.entries(n) * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k = grads.size, self.entries(grads.size)
    acc = LazySum((grads, state.residual))
    sent = top_k(acc, k)
    total = sparse.merge(in_rank_order(comm, all_gather(comm, sent)), n)
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=k, delivered=jnp.count_nonzero(total.values))
    return Reduced(total, state._replace(residual=acc.without(sent.indices)), counters)
