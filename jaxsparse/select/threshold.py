"""Selection by a given threshold: one pass, no sort, and a number of entries that varies.

The selected entries are a bitset over the n entries of a lazily summed vector.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.select.blocks import LazySum, keys_of
from jaxsparse.select.exact import top_k
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse


def select_reaching(x: LazySum, threshold: jax.Array) -> jax.Array:
  """The bitset of the entries of magnitude ≥ threshold, and of every NaN; zeros are never selected.

  Args:
    x: f32[n].
    threshold: f32[], at least 0.

  Example:
    >>> bitset.count(select_reaching(LazySum((jnp.array([3.0, 0.0, -2.0, 1.0]),)), jnp.float32(2)))
    Array(2, dtype=int32)
  """
  values = x.values
  # Not |x| ≥ threshold, which is false for NaN: a NaN would stay in the residual
  # unnoticed.
  return bitset.pack(~(jnp.abs(values) < threshold) & (values != 0))


def choose_reaching(
  x: LazySum, last: jax.Array, is_exact: jax.Array, k: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The entries that reach the last threshold or, if `is_exact`, the k-th largest magnitude.

  If more than `most` entries reach it, the `most` largest, ties to the lowest index.

  Args:
    x: f32[n].
    last: f32[], the threshold of the last step.
    is_exact: bool[]. False selects by a given threshold, `last`, and ignores k.
    k: at most `most`.
    most: at most n.

  Returns:
    (threshold f32[], the bitset of the selected entries, and the number of entries that
    reach the threshold, i32[], which may exceed `most`).

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 4.0, 3.0]),))
    >>> threshold, members, count = choose_reaching(x, jnp.float32(0), jnp.bool_(True), k=2, most=2)
    >>> threshold, bitset.nonzero(members, 2), count
    (Array(3., dtype=float32), Array([0, 3], dtype=int32), Array(3, dtype=int32))
  """

  def search() -> tuple[jax.Array, jax.Array, jax.Array]:
    # One top-k serves both cases: the `most` largest entries contain the k-th largest
    # magnitude, and are the selection where too many entries reach the threshold.
    largest = top_k(x, most)
    threshold = jnp.where(is_exact, kth_magnitude(largest, k, x.size), last)
    reach = select_reaching(x, threshold)
    count = bitset.count(reach)
    cut = bitset.insert(jnp.zeros_like(reach), largest.indices, x.size)
    return threshold, jnp.where(count > most, cut, reach), count

  reach = select_reaching(x, last)
  count = bitset.count(reach)
  return varying.cond(is_exact | (count > most), search, lambda: (last, reach, count))


def kth_magnitude(entries: Sparse, k: int, end: int) -> jax.Array:
  """The k-th largest magnitude of the entries, f32[]; 0 if there are fewer than k.

  Args:
    entries: of any shape.
    k: at least 1.
    end: length of the vector.

  Example:
    >>> kth_magnitude(Sparse(jnp.arange(3), jnp.array([1.0, -3.0, 2.0])), k=2, end=3)
    Array(2., dtype=float32)
  """
  # an empty slot reaches no key
  keys = jnp.where(entries.indices < end, keys_of(entries.values), -1)
  has_enough = lambda key: bitset.count(bitset.pack(keys >= key)) >= k
  key = largest_that(has_enough, jnp.int32(0), bits=31)
  return jax.lax.bitcast_convert_type(key, jnp.float32)


def largest_that(
  holds: Callable[[jax.Array], jax.Array], zero: jax.Array, bits: int
) -> jax.Array:
  """The largest numbers below 2^bits for which `holds`, integers like `zero`; 0 where it holds for none.

  `holds` is monotone: false for a number, it is false for all larger ones. The bits are
  found from the highest to the lowest, in a loop of constant length: a loop of unknown
  length makes a GPU wait for the host.

  Example:
    >>> largest_that(lambda x: x * x <= 50, jnp.int32(0), bits=4)
    Array(7, dtype=int32)
  """

  def decide(step: jax.Array, decided: jax.Array) -> jax.Array:
    bit = jnp.ones((), zero.dtype) << (bits - 1 - step).astype(zero.dtype)
    candidate = decided | bit
    return jnp.where(holds(candidate), candidate, decided)

  return varying.fori_loop(0, bits, decide, zero)


