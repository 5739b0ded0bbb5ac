"""Random-k: all workers draw the same k indices from a shared seed, so that no indices are sent.

One all-reduce of k values: 2⌈log₂P⌉ messages and 2 k (P − 1)/P words. The flat indices
are divided into k strata of ⌊n/k⌋ or ⌈n/k⌉ neighbours, and one index is drawn uniformly
from each: k different indices in O(k).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxsparse.arrays import iota
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_reduce_cost
from jaxsparse.select.accumulator import SparseReduced, pending_zeros
from jaxsparse.select.blocks import LazySum
from jaxsparse.types import Comm, Cost, Reduced, Sparse, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(SparseCollective):
  """All-reduces k entries at random indices, the same indices on every worker (Random-k).

  With `acc_w = gradient_w + residual_w`, the total is `Σ_w acc_w` at k indices I drawn
  from (seed, step), and the next residual is `acc_w` outside I. Nothing is rescaled: an
  entry that is not drawn now is drawn later, after n/k steps on average. The state is
  the residual, f32[n] a worker, and the number of the step.

  Args:
    seed: the seed of the indices, the same on every worker.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> out = js.simulate("randomk", jnp.ones((3, 8)), k=2)
    >>> int((out.total == 3).sum()), float(out.residuals.sum())
    (2, 18.0)
  """

  seed: int = 0
  ranges = (("seed", 0, 2**32 - 1),)

  def init(self, n: int, size: int) -> State:
    return super().init(n, size)._replace(shared=jnp.int32(0))

  def cost(self, n: int, size: int) -> Cost:
    return all_reduce_cost(self.entries(n), size)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    k = self.entries(n)
    acc = LazySum((grads, state.residual))
    # (seed, step), equal on all workers: `shared` is the number of the step
    key = jax.random.fold_in(jax.random.key(self.seed), state.shared)
    indices = draw_indices(key, n, k)
    # A NaN outside the drawn indices would stay in the residual unnoticed, so the
    # worker then sends NaN only.
    is_finite = jnp.isfinite(acc.values).all()
    values = comm.all_reduce(jnp.where(is_finite, acc.read_at(indices), jnp.nan))
    state = state._replace(
      residual=pending_zeros(acc, indices), shared=state.shared + 1
    )
    return SparseReduced(
      Sparse(indices, values), state, self.count(comm, n, selected=k, delivered=k)
    )


def draw_indices(key: jax.Array, n: int, k: int) -> jax.Array:
  """Draws k different indices below n, i32[k], ascending: one in each of k strata of almost equal size.

  Example:
    >>> draw_indices(jax.random.key(0), n=3, k=3)
    Array([0, 1, 2], dtype=int32)
  """
  short, longer = divmod(n, k)  # the first `longer` strata have one more index
  stratum = iota(k)
  # the first index of each stratum
  start = stratum * short + jnp.minimum(stratum, longer)
  length = short + (stratum < longer).astype(jnp.int32)
  return start + jax.random.randint(key, (k,), 0, length, jnp.int32)
