"""Exact top-k by magnitude, the selection that all collectives share.

    find_candidates   one pass over n entries: a sample of each block gives a threshold that a few more than k reach
    search_among      the k largest of the candidates, by counting; if fewer are not 0, these and the first zeros
    search_keys       if the candidates are not proven to contain the top-k, the k largest of whole blocks, by counting

The result is bitwise the same on every path: ties go to the lowest index, and NaN ranks
above all numbers, so that it is always selected.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat, sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.select.blocks import (
  Blocks,
  LazySum,
  check_float32,
  keys_of,
  kth_largest,
  search_keys,
)
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse, check_whole

Search = Literal["bracket", "bisect", "sort"]

SHORT = 1 << 14
"""Entries of a block up to which one sort costs less than a search for candidates."""

_SAMPLES = (SHORT, 1 << 16)  # entries of a sample, at least and at most
_NO_SLOT = jnp.iinfo(jnp.int32).max
_DEVIATIONS = 3.5  # a sample is off by more once in 4,000 times


def top_k(
  x: jax.Array | LazySum,
  k: int,
  *,
  method: Search | None = None,
) -> Sparse:
  """The k entries of largest magnitude of each row, in the order of their indices.

  Ties go to the lowest index, and NaN ranks above everything. Whatever the method, the
  result is the same bit for bit.

  Args:
    x: f32[..., n], or a lazily summed f32[n].
    k: number of entries to select from each row, 1 … n.
    method: None for the fastest by `method_for`. "bracket" reads x once: a sample gives
      a threshold that a few more than k entries reach, and these candidates are
      searched; where they are too few or too many, "bisect" follows. "bisect" counts
      the entries that reach a threshold, again and again, until they are k. "sort" is
      `lax.top_k`.

  Returns:
    `Sparse` of i32[..., k] indices into the row, ascending, and f32[..., k] values.

  Raises:
    ValueError: if k is no whole number in 1 … n, or for an unknown method.
    TypeError: for numbers that are not float32.

  Example:
    >>> import jax.numpy as jnp
    >>> top_k(jnp.array([1.0, -3.0, 0.0, 3.0]), 2)
    Sparse(indices=Array([1, 3], dtype=int32), values=Array([-3.,  3.], dtype=float32))
  """
  shape = (x.size,) if isinstance(x, LazySum) else jnp.shape(x)
  if not isinstance(x, LazySum):
    x = LazySum((jnp.asarray(x).reshape(-1),))
  for term in x.parts:
    check_float32(term)
  n = shape[-1]
  check_whole("top_k", 1, n, k=k)
  method = method_for(n, k) if method is None else method
  if method not in _METHODS:
    raise ValueError(
      f"method={method!r}, choose one of {', '.join(map(repr, _METHODS))}"
    )
  # A row is a block, so that the searches of collectives serve rows, too.
  rows = x.size // n
  blocks = Blocks(x, iota(rows), n, k)
  indices = _METHODS[method](blocks) if rows else jnp.zeros((0, k), jnp.int32)
  values = x.read_at(blocks.flat_indices(indices))
  shape_of_result = *shape[:-1], k
  return Sparse(indices.reshape(shape_of_result), values.reshape(shape_of_result))


def method_for(n: int, k: int) -> Search:
  """The method that measured fastest for the k largest of rows of n entries; nothing here depends on the platform.

  Example:
    >>> method_for(1_000_000, 10_000), method_for(1_000_000, 900_000), method_for(1_000, 10)
    ('bracket', 'bisect', 'sort')
  """
  return "sort" if n <= SHORT else "bracket" if plan_search(n, k) else "bisect"


def plan_search(length: int, k: int) -> tuple[int, int, int] | None:
  """How candidates for the k largest entries of a block are found; None where that takes longer than without them.

  Returns:
    (size, rank, slots): the rank-th largest key of a sample of `size` entries is the
    threshold of the candidates. That more than `slots`, or fewer than k, of the entries
    reach it happens about once in 4,000 samples each.

  Example:
    >>> plan_search(1_000_000, 10_000), plan_search(1_000_000, 900_000)
    ((16384, 209, 16128), None)
  """
  least, most = _SAMPLES
  size = bitset.align(min(max(length // 128, least), most))
  # The number of the k largest that a sample contains is binomial, about Poisson: its
  # deviation is the root of its mean.
  mean = size * k / length
  rank = min(size, int(mean + _DEVIATIONS * mean**0.5 + 1))
  # `rank` entries of the sample reach the threshold. In proportion, with 3.5 deviations
  # more, that is the number of entries of the block that reach it.
  slots = bitset.align(int(k * (rank + _DEVIATIONS * rank**0.5 + 1) / mean))
  # A short block is sorted whole. Candidates that are half of a block, or more, save
  # nothing.
  return (size, rank, slots) if length > SHORT and slots < length // 2 else None


class Candidates(NamedTuple):
  """The entries of each block that reach a threshold: a superset of its top-k where enough of them reach it.

  Attributes:
    members: the bitset of their flat indices.
    indices: i32[rows, c], block-relative, ascending; the block's length in empty slots.
    low: i32[rows], a key (`keys_of`). If `fits`, every entry of the block that reaches
      it is a candidate.
    fits: bool[rows], whether all entries that reach `low` fit into the slots.
    needed: i32[], the minimum number of candidates that reach `low` to prove that they
      contain all to be selected.
  """

  members: jax.Array
  indices: jax.Array
  low: jax.Array
  fits: jax.Array
  needed: jax.Array


def find_candidates(blocks: Blocks, low: jax.Array | None = None) -> Candidates | None:
  """Candidates for the k largest entries of each block; None where `plan_search` has none.

  Args:
    blocks: the blocks; entries beyond n count as zeros and are never candidates.
    low: i32[rows], at least 1: the smallest key of an entry to be selected, and so of a
      candidate. None takes a key that, with high probability, a few more than k entries
      reach, estimated from a sample of each block.

  Example:
    >>> x = jax.random.normal(jax.random.key(0), (100_000,))
    >>> blocks = lambda x: Blocks(LazySum((x,)), order=jnp.array([1, 0]), length=50_000, k=100)
    >>> found = jax.jit(lambda x: find_candidates(blocks(x)))(x)
    >>> found.fits, bool((x[50_000 + found.indices[0, :100]] ** 2 > 4).all())
    (Array([ True,  True], dtype=bool), True)
  """
  n = blocks.x.size
  length = blocks.length
  rows = blocks.order.size
  plan = plan_search(length, blocks.k)
  if plan is None:
    return None
  size, rank, capacity = plan
  # the threshold of each block, in the order of blocks; rows have another order
  by_block = (
    _estimate_keys(blocks, size, rank)
    if low is None
    else jnp.zeros_like(low).at[blocks.order].set(low)
  )
  # By word a TPU moves 1.2 times the bytes, and stores n entries; by entry a CPU takes
  # 1.17 times the time of this function.
  low_of_entry = _compat.by_platform(tpu=_low_of_entries, default=_low_of_words)(
    by_block, n, length
  )
  members = bitset.pack(keys_of(blocks.x.values) >= low_of_entry)
  # The candidates of all blocks, ascending; empty slots hold n or more. There may be 32
  # more for each block, from a word that lies in two blocks (`_low_of_words`).
  flat = bitset.nonzero(members, bitset.align(rows * (capacity + bitset.BITS)))

  # the flat indices at which blocks begin, and the end of the last one
  edges = jnp.minimum(iota(rows + 1) * length, n)
  # The slot of `flat` at which each block starts, as a rank in the bitset: a binary
  # search would run 8 more kernels on a GPU, and save 3 % of the CPU time here.
  starts = bitset.rank(members, edges)
  # candidates of a row: slots begin … end − 1 of `flat`
  begin = starts[blocks.order]
  end = starts[blocks.order + 1]
  slots = begin[:, None] + iota(capacity)[None]
  starts_of_rows = (blocks.order * length)[:, None]
  relative = flat[jnp.minimum(slots, flat.size - 1)] - starts_of_rows
  # `flat` has too few slots for the candidates of a row that ends beyond it.
  fits = (end - begin <= capacity) & (end < flat.size)
  indices = jnp.where(slots < end[:, None], relative, length)
  # With a given threshold fewer than k entries may reach it, so none are needed.
  needed = jnp.int32(blocks.k if low is None else 0)
  return Candidates(members, indices, by_block[blocks.order], fits, needed)


def _estimate_keys(blocks: Blocks, size: int, rank: int) -> jax.Array:
  """The `rank`-th largest key, at least 1, of a sample of `size` entries of each block, i32[rows]."""
  length = blocks.length
  rows = blocks.order.size
  # A random entry of each of `size` equal parts of a block, so that periodic data give
  # a fair sample. The seed is `length`, so that all programs draw the same entries.
  parts = np.arange(size) + np.random.default_rng(length).random(size)
  positions = np.minimum(parts * length / size, length - 1)
  sample = jnp.array(positions, jnp.int32)[None]
  starts = length * iota(rows)[:, None]
  keys = keys_of(blocks.x.read_at(sample + starts))
  slots = jnp.broadcast_to(iota(size), keys.shape)
  # a GPU sorts so few keys in one kernel
  by_sort = lambda keys: jnp.sort(keys, axis=1)[:, -rank]
  by_search = lambda keys: kth_largest(keys, slots, rank).key[:, 0]
  # By search an update of SparDL moves 1.4 times the bytes.
  cut = _compat.by_platform(gpu=by_sort, default=by_search)(keys)
  # Never 0: the zeros of a block with few other entries would all become candidates,
  # and take the slots of other blocks.
  return jnp.maximum(cut, 1)


def _low_of_words(by_block: jax.Array, n: int, length: int) -> jax.Array:
  """The key of the block of each of n entries, i32[n]; 32 entries of a word that lie in two blocks get the lower key.

  A lower key makes up to 32 more candidates.

  Args:
    by_block: i32[blocks].
    n: entries of the vector.
    length: entries of a block.
  """
  starts = jnp.arange(0, n, bitset.BITS, dtype=jnp.int32)
  ends = jnp.minimum(starts + (bitset.BITS - 1), n - 1)
  low = jnp.minimum(by_block[starts // length], by_block[ends // length])
  return jnp.repeat(low, bitset.BITS)[:n]


def _low_of_entries(by_block: jax.Array, n: int, length: int) -> jax.Array:
  """The key of the block of each of n entries, i32[n], as `_low_of_words` for TPUs, entry by entry.

  A TPU would pad rows of 32 entries, as `jnp.repeat` makes them, to 128 and store them.
  """
  index = iota(n)
  low = jnp.broadcast_to(by_block[0], n)
  for row in range(1, len(by_block)):
    low = jnp.where(index >= row * length, by_block[row], low)
  return low


def search_among(
  candidates: Candidates,
  read: Callable[[jax.Array], jax.Array],
  blocks: Blocks,
  search_all: Callable[[], jax.Array],
  least: jax.Array | None = None,
) -> jax.Array:
  """The k largest entries of each row, found among its candidates where these provably contain them.

  Args:
    candidates: of the rows, c a multiple of 256; each index once, in any order.
    read: (i32[rows, c]) -> f32[rows, c], the values of block-relative indices.
    blocks: says the length of a block, and k.
    search_all: returns the result from all entries of the rows; runs if not proven.
    least: i32[rows], at least 1: the key that a selected entry must reach; fewer than k
      entries may.

  Returns:
    i32[rows, k], block-relative, in the order of `candidates.indices` unless zeros are
    selected; `length` in empty slots.
  """
  # On a GPU `_by_count_with_zeros` runs 23 % more kernels; on a CPU `_by_order` takes
  # 1.4 times the time.
  search = _compat.by_platform(
    gpu=_by_order, tpu=_by_count, default=_by_count_with_zeros
  )
  largest, known = search(candidates.indices, candidates.low, read, blocks, least)
  # `known`: how many candidates of a row reach `low` (on a GPU 0 if fewer than k do),
  # or k if proven otherwise. About once in some thousand searches it is not proven:
  # then all entries are searched.
  proven = candidates.fits & (known >= candidates.needed)
  return varying.cond(proven.all(), lambda: largest, search_all)


def _by_order(
  indices: jax.Array,
  low: jax.Array,
  read: Callable,
  blocks: Blocks,
  least: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The k largest candidates, filled up with the first zeros, on GPUs.

  A sort of the slots of the chosen entries is fewer kernels than the sum and scatter of
  `_by_count_with_zeros`.

  Args:
    indices: i32[rows, c], the candidates, block-relative; `length` in empty slots.
    low: i32[rows], at least 1: every entry whose key reaches it is a candidate. Where
      it is 1, every entry that is not 0 is a candidate.
    read: (i32[rows, c]) -> f32[rows, c], the values of block-relative indices.
    blocks: says the length of a block, and k.
    least: i32[rows], at least 1: the key that a selected entry must reach; None for the
      k largest.

  Returns:
    (i32[rows, k], i32[rows]): the entries, `length` in empty slots; and k where they
    are proven to be the k largest, else 0.
  """
  # A row of fewer than k non-zero entries is filled up with its first zeros, which are
  # among the first k entries of the block.
  k = blocks.k
  length = blocks.length
  known = indices.shape[1]
  width = bitset.align(k)
  slots = jnp.broadcast_to(iota(known + width), (len(indices), known + width))
  # Candidates first, then the first k entries of the block.
  is_candidate = slots < known
  # No concatenation, which XLA would not compute in one kernel with the keys.
  padded = jnp.pad(indices, ((0, 0), (0, width)))
  indices = jnp.where(is_candidate, padded, slots - known)
  keys = keys_of(read(indices))
  # A candidate that has become 0 counts among the first k entries only, not twice.
  is_zero = (indices < k) & (keys == 0)
  is_entry = (indices < length) & (keys > 0)
  keys = jnp.where(jnp.where(is_candidate, is_entry, is_zero), keys, -1)
  cut = kth_largest(keys, indices, k)
  chosen = cut.selects(keys, indices)
  # Proven: k candidates reach `low`, and all other entries are below it.
  is_full = cut.key[:, 0] >= low
  if least is not None:
    chosen &= keys >= least[:, None]
  # In the order of slots if no zeros are selected, else in that of indices, since zeros
  # have the last slots. Entries that are not chosen are sorted to the end.
  by_slot = is_full.all() | (least is not None)
  order = jnp.where(chosen, jnp.where(by_slot, slots, indices), _NO_SLOT)
  order = jax.lax.sort(order, is_stable=False)[:, :k]
  at_slots = jnp.take_along_axis(indices, order, 1, mode="clip")
  largest = jnp.where(by_slot, at_slots, order)
  # Where `low` is 1, all entries that are not candidates are 0.
  is_known = is_full | (low == 1)
  reached = jnp.where(is_known, jnp.int32(k), jnp.int32(0))
  return jnp.where(order < _NO_SLOT, largest, length), reached


