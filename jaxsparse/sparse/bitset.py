"""Sets of places as bits: 32 of them to a word, so that finding out where they are costs a pass over n/32 words.

A comparison of n entries that is packed at once reads them and writes next to nothing. Bits are in the order of places,
and so is all that is read from them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

BITS = 32
_ALIGNED = 256  # slots
GROUP = 8  # words, 256 places, that are counted together: enough that counts are few, few enough to search one by one


def pack(flags: jax.Array) -> jax.Array:
  """Bit i % 32 of word i // 32 is flag i; zeros fill the last group of words.

  Args:
    flags: bool[n], or bool[rows, n] with n a multiple of 256. Where it comes of one elementwise pass, the compiler
      makes it part of this one.

  Returns:
    u32[⌈n/256⌉ · 8], or u32[rows, n/32].

  Example:
    >>> pack(jnp.array([True, False, True]))[:2]
    Array([5, 0], dtype=uint32)
  """
  # Rows one after the other: compilers do worse with a batch.
  return _pack(flags.reshape(-1), lambda part, _: part).reshape(*flags.shape[:-1], -1)


def reaching(keys: jax.Array, bounds: jax.Array) -> jax.Array:
  """Packs which keys are at least the bound of their word, of 32 keys.

  Args:
    keys: [n]; where they come of one elementwise pass, the compiler makes it part of this one.
    bounds: [⌈n/32⌉].

  Example:
    >>> reaching(jnp.array([3, 1, 4]), jnp.array([3]))[0]
    Array(5, dtype=uint32)
  """
  return _pack(keys, lambda part, first: part >= bounds[first : first + len(part), None])


def _pack(x: jax.Array, flags_of: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
  """The words of `flags_of(32 entries a row, number of the first row)`."""
  bits = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)

  def words_of(part: jax.Array, first: int) -> jax.Array:
    flags = flags_of(part.reshape(-1, BITS), first)
    return jnp.sum(jnp.where(flags, bits[None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)

  whole = x.size // BITS
  words = words_of(x[: whole * BITS], 0)
  rest = x[whole * BITS :]
  if rest.size:  # by itself, since padding x would cost a copy of what it comes from
    last = words_of(jnp.pad(rest, (0, BITS - rest.size)), whole)
    words = jnp.concatenate([words, last & ((1 << rest.size) - 1)])
  return jnp.pad(words, (0, -words.size % GROUP))


def none(n: int) -> jax.Array:
  """The empty set of places below n.

  Example:
    >>> none(40)
    Array([0, 0], dtype=uint32)
  """
  return jnp.zeros(-(-n // BITS), jnp.uint32)


def aligned(capacity: int) -> int:
  """`capacity` or a little more: a number of slots that fills the vectors of the machine.

  Example:
    >>> aligned(1000)
    1024
  """
  return -(-capacity // _ALIGNED) * _ALIGNED


def count(words: jax.Array) -> jax.Array:
  """How many places a set of packed bits holds, i32[], or i32[rows] of each of them.

  Packing and this are several times as fast on CPU as the sum of the flags.

  Example:
    >>> count(pack(jnp.array([True, False, True])))
    Array(2, dtype=int32)
  """
  return jnp.sum(_counts(words), axis=-1, dtype=jnp.int32)


def places(words: jax.Array, capacity: int) -> jax.Array:
  """The first `capacity` places of a set in their order, i32[capacity]; beyond all places where there are fewer.

  Each group of words drops a mark where its places begin; the running sum of the marks tells every slot its group.

  Example:
    >>> places(pack(jnp.array([True, False, True])), 2)
    Array([0, 2], dtype=int32)
  """
  counts = _group_counts(words)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  starts = ends - counts
  slots = jnp.arange(aligned(capacity), dtype=jnp.int32)
  marks = jnp.zeros(slots.size, jnp.int32).at[starts].add(1, mode="drop", indices_are_sorted=True)
  group = jnp.cumsum(marks, dtype=jnp.int32) - 1
  found = jnp.where(slots < ends[-1], _within(words, group, slots - starts[group]), BITS * words.size)
  if slots.size == capacity:
    return found
  # A scatter, and no slice: the compiler would search for slots one by one, to a length that does not fill its vectors.
  return jnp.zeros(capacity, jnp.int32).at[slots].set(found, mode="drop", unique_indices=True, indices_are_sorted=True)


def before(words: jax.Array, bound: jax.Array) -> jax.Array:
  """How many places below `bound` a set holds, i32[].

  Example:
    >>> before(pack(jnp.array([True, False, True])), jnp.int32(2))
    Array(1, dtype=int32)
  """
  return jnp.sum(_counts(words & _below(words.size, bound)), dtype=jnp.int32)


def contains(words: jax.Array, places: jax.Array) -> jax.Array:
  """Whether each of `places` is in a set, bool like them; those beyond its end are not.

  Example:
    >>> contains(pack(jnp.array([True, False, True])), jnp.array([1, 2]))
    Array([False,  True], dtype=bool)
  """
  held = words.at[places // BITS].get(mode="fill", fill_value=0)
  return (held >> (places % BITS).astype(jnp.uint32)) & 1 != 0


def with_new(words: jax.Array, places: jax.Array, n: int) -> jax.Array:
  """A set with `places` that are not in it yet, each once; those from n on are left out.

  Example:
    >>> count(with_new(pack(jnp.array([True, False, True])), jnp.array([1, 3, 3]), n=3))
    Array(3, dtype=int32)
  """
  bits = jnp.uint32(1) << (places % BITS).astype(jnp.uint32)
  return words.at[jnp.where(places < n, places // BITS, words.size)].add(bits, mode="drop")


def place(words: jax.Array, ordinal: jax.Array) -> jax.Array:
  """The place of that ordinal, 0 for the first, i32[]; the last of all places where there are fewer.

  Example:
    >>> place(pack(jnp.array([True, False, True])), jnp.int32(1))
    Array(2, dtype=int32)
  """
  return jax.lax.platform_dependent(words, ordinal, cuda=place_by_sums, rocm=place_by_sums, default=_place_by_halves)


def place_by_sums(words: jax.Array, ordinal: jax.Array) -> jax.Array:
  """`place` without a loop after each round of which the host of a GPU must see whether it was the last.

  Example:
    >>> place_by_sums(pack(jnp.array([True, False, True])), jnp.int32(1))
    Array(2, dtype=int32)
  """
  counts = _group_counts(words)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  group = jnp.minimum(jnp.sum(ends <= ordinal, dtype=jnp.int32), counts.size - 1)
  found = _within(words, group, ordinal - (ends[group] - counts[group]))
  return jnp.where(ordinal < ends[-1], found, BITS * words.size - 1)


def _place_by_halves(words: jax.Array, ordinal: jax.Array) -> jax.Array:
  """On CPU four times as fast where the words come of a pass over many entries, which sums would make part of them."""

  def halve(bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bracket  # no more than `ordinal` places lie below `low`
    middle = low + (high - low) // 2
    few = before(words, middle) <= ordinal
    return jnp.where(few, middle, low), jnp.where(few, high, middle)

  bracket = (jnp.int32(0), jnp.int32(BITS * words.size))
  return jax.lax.while_loop(lambda bracket: bracket[1] - bracket[0] > 1, halve, bracket)[0]


def _below(size: int, bound: jax.Array) -> jax.Array:
  """The set of all places below `bound`, u32[size]."""
  bits = jnp.clip(bound - BITS * jnp.arange(size, dtype=jnp.int32), 0, BITS).astype(jnp.uint32)
  return jnp.where(bits == BITS, ~jnp.uint32(0), (jnp.uint32(1) << (bits % BITS)) - 1)


def _counts(words: jax.Array) -> jax.Array:
  return jax.lax.population_count(words).astype(jnp.int32)


def _group_counts(words: jax.Array) -> jax.Array:
  return jnp.sum(_counts(words).reshape(-1, GROUP), axis=1, dtype=jnp.int32)


def _within(words: jax.Array, group: jax.Array, rank: jax.Array) -> jax.Array:
  """The place of the bit of that rank, 0 for the first, within a group."""
  word, bits = group * GROUP, jnp.zeros(group.shape, jnp.uint32)
  found = jnp.zeros(group.shape, jnp.bool_)
  for number in range(GROUP):
    candidate = words[group * GROUP + number]
    held = _counts(candidate)
    here = ~found & (rank < held)
    word, bits = jnp.where(here, group * GROUP + number, word), jnp.where(here, candidate, bits)
    found |= here
    rank = jnp.where(found, rank, rank - held)
  return word * BITS + _bit_of_rank(bits, rank)


def _bit_of_rank(bits: jax.Array, rank: jax.Array) -> jax.Array:
  """Where in a word its set bit of that rank is: half of what is left at a time."""
  position = jnp.zeros(bits.shape, jnp.int32)
  for width in (16, 8, 4, 2, 1):
    low = bits & jnp.uint32((1 << width) - 1)
    held = _counts(low)
    upper = rank >= held
    rank, position = jnp.where(upper, rank - held, rank), jnp.where(upper, position + width, position)
    bits = jnp.where(upper, bits >> width, low)
  return position
