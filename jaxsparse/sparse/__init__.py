"""Sparse vectors: rows of entries in coordinate form (`types.Sparse`) with empty slots, and what is done with them.

Array shapes are static and numbers of entries are not, so a row may have empty slots:
index `end` or more, which a scatter drops, and value 0. Sums add rows in their order,
not in the order of arrival, so that every worker computes the same bits (Law R).

Beside this module: `bitset`, sets of indices, one bit per index; `codec`, what a
message looks like, with the formats of its values in `values` and `tables`, numbers of
a few bits in `fields`; `packing`, arrays of which most entries are 0, in few bits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxsparse._compat import varying
from jaxsparse.arrays import iota
from jaxsparse.sparse import bitset
from jaxsparse.types import Sparse

__all__ = [
  "add",
  "add_rows",
  "as_row",
  "compress",
  "concatenate",
  "count",
  "merge",
  "only_row",
  "put",
  "read_at",
]
__all__ += ["resize", "where"]


def read_at(x: jax.Array, indices: jax.Array) -> jax.Array:
  """x[indices], and 0 for an index beyond the end.

  Example:
    >>> read_at(jnp.array([1.0, 2.0]), jnp.array([1, 7]))
    Array([2., 0.], dtype=float32)
  """
  return x.at[indices].get(mode="fill", fill_value=0.0)


def put(
  x: jax.Array,
  indices: jax.Array,
  values: jax.Array | float,
) -> jax.Array:
  """`x` with `values` at `indices`, each of which occurs once; indices beyond the end are dropped.

  Example:
    >>> put(jnp.zeros(3), jnp.array([2, 7]), 1.0)
    Array([0., 0., 1.], dtype=float32)
  """
  return x.at[indices].set(values, mode="drop", unique_indices=True)


def add(
  x: jax.Array,
  indices: jax.Array,
  values: jax.Array,
) -> jax.Array:
  """`x` with `values` added at `indices`, each of which occurs once; indices beyond the end are dropped.

  Example:
    >>> add(jnp.ones(3), jnp.array([2, 7]), jnp.array([1.0, 1.0]))
    Array([1., 1., 2.], dtype=float32)
  """
  return x.at[indices].add(values, mode="drop", unique_indices=True)


def where(keep: jax.Array, entries: Sparse, end: int) -> Sparse:
  """`entries` where `keep` is true, and empty slots elsewhere.

  Example:
    >>> where(jnp.array([True, False]), Sparse(jnp.array([4, 1]), jnp.array([2.0, 3.0])), end=9)
    Sparse(indices=Array([4, 9], dtype=int32), values=Array([2., 0.], dtype=float32))
  """
  return Sparse(
    jnp.where(keep, entries.indices, end), jnp.where(keep, entries.values, 0.0)
  )


def as_row(entries: Sparse) -> Sparse:
  """[c] entries as the only row of a matrix, [1, c]."""
  return Sparse(entries.indices[None], entries.values[None])


def only_row(rows: Sparse) -> Sparse:
  """The [c] entries of a matrix of one row, [1, c]."""
  return Sparse(rows.indices[0], rows.values[0])


def concatenate(parts: Sequence[Sparse]) -> Sparse:
  """The slots, or the rows of slots, of several arrays of entries, one after the other."""
  return Sparse(*(jnp.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def resize(entries: Sparse, slots: int, end: int) -> Sparse:
  """`entries` with `slots` slots in each row: the first ones, and empty slots after them.

  Example:
    >>> resize(Sparse(jnp.array([4]), jnp.array([2.0])), slots=2, end=9)
    Sparse(indices=Array([4, 9], dtype=int32), values=Array([2., 0.], dtype=float32))
  """
  indices = entries.indices[..., :slots]
  values = entries.values[..., :slots]
  missing = slots - indices.shape[-1]
  more = [(0, 0)] * (indices.ndim - 1) + [(0, missing)]
  return Sparse(jnp.pad(indices, more, constant_values=end), jnp.pad(values, more))


def compress(entries: Sparse, keep: jax.Array, slots: int, end: int) -> Sparse:
  """The entries where `keep` is true, in their order, in the first slots; entries beyond `slots` are dropped.

  Args:
    entries: [c].
    keep: bool[c].
    slots: number of slots of the result.
    end: the index of empty slots.

  Example:
    >>> entries = Sparse(jnp.array([4, 1, 7]), jnp.array([2.0, 3.0, 5.0]))
    >>> compress(entries, jnp.array([True, False, True]), slots=3, end=9)
    Sparse(indices=Array([4, 7, 9], dtype=int32), values=Array([2., 5., 0.], dtype=float32))
  """
  kept_so_far = bitset.running_sum(keep.astype(jnp.int32))
  slot = jnp.where(keep, kept_so_far - 1, slots)
  put_kept = lambda row, new: put(row, slot, new)
  return jax.tree.map(put_kept, empty((slots,), end), entries)


def empty(shape: tuple[int, ...], end: int) -> Sparse:
  """Empty slots."""
  return Sparse(jnp.full(shape, end, jnp.int32), jnp.zeros(shape, jnp.float32))


def add_rows(rows: Sparse, end: int) -> jax.Array:
  """The sum of rows of entries as a dense f32[end], added one row after the other.

  Args:
    rows: [r, c]; within a row each index occurs once.
    end: length of the vector.

  Example:
    >>> add_rows(Sparse(jnp.array([[0, 2], [2, 3]]), jnp.array([[1.0, 2.0], [4.0, 8.0]])), end=3)
    Array([1., 0., 6.], dtype=float32)
  """
  # Row by row: in one scatter the order of equal indices is unspecified (Law R).
  add_row = lambda total, row: (add(total, *row), None)
  return varying.scan(add_row, jnp.zeros(end, jnp.float32), rows)[0]


def merge(rows: Sparse, end: int) -> Sparse:
  """The sum of rows of entries as one row of entries, in ascending order of their indices.

  The slot of an entry is the rank of its index in the bitset of all indices, so nothing
  is sorted.

  Args:
    rows: [r, c]; within a row each index occurs once; any order.
    end: length of the vector.

  Returns:
    [min(r · c, end)] entries, each index once, empty slots last. Values are added in
    row order.

  Example:
    >>> rows = Sparse(jnp.array([[0, 2], [2, 9]]), jnp.array([[1.0, 2.0], [4.0, 0.0]]))
    >>> jax.jit(merge, static_argnames="end")(rows, end=9)
    Sparse(indices=Array([0, 2, 9, 9], dtype=int32), values=Array([1., 6., 0., 0.], dtype=float32))
  """
  # Behind a barrier, XLA for GPUs stores the rows once, and need not keep the messages
  # from which they are decoded.
  rows = jax.lax.optimization_barrier(rows)

  def unite(members: jax.Array, indices: jax.Array) -> tuple[jax.Array, None]:
    # `insert` leaves out the index `end`.
    new = jnp.where(bitset.contains(members, indices), end, indices)
    return bitset.insert(members, new, end), None

  # row after row, since `insert` takes no member twice
  members, _ = varying.scan(unite, bitset.empty(end), rows.indices)
  # There are at most `end` different indices. Writes to slot `slots` are dropped.
  slots = min(rows.indices.size, end)
  slot = jnp.where(rows.indices < end, bitset.rank(members, rows.indices), slots)
  # The barriers make slots, values and indices one after the other: XLA for GPUs would
  # have all their intermediate arrays in memory at once.
  slot, size = jax.lax.optimization_barrier((slot, bitset.count(members)))
  filled = lambda size: iota(slots) < size
  add_row = lambda values, row: (add(values, *row), None)
  # Sums start at −0, since −0 + x is x for every x, while 0 + −0 is 0.
  start = jnp.where(filled(size), jnp.float32(-0.0), jnp.float32(0))
  values, _ = varying.scan(add_row, start, (slot, rows.values))
  slot, size, values = jax.lax.optimization_barrier((slot, size, values))
  # `end` in empty slots; the 0 of other slots is overwritten.
  indices = jnp.where(filled(size), jnp.int32(0), jnp.int32(end))
  # Workers that send the same index write the same number to its slot.
  flat = rows.indices.reshape(-1)
  indices = indices.at[slot.reshape(-1)].set(flat, mode="drop")
  return jax.lax.optimization_barrier(Sparse(indices, values))


def count(entries: Sparse, end: int) -> jax.Array:
  """The number of non-empty slots, i32[].

  Example:
    >>> count(Sparse(jnp.array([4, 9]), jnp.array([0.0, 0.0])), end=9)
    Array(1, dtype=int32)
  """
  return jnp.sum(entries.indices < end, dtype=jnp.int32)