def _by_count(
  indices: jax.Array,
  low: jax.Array,
  read: Callable,
  blocks: Blocks,
  least: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The k largest candidates without a loop that waits for a host.

  A TPU searches by this function alone: in a row of fewer than k non-zero entries fewer
  than k candidates reach `low`, so `search_among` searches all entries of the rows
  instead, where zeros are selected, too.

  Args:
    indices: i32[rows, c], the candidates, block-relative, each once; the block's length
      in empty slots.
    low: i32[rows], at least 1: every entry whose key reaches it is a candidate. Where
      it is 1, every entry that is not 0 is a candidate.
    read: (i32[rows, c]) -> f32[rows, c], the values of block-relative indices.
    blocks: says the length of a block, and k.
    least: i32[rows], at least 1: the key that a selected entry must reach, so that
      fewer than k may be selected; None for the k largest.

  Returns:
    (i32[rows, k], i32[rows]): the entries, `length` in empty slots; and the number of
    candidates that reach `low`. With `least` it is k where `low` is 1: the entries that
    are not candidates are then zeros, which are below `least`.
  """
  keys = jnp.where(indices < blocks.length, keys_of(read(indices)), -1)
  # Not all entries below `low` are candidates, so the candidates there prove nothing.
  reached = bitset.count_true(keys >= low[:, None])
  cut = kth_largest(keys, indices, jnp.minimum(blocks.k, reached), low)
  chosen = cut.selects(keys, indices)
  if least is not None:
    chosen &= keys >= least[:, None]
  empty = jnp.full((len(indices), blocks.k), blocks.length, jnp.int32)
  largest = _append(empty, jnp.zeros_like(low), chosen, indices)
  return largest, reached if least is None else jnp.where(low == 1, blocks.k, reached)


def _by_count_with_zeros(
  indices: jax.Array,
  low: jax.Array,
  read: Callable,
  blocks: Blocks,
  least: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """As `_by_count`, but rows of fewer than k non-zero entries are filled up with their first zeros.

  These zeros are among the first k entries of the block. Not used on TPUs, where the
  sort takes long to compile. Arguments and results are those of `_by_count`; the second
  result is k wherever `low` is 1.
  """
  largest, reached = _by_count(indices, low, read, blocks, least)

  def add_zeros() -> jax.Array:
    first = jnp.broadcast_to(iota(blocks.k), largest.shape)
    is_zero = keys_of(read(first)) == 0
    return jnp.sort(_append(largest, reached, is_zero, first), axis=1)

  # Zeros do not reach `least`, which is at least 1.
  if least is None:
    largest = varying.cond((reached < blocks.k).any(), add_zeros, lambda: largest)
  # Where `low` is 1, the smallest key above 0, all entries besides candidates are 0:
  # proven. Elsewhere, if fewer than k reach `low`, `search_among` searches all entries.
  return largest, jnp.where(low == 1, blocks.k, reached)


def _append(
  chosen: jax.Array, filled: jax.Array, flags: jax.Array, new: jax.Array
) -> jax.Array:
  """`chosen` [rows, k] with the flagged entries of `new` [rows, c] in the slots from `filled` i32[rows] on.

  Entries for which no slot is left are dropped.
  """
  rows, k = chosen.shape
  ones = flags.astype(jnp.int32)
  # Flagged entries before each entry in all rows; `before[:, :1]` are those of earlier
  # rows.
  before = bitset.running_sum(ones.reshape(-1)).reshape(ones.shape) - ones
  slot = filled[:, None] + before - before[:, :1]
  # slots of all rows in one vector: a scatter into a vector is fewer operations
  slot = jnp.where(flags & (slot < k), slot + k * iota(rows)[:, None], rows * k)
  flat = sparse.put(chosen.reshape(-1), slot.reshape(-1), new.reshape(-1))
  return flat.reshape(-1, k)


def _by_bracket(blocks: Blocks) -> jax.Array:
  """`top_k` by candidates: i32[rows, k], block-relative, ascending."""
  candidates = find_candidates(blocks)
  if candidates is None:
    return _by_bisection(blocks)
  read = lambda indices: blocks.x.read_at(blocks.flat_indices(indices))
  return search_among(candidates, read, blocks, lambda: _by_bisection(blocks))


def _by_bisection(blocks: Blocks) -> jax.Array:
  """`top_k` by counting in all entries: i32[rows, k], block-relative, ascending."""

  def read(start: jax.Array) -> jax.Array:
    first, *others = blocks.x.parts
    # Always true. Without it XLA would replace the slice of a single block by the whole
    # vector, which does not depend on `start`, and would compute and store its keys.
    first = jnp.where(start >= 0, first, 0.0)
    return keys_of(LazySum((first, *others)).slice(start, blocks.length))

  return search_keys(read, blocks, blocks.order)


def _by_sorting(blocks: Blocks) -> jax.Array:
  """`top_k` by `lax.top_k`: i32[rows, k], block-relative, ascending."""
  return sort_rows(
    keys_of(blocks.x.values).reshape(blocks.order.size, blocks.length), blocks.k
  )


def sort_rows(keys: jax.Array, k: int) -> jax.Array:
  """The indices of the k largest keys of each row, ties to the lowest index, ascending, i32[rows, k].

  Args:
    keys: i32[rows, c] of `keys_of`: 0 for a zero, more for other numbers. An empty slot
      (−1) would tie with a zero.
    k: at most c.
  """
  # Keys as the bits of floats: compilers have a fast top_k for floats, none for
  # integers. Less 1, so that the key of NaN becomes infinity: XLA for GPUs ranks NaN
  # last where it selects a few without sorting. Small keys become subnormal floats,
  # which top_k keeps in order; a key of 0 or less becomes −1, below all others.
  below = jax.lax.bitcast_convert_type(keys - 1, jnp.float32)
  _, largest = jax.lax.top_k(jnp.where(keys > 0, below, -1), k)
  return jnp.sort(largest, axis=-1)


_METHODS = {"bracket": _by_bracket, "bisect": _by_bisection, "sort": _by_sorting}


def top_k_of_entries(
  entries: Sparse, k: jax.Array | int, slots: int, end: int
) -> tuple[Sparse, Sparse]:
  """The k entries of largest magnitude of a sparse vector, ties to the lowest index, and the rest.

  Args:
    entries: [c], each index once; empty slots anywhere.
    k: an int or i32[], at most `slots`; with fewer than k entries all are kept.
    slots: number of slots of the result.
    end: length of the vector.

  Returns:
    (kept, rest): [slots] entries, in their order, empty slots last; and `entries` [c]
    with empty slots in place of the kept ones.

  Example:
    >>> entries = Sparse(jnp.array([0, 1, 9, 3]), jnp.array([1.0, -3.0, 0.0, 2.0]))
    >>> kept, rest = top_k_of_entries(entries, 2, slots=2, end=9)
    >>> kept.indices, rest.indices
    (Array([1, 3], dtype=int32), Array([0, 9, 9, 9], dtype=int32))
  """
  size = entries.indices.size
  more = (0, bitset.align(size) - size)
  keys = jnp.where(entries.indices < end, keys_of(entries.values), -1)
  keys = jnp.pad(keys, more, constant_values=-1)[None]
  indices = jnp.pad(entries.indices, more)[None]
  count = jnp.minimum(k, sparse.count(entries, end))
  cut = kth_largest(keys, indices, count)
  # For k = 0 `kth_largest` may select an entry.
  chosen = cut.selects(keys, indices)[0, :size] & (count > 0)
  kept = sparse.compress(entries, chosen, slots, end)
  return kept, sparse.where(~chosen, entries, end)
