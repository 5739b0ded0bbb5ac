"""Candidates: the few entries of each block that can be among its largest, found in one pass over all blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse.select.blocks import Blocks
from jaxsparse.select.kth_largest import keys_of, kth_largest, rank_in_sample, sample
from jaxsparse.sparse import bitset

SHORT = 1 << 14
"""Entries of a block up to which one sort costs less than a search for candidates."""

_SAMPLES = (SHORT, 1 << 16)  # of a block, at least and at most


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


def worthwhile(length: int, k: int) -> bool:
  """Whether blocks are long enough, and candidates few enough, that finding candidates first saves time.

  Example:
    >>> worthwhile(1_000_000, 10_000), worthwhile(1_000_000, 900_000), worthwhile(1_000, 10)
    (True, False, False)
  """
  return length > SHORT and _capacity(length, k) < length // 2


def candidates(blocks: Blocks, low: jax.Array | None = None) -> Candidates:
  """Candidates for the k largest entries of each block.

  Args:
    blocks: the blocks; entries beyond n count as zeros and are never candidates.
    low: i32[rows], at least 1: the smallest key of a candidate. By default a key that, with high probability, a few
      more than k entries reach, estimated from a sample of each block.

  Example:
    >>> from jaxsparse.sparse.lazy import LazySum
    >>> x = LazySum((jax.random.normal(jax.random.key(0), (100_000,)),))
    >>> found = candidates(Blocks(x, order=jnp.array([1, 0]), length=50_000, k=100))
    >>> found.fits, bool((x.at(50_000 + found.indices[0, :100]) ** 2 > 4).all())
    (Array([ True,  True], dtype=bool), True)
  """
  n, length, rows = blocks.n, blocks.length, blocks.order.size
  capacity = _capacity(length, blocks.k)
  by_block = _estimates(blocks) if low is None else jnp.zeros_like(low).at[blocks.order].set(low)
  members = bitset.pack_reaching(keys_of(blocks.x.values), _of_words(by_block, length, n))
  found = bitset.nonzero(members, bitset.aligned(rows * (capacity + bitset.BITS)))

  edges = jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32) * length, n)  # empty slots hold n or more
  starts = jnp.searchsorted(found, edges).astype(jnp.int32)
  begin, end = starts[blocks.order], starts[blocks.order + 1]
  slots = begin[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
  relative = found[jnp.minimum(slots, found.size - 1)] - (blocks.order * length)[:, None]
  fits = (end - begin <= capacity) & (end < found.size)
  return Candidates(members, jnp.where(slots < end[:, None], relative, length), by_block[blocks.order], fits)


def _of_words(low: jax.Array, length: int, n: int) -> jax.Array:
  """The key of each word of n bits: that of its block, the lower one where a word belongs to two blocks."""
  group = bitset.GROUP * bitset.BITS
  assert length >= group, "a group of words lies in one block or two"
  starts = jnp.arange(0, n, group, dtype=jnp.int32)
  block = starts // length
  left = ((block + 1) * length - starts)[:, None]  # indices of the group in its first block
  here, there = low[block][:, None], low[jnp.minimum(block + 1, low.size - 1)][:, None]
  word = jnp.arange(0, group, bitset.BITS, dtype=jnp.int32)[None]
  both = jnp.where(word >= left, there, jnp.minimum(here, there))
  keys = jnp.where(word + bitset.BITS <= left, here, both).reshape(-1)
  return keys[: -(-n // bitset.BITS)]


def _estimates(blocks: Blocks) -> jax.Array:
  """A key for each block, i32[rows], that a few more than k of its entries reach."""
  size = _sample_size(blocks.length)
  rank, _ = rank_in_sample(size, blocks.k / blocks.length)
  starts = blocks.length * jnp.arange(blocks.order.size, dtype=jnp.int32)
  keys = keys_of(blocks.x.at(sample(blocks.length, size)[None] + starts[:, None]))
  order = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), keys.shape)
  # Never 0: the candidates of a block of few non-zero entries would fill the slots of other blocks with zeros.
  return jnp.maximum(kth_largest(keys, order, rank).key, 1)


def _sample_size(length: int) -> int:
  least, most = _SAMPLES
  return bitset.aligned(min(max(length // 128, least), most))


def _capacity(length: int, k: int) -> int:
  return bitset.aligned(int(k * rank_in_sample(_sample_size(length), k / length)[1]))
