"""Finding and adding the differences of bit patterns on the device, as jitted programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.sparse import bitset


def mark(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A bitset of the patterns that differ, and how many there are."""
  words = bitset.pack(old != new)
  return words, bitset.count(words)


def gather(words: jax.Array, old: jax.Array, new: jax.Array, capacity: int) -> Any:
  """Indices of the bitset, of which there are at most `capacity`, and the differences there."""
  indices = bitset.nonzero(words, capacity)
  inside = jnp.minimum(indices, old.size - 1)
  return indices, new[inside] - old[inside]


def add(old: jax.Array, indices: jax.Array, differences: jax.Array) -> jax.Array:
  """The new patterns."""
  return old.at[indices].add(differences, mode="drop", indices_are_sorted=True)


def capacity_of(count: int) -> int:
  """A power of two above a count, so that few programs are compiled."""
  return 1 << count.bit_length()


_mark = jax.jit(mark)
_gather = functools.partial(jax.jit, static_argnames="capacity")(gather)
apply = jax.jit(add)


def diff(old: jax.Array, new: jax.Array) -> Any:
  """Indices and differences, in two programs: the second one has as many slots as the first one's count asks for."""
  words, count = _mark(old, new)
  return _gather(words, old, new, capacity_of(int(count)))
