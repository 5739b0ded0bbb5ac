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
from jaxsparse.select import threshold as by_threshold
from jaxsparse.sparse import bitset, saturating
from jaxsparse.sparse import capacities as ladder
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
    home = grads + state.residual
    threshold = fitted_threshold(home, k)
    if self.correction:
      threshold = corrected(threshold, home, k)
    chosen = by_threshold.selected(home, threshold)
    selected = bitset.count(chosen)
    finite, needed = ladder.agree(comm, selected, jnp.isfinite(home).all())
    sent = by_threshold.first(home, by_threshold.at_most(home, chosen, most), most)

    def gather(capacity: int) -> tuple[Sparse, jax.Array]:
      rows = all_gather(comm, sparse.narrowed(sent, capacity))
      return sparse.widened(rows, most, n), saturating.times(capacity, 2 * (comm.size - 1))

    rows, words = ladder.climb(ladder.rungs(min(most, max(1, k // 4)), most), needed, gather)
    total = sparse.add_rows(in_rank_order(comm, rows), n)
    residual = sparse.put(home, sent.indices, 0.0)
    used = saturating.times(jnp.minimum(selected, most), 2 * (comm.size - 1))
    overflow = jnp.maximum(selected - most, 0)
    delivered = jnp.count_nonzero(total)
    counters = Counters(words, used, selected=selected, delivered=delivered, overflow=overflow)
    return Reduced(jnp.where(finite, total, jnp.nan), state._replace(residual=residual), counters)


def fitted_threshold(x: jax.Array, k: int) -> jax.Array:
  """The magnitude f32[] that k entries of x reach if they are normally distributed; 0 for all of them.

  Example:
    >>> x = jax.random.normal(jax.random.key(0), (10_000,))
    >>> round(float(fitted_threshold(x, 500)), 1)  # the two-sided 5 % point of a normal distribution
    2.0
  """
  if k == x.size:
    return jnp.float32(0)
  tail = abs(statistics.NormalDist().inv_cdf(k / x.size / 2))
  mean = ordered_sum(x) / x.size
  return jnp.abs(mean) + tail * jnp.sqrt(ordered_sum((x - mean) ** 2) / x.size)


def corrected(threshold: jax.Array, x: jax.Array, k: int) -> jax.Array:
  """A threshold f32[] that about k entries of x reach, moved there from `threshold` by factors of 1.02.

  Example:
    >>> round(float(corrected(jnp.float32(2), jnp.ones(8), k=8)), 3)  # 20 steps down
    1.346
  """
  few, many = -(-3 * k // 4), min(5 * k // 4, jnp.iinfo(jnp.int32).max)

  def adjust(_: int, threshold: jax.Array) -> jax.Array:
    reached = bitset.count(bitset.pack(jnp.abs(x) >= threshold))
    return threshold * jnp.where(reached < few, 1 / _FACTOR, jnp.where(reached > many, _FACTOR, 1.0))

  return jax.lax.fori_loop(0, _ADJUSTMENTS, adjust, threshold)
