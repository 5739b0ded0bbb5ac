"""TopkA: every worker gathers the k largest entries of every other one (Renggli et al., "SparCML"; the AllGather Topk).

⌈log₂P⌉ messages of Bruck's all-gather and 2 k (P − 1) words: the total has up to P k entries and is exact in what was
sent, but the words grow with P.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxsparse import sparse
from jaxsparse._compat import AxisName
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather, in_rank_order, topology
from jaxsparse.select import top_k
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm, Cost, Counters, Reduced, State


def topka_transform(
  axis: AxisName | Comm, *, density: float | None = None, k: int | None = None
) -> optax.GradientTransformation:
  """Averages gradients over the workers, the k largest entries of each of them a step (TopkA).

  With `home = gradient + residual`, the total is `Σ_w top_k(home_w)` added in rank order, and each worker keeps what it
  did not send: `residual_w = home_w − top_k(home_w)`.

  Like every jaxsparse transform it must be the first of its chain and run inside `jax.shard_map` over `axis` with
  `check_vma=False`; see `js.spardl_transform`.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    density: ρ in (0, 1]; each worker sends k = ⌈ρ n⌉ entries.
    k: the number of entries instead, 1 … n.

  Returns:
    An `optax.GradientTransformation`. Its state holds the residual, f32[n] a worker.

  Raises:
    ValueError: for a density or k outside their choices, outside shard_map, or with a state of other sizes.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.topka_transform("workers", density=0.01), optax.sgd(0.1))
  """
  return transform_of(TopkA(density=density, k=k), axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkA(SparseCollective):
  """All-gather of local top-k entries; see `topka_transform` for the fields."""

  def cost(self, n: int, size: int) -> Cost:
    return Cost(len(topology.strides(size)), 2 * self.entries(n) * (size - 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k = grads.size, self.entries(grads.size)
    home = LazySum((grads, state.residual))
    sent = top_k(home, k)
    total = sparse.add_rows(in_rank_order(comm, all_gather(comm, sent)), n)
    words = self.cost(n, comm.size).words
    counters = Counters(words, words, selected=k, delivered=jnp.count_nonzero(total))
    return Reduced(total, state._replace(residual=home.without(sent.indices)), counters)
