"""The verbs of `types.Comm` on JAX: workers along a shard_map axis, or all of them under vmap on one device.

`shift` and `permute` bit-cast a pytree to one uint32 buffer, so that a round is one collective op that the compiler has
nothing to widen, split or combine in.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp

from jaxsparse import _compat, routes
from jaxsparse.replication import mark_total
from jaxsparse.types import Comm, Reduction, Tree

_WORD = 4  # bytes


def comm_of(axis: _compat.AxisName | Comm) -> Comm:
  """`axis` if it is a comm already, else the comm of the workers along a shard_map axis of that name (or names).

  Raises:
    TypeError: if `axis` is neither.
  """
  if isinstance(axis, str) or (isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)):
    return AxisComm(axis)
  if all(hasattr(axis, verb) for verb in ("shift", "permute", "all_reduce", "split")):
    return cast(Comm, axis)
  raise TypeError(f"axis={axis!r}: give the name of a shard_map axis, a tuple of such names, or a comm")


def axes_of(comm: Comm) -> tuple[str, ...] | None:
  """The names of the axes over all of whose workers a comm reaches; None for a comm that does not tell."""
  return getattr(comm, "axes", None)


class View:
  """Every `stride`-th worker of an engine, `members` of them: what the views of all engines share.

  An engine adds three things: how many workers it has, which of them this one is, and how a buffer gets from some of
  them to others. Rings, partial permutations and teams are the same everywhere.
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
    """The names of the axes over all of whose workers this view reaches; none for a part of them."""
    return () if self.size < self._everyone() else self._names()

  def shift(self, tree: Tree, by: int) -> Tree:
    """Sends `tree` `by` places further and returns what came from `by` places before: one message."""
    size = self.size
    return self._send(tree, routes.rotation(size, by)) if by % size else tree

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """Sends `tree` along (source, destination) pairs: one message; zeros arrive where nobody sends.

    Raises:
      ValueError: if a worker is out of range, sends twice or receives twice.
    """
    return self._send(tree, routes.checked(pairs, self.size))

  def split(self, teams: int) -> tuple[Self, Self]:
    """(team, member): views of the size / teams workers of my team, and of the `teams` workers of my position.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors.
    """
    length = routes.team_size(self.size, teams)
    view: Any = functools.partial(dataclasses.replace, self)
    return view(members=length), view(stride=self.stride * length, members=teams)

  def _send(self, tree: Tree, pairs: routes.Pairs) -> Tree:
    """Sends `tree` along pairs of this view, and along the same ones of all views that tile the engine."""
    moves = [(start + a * self.stride, start + b * self.stride) for start in self._starts() for a, b in pairs]
    return unpack(self._ppermute(pack(tree), moves), tree)

  def _starts(self) -> list[int]:
    """The first worker of each of the views that tile the engine."""
    if self.members is None:
      return [0]
    span = self.stride * self.members
    return [first + offset for first in range(0, self._everyone(), span) for offset in range(self.stride)]

  def _everyone(self) -> int:
    """Number of workers of the engine."""
    raise NotImplementedError

  def _names(self) -> tuple[str, ...]:
    """The names of the axes that the workers of the engine lie along."""
    return ()

  def _position(self) -> jax.Array:
    """Number of this worker within the engine, i32[]."""
    raise NotImplementedError

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends a u32[words] along pairs of workers of the engine; zeros arrive where nobody sends."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AxisComm(View):
  """The workers along a named axis of `jax.shard_map`, or every `stride`-th of them.

  Attributes:
    axis: the name of the axis, or a tuple of names (the first is the slowest).
    stride: distance on the axis between neighbours of this view.
    members: how many workers this view has; None for the whole axis.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> total = lambda x: AxisComm("workers").all_reduce(x)
    >>> program = jax.shard_map(total, mesh=mesh, in_specs=P("workers"), out_specs=P(), check_vma=False)
    >>> float(jax.jit(program)(jnp.ones(len(jax.devices())))[0]) == len(jax.devices())
    True
  """

  axis: _compat.AxisName
  stride: int = 1
  members: int | None = None

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers of the view with the platform's own all-reduce, in the platform's order."""
    reduce = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    return reduce(x, self.axis, axis_index_groups=self._groups())

  def _everyone(self) -> int:
    try:
      return jax.lax.axis_size(self.axis)
    except NameError as error:
      raise ValueError(
        f"axis {self.axis!r} is not mapped here: jaxsparse transforms take the local gradients of one worker, so init "
        f"and update must run inside jax.shard_map over {self.axis!r}; js.init and js.make_train_step do that for you"
      ) from error

  def _names(self) -> tuple[str, ...]:
    return _compat.names_of(self.axis)

  def _position(self) -> jax.Array:
    return jax.lax.axis_index(self.axis)

  def _groups(self) -> list[list[int]] | None:
    """The views that tile the axis, as lists of axis positions; None where one view is the whole axis."""
    if self.members is None:
      return None
    span = self.stride * self.members
    return [list(range(start, start + span, self.stride)) for start in self._starts()]

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    return _compat.ppermute(buffer, self.axis, pairs)


@dataclasses.dataclass(frozen=True)
class SimComm(AxisComm):
  """The same workers under `jax.vmap(axis_name=axis)` on one device: bit for bit what shard_map gives on CPU.

  vmap sums in an order of its own and takes only full permutations, so both are spelled out here. With `members` it is
  also an engine for `js.init` and `js.make_train_step`: `js.SimComm("workers", members=64)` trains with 64 workers
  wherever there is one device.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: SimComm("workers").shift(x, 1), axis_name="workers")(jnp.arange(4))
    Array([3, 0, 1, 2], dtype=int32)
  """

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines in rank order and in float32, as XLA's CPU all-reduce does."""
    gathered = jax.lax.all_gather(x, self.axis)
    if self.members is not None:
      first = self._position() - self.rank * self.stride
      gathered = gathered[first + jnp.arange(self.size, dtype=jnp.int32) * self.stride]
    return mark_total(combined(gathered, op), self.axes)

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    size = self._everyone()
    idle = lambda end: sorted(set(range(size)) - {pair[end] for pair in pairs})
    full = [*pairs, *zip(idle(0), idle(1), strict=True)]
    got = jax.lax.ppermute(buffer, self.axis, full)
    if len(full) == len(pairs):
      return got
    received = jnp.zeros(size, jnp.bool_).at[jnp.array([d for _, d in pairs], jnp.int32)].set(True)
    return jnp.where(received[jax.lax.axis_index(self.axis)], got, jnp.zeros_like(got))


