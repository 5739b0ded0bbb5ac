"""Gaussian-k: entries above a threshold that would leave k if they were normally distributed (Shi et al., 2019).

Two passes give mean and deviation, a few more adjust the threshold: no sorting. Gradients are not normal, so the
number of entries misses k; up to ⌈5k/4⌉ of them are gathered as in TopkA: ⌈log₂P⌉ messages and at most
2 ⌈5k/4⌉ (P − 1) words. The limit of 5k/4 is ours: the published formula, 2 k (P − 1) words, is for exactly k entries.
"""

import dataclasses
import math
import statistics
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective
from jaxsparse.comm import all_gather, in_rank_order, topology
from jaxsparse.select import threshold, top_k
from jaxsparse.select.exact import top_k_of_entries
from jaxsparse.select.kth_largest import keys_of
from jaxsparse.sparse import bitset, saturating
from jaxsparse.sparse.capacities import agree, climb, rungs
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.sparse.sums import ordered_sum
from jaxsparse.types import Comm, Cost, Counters, Reduced, Sparse, State

_ADJUSTMENTS = 20
_FACTOR = 1.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianK(SparseCollective):
  """Sends about k entries of each worker, those above a fitted threshold, to all others (Gaussian-k).

  With `acc = gradient + residual`, the threshold is `|mean| + |Φ⁻¹(ρ/2)| · std` of `acc`. Gradients are not normally
  distributed, so it is often too high and selects fewer than k entries, late in training by an order of magnitude
  (Ok-Topk, §5.2). The correction divides it by 1.02 while fewer than 3k/4 entries reach it and multiplies it by 1.02
  while more than 5k/4 do, at most 20 times. The total is the sum of the selected entries, of each worker the ⌈5k/4⌉
  largest at most; the others stay in its residual. The state is the residual, f32[n] a worker.

  Args:
    density: ρ in (0, 1]; k = ⌈ρ n⌉ is the number of entries aimed at.
    k: the number of entries instead, 1 … n.
    correction: whether the threshold is corrected. False is the published estimate as it is.

  Raises:
    ValueError: for a density, k or correction outside their choices.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.gaussiank_transform("workers", density=0.01), optax.sgd(0.1))
  """

  correction: Literal[True, False] = True

  @property
  def sizes_vary(self) -> bool:
    return True

  def capacity(self, n: int) -> int:
    """The most entries that one worker sends."""
    return min(n, math.ceil(5 * self.entries(n) / 4))

  def cost(self, n: int, size: int) -> Cost:
    return Cost(len(topology.strides(size)), 2 * self.capacity(n) * (size - 1), agreements=int(size > 1))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n, k, most = grads.size, self.entries(grads.size), self.capacity(grads.size)
    home = LazySum((grads, state.residual))
    limit = fitted_threshold(home, k)
    if self.correction:
      limit = corrected(limit, home, k)
    chosen = threshold.selected(home, limit)
    selected = bitset.count(chosen)
    sent = threshold.first(home, threshold.at_most(home, chosen, most), most)
    # A threshold selects everything that is not finite, and of too many entries the largest.
    finite, needed = agree(comm, selected, jnp.isfinite(sent.values).all())

    def gather(capacity: int) -> tuple[Sparse, jax.Array]:
      rows = all_gather(comm, sparse.narrowed(sent, capacity))
      return sparse.widened(rows, most, n), saturating.times(capacity, 2 * (comm.size - 1))

    rows, words = climb(rungs(min(most, max(1, k // 4)), most), needed, gather)
    total = sparse.add_rows(in_rank_order(comm, rows), n)
    used = saturating.times(jnp.minimum(selected, most), 2 * (comm.size - 1))
    overflow = jnp.maximum(selected - most, 0)
    delivered = jnp.count_nonzero(total)
    counters = Counters(words, used, selected=selected, delivered=delivered, overflow=overflow)
    state = state._replace(residual=home.without(sent.indices))
    return Reduced(jnp.where(finite, total, jnp.nan), state, counters)


def fitted_threshold(x: LazySum, k: int) -> jax.Array:
  """The magnitude f32[] that k entries of x reach if they are normally distributed; 0 for all of them.

  Example:
    >>> x = LazySum((jax.random.normal(jax.random.key(0), (10_000,)),))
    >>> round(float(fitted_threshold(x, 500)), 1)  # the two-sided 5 % point of a normal distribution
    2.0
  """
  if k == x.size:
    return jnp.float32(0)
  tail = abs(statistics.NormalDist().inv_cdf(k / x.size / 2))
  mean = ordered_sum(x.values) / x.size
  return jnp.abs(mean) + tail * jnp.sqrt(ordered_sum((x.values - mean) ** 2) / x.size)


def corrected(limit: jax.Array, x: LazySum, k: int) -> jax.Array:
  """A threshold f32[] that about k entries of x reach, moved there from `limit` by factors of 1.02.

  At least 3k/4 entries reach a threshold if the ⌈3k/4⌉-th largest does, and more than 5k/4 if the next one after 5k/4
  does. So two entries are all that is read of x, however many steps it takes.

  Example:
    >>> round(float(corrected(jnp.float32(2), LazySum((jnp.ones(8),)), k=8)), 3)  # 20 steps down
    1.346
  """
  few, many = -(-3 * k // 4), 5 * k // 4
  largest = top_k(x, min(many + 1, x.size))
  enough, _ = top_k_of_entries(largest, few, few, x.size)
  too_few = lambda limit: keys_of(limit) > keys_of(enough.values).min()
  too_many = lambda limit: keys_of(limit) <= (keys_of(largest.values).min() if many < x.size else -1)

  def adjust(_: int, limit: jax.Array) -> jax.Array:
    return limit * jnp.where(too_few(limit), 1 / _FACTOR, jnp.where(too_many(limit), _FACTOR, 1.0))

  return jax.lax.fori_loop(0, _ADJUSTMENTS, adjust, limit)
