"""Exact top-k by magnitude, the selection that all collectives share.

    find_candidates   one pass over n entries: a sample of each block gives a threshold that a few more than k reach
    search_among      the k largest of the candidates, by counting
    _bisect_row       if the candidates are not proven to contain the top-k, the k largest of whole blocks, by counting

The result is bitwise the same on every path: ties go to the lowest index, and NaN ranks above all numbers, so that it
is always selected.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select.blocks import (
  TOP,
  Blocks,
  LazySum,
  bisect,
  keys_of,
  kth_largest,
  rank_in_sample,
  sample_indices,
)
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse

Search = Literal["bracket", "bisect", "sort"]

SHORT = 1 << 14
"""Entries of a block up to which one sort costs less than a search for candidates."""

_SAMPLES = (SHORT, 1 << 16)  # of a block, at least and at most


def top_k(x: jax.Array | LazySum, k: int, *, method: Search | None = None) -> Sparse:
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
  values = lazy.read_at(blocks.flat_indices(indices))
  return Sparse(indices.reshape(*shape[:-1], k), values.reshape(*shape[:-1], k))


def method_for(n: int, k: int) -> Search:
  """The method that measured fastest for the k largest of rows of n entries; nothing here depends on the platform.

  Example:
    >>> method_for(1_000_000, 10_000), method_for(1_000_000, 900_000), method_for(1_000, 10)
    ('bracket', 'bisect', 'sort')
  """
  return "sort" if n <= SHORT else "bracket" if use_candidates(n, k) else "bisect"


def use_candidates(length: int, k: int) -> bool:
  """Whether blocks are long enough, and candidates few enough, that finding candidates first saves time.

  Example:
    >>> use_candidates(1_000_000, 10_000), use_candidates(1_000_000, 900_000), use_candidates(1_000, 10)
    (True, False, False)
  """
  return length > SHORT and _plan_search(length, k)[2] < length // 2


def _plan_search(length: int, k: int) -> tuple[int, int, int]:
  """The size of the sample of a block, the rank in it of the candidates' threshold, and the slots for candidates."""
  least, most = _SAMPLES
  size = bitset.align(min(max(length // 128, least), most))
  rank, factor = rank_in_sample(size, k / length)
  return size, rank, bitset.align(int(k * factor))


class Candidates(NamedTuple):
  """The entries of each block that reach a threshold, and a few others.

  Attributes:
    members: the bitset of their flat indices.
    indices: i32[rows, c], block-relative, ascending; the block's length in empty slots.
    low: i32[rows], a key (`keys_of`). If `fits`, every entry of the block that reaches it is a candidate.
    fits: bool[rows], whether all entries that reach `low` fit into the slots.
  """

  members: jax.Array
  indices: jax.Array
  low: jax.Array
  fits: jax.Array


def find_candidates(blocks: Blocks, low: jax.Array | None = None) -> Candidates:
  """Candidates for the k largest entries of each block.

  Args:
    blocks: the blocks; entries beyond n count as zeros and are never candidates.
    low: i32[rows], at least 1: the smallest key of a candidate. By default a key that, with high probability, a few
      more than k entries reach, estimated from a sample of each block.

  Example:
    >>> x = LazySum((jax.random.normal(jax.random.key(0), (100_000,)),))
    >>> found = find_candidates(Blocks(x, order=jnp.array([1, 0]), length=50_000, k=100))
    >>> found.fits, bool((x.read_at(50_000 + found.indices[0, :100]) ** 2 > 4).all())
    (Array([ True,  True], dtype=bool), True)
  """
  n, length, rows = blocks.x.size, blocks.length, blocks.order.size
  capacity = _plan_search(length, blocks.k)[2]
  by_block = _estimate_keys(blocks) if low is None else jnp.zeros_like(low).at[blocks.order].set(low)
  members = bitset.pack_reaching(keys_of(blocks.x.values), _keys_of_words(by_block, length, n))
  # A word of two blocks uses the lower key: up to 32 more.
  found = bitset.nonzero(members, bitset.align(rows * (capacity + bitset.BITS)))

  edges = jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32) * length, n)  # empty slots hold n or more
  starts = jnp.searchsorted(found, edges).astype(jnp.int32)
  begin, end = starts[blocks.order], starts[blocks.order + 1]
  slots = begin[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
  relative = found[jnp.minimum(slots, found.size - 1)] - (blocks.order * length)[:, None]
  fits = (end - begin <= capacity) & (end < found.size)  # else the list may be cut
  return Candidates(members, jnp.where(slots < end[:, None], relative, length), by_block[blocks.order], fits)


def _keys_of_words(low: jax.Array, length: int, n: int) -> jax.Array:
  """The key of each word of n bits: that of its block, the lower one where a word belongs to two blocks."""
  group = bitset.GROUP * bitset.BITS
  assert length >= group, "a group of words lies in one block or two"
  starts = jnp.arange(0, n, group, dtype=jnp.int32)
  block = starts // length
  left = ((block + 1) * length - starts)[:, None]  # indices of the group in its first block
  own, next_one = low[block][:, None], low[jnp.minimum(block + 1, low.size - 1)][:, None]
  word = jnp.arange(0, group, bitset.BITS, dtype=jnp.int32)[None]
  both = jnp.where(word >= left, next_one, jnp.minimum(own, next_one))
  keys = jnp.where(word + bitset.BITS <= left, own, both).reshape(-1)
  return keys[: -(-n // bitset.BITS)]


def _estimate_keys(blocks: Blocks) -> jax.Array:
  """A key for each block, i32[rows], that a few more than k of its entries reach."""
  size, rank, _ = _plan_search(blocks.length, blocks.k)
  starts = blocks.length * jnp.arange(blocks.order.size, dtype=jnp.int32)
  keys = keys_of(blocks.x.read_at(sample_indices(blocks.length, size)[None] + starts[:, None]))
  order = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), keys.shape)
  # Never 0: the candidates of a block of few non-zero entries would fill the slots of other blocks with zeros.
  return jnp.maximum(kth_largest(keys, order, rank).key, 1)


def search_among(
  keys: jax.Array,
  indices: jax.Array,
  blocks: Blocks,
  low: jax.Array,
  fits: jax.Array,
  needed: jax.Array | int,
  search_row: Callable[[jax.Array], jax.Array],
  least: jax.Array | None = None,
) -> jax.Array:
  """The k largest entries of each block, found among some of its entries where these provably contain them.

  Args:
    keys: i32[rows, c], c a multiple of 256, of entries known to be large, each once; −1 in empty slots.
    indices: i32[rows, c], block-relative.
    blocks: says the length of a block, and k.
    low: i32[rows], a key.
    fits: bool[rows], whether every entry of a block that reaches `low` is given.
    needed: the number of keys that reach `low` which proves that the given entries contain the k largest.
    search_row: (row) -> i32[k], the result for a row from all its entries; runs, row by row, if not proven.
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

  def search_each_row() -> jax.Array:
    return jax.lax.map(search_row, jnp.arange(rows, dtype=jnp.int32))

  return jax.lax.cond((fits & (reached >= needed)).all(), among_these, search_each_row)


def _by_bracket(blocks: Blocks) -> jax.Array:
  if blocks.length < bitset.GROUP * bitset.BITS:  # too short for candidates
    return _by_bisection(blocks)
  some = find_candidates(blocks)
  keys = jnp.where(some.indices < blocks.length, keys_of(blocks.x.read_at(blocks.flat_indices(some.indices))), -1)
  search_row = functools.partial(_bisect_row, blocks)
  return search_among(keys, some.indices, blocks, some.low, some.fits, blocks.k, search_row)


def _by_bisection(blocks: Blocks) -> jax.Array:
  if blocks.order.size == 1:  # not batched: XLA on CPU compiles a batch of rows to slower code
    return _bisect_row(blocks, jnp.int32(0))[None]
  return jax.vmap(functools.partial(_bisect_row, blocks))(jnp.arange(blocks.order.size, dtype=jnp.int32))


def _bisect_row(blocks: Blocks, row: jax.Array) -> jax.Array:
  """The k largest of one row, i32[k], by counting."""
  single = blocks.order.size == 1
  values = blocks.x.values if single else blocks.x.slice(blocks.order[row] * blocks.length, blocks.length)
  keys = keys_of(values)
  members = lambda cut: bitset.pack(cut.selects(keys, jnp.arange(keys.size, dtype=jnp.int32)))
  cut = bisect(lambda cut: bitset.count(members(cut)), jnp.int32(blocks.k), jnp.int32(0), jnp.int32(TOP))
  return bitset.nonzero(members(cut), blocks.k)


def _by_sorting(blocks: Blocks) -> jax.Array:
  # As floats: compilers have a fast top_k of floats, but sort integers.
  magnitudes = jax.lax.bitcast_convert_type(keys_of(blocks.x.values), jnp.float32)
  return jnp.sort(jax.lax.top_k(magnitudes.reshape(blocks.order.size, blocks.length), blocks.k)[1], axis=-1)


_METHODS = {"bracket": _by_bracket, "bisect": _by_bisection, "sort": _by_sorting}


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
  return sparse.compress(entries, chosen, slots, end), sparse.where(~chosen, entries, end)
