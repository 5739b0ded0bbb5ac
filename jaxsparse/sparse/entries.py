"""Arithmetic on entries: vectors as `types.Sparse`, some of whose slots may be empty.

Sizes are static and numbers of entries are not, so a row of entries may have empty slots: their index is beyond the end
of the vector, where a scatter drops it, and their value is 0. Sums add in row order, whatever the order of arrival, so
that every worker gets the same bits (Law R).
"""

import jax
import jax.numpy as jnp

from jaxsparse.types import Sparse


def at(x: jax.Array, places: jax.Array) -> jax.Array:
  """What is at `places` of x; 0 beyond its end.

  Example:
    >>> at(jnp.array([1.0, 2.0]), jnp.array([1, 7]))
    Array([2., 0.], dtype=float32)
  """
  return x.at[places].get(mode="fill", fill_value=0.0)


def put(x: jax.Array, places: jax.Array, values: jax.Array | float) -> jax.Array:
  """Returns x with `values` at `places`, each of which occurs once; those beyond its end are dropped.

  Example:
    >>> put(jnp.zeros(3), jnp.array([2, 7]), 1.0)
    Array([0., 0., 1.], dtype=float32)
  """
  return x.at[places].set(values, mode="drop", unique_indices=True)


def where(keep: jax.Array, entries: Sparse, end: int) -> Sparse:
  """`entries` with the slots where `keep` is false emptied.

  Example:
    >>> where(jnp.array([True, False]), Sparse(jnp.array([4, 1]), jnp.array([2.0, 3.0])), end=9)
    Sparse(indices=Array([4, 9], dtype=int32), values=Array([2., 0.], dtype=float32))
  """
  return Sparse(jnp.where(keep, entries.indices, end), jnp.where(keep, entries.values, 0.0))


def widened(entries: Sparse, slots: int, end: int) -> Sparse:
  """`entries` with empty slots added to each row, up to `slots` of them.

  Example:
    >>> widened(Sparse(jnp.array([4]), jnp.array([2.0])), slots=2, end=9)
    Sparse(indices=Array([4, 9], dtype=int32), values=Array([2., 0.], dtype=float32))
  """
  more = [(0, 0)] * (entries.indices.ndim - 1) + [(0, slots - entries.indices.shape[-1])]
  return Sparse(jnp.pad(entries.indices, more, constant_values=end), jnp.pad(entries.values, more))


def narrowed(entries: Sparse, slots: int) -> Sparse:
  """The first `slots` slots of each row of `entries`; undone by `widened` where the others were empty.

  Example:
    >>> narrowed(Sparse(jnp.array([4, 9]), jnp.array([2.0, 0.0])), slots=1)
    Sparse(indices=Array([4], dtype=int32), values=Array([2.], dtype=float32))
  """
  return jax.tree.map(lambda x: x[..., :slots], entries)


def add_rows(rows: Sparse, end: int) -> jax.Array:
  """The dense sum of rows of entries, added one row after the other.

  Args:
    rows: [r, c]; within a row each index occurs once.
    end: length of the vector.

  Returns:
    f32[end].

  Example:
    >>> add_rows(Sparse(jnp.array([[0, 2], [2, 3]]), jnp.array([[1.0, 2.0], [4.0, 8.0]])), end=3)
    Array([1., 0., 6.], dtype=float32)
  """
  add = lambda total, row: (total.at[row.indices].add(row.values, mode="drop"), None)
  return jax.lax.scan(add, jnp.zeros(end, jnp.float32), rows)[0]


def merge(rows: Sparse, end: int) -> Sparse:
  """The sum of rows of entries as entries: sorting what is there costs nothing that grows with `end`.

  Args:
    rows: [r, c]; within a row each index occurs once.
    end: length of the vector.

  Returns:
    [r · c] entries in the order of their indices, each index once; its values are added in row order. Empty slots lie
    in between.

  Example:
    >>> rows = Sparse(jnp.array([[0, 2], [2, 9]]), jnp.array([[1.0, 2.0], [4.0, 0.0]]))
    >>> merge(rows, end=9)
    Sparse(indices=Array([0, 2, 9, 9], dtype=int32), values=Array([1., 6., 0., 0.], dtype=float32))
  """
  count = rows.indices.shape[0]
  indices, values = jax.lax.sort((rows.indices.reshape(-1), rows.values.reshape(-1)), num_keys=1, is_stable=True)
  further = widened(Sparse(indices, values), indices.size + count, end)

  def add(distance: jax.Array, sums: jax.Array) -> jax.Array:
    there = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, distance, indices.size), further)
    return jnp.where(there.indices == indices, sums + there.values, sums)

  sums = jax.lax.fori_loop(1, count, add, values)
  first = indices != jnp.pad(indices[:-1], (1, 0), constant_values=-1)
  return where(first & (indices < end), Sparse(indices, sums), end)


