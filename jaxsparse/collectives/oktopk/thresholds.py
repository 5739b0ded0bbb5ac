"""The global threshold of Ok-Topk, and updates of both thresholds between exact ones.

The threshold, and how many sums of each worker reach it, come from the same all-reduce:
its rows are the counts of each worker.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.comm import number_of_each
from jaxsparse.select.blocks import keys_of
from jaxsparse.sparse import bitset
from jaxsparse.types import Comm, Sparse

_STEP = 1.012
_INT32 = jnp.iinfo(jnp.int32).max
# bits of a magnitude that an all-reduce of `kth_of_all` decides: 31 counts, as many as
# `search_near` has; a 31st bit remains
_DIGIT = 5


def search_near(
  comm: Comm, entries: Sparse, threshold: jax.Array, k: int, end: int
) -> tuple[jax.Array, jax.Array]:
  """A threshold near the last one that about k entries of all workers reach: two all-reduces of 33 counts.

  The first compares 33 candidates from 1/4 to 4 times the last threshold, the second 33
  candidates around the best one, 0.3 % apart. Steps this small are needed because error
  feedback makes magnitudes similar: all k entries can lie within 9 % of the threshold.

  Args:
    comm: the workers.
    entries: [c] entries of this worker; index `end` is an empty slot.
    threshold: f32[], the last threshold, more than 0.
    k: the number of entries of all workers that should reach it.
    end: length of the vector.

  Returns:
    The threshold f32[], and the number of entries of each worker that reach it, i32[P].
  """
  magnitude = jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0)
  # Empty slots have −1, which reaches no candidate.
  steps = np.arange(-16, 17)
  around = lambda per_octave: np.exp2(steps / per_octave).astype(np.float32)
  nearest = lambda reached: jnp.argmin(jnp.abs(reached - k))
  # 8 candidates an octave, over two octaves up and down
  coarse = threshold * around(8)
  best = coarse[nearest(comm.all_reduce(_count_reaching(magnitude, coarse)))]
  # 256 candidates an octave: 16 up and 16 down reach half way to the next coarse ones
  fine = best * around(256)
  # counts of each worker, i32[P, 33]
  of_each = number_of_each(comm, _count_reaching(magnitude, fine))
  chosen = nearest(of_each.sum(axis=0))
  return fine[chosen], of_each[:, chosen]


def kth_of_all(
  comm: Comm, entries: Sparse, k: int, end: int
) -> tuple[jax.Array, jax.Array]:
  """The k-th largest magnitude of the entries of all workers: seven all-reduces, six of which decide five bits each.

  Args:
    comm: the workers.
    entries: [c] entries of this worker; index `end` is an empty slot.
    k: the rank of the magnitude, at least 1.
    end: length of the vector.

  Returns:
    The magnitude f32[], 0 if there are fewer than k entries, and the number of entries
    of each worker that reach it, i32[P].
  """
  # −1: an empty slot reaches no candidate
  keys = jnp.where(entries.indices < end, keys_of(entries.values), -1)

  def decide(step: jax.Array, key: jax.Array) -> jax.Array:
    # candidates: `key`, whose lower bits are 0, with 1 … 31 as its next five bits
    shift = 31 - _DIGIT * (step + 1)
    candidates = key | (jnp.arange(1, 2**_DIGIT, dtype=jnp.int32) << shift)
    reached = comm.all_reduce(_count_reaching(keys, candidates))
    # Candidates ascend, so the digit is how many of them k entries reach.
    return key | (jnp.sum(reached >= k, dtype=jnp.int32) << shift)

  # Keys have 31 bits: six digits of five, the highest first, and the lowest bit.
  key = varying.fori_loop(0, 31 // _DIGIT, decide, jnp.int32(0))
  # `key` with 0 and with 1 as its lowest bit; `of_each`, i32[P, 2]: how many keys of
  # each worker reach these
  candidates = key | iota(2)
  of_each = number_of_each(comm, _count_reaching(keys, candidates))
  lowest_bit = (of_each[:, 1].sum() >= k).astype(jnp.int32)
  magnitude = jax.lax.bitcast_convert_type(candidates[lowest_bit], jnp.float32)
  return magnitude, of_each[:, lowest_bit]


def count_reaching(
  comm: Comm, entries: Sparse, threshold: jax.Array, end: int
) -> jax.Array:
  """The number of entries of each worker that reach the threshold, i32[P]: an all-reduce."""
  magnitude = jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0)
  return number_of_each(comm, bitset.count(bitset.pack(magnitude >= threshold)))


def _count_reaching(x: jax.Array, candidates: jax.Array) -> jax.Array:
  """The number of x that are at least each of the candidates, i32[c]."""
  # As bitsets: XLA for CPUs stores a comparison that is summed as one byte an entry.
  return jax.vmap(lambda least: bitset.count(bitset.pack(x >= least)))(candidates)


def nudge_by_factor(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold of the next step: times 1.012 after more than 5k/4 entries, over 1.012 after fewer than 2k/3.

  This is the rule of the authors' code.

  Example:
    >>> [round(float(nudge_by_factor(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 60)]
    [1.0, 1.012, 0.9881]
  """
  # A Python int beyond i32 cannot be compared with `selected`, i32[].
  many = min(5 * k // 4, _INT32)
  few = -(-2 * k // 3)
  lower = jnp.where(selected < few, 1 / _STEP, 1.0)
  return threshold * jnp.where(selected > many, _STEP, lower)


def nudge_in_proportion(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The threshold of the next step: times 1 + x/10 with `x = selected / k − 1`, at most 2.

  Example:
    >>> [round(float(nudge_in_proportion(jnp.float32(1), jnp.int32(selected), k=100)), 4) for selected in (100, 130, 0)]
    [1.0, 1.03, 0.9]
  """
  # 1 + (selected / k − 1) / 10
  factor = 0.9 + selected.astype(jnp.float32) / (10.0 * k)
  return threshold * jnp.minimum(factor, 2.0)
