"""Gaussian-k: selects by a threshold that k entries exceed if they are normally distributed (Shi et al., 2019).

The threshold is computed from mean and standard deviation, without a sort. Gradients
are not normally distributed, so the number of selected entries differs from k. Up to
⌈5k/4⌉ of them are gathered as in TopkA: ⌈log₂P⌉ messages and at most 2 ⌈5k/4⌉ (P − 1)
words. The capacity of 5k/4 is ours: the published 2 k (P − 1) words are for exactly k
entries.
"""

import dataclasses
import math
import statistics
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.arrays.sums import ordered_sum, round_mantissa
from jaxsparse.collectives._base import Traits
from jaxsparse.collectives._messages import (
  EncodingCollective,
  agree,
  geometric,
  send_up_to,
  words_of,
)
from jaxsparse.comm import in_rank_order, schedules
from jaxsparse.select import threshold, top_k
from jaxsparse.select.accumulator import Pending, SparseReduced, pending_zeros
from jaxsparse.select.blocks import LazySum, keys_of
from jaxsparse.sparse import bitset
from jaxsparse.sparse.codec import codec_of
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Reduced,
  Sparse,
  State,
)

_ADJUSTMENTS = 20
_FACTOR = 1.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianK(EncodingCollective):
  """Sends about k entries of each worker, those above a fitted threshold, to all others (Gaussian-k).

  With `acc = gradient + residual`, the threshold is `|mean| + |Φ⁻¹(ρ/2)| · std` of `acc`. Gradients are not normally
  distributed, so the threshold is often too high and selects fewer than k entries, late in training by an order of
  magnitude (Ok-Topk, §5.2). The correction divides the threshold by 1.02 until 3k/4 entries reach it, and multiplies it
  by 1.02 while more than 5k/4 do, at most 20 times. The total is the sum over workers of the selected entries, at most
  the ⌈5k/4⌉ largest of each worker; all others stay in its residual. Ablation: `correction=False`.

  Args:
    correction: whether the threshold is corrected; False uses the published estimate.

  Example:
    >>> import optax, jaxsparse as js
    >>> tx = optax.chain(js.make_transform("gaussiank", "workers", density=0.01), optax.sgd(0.1))
  """

  correction: Literal[True, False] = True

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, sizes_vary=True)

  def capacity(self, n: int) -> int:
    """The largest number of entries that one worker sends."""
    return min(n, math.ceil(5 * self.entries(n) / 4))

  def cost(self, n: int, size: int) -> Cost:
    """The most messages and 4-byte words that one of `size` workers sends in a step, for n entries."""
    words = words_of(codec_of(self.wire, n), size, self.capacity(n))
    agreements = schedules.agreement_messages(size)
    return Cost(len(schedules.strides(size)), words, agreements)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    n = grads.size
    k = self.entries(n)
    most = self.capacity(n)
    acc = LazySum((grads, state.residual))
    # `sent` has at most `most` entries; `selected` counts all that reach the threshold.
    sent, selected = self._select(acc, k)
    # NaN and Inf reach every threshold and are among the largest, so `sent` contains
    # them.
    finite, needed = agree(comm, selected, jnp.isfinite(sent.values).all())

    # Random rounding by `wire` has other noise in each step and at each rank. `shared`
    # is the number of the step; () where rounding is not random.
    writer = self.writer(codec_of(self.wire, n), state.shared, comm.rank)
    # Message 0 of the step has the smallest capacity that is sufficient for all
    # workers: a threshold that is too high selects far fewer than k.
    capacities = geometric(min(most, max(1, k // 4)), most)
    rows, lost, words = send_up_to(
      writer.gather_rows, comm, sparse.as_row(sent), 0, capacities, needed, n
    )
    total = sparse.merge(in_rank_order(comm, rows), n)
    used = writer.words_used(jnp.minimum(selected, most), most, comm.size)
    delivered = jnp.count_nonzero(total.values)
    overflow = jnp.maximum(selected - most, 0)
    counters = Counters(words, used, selected, delivered, overflow=overflow)
    # At sent entries the residual is their rounding error: `lost` is a list of one
    # `Sparse`, [] where values are not rounded; then it is 0.
    residual = (
      Pending(grads, state.residual, *lost)
      if lost
      else pending_zeros(acc, sent.indices)
    )
    total = total._replace(values=jnp.where(finite, total.values, jnp.nan))
    return SparseReduced(total, State(residual, shared=writer.next_step), counters)

  def _select(self, acc: LazySum, k: int) -> tuple[Sparse, jax.Array]:
    """The entries that reach the threshold, the ⌈5k/4⌉ largest if more do; and how many reach it, i32[]."""
    n = acc.size
    most = self.capacity(n)
    # the threshold of the paper, then its correction
    limit = fit_threshold(acc, k)
    if not self.correction:
      # `False` selects by `limit`, not by the exact k-th magnitude.
      _, chosen, selected = threshold.choose_reaching(
        acc, limit, jnp.bool_(False), k, most
      )
      return threshold.read_first(acc, chosen, most), selected
    # One entry more than 5k/4: if all of these reach a threshold, it is too low.
    largest = top_k(acc, min(5 * k // 4 + 1, n))
    limit = correct_threshold(limit, largest, k, n)
    selected = bitset.count(threshold.select_reaching(acc, limit))
    return cut_reaching(largest, limit, most, n), selected


def fit_threshold(x: LazySum, k: int) -> jax.Array:
  """The magnitude f32[] that k entries of x reach if the entries are normally distributed; 0 if k is all of them.

  Example:
    >>> x = LazySum((jax.random.normal(jax.random.key(0), (10_000,)),))
    >>> round(float(fit_threshold(x, 500)), 1)  # the two-sided 5 % point of a normal distribution
    2.0
  """
  if k == x.size:
    return jnp.float32(0)
  # Φ⁻¹(ρ/2): half of the k entries are below minus this many standard deviations
  tail = abs(statistics.NormalDist().inv_cdf(k / x.size / 2))

  def average(
    moment: jax.Array, before: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    """From (_, m) to (m, average): of the values in round 0, of their squared distances from m in round 1."""
    _, mean = before

    def term(values: jax.Array) -> jax.Array:
      # rounded, so that a fused multiply-add with the sum gives the same bits
      squares = round_mantissa((values - mean) ** 2)
      return jnp.where(moment == 0, values, squares)

    return mean, ordered_sum(*x.parts, term=term) / x.size

  # A loop of two rounds, of the mean and of the variance: otherwise XLA on CPUs
  # computes the mean again for every entry.
  start = jnp.float32(0), jnp.float32(0)
  mean, variance = varying.fori_loop(0, 2, average, start)
  return jnp.abs(mean) + tail * jnp.sqrt(variance)


def correct_threshold(
  limit: jax.Array,
  largest: Sparse,
  k: int,
  end: int,
) -> jax.Array:
  """`limit` divided by 1.02 until 3k/4 entries reach it, or multiplied by 1.02, 20 times at most, while over 5k/4 do.

  No step counts entries: fewer than 3k/4 reach a threshold above the ⌈3k/4⌉-th largest
  magnitude, and more than 5k/4 reach one up to the (⌊5k/4⌋ + 1)-th largest. 20 steps
  compare the threshold with these two. If it is still too high, a logarithm tells how
  many divisions are missing. Returns f32[].

  Args:
    limit: f32[].
    largest: the ⌊5k/4⌋ + 1 largest entries, or all if they are fewer.
    k: number of entries that a worker sends.
    end: length of the vector.

  Example:
    >>> ones = Sparse(jnp.arange(8), jnp.ones(8))
    >>> round(float(correct_threshold(jnp.float32(2), ones, k=8, end=8)), 3)  # 36 steps down
    0.98
  """
  # The ⌈3k/4⌉-th largest magnitude, `least`, must reach the threshold.
  few = -(-3 * k // 4)
  many = 5 * k // 4
  least = threshold.kth_magnitude(largest, few, end)
  # Keys are integers that order as magnitudes do, NaN last. A threshold with a key
  # above `enough` is too high, one with a key up to `more` is too low. `more` is −1,
  # below all keys, if the vector has no more than `many` entries.
  enough = keys_of(least)
  more = keys_of(largest.values).min() if many < largest.indices.size else -1

  def adjust(_: int, limit: jax.Array) -> jax.Array:
    too_few = keys_of(limit) > enough
    too_many = keys_of(limit) <= more
    return limit * jnp.where(too_few, 1 / _FACTOR, jnp.where(too_many, _FACTOR, 1.0))

  limit = varying.fori_loop(0, _ADJUSTMENTS, adjust, limit, unroll=10)  # 20 steps
  # If still too high after 20 steps, all missing divisions at once; at most `least`,
  # against rounding. `fmin` ignores the NaN of an infinite `limit`.
  steps = jnp.ceil(jnp.log(limit / least) / math.log(_FACTOR))
  lowered = jnp.fmin(limit * _FACTOR**-steps, least)
  return jnp.where(keys_of(limit) > enough, lowered, limit)


def cut_reaching(largest: Sparse, limit: jax.Array, most: int, end: int) -> Sparse:
  """The entries of magnitude ≥ limit, at most the `most` largest of them, ties to the lowest index.

  Args:
    largest: the largest entries of a vector, in ascending order of indices: `most`, or
      one more.
    limit: f32[].
    most: slots of the result.
    end: length of the vector.

  Example:
    >>> cut_reaching(Sparse(jnp.arange(3), jnp.array([3.0, 2.0, 2.0])), jnp.float32(2), most=2, end=9).indices
    Array([0, 1], dtype=int32)
  """
  # Not |x| ≥ limit, which is false for NaN: every worker must see a NaN. Zeros are
  # never sent, also with a limit of 0.
  reach = ~(jnp.abs(largest.values) < limit) & (largest.values != 0)
  if largest.indices.size > most:
    # There is one entry more than slots: if all reach, drop the last of the smallest.
    keys = keys_of(largest.values)
    slots = iota(most + 1)
    last_smallest = jnp.max(jnp.where(keys == keys.min(), slots, -1))
    reach &= (slots != last_smallest) | ~reach.all()
  return sparse.compress(largest, reach, most, end)
