"""The k-th largest magnitude of a row, the threshold of top-k.

Magnitudes are compared as keys (`blocks.keys_of`). Ties go to the lowest index, so a selection ends at a pair, a key
and an index.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.select.blocks import TOP
from jaxsparse.sparse import bitset

_FEW = 1 << 20  # keys of a row
_LAST = jnp.iinfo(jnp.int32).max - 2
_DEVIATIONS = 3.5  # a sample is off by more once in 4,000 times


class Cut(NamedTuple):
  """The end of a selection, which contains keys above `key`, and of keys equal to `key` the indices up to `last`.

  Attributes:
    key: i32[rows]; a scalar for a single row, or i32[c], one for each key.
    last: likewise.
  """

  key: jax.Array
  last: jax.Array

  def selects(self, keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Which of i32[rows, c] or i32[c] keys are in the selection, bool like them."""
    key, last = (jnp.expand_dims(x, tuple(range(x.ndim, keys.ndim))) for x in self)
    return (keys > key) | ((keys == key) & (indices <= last))


def kth_largest(keys: jax.Array, indices: jax.Array, k: jax.Array | int, low: jax.Array | int = 0) -> Cut:
  """The cut that selects the k largest keys of each row, ties to the lowest index.

  By counting, but on a GPU by sorting where keys are few, as those of samples and candidates are: a sort of a million
  keys is a few kernels there, and after each round of counting the host would have to see whether it was the last.

  Args:
    keys: i32[rows, c], c a multiple of 256; −1 in empty slots.
    indices: i32[rows, c], at least 0, in any order; those of equal keys differ.
    k: i32[rows], or for all; at most as many keys as reach `low`.
    low: i32[rows], or for all.

  Example:
    >>> keys, indices = jnp.zeros((1, 256), jnp.int32).at[0, :3].set(jnp.array([7, 8, 7])), 255 - jnp.arange(256)[None]
    >>> cut = kth_largest(keys, indices, 2)
    >>> jnp.flatnonzero(cut.selects(keys, indices)[0])
    Array([1, 2], dtype=int32)
  """
  k, low = (jnp.broadcast_to(jnp.asarray(value, jnp.int32), keys.shape[:1]) for value in (k, low))
  if keys.shape[1] > _FEW:
    return by_counting(keys, indices, k, low)
  choices = {"cuda": by_sorting, "rocm": by_sorting, "default": by_counting}
  return jax.lax.platform_dependent(keys, indices, k, low, **choices)


def by_sorting(keys: jax.Array, indices: jax.Array, k: jax.Array, _: jax.Array) -> Cut:
  """`kth_largest` by a sort; k is i32[rows]."""
  ordered = jax.lax.sort((TOP - keys, indices), num_keys=2)
  last = jnp.maximum(k, 1)[:, None] - 1
  key, index = (jnp.take_along_axis(x, last, axis=1, mode="clip")[:, 0] for x in ordered)
  return Cut(jnp.where(k > 0, TOP - key, TOP), index)


def by_counting(keys: jax.Array, indices: jax.Array, k: jax.Array, low: jax.Array) -> Cut:
  """`kth_largest` by bisection: each round counts the keys of a selection; k and low are i32[rows]."""
  high = jnp.maximum(jnp.max(keys, axis=1), low) + 1
  return bisect(lambda cut: bitset.count(bitset.pack(cut.selects(keys, indices))), k, low, high)


class _Bracket(NamedTuple):
  """The state of a bisection: first for the last key of each row, then for the last index with that key; each [rows].

  Attributes:
    low: i32, a selection from here on has at least k keys; in the second phase, minus an index.
    high: i32, likewise fewer.
    key: i32, the last key, in the second phase.
    ties: bool, whether the second phase has begun.
  """

  low: jax.Array
  high: jax.Array
  key: jax.Array
  ties: jax.Array


def bisect(count_of: Callable[[Cut], jax.Array], k: jax.Array, low: jax.Array, high: jax.Array) -> Cut:
  """The cut at which a selection has k keys.

  Args:
    count_of: the number of keys of a selection, i32[rows], for its `Cut`; all may be scalars instead.
    k: i32[rows].
    low: i32[rows], a key that at least k keys reach.
    high: i32[rows], a key that fewer than k keys reach.
  """

  def halve(bracket: _Bracket) -> _Bracket:
    low, high, key, ties = bracket
    middle = low + (high - low) // 2
    count = count_of(Cut(jnp.where(ties, key, middle), jnp.where(ties, -middle, _LAST)))
    low, high = jnp.where(count >= k, middle, low), jnp.where(count >= k, high, middle)
    exact = count == k
    # All indices of the key are selected from −_LAST on, and none of them from 1 on.
    to_ties = ~ties & (exact | (high - low <= 1))
    key = jnp.where(to_ties, low, key)
    low, high = jnp.where(to_ties, -_LAST, low), jnp.where(to_ties, 1, high)
    return _Bracket(low, jnp.where(exact, low, high), key, ties | to_ties)

  def is_open(bracket: _Bracket) -> jax.Array:
    return (~bracket.ties | (bracket.high - bracket.low > 1)).any()

  start = _Bracket(low, high, jnp.zeros_like(low), jnp.zeros(low.shape, jnp.bool_))
  bracket = jax.lax.while_loop(is_open, halve, start)
  return Cut(bracket.key, -bracket.low)


def sample_indices(n: int, size: int) -> jax.Array:
  """`size` indices below n, one at random from each of `size` equal parts, so that periodic data give a fair sample.

  Example:
    >>> indices = sample_indices(1000, 10)
    >>> bool((indices // 100 == jnp.arange(10)).all())
    True
  """
  parts = np.arange(size) + np.random.default_rng(n).random(size)
  return jnp.array(np.minimum(parts * n / size, n - 1), jnp.int32)


def rank_in_sample(size: int, share: float) -> tuple[int, float]:
  """The rank in a sample of a threshold that at least a given share of all keys reaches, and the most that reach it.

  Args:
    size: keys of the sample.
    share: of all keys that are wanted, in (0, 1].

  Returns:
    (rank, most): the rank-th largest key of the sample is the threshold; at most `most` times as many keys as wanted
    reach it. Each fails about once in 4,000 samples.

  Example:
    >>> rank, most = rank_in_sample(65536, 0.01)
    >>> rank, round(most, 2)
    (745, 1.28)
  """
  mean = size * share
  rank = min(size, int(mean + _DEVIATIONS * mean**0.5 + 1))
  return rank, (rank + _DEVIATIONS * rank**0.5 + 1) / mean
