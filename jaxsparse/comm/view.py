"""The base class of all comms: `shift`, `permute` and `split` over one primitive operation that sends a buffer.

`shift` and `permute` bit-cast a pytree to one uint32 buffer. Each round is therefore one collective operation, which
the compiler can neither widen nor split nor combine with another one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxsparse.comm import topology
from jaxsparse.types import Tree

_WORD = 4  # bytes


class View:
  """`members` workers of an engine, `stride` apart; a subclass for each engine.

  A subclass implements the number of workers of the engine, the number of this worker, and the sending of a buffer.
  """

  stride: int
  members: int | None

  @property
  def size(self) -> int:
    """Number of workers of this view."""
    return self._everyone() if self.members is None else self.members

  @property
  def rank(self) -> jax.Array:
    """Number of this worker within the view, i32[]."""
    return self._position() // self.stride % self.size

  @property
  def axes(self) -> tuple[str, ...]:
    """Names of the axes all of whose workers belong to this view; empty for a view of some workers."""
    return () if self.size < self._everyone() else self._names()

  def shift(self, tree: Tree, by: int) -> Tree:
    """Sends `tree` to worker (rank + by) mod size and returns that of worker (rank − by) mod size: one message."""
    size = self.size
    return self._send(tree, topology.rotation(size, by)) if by % size else tree

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """Sends `tree` along (source, destination) pairs: one message; a worker that is no destination gets zeros.

    Raises:
      ValueError: if a worker is out of range, sends twice or receives twice.
    """
    return self._send(tree, topology.checked(pairs, self.size))

  def split(self, teams: int) -> tuple[Self, Self]:
    """(team, member): views of the size / teams workers of this team, and of the workers of this rank in all teams.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors.
    """
    length = topology.team_size(self.size, teams)
    view: Any = functools.partial(dataclasses.replace, self)
    return view(members=length), view(stride=self.stride * length, members=teams)

  def _send(self, tree: Tree, pairs: topology.Pairs) -> Tree:
    """Sends `tree` along pairs of this view, and along the same pairs of all views that tile the engine."""
    moves = [(start + a * self.stride, start + b * self.stride) for start in self._starts() for a, b in pairs]
    return unpack(self._ppermute(pack(tree), moves), tree)

  def _starts(self) -> list[int]:
    """First worker of each of the views that tile the engine."""
    if self.members is None:
      return [0]
    span = self.stride * self.members
    return [first + offset for first in range(0, self._everyone(), span) for offset in range(self.stride)]

  def _everyone(self) -> int:
    """Number of workers of the engine."""
    raise NotImplementedError

  def _names(self) -> tuple[str, ...]:
    """Names of the axes of the workers of the engine."""
    return ()

  def _position(self) -> jax.Array:
    """Number of this worker within the engine, i32[]."""
    raise NotImplementedError

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends a u32[words] along pairs of workers of the engine; a worker that is no destination gets zeros."""
    raise NotImplementedError


def pack(tree: Tree) -> jax.Array:
  """Bit-casts the leaves of a pytree into one u32[words] buffer, in order; short leaves are padded to whole words."""
  return jnp.concatenate([_to_words(leaf) for leaf in jax.tree.leaves(tree)])


def unpack(words: jax.Array, like: Tree) -> Tree:
  """The inverse of `pack`, for a pytree with the shapes and dtypes of `like`."""
  leaves, structure = jax.tree.flatten(like)
  ends = [0]
  for leaf in leaves:
    ends.append(ends[-1] + math.ceil(leaf.size * leaf.dtype.itemsize / _WORD))
  parts = [_from_words(words[a:b], leaf) for (a, b), leaf in zip(itertools.pairwise(ends), leaves, strict=True)]
  return jax.tree.unflatten(structure, parts)


def _to_words(x: jax.Array) -> jax.Array:
  flat = x.reshape(-1)
  if x.dtype == jnp.bool_:
    flat = flat.astype(jnp.uint8)
  per_word = max(1, _WORD // flat.dtype.itemsize)
  if per_word > 1:
    flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
  return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
  dtype = jnp.dtype(jnp.uint8) if like.dtype == jnp.bool_ else like.dtype
  if dtype.itemsize > _WORD:
    words = words.reshape(-1, dtype.itemsize // _WORD)
  flat = jax.lax.bitcast_convert_type(words, dtype).reshape(-1)
  return flat[: like.size].reshape(like.shape).astype(like.dtype)
