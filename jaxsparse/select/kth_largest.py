"""Order statistics of magnitudes: how large the k-th largest is, by counting, or by sorting where keys are few.

Magnitudes are handled as the bits of |x|, which order as they do; here they are called keys. Every NaN has the same
key, above that of infinity.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.sparse import bitset

_NAN = 0x7F80_0001
TOP = _NAN + 1
"""Every key is smaller."""

_FEW = 1 << 20  # keys of a row
_LAST_PLACE = jnp.iinfo(jnp.int32).max - 1
_DEVIATIONS = 3.5  # a sample is off by more once in 4,000 times
_BY_LINE = 16  # rounds, every other of which goes to where the line says, and the next one beyond it
_BEYOND = 4  # times as far as the line says


def keys_of(x: jax.Array) -> jax.Array:
  """The key of each entry, i32 like x.

  Example:
    >>> keys_of(jnp.array([-1.0, 1.0, 0.0]))
    Array([1065353216, 1065353216,          0], dtype=int32)
  """
  return jnp.minimum(jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF, _NAN)


def bound_of(
  keys: jax.Array,
  k: jax.Array | int,
  low: jax.Array | int = 0,
  high: jax.Array | int = TOP,
  reach_low: jax.Array | int | None = None,
) -> jax.Array:
  """The k-th largest key or, where one comes first, a bound that exactly k keys reach, i32[].

  By counting, but on GPU by sorting where keys are few, as those of samples and candidates are: there a sort of a
  million keys is a few kernels, and after each round of counting the host must see whether it was the last.

  Args:
    keys: i32[n], or i32[rows, n] with n a multiple of 256, each row by itself; all else is then i32[rows] or for all.
    k: at most n.
    low: at least k keys reach it.
    high: fewer than k keys reach it.
    reach_low: how many reach `low`; None for all.

  Example:
    >>> bound_of(jnp.array([3, 1, 4, 4, 5]), 2)
    Array(4, dtype=int32)
  """
  each = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), keys.shape[:-1])
  bracket = (each(k), each(low), each(high), each(keys.shape[-1] if reach_low is None else reach_low))
  if keys.shape[-1] > _FEW:
    return by_counting(keys, *bracket)
  return jax.lax.platform_dependent(keys, *bracket, cuda=by_sorting, rocm=by_sorting, default=by_counting)


def by_sorting(keys: jax.Array, k: jax.Array, *_: jax.Array) -> jax.Array:
  """`bound_of` by a sort, whatever is known before; the arguments are those of `by_counting`.

  Example:
    >>> by_sorting(jnp.array([3, 1, 4, 4, 5]), jnp.int32(2))
    Array(4, dtype=int32)
  """
  place = keys.shape[-1] - jnp.maximum(k, 1)
  kth = jnp.take_along_axis(jnp.sort(keys, axis=-1), place[..., None], axis=-1, mode="clip")[..., 0]
  return jnp.where(k > 0, kth, jnp.iinfo(jnp.int32).max)


def by_counting(keys: jax.Array, k: jax.Array, low: jax.Array, high: jax.Array, reach: jax.Array) -> jax.Array:
  """`bound_of` by counts of `keys`, each of which shrinks a bracket around the bound.

  The logarithm of how many keys reach a bound, to how many do not where all are in sight, is about a line. So one round
  goes to where the line through what the ends reach says, the next a few times as far from the nearer end, which takes
  the other end there; after 16 rounds by half only. Keys that are spread smoothly take 10 to 25 counts, none over 47.

  Args:
    keys: as for `bound_of`.
    k: i32[], or i32[rows].
    low: likewise; at least k keys reach it.
    high: likewise; fewer than k keys reach it.
    reach: likewise; how many reach `low`.

  Example:
    >>> by_counting(jnp.array([3, 1, 4, 4, 5]), *map(jnp.int32, (2, 0, 9, 5)))
    Array(4, dtype=int32)
  """

  def odds(count: jax.Array) -> jax.Array:
    logarithm = lambda count: jnp.log(count.astype(jnp.float32) + 0.5)
    return logarithm(count) - jnp.where(low == 0, logarithm(reach - count), 0.0)

  def shrink(bracket: _Bracket) -> _Bracket:
    count = bitset.count(bitset.pack(keys >= bracket.bound[..., None]))
    enough, exact = count >= k, count == k
    low, reach_low = jnp.where(enough, bracket.bound, bracket.low), jnp.where(enough, count, bracket.reach_low)
    high = jnp.where(exact, bracket.bound + 1, jnp.where(enough, bracket.high, bracket.bound))
    reach_high = jnp.where(enough, bracket.reach_high, count)
    share = (odds(reach_low) - odds(k)) / jnp.maximum(odds(reach_low) - odds(reach_high), 1e-6)
    width = high - low
    bound = low + jnp.clip(_step(width, share, bracket.round), 1, jnp.maximum(width - 1, 1))
    # A row that is done stays as it is.
    fresh = _Bracket(low, high, reach_low, reach_high, bound, bracket.round + 1)
    return jax.tree.map(lambda new, old: jnp.where(bracket.high - bracket.low > 1, new, old), fresh, bracket)

  zero = jnp.zeros_like(low)
  start = _Bracket(low, high, reach, zero, low + 1, zero)
  return jax.lax.while_loop(lambda bracket: (bracket.high - bracket.low > 1).any(), shrink, start).low


def _step(width: jax.Array, share: jax.Array, number: jax.Array) -> jax.Array:
  """How far from its low end a bracket is tried in round `number`, where the line says at that share of its width."""
  share = jnp.clip(share, 0.0, 1.0)
  beyond = jnp.where(share < 0.5, jnp.minimum(_BEYOND * share, 0.5), jnp.maximum(1 - _BEYOND * (1 - share), 0.5))
  by_line = (jnp.where(number % 2 == 0, share, beyond) * width.astype(jnp.float32)).astype(jnp.int32)
  return jnp.where(number < _BY_LINE, by_line, width // 2)


class _Bracket(NamedTuple):
  """What `bound_of` knows: at least k keys reach `low`, fewer reach `high`, and `bound` is tried next; each i32[]."""

  low: jax.Array
  high: jax.Array
  reach_low: jax.Array
  reach_high: jax.Array
  bound: jax.Array
  round: jax.Array


def largest(keys: jax.Array, k: int, bound: jax.Array) -> jax.Array:
  """Which keys are the k largest, ties to the first: bool[n] with k of them set.

  Args:
    keys: i32[n].
    k: at most n.
    bound: from `bound_of`.

  Example:
    >>> largest(jnp.array([3, 4, 1, 4, 4]), 2, jnp.int32(4))
    Array([False,  True, False,  True, False], dtype=bool)
  """
  above, ties = keys > bound, keys == bound
  last = bitset.place(bitset.pack(ties), k - 1 - bitset.count(bitset.pack(above)))
  return above | (ties & (jnp.arange(keys.size, dtype=jnp.int32) <= last))


def largest_of(
  keys: jax.Array, places: jax.Array, k: jax.Array | int, low: jax.Array, reach_low: jax.Array
) -> jax.Array:
  """Which keys of each row are its k largest, ties to the lowest place: bool[rows, n] with k set in each.

  Args:
    keys: i32[rows, n], n a multiple of 256.
    places: i32[rows, n], at least 0, in any order; those of equal keys differ.
    k: at most n; i32[rows], or for all.
    low: i32[rows], which at least k keys of the row reach.
    reach_low: i32[rows], how many do.

  Example:
    >>> keys, places = jnp.zeros((1, 256), jnp.int32).at[0, :3].set(jnp.array([7, 8, 7])), 255 - jnp.arange(256)[None]
    >>> jnp.flatnonzero(largest_of(keys, places, 2, low=jnp.array([1]), reach_low=jnp.array([3]))[0])
    Array([1, 2], dtype=int32)
  """
  bound = bound_of(keys, k, low, reach_low=reach_low)[:, None]
  above, ties = keys > bound, keys == bound
  nearness = jnp.where(ties, _LAST_PLACE - places, -1)
  left, tied = k - bitset.count(bitset.pack(above)), bitset.count(bitset.pack(ties))
  farthest = _LAST_PLACE - jnp.max(places, axis=1)
  return above | (nearness >= bound_of(nearness, left, farthest, _LAST_PLACE + 1, tied)[:, None])


def sample(n: int, size: int) -> jax.Array:
  """`size` places of n, one at random from each of as many equal parts: no period of the data can fool it.

  Example:
    >>> places = sample(1000, 10)
    >>> bool((places // 100 == jnp.arange(10)).all())
    True
  """
  parts = np.arange(size) + np.random.default_rng(n).random(size)
  return jnp.array(np.minimum(parts * n / size, n - 1), jnp.int32)


def rank_in_sample(size: int, share: float) -> tuple[int, float]:
  """Where in a sample of `size` keys a bound lies that surely reaches the `share` largest of all, and how far below.

  Returns:
    (rank, most): the rank-th largest of the sample is the bound, and it is reached by at most `most` times as many
    keys as were wanted, each up to what happens once in thousands of samples.

  Example:
    >>> rank, most = rank_in_sample(65536, 0.01)
    >>> rank, round(most, 2)
    (745, 1.28)
  """
  mean = size * share
  rank = min(size, int(mean + _DEVIATIONS * mean**0.5 + 1))
  return rank, (rank + _DEVIATIONS * rank**0.5 + 1) / mean
