"""The k largest entries of each chunk of consecutive entries of a vector: the same entries on every platform.

    CPU    _by_threshold   a key that at least k entries of a chunk reach; the k largest of those that do, by counting
    GPU    _by_groups      the k groups of 8 whose maxima are largest contain the k largest; sorts of 8 k keys, no n
    TPU    _by_sorting     `lax.top_k` of some chunks at a time

Nothing waits for the host on GPUs: which method runs does not depend on the entries.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.select.blocks import TOP, LazySum, keys_of
from jaxsparse.select.exact import sort_rows
from jaxsparse.select.threshold import largest_that
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse

_CACHED = 1 << 18  # entries that are read twice by a CPU
_PIECES = 16  # pieces that TPUs sort, one after the other
_GROUP = 8  # entries, or maxima, that a GPU compares at once
_KEY_BITS = 31

_Read = Callable[[jax.Array], jax.Array]
_Method = Callable[[jax.Array, _Read, int, int], jax.Array]


def top_k_of_chunks(x: LazySum, length: int, k: int) -> Sparse:
  """The k entries of largest magnitude of each chunk, ties to the lowest index; NaN ranks above everything.

  Args:
    x: f32[n]; zeros fill the last chunk.
    length: entries of a chunk, at most 16,384.
    k: entries of each chunk, at most `length`.

  Returns:
    [⌈n / length⌉, k] entries, ascending indices relative to their chunk.

  Example:
    >>> top_k_of_chunks(LazySum((jnp.array([1.0, -3.0, 2.0, 4.0, 0.0]),)), length=3, k=2)
    Sparse(indices=Array([[1, 2],
           [0, 1]], dtype=int32), values=Array([[-3.,  2.],
           [ 4.,  0.]], dtype=float32))
  """
  rows = -(-x.size // length)
  # A TPU sorts about 16 pieces, one after the other, which bounds the memory of a sort.
  on_tpu = functools.partial(_in_pieces, _by_sorting, x, length, k, _PIECES)
  # Groups of 8 save sorting where the k best groups are at most half of a chunk; else a
  # GPU sorts as a TPU does.
  on_gpu = (
    functools.partial(_in_pieces, _by_groups, x, length, k, 1)
    if 2 * _GROUP * k <= length
    else on_tpu
  )
  # Whether `_by_threshold` serves: chunks of a multiple of 256 entries, for its bitset,
  # that are cut into groups of at least four entries. 256 and the number of groups are
  # powers of two, so the larger is a multiple of both.
  groups = _groups(k)
  multiple = max(bitset.GROUP * bitset.BITS, groups)
  bracketed = length % multiple == 0 and 4 * groups <= length
  # Each piece is read twice, so it has to fit into the cache.
  pieces = max(1, rows * length // _CACHED)
  on_cpu = functools.partial(
    _in_pieces, _by_threshold if bracketed else _by_sorting, x, length, k, pieces
  )
  # On a CPU `_by_groups` takes 6 times the time; on a GPU `_by_threshold` runs 1.8
  # times the kernels.
  indices = _compat.by_platform(gpu=on_gpu, tpu=on_tpu, default=on_cpu)()
  flat = indices + length * iota(rows)[:, None]
  return Sparse(indices, x.read_at(flat))


def _in_pieces(
  select: _Method, x: LazySum, length: int, k: int, pieces: int
) -> jax.Array:
  """The results of `select` for all chunks, i32[⌈n / length⌉, k], one piece after the other.

  Args:
    select: one of the methods below. Takes the values of a piece, a function that reads
      them at indices in the piece, `length` and k, as `_by_sorting`.
    x: f32[n].
    length: of a chunk.
    k: of each chunk.
    pieces: about the number of pieces, each of whole chunks.
  """
  size = -(-x.size // (length * pieces)) * length
  full, rest = divmod(x.size, size)

  def select_piece(start: jax.Array, values: jax.Array) -> jax.Array:
    return select(values, lambda at: x.read_at(start + at), length, k)

  chosen = jnp.zeros((0, k), jnp.int32)
  if full:
    starts = size * iota(full)
    chosen = jax.lax.map(
      lambda start: select_piece(start, x.slice(start, size)), starts
    )
    chosen = chosen.reshape(-1, k)
  if not rest:
    return chosen
  # a shorter piece, whose last chunk is filled with zeros
  start = jnp.int32(full * size)
  values = jnp.pad(x.slice(start, rest), (0, -rest % length))
  return jnp.concatenate([chosen, select_piece(start, values)])


def _by_sorting(
  values: jax.Array,
  _: _Read,
  length: int,
  k: int,
) -> jax.Array:
  """The positions of the k largest of each chunk, i32[rows, k].

  Args:
    values: f32[rows · length], as an expression.
    _: reads the values at given indices, for other methods.
    length: of a chunk.
    k: of each.
  """
  return sort_rows(keys_of(values).reshape(-1, length), k)


def _by_groups(
  values: jax.Array,
  read: _Read,
  length: int,
  k: int,
) -> jax.Array:
  """As `_by_sorting`, by groups of 8 entries, groups of 8 such groups, and so on.

  The k groups with the largest maxima, ties to the first group, contain the k largest
  entries: each of these groups has an entry that ranks above every entry of the other
  groups. So each level sorts only the members of the k best groups of the level above.
  """
  keys = keys_of(values).reshape(-1, length)
  rows = len(keys)
  # maxima of groups, then of groups of groups, until there are fewer than 8 k
  levels = []
  while (width := keys.shape[1]) >= _GROUP * k:
    more = ((0, 0), (0, -width % _GROUP))
    groups = jnp.pad(keys, more, constant_values=-1).reshape(rows, -1, _GROUP)
    keys = groups.max(axis=2)
    levels.append(keys)
  indices = iota(keys.shape[1])[None]
  # From the last level down: its k best groups, then their members in the level below.
  # The entries themselves, None, are read again instead of stored.
  for keys_below in reversed([None, *levels[:-1]]):
    groups = _first(keys, jnp.broadcast_to(indices, keys.shape), k)
    members = groups[:, :, None] * _GROUP + iota(_GROUP)[None, None]
    indices = members.reshape(rows, -1)
    if keys_below is None:
      chunk = iota(rows)[:, None]
      keys = jnp.where(indices < length, keys_of(read(chunk * length + indices)), -1)
    else:
      keys = jnp.take_along_axis(
        keys_below, indices, axis=1, mode="fill", fill_value=-1
      )
  return jnp.sort(_first(keys, indices, k), axis=1)


def _first(keys: jax.Array, indices: jax.Array, k: int) -> jax.Array:
  """The indices of the k largest keys of each row, the largest first; indices are below 2¹⁵, and sorted as 16 bits."""
  # Ascending in TOP − key, then in the index: ties go to the lowest index.
  operands = TOP - keys, indices.astype(jnp.int16)
  _, ordered = jax.lax.sort(operands, num_keys=2, is_stable=False)
  return ordered[:, :k].astype(jnp.int32)


def _groups(k: int) -> int:
  """The number of groups whose k-th largest maximum few more than k entries reach."""
  return max(128, 1 << (3 * k - 1).bit_length())


def _by_threshold(
  values: jax.Array,
  read: _Read,
  length: int,
  k: int,
) -> jax.Array:
  """As `_by_sorting`, among the entries that reach the k-th largest of the maxima of groups.

  At least k entries reach this threshold, so the k largest do. If more entries reach it
  than there are slots, the piece is sorted.
  """
  size = values.size
  groups = _groups(k)
  rows = size // length
  # The mean number of entries that reach the threshold, if their order is random: a
  # group with λ of them in the mean has at least one with probability 1 − e^(−λ), which
  # is k/groups, since k of the groups have one.
  mean = -groups * np.log1p(-k / groups)
  # Nearly twice the mean for each chunk, a tenth more than the mean for all chunks.
  slots = 32 * -(-int(1.9 * mean) // 32)
  capacity = bitset.align(int(rows * (1.1 * mean + 2)) + slots)
  members = _reaching(keys_of(values), rows, k, groups)
  counts = bitset.count(members)
  ends = bitset.running_sum(counts)

  def search() -> jax.Array:
    ascending = bitset.nonzero(members.reshape(-1), capacity)
    slot = (ends - counts)[:, None] + iota(slots)[None]
    # [rows, slots], each row with the members of its chunk; `size` in empty slots
    flat = jnp.where(slot < ends[:, None], ascending[slot], size)
    # [slots, rows], so that a vector register counts in several chunks at once
    keys = jnp.where(flat < size, keys_of(read(flat)), -1).T
    chosen = bitset.pack(_is_largest(keys, k).T.reshape(-1))
    # exactly k of each row, in the order of rows and of indices
    largest = flat.reshape(-1)[bitset.nonzero(chosen, rows * k)]
    return largest.reshape(rows, k) % length

  # data whose order is not random may need more
  fits = (jnp.max(counts) <= slots) & (ends[-1] <= capacity)
  return varying.cond(fits, search, lambda: _by_sorting(values, read, length, k))


def _reaching(
  keys: jax.Array,
  rows: int,
  k: int,
  groups: int,
) -> jax.Array:
  """The bitset, u32[rows, words], of the entries of chunks that reach the k-th largest of the maxima of groups."""
  length = keys.size // rows
  of_groups = keys.reshape(rows, -1, groups)  # every `groups`-th entry
  # Not `max(axis=1)`, which XLA on CPU compiles to slower code.
  best = functools.reduce(
    jnp.maximum, [of_groups[:, group] for group in range(length // groups)]
  )
  # The upper 16 bits of keys give a slightly lower threshold, which a few more entries
  # reach, in half as many rounds on vectors of twice as many numbers.
  upper = (best >> 16).astype(jnp.int16).T
  kth = _kth_largest(upper, jnp.int16(k), 15)
  low = kth.astype(jnp.int32)[:, None] << 16
  reaches = keys.reshape(rows, length) >= jnp.maximum(low, 1)
  # A threshold of 0: zeros may be selected, all of them among the first k entries.
  first = bitset.pack(jnp.arange(length) < k)[None]
  members = bitset.pack(reaches.reshape(-1)).reshape(rows, -1)
  return members | jnp.where(low == 0, first, jnp.uint32(0))


def _is_largest(keys: jax.Array, k: int) -> jax.Array:
  """Whether each key i32[slots, rows] is one of the k largest of its column, ties to the first."""
  slots = len(keys)
  least = _kth_largest(keys, jnp.int32(k), _KEY_BITS)
  above = keys > least[None]
  ties = keys == least[None]
  left = k - jnp.sum(above, axis=0, dtype=jnp.int32)
  # numbers the ties from the last slot on, so that the first tie has the largest number
  backward = jnp.where(ties, slots - iota(slots)[:, None], 0)
  # the number of the last tie that is still among the k
  last = _kth_largest(backward, left, slots.bit_length())
  return above | (backward >= jnp.maximum(last, 1)[None])


def _kth_largest(keys: jax.Array, k: jax.Array, bits: int) -> jax.Array:
  """The k-th largest of each column, bit by bit; keys are integers [c, rows] below 2 to the power of `bits`.

  It is the largest number that at least k keys of the column reach; 0 if fewer than k
  keys are above 0.
  """
  dtype = keys.dtype

  def has_enough(key: jax.Array) -> jax.Array:
    # counted in the dtype of the keys, so that a vector register holds as many
    reaches = (keys >= key[None]).astype(dtype)
    return jnp.sum(reaches, axis=0, dtype=dtype) >= k

  return largest_that(has_enough, jnp.zeros(keys.shape[1], dtype), bits)
