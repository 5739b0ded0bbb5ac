"""The few entries of each block that can be among its largest, found in one pass over all blocks."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.select import kth_largest as order
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse

_SAMPLES = 1 << 14  # of a block


class Candidates(NamedTuple):
  """The larger entries of each block.

  Attributes:
    indices: i32[rows, c], places within the block, ascending; the block's length where a slot is empty.
    values: f32[rows, c]; 0 where a slot is empty.
    low: i32[rows], the key (`order.keys_of`) that all of them reach and no other entry of the block does.
    hit: bool[rows], whether all of them found a slot, and they are as many as were wanted if the bound is a guess.
  """

  indices: jax.Array
  values: jax.Array
  low: jax.Array
  hit: jax.Array


def worthwhile(length: int, share: int) -> bool:
  """Whether candidates are few enough, and a block long enough, that finding them first saves time.

  Example:
    >>> worthwhile(1_000_000, 10_000), worthwhile(1_000_000, 900_000), worthwhile(1_000, 10)
    (True, False, False)
  """
  return length > _SAMPLES and _capacity(length, share) < length // 2


def candidates(
  parts: Sequence[jax.Array], length: int, share: int, blocks: jax.Array, known: jax.Array | None = None
) -> Candidates:
  """Candidates for the `share` largest entries of each block of the sum of `parts`.

  A bound is known, or guessed from a sample of each block; one pass packs which entries reach it.

  Args:
    parts: f32[n] each; their sum is never written out.
    length: of a block; block b starts at b · length. What lies beyond n counts as zeros, and is never a candidate.
    share: entries wanted of each block.
    blocks: i32[⌈n / length⌉], the block of each row of the result, each once.
    known: i32[rows], at least 1: the keys that candidates are to reach, however few do.

  Returns:
    `Candidates` by row.

  Example:
    >>> x = jax.random.normal(jax.random.key(0), (100_000,))
    >>> found = candidates([x], length=50_000, share=100, blocks=jnp.array([1, 0]))
    >>> found.hit, bool((x[50_000 + found.indices[0, :100]] ** 2 > 4).all())
    (Array([ True,  True], dtype=bool), True)
  """
  parts = [jnp.asarray(part) for part in parts]
  n, count, capacity = parts[0].size, blocks.size, _capacity(length, share)
  low = _bounds(parts, length, share, count) if known is None else jnp.zeros_like(known).at[blocks].set(known)
  words = bitset.reaching(order.keys_of(_sum(parts)), _of_words(low, length, n))
  everywhere = bitset.places(words, bitset.aligned(count * (capacity + bitset.BITS)))

  edges = jnp.minimum(jnp.arange(count + 1, dtype=jnp.int32) * length, n)  # empty slots lie at n or beyond
  starts = jnp.searchsorted(everywhere, edges).astype(jnp.int32)
  begin, end = starts[blocks][:, None], starts[blocks + 1][:, None]
  slots = begin + jnp.arange(capacity, dtype=jnp.int32)[None]
  places = jnp.where(slots < end, everywhere[jnp.minimum(slots, everywhere.size - 1)], n)
  found = Sparse(jnp.where(places < n, places - (blocks * length)[:, None], length), _at(parts, places))
  # Two blocks may share a word, which took the lower bound: what only reaches that is left out.
  found = sparse.where(order.keys_of(found.values) >= low[blocks][:, None], found, length)
  enough = bitset.count(bitset.pack(found.indices < length)) >= (share if known is None else 0)
  hit = enough & (end[:, 0] - begin[:, 0] <= capacity) & (end[:, 0] < everywhere.size)
  return Candidates(found.indices, found.values, low[blocks], hit)


def _of_words(low: jax.Array, length: int, n: int) -> jax.Array:
  """The bound of each word of n packed bits: that of its block, of two blocks in a word the lower one."""
  group = bitset.GROUP * bitset.BITS
  assert length >= group, "a group of words lies in one block or two"
  starts = jnp.arange(0, n, group, dtype=jnp.int32)
  block = starts // length
  left = ((block + 1) * length - starts)[:, None]  # places that a group has in its first block
  here, there = low[block][:, None], low[jnp.minimum(block + 1, low.size - 1)][:, None]
  word = jnp.arange(0, group, bitset.BITS, dtype=jnp.int32)[None]
  both = jnp.where(word >= left, there, jnp.minimum(here, there))
  bounds = jnp.where(word + bitset.BITS <= left, here, both).reshape(-1)
  return bounds[: -(-n // bitset.BITS)]


def _bounds(parts: Sequence[jax.Array], length: int, share: int, count: int) -> jax.Array:
  """A key for each block, i32[count], that a few more than `share` of its entries reach."""
  rank, _ = order.rank_in_sample(_SAMPLES, share / length)
  places = order.sample(length, _SAMPLES)[None] + length * jnp.arange(count, dtype=jnp.int32)[:, None]
  keys = order.keys_of(_at(parts, places))
  # Never 0: a block of zeros and little else has no use for candidates, and would take the slots of others.
  return jnp.maximum(order.bound_of(keys, rank), 1)


def _capacity(length: int, share: int) -> int:
  return bitset.aligned(int(share * order.rank_in_sample(_SAMPLES, share / length)[1]))


def _at(parts: Sequence[jax.Array], places: jax.Array) -> jax.Array:
  return _sum([sparse.at(part, places) for part in parts])


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, parts)
