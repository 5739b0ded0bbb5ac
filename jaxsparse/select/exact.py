"""Exact top-k by magnitude."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxsparse.select import kth_largest as order
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse

Method = Literal["bracket", "bisect", "sort"]

_SORTED_UP_TO = 1 << 14  # entries of a row: where passes are as short as that, one sort costs less than counting
_SAMPLES = 1 << 16


def top_k(x: jax.Array, k: int, *, method: Method | None = None) -> Sparse:
  """The k entries of largest magnitude of each row, in the order of their indices.

  Ties go to the lowest index, and NaN ranks above everything, so that it is never left behind unseen. Whatever the
  method, the result is the same bit for bit.

  Args:
    x: f32[..., n].
    k: number of entries to select from each row, 1 … n.
    method: None for what `method_for` chooses. "bracket" reads x once: a sample gives a bound that a few more than k
      entries reach, those are packed as bits, and the rest is done among them; where the bound was no good, which
      shows, the same program bisects. "bisect" counts how many entries reach a bound, again and again, until k do.
      "sort" is `lax.top_k`.

  Returns:
    `Sparse` of i32[..., k] indices into the row, ascending, and f32[..., k] values.

  Raises:
    ValueError: if k is not in 1 … n, or for an unknown method.

  Example:
    >>> import jax.numpy as jnp
    >>> top_k(jnp.array([1.0, -3.0, 0.0, 3.0]), 2)
    Sparse(indices=Array([1, 3], dtype=int32), values=Array([-3.,  3.], dtype=float32))
  """
  x = jnp.asarray(x)
  n = x.shape[-1]
  if not 1 <= k <= n:
    raise ValueError(f"k={k}, choose a number of entries from 1 to the {n} of a row")
  method = method_for(n, k) if method is None else method
  if method not in _METHODS:
    raise ValueError(f"method={method!r}, choose one of {', '.join(map(repr, _METHODS))}")
  indices = _METHODS[method](x.reshape(-1, n), k).reshape(*x.shape[:-1], k)
  return Sparse(indices, jnp.take_along_axis(x, indices, axis=-1, mode="clip"))


def method_for(n: int, k: int) -> Method:
  """The method that measured best for the k largest of rows of n entries; nothing here depends on the platform.

  Example:
    >>> method_for(1_000_000, 10_000), method_for(1_000_000, 900_000), method_for(1_000, 10)
    ('bracket', 'bisect', 'sort')
  """
  if n <= _SORTED_UP_TO:
    return "sort"
  return "bracket" if _capacity(n, k) < n // 2 else "bisect"


def _by_sorting(rows: jax.Array, k: int) -> jax.Array:
  # As floats, which compilers have a selection of their own for; integers would be sorted whole.
  magnitudes = jax.lax.bitcast_convert_type(order.keys_of(rows), jnp.float32)
  return jnp.sort(jax.lax.top_k(magnitudes, k)[1], axis=-1)


def _by_bisection(rows: jax.Array, k: int) -> jax.Array:
  nothing_known = jnp.zeros(rows.shape[0], jnp.int32)
  return _each(functools.partial(_bisected, k=k), rows, nothing_known, nothing_known + rows.shape[1])


def _bisected(row: jax.Array, tried: jax.Array, reached: jax.Array, *, k: int) -> jax.Array:
  """The indices of one row; `reached` of its keys are known to reach the bound `tried`."""
  keys, enough = order.keys_of(row), reached >= k
  low, high = jnp.where(enough, tried, 0), jnp.where(enough, order.TOP, tried)
  bound = order.bound_of(keys, k, low, high, jnp.where(enough, reached, keys.size))
  return bitset.places(bitset.pack(order.largest(keys, k, bound)), k)


def _by_bracket(rows: jax.Array, k: int) -> jax.Array:
  n = rows.shape[1]
  capacity, size = _capacity(n, k), _samples(n)
  rank, _ = order.rank_in_sample(size, k / n)

  def one(row: jax.Array) -> tuple[jax.Array, ...]:
    keys = order.keys_of(row)
    low = order.bound_of(order.keys_of(row[order.sample(n, size)]), rank)
    words = bitset.pack(keys >= low)
    candidates, reached = bitset.places(words, capacity), bitset.count(words)
    some = jnp.where(candidates < n, order.keys_of(row.at[candidates].get(mode="clip")), -1)
    chosen = order.largest(some, k, order.bound_of(some, k, low, reach_low=reached))
    return candidates[bitset.places(bitset.pack(chosen), k)], low, reached

  indices, low, reached = _each(one, rows)
  hit = ((reached >= k) & (reached <= capacity)).all()
  return jax.lax.cond(hit, lambda: indices, lambda: _each(functools.partial(_bisected, k=k), rows, low, reached))


def _each(function: Callable, *rows: jax.Array) -> Any:
  """`function` of each row; a single one is not batched, which compilers do worse with."""
  if len(rows[0]) != 1:
    return jax.vmap(function)(*rows)
  return jax.tree.map(lambda x: x[None], function(*(row[0] for row in rows)))


def _samples(n: int) -> int:
  return max(1, min(_SAMPLES, n // 8))


def _capacity(n: int, k: int) -> int:
  return bitset.aligned(int(k * order.rank_in_sample(_samples(n), k / n)[1]))


_METHODS = {"bracket": _by_bracket, "bisect": _by_bisection, "sort": _by_sorting}