def by_index(entries: Sparse) -> Sparse:
  """[c] entries in the order of their indices, empty slots last.

  Example:
    >>> by_index(Sparse(jnp.array([9, 3, 1]), jnp.array([0.0, 1.0, 2.0])))
    Sparse(indices=Array([1, 3, 9], dtype=int32), values=Array([2., 1., 0.], dtype=float32))
  """
  return Sparse(*jax.lax.sort((entries.indices, entries.values), num_keys=1))


def largest(entries: Sparse, k: int, end: int) -> tuple[Sparse, Sparse]:
  """The k entries of largest magnitude, largest first, ties to the lowest slot, and what is left.

  Args:
    entries: [c] entries; in the order of their indices (`by_index`), ties go to the lowest index.
    k: how many; the last slots stay empty where there are fewer.
    end: length of the vector.

  Returns:
    (taken, rest): [k] and [c].

  Example:
    >>> entries = Sparse(jnp.array([0, 1, 9, 3]), jnp.array([1.0, -3.0, 0.0, 2.0]))
    >>> taken, rest = largest(entries, 2, end=9)
    >>> taken.indices, rest.indices
    (Array([1, 3], dtype=int32), Array([0, 9, 9, 9], dtype=int32))
  """
  size = entries.indices.size
  # NaN is larger than everything, an empty slot is less than a zero.
  magnitude = jnp.where(entries.indices < end, jnp.abs(entries.values), -1.0)
  _, slots = jax.lax.top_k(magnitude, min(k, size))
  taken = jax.tree.map(lambda x: x[slots], entries)
  left = jnp.ones(size, jnp.bool_).at[slots].set(False, unique_indices=True)
  return widened(taken, k, end), where(left, entries, end)


def split(entries: Sparse, row: jax.Array, rows: int, capacity: int, end: int) -> Sparse:
  """Deals entries out to rows: the first `capacity` that belong to each, in their order.

  Args:
    entries: [c].
    row: i32[c], where each belongs, 0 … rows − 1; those with another number are left out.
    rows: number of rows.
    capacity: slots of a row.
    end: length of the vector.

  Returns:
    [rows, capacity] entries.

  Example:
    >>> entries = Sparse(jnp.array([7, 1, 6]), jnp.array([3.0, 2.0, 1.0]))
    >>> split(entries, jnp.array([1, 0, 1]), rows=2, capacity=1, end=9).indices
    Array([[1],
           [7]], dtype=int32)
  """
  order = jnp.argsort(row, stable=True)
  row = row[order]
  position = jnp.arange(row.size, dtype=jnp.int32) - jnp.searchsorted(row, row).astype(jnp.int32)
  fits = (position < capacity) & (row < rows)
  slot = jnp.where(fits, row * capacity + position, rows * capacity)
  indices = put(jnp.full(rows * capacity, end, jnp.int32), slot, entries.indices[order])
  values = put(jnp.zeros(rows * capacity, jnp.float32), slot, entries.values[order])
  return Sparse(indices.reshape(rows, capacity), values.reshape(rows, capacity))


def undelivered(home: jax.Array, sent: Sparse, total: jax.Array) -> jax.Array:
  """The residual of a worker: `home`, with zeros at (sent by it ∩ in the total).

  Where a total is 0 the sum of all that was sent is 0, or it was left out: either way its senders keep theirs, and
  nothing is lost.

  Example:
    >>> home, sent = jnp.array([1.0, 2.0, 3.0]), Sparse(jnp.array([0, 2]), jnp.array([1.0, 3.0]))
    >>> undelivered(home, sent, total=jnp.array([0.0, 4.0, 5.0]))
    Array([1., 2., 0.], dtype=float32)
  """
  indices = sent.indices.reshape(-1)
  delivered = at(total, indices) != 0
  return put(home, jnp.where(delivered, indices, home.size), 0.0)


def count(entries: Sparse, end: int) -> jax.Array:
  """How many slots hold an entry, i32[].

  Example:
    >>> count(Sparse(jnp.array([4, 9]), jnp.array([0.0, 0.0])), end=9)
    Array(1, dtype=int32)
  """
  return jnp.sum(entries.indices < end, dtype=jnp.int32)