@dataclasses.dataclass(frozen=True)
class SoloComm(View):
  """One of `workers` workers, alone: it receives what it sends, so that an update costs what it does without the wire.

  Its results mean nothing, its shapes and its arithmetic are those of a real update.

  Example:
    >>> import jax.numpy as jnp
    >>> SoloComm(6).shift(jnp.arange(3), 1)
    Array([0, 1, 2], dtype=int32)
  """

  workers: int
  stride: int = 1
  members: int | None = None

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Gives back `x`."""
    del op
    return message(x)

  def _everyone(self) -> int:
    return self.workers

  def _position(self) -> jax.Array:
    return jnp.int32(0)

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    del pairs
    return message(buffer)


@jax.jit
def message(buffer: jax.Array) -> jax.Array:
  """What stands for a message in the jaxpr of a worker alone."""
  return buffer


def combined(rows: jax.Array, op: Reduction) -> jax.Array:
  """Combines the rows of x[P, …] in rank order, short floats in float32: the bits do not depend on the engine."""
  combine = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op]
  dtype = rows.dtype
  if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _WORD:
    rows = rows.astype(jnp.float32)
  result, _ = jax.lax.scan(lambda total, row: (combine(total, row), None), rows[0], rows[1:])
  return result.astype(dtype)


def all_reduce_in_order(comm: Comm, x: jax.Array, op: Reduction = "sum") -> jax.Array:
  """An all-reduce over `shift` alone that adds in rank order, for engines that have none of their own.

  Few entries are gathered (⌈log₂ P⌉ messages) and combined by everyone. More are split into P blocks: each worker
  combines one (P − 1 messages), and the results are gathered, 2n(P − 1)/P words in all as for any good all-reduce.
  """
  if x.size < comm.size:
    return combined(in_rank_order(comm, all_gather(comm, x)), op)
  blocks = jnp.pad(x.reshape(-1), (0, -x.size % comm.size)).reshape(comm.size, -1)
  mine = combined(exchange(comm, blocks), op)
  return in_rank_order(comm, all_gather(comm, mine)).reshape(-1)[: x.size].reshape(x.shape)


def all_gather(comm: Comm, tree: Tree) -> Tree:
  """Bruck's all-gather over `shift` alone: ⌈log₂ P⌉ messages and P − 1 times the words of `tree`, for any P.

  Every leaf gains a leading axis of P rows in the home frame: row b came from worker (rank + b) mod P. Six workers,
  what worker 0 holds after each round (the last one sends only what is missing):

      own            0
      from 1         0 1
      from 2         0 1 2 3
      from 4         0 1 2 3 4 5
  """
  rows = jax.tree.map(lambda x: x[None], tree)
  for stride in reversed(routes.strides(comm.size)):
    missing = min(stride, comm.size - stride)
    got = comm.shift(jax.tree.map(lambda x, m=missing: x[:m], rows), -stride)
    rows = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), rows, got)
  return rows


def in_rank_order(comm: Comm, rows: Tree) -> Tree:
  """Rows of the home frame, row b from worker (rank + b) mod P, as rows 0 … P − 1 by worker."""
  order = (jnp.arange(comm.size, dtype=jnp.int32) - comm.rank) % comm.size
  return jax.tree.map(lambda x: x[order], rows)


def exchange(comm: Comm, rows: Tree) -> Tree:
  """Row r goes to worker r: P − 1 messages, rotated so that no two of them go to one worker at a time.

  The messages do not depend on each other, so a runtime is free to have several under way. Six workers, worker 2:

      row 3 -> worker 3, row 4 -> worker 4, row 5 -> worker 5, row 0 -> worker 0, row 1 -> worker 1;   row 2 stays

  Returns:
    Rows by the worker that sent them, 0 … P − 1.
  """
  away = (comm.rank + jnp.arange(comm.size, dtype=jnp.int32)) % comm.size
  home_frame = jax.tree.map(lambda x: x[away], rows)
  own = jax.tree.map(lambda x: x[:1], home_frame)
  sent = [comm.shift(jax.tree.map(lambda x, b=b: x[b : b + 1], home_frame), b) for b in range(1, comm.size)]
  # What came from `b` places before is row P − b of the home frame.
  return in_rank_order(comm, jax.tree.map(lambda *parts: jnp.concatenate(parts), own, *reversed(sent)))


def pack(tree: Tree) -> jax.Array:
  """Bit-casts the leaves of a pytree into one u32[words] buffer, in order; short leaves are padded to whole words."""
  return jnp.concatenate([_to_words(leaf) for leaf in jax.tree.leaves(tree)])


def unpack(words: jax.Array, like: Tree) -> Tree:
  """Undoes `pack` for a pytree of the shapes and dtypes of `like`."""
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
