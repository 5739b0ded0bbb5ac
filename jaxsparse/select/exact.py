"""Exact top-k by magnitude, the selection that all collectives share.

    candidates   one pass over n entries: a sample of each block gives a threshold that a few more than k entries reach
    among        the k largest of the candidates, by counting
    whole        if the candidates are not proven to contain the top-k, the k largest of whole blocks, by counting

The result is bitwise the same on every path: ties go to the lowest index, and NaN ranks above all numbers, so that it
is always selected.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import candidates as found
from jaxsparse.select.blocks import Blocks
from jaxsparse.select.kth_largest import TOP, bisected, keys_of, kth_largest
from jaxsparse.sparse import bitset
from jaxsparse.sparse.lazy import LazySum
from jaxsparse.types import Sparse

Method = Literal["bracket", "bisect", "sort"]


def top_k(x: jax.Array | LazySum, k: int, *, method: Method | None = None) -> Sparse:
  """The k entries of largest magnitude of each row, in the order of their indices.

  Ties go to the lowest index, and NaN ranks above everything. Whatever the method, the result is the same bit for bit.

  Args:
    x: f32[..., n], or a lazily summed f32[n].
    k: number of entries to select from each row, 1 … n.
    method: None for the fastest by `method_for`. "bracket" reads x once: a sample gives a threshold that a few more
      than k entries reach, and these candidates are searched; where they are too few or too many, "bisect" follows.
      "bisect" counts the entries that reach a threshold, again and again, until they are k. "sort" is `lax.top_k`.

  Returns:
    `Sparse` of i32[..., k] indices into the row, ascending, and f32[..., k] values.

  Raises:
    ValueError: if k is not in 1 … n, or for an unknown method.

  Example:
    >>> import jax.numpy as jnp
    >>> top_k(jnp.array([1.0, -3.0, 0.0, 3.0]), 2)
    Sparse(indices=Array([1, 3], dtype=int32), values=Array([-3.,  3.], dtype=float32))
  """
  shape = (x.size,) if isinstance(x, LazySum) else jnp.shape(x)
  lazy = x if isinstance(x, LazySum) else LazySum((jnp.asarray(x).reshape(-1),))
  n = shape[-1]
  if not 1 <= k <= n:
    raise ValueError(f"k={k}, choose a number of entries from 1 to the {n} of a row")
  method = method_for(n, k) if method is None else method
  if method not in _METHODS:
    raise ValueError(f"method={method!r}, choose one of {', '.join(map(repr, _METHODS))}")
  rows = lazy.size // n
  blocks = Blocks(lazy, jnp.arange(rows, dtype=jnp.int32), n, k)
  indices = _METHODS[method](blocks) if rows else jnp.zeros((0, k), jnp.int32)
  values = lazy.at(blocks.flat(indices))
  return Sparse(indices.reshape(*shape[:-1], k), values.reshape(*shape[:-1], k))


def method_for(n: int, k: int) -> Method:
  """The method that measured fastest for the k largest of rows of n entries; nothing here depends on the platform.

  Example:
    >>> method_for(1_000_000, 10_000), method_for(1_000_000, 900_000), method_for(1_000, 10)
    ('bracket', 'bisect', 'sort')
  """
  if n <= found.SHORT:
    return "sort"
  return "bracket" if found.worthwhile(n, k) else "bisect"


def top_k_of_entries(entries: Sparse, k: jax.Array | int, slots: int, end: int) -> tuple[Sparse, Sparse]:
  """The k entries of largest magnitude of a sparse vector, ties to the lowest index, and the rest.

  Args:
    entries: [c], each index once; empty slots anywhere.
    k: i32[], at most `slots`; all of them where they are fewer.
    slots: number of slots of the result.
    end: length of the vector.

  Returns:
    (kept, rest): [slots] entries, in their order, empty slots last, and [c], those of `entries` that were not kept.

  Example:
    >>> entries = Sparse(jnp.array([0, 1, 9, 3]), jnp.array([1.0, -3.0, 0.0, 2.0]))
    >>> kept, rest = top_k_of_entries(entries, 2, slots=2, end=9)
    >>> kept.indices, rest.indices
    (Array([1, 3], dtype=int32), Array([0, 9, 9, 9], dtype=int32))
  """
  more = (0, -entries.indices.size % (bitset.GROUP * bitset.BITS))
  keys = jnp.pad(jnp.where(entries.indices < end, keys_of(entries.values), -1), more, constant_values=-1)[None]
  indices = jnp.pad(entries.indices, more)[None]
  count = jnp.minimum(k, sparse.count(entries, end))
  cut = kth_largest(keys, indices, count)
  chosen = cut.selects(keys, indices)[0, : entries.indices.size] & (count > 0)
  return sparse.compressed(entries, chosen, slots, end), sparse.where(~chosen, entries, end)


def among(
  keys: jax.Array,
  indices: jax.Array,
  blocks: Blocks,
  low: jax.Array,
  proven: Callable[[jax.Array], jax.Array],
  otherwise: Callable[[jax.Array], jax.Array],
  least: jax.Array | None = None,
) -> jax.Array:
  """The k largest entries of each block, found among some of its entries where these provably contain them.

  Args:
    keys: i32[rows, c], c a multiple of 256, of entries known to be large, each once; −1 in empty slots.
    indices: i32[rows, c], block-relative.
    blocks: says the length of a block, and k.
    low: i32[rows]; every entry of a block that reaches this key is given.
    proven: (i32[rows] number of keys that reach `low`) -> bool[], whether the given entries contain the k largest.
    otherwise: (row) -> i32[k], the result for a row from all its entries; runs, row by row, if not proven.
    least: i32[rows], at least 1: the smallest key of a selected entry; fewer than k entries may reach it.

  Returns:
    i32[rows, k], block-relative, in the order of `indices`; `length` in empty slots.
  """
  (rows, size), k, length = keys.shape, blocks.k, blocks.length
  reached = bitset.count(bitset.pack(keys >= low[:, None]))

  def among_these() -> jax.Array:
    chosen = kth_largest(keys, indices, jnp.minimum(k, reached), low).selects(keys, indices)
    if least is not None:
      chosen &= keys >= least[:, None]
    ranks = bitset.ranks(bitset.pack(chosen).reshape(-1)).reshape(rows, size)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    slot = jnp.where(chosen, ranks - ranks[:, :1] + k * row, rows * k)
    empty = jnp.full(rows * k, length, jnp.int32)
    return sparse.put(empty, slot.reshape(-1), indices.reshape(-1)).reshape(rows, k)

  each = lambda: jax.lax.map(otherwise, jnp.arange(rows, dtype=jnp.int32))
  return jax.lax.cond(proven(reached), among_these, each)


def _by_bracket(blocks: Blocks) -> jax.Array:
  if blocks.length < bitset.GROUP * bitset.BITS:  # too short for candidates
    return _by_bisection(blocks)
  some = found.candidates(blocks)
  keys = jnp.where(some.indices < blocks.length, keys_of(blocks.x.at(blocks.flat(some.indices))), -1)
  proven = lambda reached: (some.fits & (reached >= blocks.k)).all()
  return among(keys, some.indices, blocks, some.low, proven, lambda row: _bisected(blocks, row))


def _by_bisection(blocks: Blocks) -> jax.Array:
  if blocks.order.size == 1:  # not batched: XLA on CPU compiles a batch of rows to slower code
    return _bisected(blocks, jnp.int32(0))[None]
  return jax.vmap(lambda row: _bisected(blocks, row))(jnp.arange(blocks.order.size, dtype=jnp.int32))


def _bisected(blocks: Blocks, row: jax.Array) -> jax.Array:
  """The k largest of one row, i32[k], by counting."""
  single = blocks.order.size == 1
  values = blocks.x.values if single else blocks.x.slice(blocks.order[row] * blocks.length, blocks.length)
  keys = keys_of(values)
  members = lambda cut: bitset.pack(cut.selects(keys, jnp.arange(keys.size, dtype=jnp.int32)))
  cut = bisected(lambda cut: bitset.count(members(cut)), jnp.int32(blocks.k), jnp.int32(0), jnp.int32(TOP))
  return bitset.nonzero(members(cut), blocks.k)


def _by_sorting(blocks: Blocks) -> jax.Array:
  # As floats: compilers have a fast top_k of floats, but sort integers.
  magnitudes = jax.lax.bitcast_convert_type(keys_of(blocks.x.values), jnp.float32)
  return jnp.sort(jax.lax.top_k(magnitudes.reshape(blocks.order.size, blocks.length), blocks.k)[1], axis=-1)


_METHODS = {"bracket": _by_bracket, "bisect": _by_bisection, "sort": _by_sorting}
