"""Sets of indices as bits, 32 to a word: finding the members of a set reads n/32 words, not n entries.

A comparison of n entries that is packed at once reads the entries and writes n/32
words. Bits are in the order of indices, and every function returns indices in ascending
order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import _compat
from jaxsparse.arrays import iota

BITS = 32
# shifts and masks: JAX writes a quotient or a remainder of integers as ten operations
_LOG_BITS = 5
_LANES = 128  # the width of a vector of a TPU
_ROW = BITS * _LANES  # flags of 128 words
_SHORT = 256  # numbers that a running sum adds up all at once
# words, 256 bits, that are counted together: few enough groups for a running sum, few
# enough words to search
GROUP = 8


def pack(flags: jax.Array) -> jax.Array:
  """Packs flags: bit i % 32 of word i // 32 is flag i; zeros fill the last group of words.

  Args:
    flags: bool[n], or bool[rows, n] with n a multiple of 256. An elementwise pass that
      computes them is fused with this one.

  Returns:
    u32[⌈n/256⌉ · 8], or u32[rows, n/32].

  Example:
    >>> pack(jnp.array([True, False, True]))[:2]
    Array([5, 0], dtype=uint32)
  """
  # all rows as one: XLA on CPU compiles a batch of rows to slower code
  flat = flags.reshape(-1)
  # The product takes an update of SparDL 3 times the CPU time, and its search for
  # candidates on an H100 1.5 times the bytes.
  words = _compat.by_platform(tpu=_pack_by_product, default=_pack_whole)(flat)
  return words.reshape(*flags.shape[:-1], -1)


def _pack_by_product(flags: jax.Array) -> jax.Array:
  """`pack` on TPUs, by a product with a matrix: each half of a word is a sum of 16 powers of two, exact in float32.

  Flags are handled in rows of 32 × 128, which become 128 words. A TPU has vectors of
  128 lanes: rows of 32 flags, one a word, would compile for minutes, and so would
  quotients of indices.
  """
  # Whole rows, each of which becomes 128 words.
  padded = jnp.pad(flags, (0, -flags.size % _ROW))
  rows = padded.reshape(-1, BITS, _LANES)
  # Flag (row, lane) of 32 × 128 is bit lane mod 32 of word 4 row + ⌊lane / 32⌋. Shifts
  # and masks compute both numbers.
  row, lane, half = (
    jax.lax.broadcasted_iota(jnp.int32, (BITS, _LANES, 2 * _LANES), axis)
    for axis in range(3)
  )
  # The 256 results of a row: the lower halves of its words, then the upper halves.
  in_word = (row << 2 | lane >> 5) == (half & _LANES - 1)
  in_half = (lane >> 4 & 1) == half >> 7
  # Powers up to 2¹⁵, and flags, are exact in bfloat16.
  power = (1 << (lane & 15)).astype(jnp.float32)
  weights = jnp.where(in_word & in_half, power, 0.0).astype(jnp.bfloat16)
  # contracts both axes of a row of flags, without batch axes
  both = (((1, 2), (0, 1)), ((), ()))
  halves = jax.lax.dot_general(
    rows.astype(jnp.bfloat16), weights, both, preferred_element_type=jnp.float32
  )
  lower, upper = jnp.split(halves.astype(jnp.uint32), 2, axis=1)
  # without the words after those of the last group of 256 flags, which may be partial
  return (lower | upper << 16).reshape(-1)[: align(flags.size) // BITS]


def _pack_whole(flags: jax.Array) -> jax.Array:
  """`pack` on CPUs and GPUs: the last, partial group of 256 flags is padded and packed alone.

  Padding all flags would copy them: an update of SparDL takes 1.2 times the CPU time.
  """
  rest = flags.size % (GROUP * BITS)
  whole = flags.size - rest
  words = _pack_words(flags[:whole])
  if not rest:
    return words
  last = _pack_words(jnp.pad(flags[whole:], (0, GROUP * BITS - rest)))
  return jnp.concatenate([words, last])


def _pack_words(flags: jax.Array) -> jax.Array:
  """The words of bool[32 m], u32[m]: the sum of the bits that are set."""
  bits = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
  shifted = jnp.where(flags.reshape(-1, BITS), bits[None], jnp.uint32(0))
  return jnp.sum(shifted, axis=1, dtype=jnp.uint32)


def empty(n: int) -> jax.Array:
  """The empty set of indices below n, u32[⌈n/256⌉ · 8].

  Example:
    >>> empty(40).shape
    (8,)
  """
  return jnp.zeros(align(n) // BITS, jnp.uint32)


def align(capacity: int) -> int:
  """`capacity` rounded up to a multiple of 256, for full vector registers and whole groups of words.

  Example:
    >>> align(1000)
    1024
  """
  return -(-capacity // (GROUP * BITS)) * (GROUP * BITS)


def count(words: jax.Array) -> jax.Array:
  """The size of a set, i32[], or i32[rows] of each of several.

  Example:
    >>> count(pack(jnp.array([True, False, True])))
    Array(2, dtype=int32)
  """
  return jnp.sum(jax.lax.population_count(words), axis=-1, dtype=jnp.int32)


def count_true(flags: jax.Array) -> jax.Array:
  """The number of flags that are set, i32[] of bool[n], or i32[rows] of bool[rows, n].

  Example:
    >>> count_true(jnp.array([True, False, True]))
    Array(2, dtype=int32)
  """
  count_packed = lambda flags: count(pack(flags))
  # On CPU a sum stores the flags: an update of A2SGD needs 1.16 n of temporary memory
  # in place of 1.00 n.
  return _compat.by_platform(
    cpu=count_packed, default=functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)
  )(flags)


def nonzero(words: jax.Array, capacity: int) -> jax.Array:
  """The `capacity` smallest members, i32[capacity]; 32 · words.size in the slots that a smaller set leaves empty.

  Example:
    >>> nonzero(pack(jnp.array([True, False, True])), 2)
    Array([0, 2], dtype=int32)
  """
  # By index an update of SparDL takes 4.5 times the CPU time; by slot a GPU runs 18 %
  # more kernels. A TPU gathers entry by entry, and pads rows of 8 to 128, so its groups
  # are of one word.
  by_word = functools.partial(_nonzero_by_slot, group=1)
  return _compat.by_platform(
    gpu=_nonzero_by_index, tpu=by_word, default=_nonzero_by_slot
  )(words, capacity)


def _nonzero_by_index(words: jax.Array, capacity: int) -> jax.Array:
  """Each index below 32 · words.size that is a member writes itself to the slot of its rank: few kernels, all wide."""
  index = iota(BITS * words.size)
  word = index >> _LOG_BITS
  # The word of each index, shifted so that the bit of the index is the highest: only
  # members up to the index are left in it.
  above = BITS - 1 - (index & BITS - 1)
  up_to = words[word] << above.astype(jnp.uint32)
  counts = _members(words)
  # members in all earlier words
  before = (running_sum(counts) - counts)[word]
  is_member = up_to >> (BITS - 1) != 0
  slot = jnp.where(is_member, before + _members(up_to) - 1, capacity)
  empty = jnp.full(capacity, BITS * words.size, jnp.int32)
  return empty.at[slot].set(index, mode="drop", unique_indices=True)


def _nonzero_by_slot(words: jax.Array, capacity: int, group: int = GROUP) -> jax.Array:
  """`nonzero`: finds the group of words of each slot, then its word in the group, then its bit in the word.

  Each group marks the slot of its first member; the running sum of the marks, less 1,
  is the group of each slot.

  Args:
    words: u32[words], a multiple of `group`.
    capacity: number of slots.
    group: words that are counted together, then searched one after the other.
  """
  counts = count(words.reshape(-1, group))
  # slots of each group: its members have the slots starts … ends − 1
  ends = running_sum(counts)
  starts = ends - counts
  slots = iota(align(capacity))
  marks = (
    jnp.zeros(slots.size, jnp.int32)
    .at[starts]
    .add(1, mode="drop", indices_are_sorted=True)
  )
  # Groups without members mark the same slot as the next group that has some; the sum
  # counts all these marks, so the slot gets the last of these groups.
  group_of_slot = running_sum(marks) - 1
  # The rank of the slot's member in its group. The loop subtracts the members of each
  # word that it passes: the member is in the word where 0 ≤ rank < members.
  ordinal = slots - starts[group_of_slot]
  first = group_of_slot * group
  word = first
  bits = jnp.zeros(first.shape, jnp.uint32)
  within = ordinal
  for offset in range(group):
    candidate = words[first + offset]
    members = _members(candidate)
    # true for one word of the group
    inside = (ordinal >= 0) & (ordinal < members)
    word = jnp.where(inside, first + offset, word)
    bits = jnp.where(inside, candidate, bits)
    within = jnp.where(inside, ordinal, within)
    ordinal -= members
  member = word * BITS + _bit_of_rank(bits, within)
  members_in_order = jnp.where(slots < ends[-1], member, BITS * words.size)
  if slots.size == capacity:
    return members_in_order
  # A scatter in place of a slice: XLA would fuse a slice with the search, whose length
  # would then no longer fill vector registers.
  return (
    jnp.zeros(capacity, jnp.int32)
    .at[slots]
    .set(members_in_order, mode="drop", unique_indices=True, indices_are_sorted=True)
  )


def _bit_of_rank(word: jax.Array, rank: jax.Array) -> jax.Array:
  """The position of the set bit that has `rank` set bits below it, in each word, by binary search."""
  position = jnp.zeros(word.shape, jnp.int32)
  for width in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << width) - 1)
    members = _members(low)
    upper = rank >= members
    rank = jnp.where(upper, rank - members, rank)
    position = jnp.where(upper, position + width, position)
    word = jnp.where(upper, word >> width, low)
  return position


def rank(words: jax.Array, indices: jax.Array) -> jax.Array:
  """The number of members below each index, i32 like `indices`.

  Example:
    >>> rank(pack(jnp.array([True, False, True])), jnp.array([0, 1, 2, 999]))
    Array([0, 1, 1, 2], dtype=int32)
  """
  # An index beyond the end counts as bit 32 of the last word: all members are below.
  word = jnp.minimum(indices >> _LOG_BITS, words.size - 1)
  bit = jnp.minimum(indices - BITS * word, BITS).astype(jnp.uint32)
  lower_bits = (jnp.uint32(1) << (bit & BITS - 1)) - 1
  # a shift by 32 is undefined
  below = jnp.where(bit < BITS, lower_bits, ~jnp.uint32(0))
  counts = _members(words)
  return (running_sum(counts) - counts)[word] + _members(words[word] & below)


def _members(words: jax.Array) -> jax.Array:
  """The number of bits that are set in each word, i32 like them."""
  return jax.lax.population_count(words).astype(jnp.int32)


def running_sum(x: jax.Array) -> jax.Array:
  """The sums of the first 1, 2, … of i32[n].

  Example:
    >>> running_sum(jnp.array([3, 1, 2]))
    Array([3, 4, 6], dtype=int32)
  """
  # Lanes take an update of SparDL 1.2 times the CPU time; rows are 19 kernels in place
  # of 15 of its search for candidates on an H100.
  return _compat.by_platform(cpu=_running_sum_of_rows, default=_running_sum_of_lanes)(x)


def _running_sum_of_lanes(x: jax.Array) -> jax.Array:
  """`running_sum` by shifts within rows of 128, the width of a TPU's tile.

  `jnp.cumsum` (`reduce_window`), or shorter rows, would compile for seconds.
  """
  # whole tiles of 8 × 128
  padded = jnp.pad(x, (0, -x.size % (8 * _LANES)))
  sums = padded.reshape(-1, _LANES)
  for step in (1, 2, 4, 8, 16, 32, 64):
    shifted = jnp.pad(sums[:, :-step], ((0, 0), (step, 0)))
    sums += shifted
  # adds the total of all earlier rows to each row
  if x.size > _LANES:
    totals = sums[:, -1]
    sums += (_running_sum_of_lanes(totals) - totals)[:, None]
  return sums.reshape(-1)[: x.size]


def _running_sum_of_rows(x: jax.Array) -> jax.Array:
  """`running_sum` in rows of 8 or 16: on CPU `jnp.cumsum` takes two to three times as long."""
  n = x.size
  # Up to 256 numbers are one row.
  width = n if n <= _SHORT else 16 if n <= _SHORT**2 else 8
  rows = jnp.pad(x, (0, -n % width)).reshape(-1, width)
  column = iota(width)
  # A product with a triangle of ones: term [r, i, j] is rows[r, j] if j ≤ i, else 0.
  terms = jnp.where(column[:, None] >= column[None], rows[:, None], 0)
  sums = jnp.sum(terms, axis=2, dtype=jnp.int32)
  if len(rows) == 1:
    return sums[0]
  # not the last column of `sums`, which XLA would compute in full
  totals = jnp.sum(rows, axis=1, dtype=jnp.int32)
  before = _running_sum_of_rows(totals) - totals
  return (sums + before[:, None]).reshape(-1)[:n]


def of_indices(indices: np.ndarray, words: int) -> np.ndarray:
  """The set with these members, in u32[words] of numpy.

  Example:
    >>> of_indices(np.array([0, 2, 33]), 2)
    array([5, 2], dtype=uint32)
  """
  flags = np.zeros(BITS * words, np.bool_)
  flags[indices] = True
  return np.packbits(flags, bitorder="little").view(np.uint32)


def contains(words: jax.Array, indices: jax.Array) -> jax.Array:
  """Whether each index is a member, bool like `indices`; false beyond the end.

  Example:
    >>> contains(pack(jnp.array([True, False, True])), jnp.array([1, 2]))
    Array([False,  True], dtype=bool)
  """
  # Negative indices and those beyond the end read a word without members.
  word = words.at[indices >> _LOG_BITS].get(
    mode="fill", fill_value=0, wrap_negative_indices=False
  )
  return (word >> (indices & BITS - 1).astype(jnp.uint32)) & 1 != 0


def insert(words: jax.Array, indices: jax.Array, n: int) -> jax.Array:
  """The set with more members.

  Args:
    words: u32[words], the set.
    indices: i32 of any shape: the new members, each once, none in the set before;
      indices of n or more are left out, and may repeat.
    n: the end of the indices.

  Example:
    >>> count(insert(pack(jnp.array([True, False, True])), jnp.array([1, 3, 3]), n=3))
    Array(3, dtype=int32)
  """
  # Each bit is added once to a word without it, so that a sum is a union.
  bits = jnp.uint32(1) << (indices & BITS - 1).astype(jnp.uint32)
  word = jnp.where(indices < n, indices >> _LOG_BITS, words.size)
  return words.at[word].add(bits, mode="drop", wrap_negative_indices=False)