def read_first(x: LazySum, members: jax.Array, capacity: int) -> Sparse:
  """The first `capacity` selected entries, in the order of their indices; empty slots have index n.

  Args:
    x: f32[n].
    members: of `select_reaching`.
    capacity: slots.

  Example:
    >>> x = LazySum((jnp.array([3.0, 0.0, -2.0, 1.0]),))
    >>> read_first(x, select_reaching(x, jnp.float32(1)), 2).indices
    Array([0, 2], dtype=int32)
  """
  # the last words of a bitset reach beyond n
  indices = jnp.minimum(bitset.nonzero(members, capacity), x.size)
  return Sparse(indices, x.read_at(indices))


def region_starts(indices: jax.Array, bounds: jax.Array) -> jax.Array:
  """The slot at which the entries of each region start, i32[r + 1]; the last one is the number of entries.

  Args:
    indices: i32[c], ascending; empty slots are last.
    bounds: i32[r + 1], region i is bounds[i] … bounds[i + 1] − 1.

  Example:
    >>> region_starts(jnp.array([0, 2, 5, 5]), jnp.array([0, 1, 5]))
    Array([0, 1, 2], dtype=int32)
  """
  # By comparing all: a binary search is a loop of many small kernels.
  return bitset.count(jax.vmap(lambda bound: bitset.pack(indices < bound))(bounds))


def read_regions(entries: Sparse, starts: jax.Array, capacity: int, end: int) -> Sparse:
  """The `capacity` largest entries of each region, ties to the lowest index, in the order of their indices.

  Args:
    entries: [c], in ascending order; empty slots are last.
    starts: i32[r + 1], the slot of `entries` at which each region starts, and the end of
      the last one (`region_starts`).
    capacity: slots of a region.
    end: length of the vector.

  Returns:
    [r, capacity] entries, one region a row.

  Example:
    >>> entries = Sparse(jnp.array([0, 1, 2, 4]), jnp.array([3.0, 2.0, 3.0, 4.0]))
    >>> read_regions(entries, jnp.array([0, 1, 4]), capacity=2, end=5).indices
    Array([[0, 5],
           [2, 4]], dtype=int32)
  """
  sizes = jnp.diff(starts)
  # Regions seldom overflow, and the search of a cut is many passes over the entries.
  cut = lambda: _cut_regions(entries, starts, capacity, end)
  entries, starts = varying.cond(
    (sizes > capacity).any(), cut, lambda: (entries, starts)
  )
  slots = starts[:-1, None] + iota(capacity)[None]
  inside = slots < starts[1:, None]
  # Slots behind the end of a region read slot 0, and become empty.
  at = jnp.where(inside, slots, 0)
  return sparse.where(inside, jax.tree.map(lambda x: x[at], entries), end)


def _cut_regions(
  entries: Sparse, starts: jax.Array, capacity: int, end: int
) -> tuple[Sparse, jax.Array]:
  """The `capacity` largest entries of each region, one after the other, [c], and their `region_starts`.

  By counting, all regions at once: the smallest key that is kept, then the slot at
  which equal keys are cut.
  """
  sizes = jnp.diff(starts)
  keys = keys_of(entries.values)
  slots = iota(entries.indices.size)
  # the region of each slot; slots behind the last region count to it, and are dropped
  region = jnp.searchsorted(
    starts[1:-1], slots, side="right", method="compare_all"
  ).astype(jnp.int32)
  # the slots of each region as a bitset, u32[r, words]
  in_region = lambda index: bitset.pack((region == index) & (slots < starts[-1]))
  members = jax.vmap(in_region)(iota(sizes.size))
  # flagged entries of each region, i32[r]
  count = lambda flags: bitset.count(bitset.pack(flags)[None] & members)
  zero = jnp.zeros_like(sizes)
  kept = jnp.minimum(sizes, capacity)
  # the largest key that `kept` entries of a region reach, for each entry of the region
  has_enough = lambda key: count(keys >= key[region]) >= kept
  key = largest_that(has_enough, zero, bits=31)[region]
  # Entries with that very key are kept below slot `last`, the largest slot at which no
  # more than `kept` entries are kept.
  is_tie = keys == key
  reaches = lambda last: (keys > key) | (is_tie & (slots < last[region]))
  fits = lambda last: count(reaches(last)) <= kept
  last = largest_that(fits, zero, slots.size.bit_length())
  # slots behind the last region are empty
  keep = reaches(last) & (slots < starts[-1])
  ends = jnp.cumsum(kept, dtype=jnp.int32)
  largest = sparse.compress(entries, keep, slots.size, end)
  return largest, jnp.append(jnp.int32(0), ends)
