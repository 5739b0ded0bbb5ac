"""The verbs of `types.Comm` on JAX: along a shard_map axis, under vmap on one device, or for one worker alone.

`shift` and `permute` bit-cast a pytree to one uint32 buffer. Each round is therefore
one collective operation, which the compiler can neither widen nor split nor combine.
Primitives that compute nothing mark values in a jaxpr: what is equal on all workers
(`mark_total`), the rank of a process of MPI, and messages of a worker alone.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jaxsparse import _compat
from jaxsparse.arrays import iota
from jaxsparse.comm import schedules
from jaxsparse.types import Comm, Reduction, Tree

_WORD = 4  # bytes


def _identity(name: str) -> core.Primitive:
  """A primitive that returns its operand and that every transformation of JAX keeps."""
  primitive = core.Primitive(name)
  primitive.def_impl(lambda x, **_: x)
  # The result has the type of the operand, but is equal along the `axes` that `bind`
  # gets: along all axes for None, along none where `bind` gets no `axes`.
  primitive.def_abstract_eval(_compat.equal_along)
  mlir.register_lowering(primitive, lambda _, x, **__: [x])
  ad.deflinear2(primitive, lambda cotangent, *_, **__: [cotangent])
  batching.primitive_batchers[primitive] = lambda args, dims, **params: (
    primitive.bind(*args, **params),
    dims[0],
  )
  return primitive


# equal on all workers of `axes`; None where the comm does not name its axes
total_p = _identity("jaxsparse_total")
# the number of a rank of MPI: the one number that ranks may trace differently
rank_p = _identity("jaxsparse_rank")
# a message of `SoloComm`, which sends nothing
message_p = _identity("jaxsparse_message")
# name of the jitted function that sends a message of MPI: each rank has its own
# partners
MESSAGE = "jaxsparse_message"


def mark_total(tree: Any, axes: Sequence[str] | None) -> Any:
  """`tree`, marked as equal on all workers along `axes`; a law of its algorithm must guarantee this.

  Args:
    tree: a pytree of arrays.
    axes: names of all axes of the workers; None for a comm that names no axes, () for a
      view of some workers, where nothing is marked.

  Example:
    >>> mark_total(jnp.ones(2), ("workers",))
    Array([1., 1.], dtype=float32)
  """
  # a view of some workers: other views have other totals
  if axes is not None and not axes:
    return tree
  named = None if axes is None else frozenset(axes)
  return jax.tree.map(functools.partial(total_p.bind, axes=named), tree)


def other_axes_error(ours: Iterable[str], mapped: Iterable[str]) -> ValueError:
  """The error for a transform over other axes than those that a program is mapped over."""
  return ValueError(
    f"the jaxsparse transform is over the axis {list_axes(ours)}, and js.init and the training step are over "
    f"{list_axes(mapped)}: give all of them the same axis"
  )


def list_axes(axes: Iterable[str]) -> str:
  """The names of axes, for messages."""
  return " and ".join(map(repr, sorted(axes))) or "none"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CommView:
  """`members` workers of an engine, `stride` apart; a subclass for each engine.

  An engine is what all workers run on: an axis of a shard_map, the simulator, MPI. A
  subclass implements the number of workers of the engine, the number of this worker,
  and the sending of a buffer.

  Attributes:
    stride: distance between neighbours of this view.
    members: number of workers of this view; None for all workers of the engine.
  """

  stride: int = 1
  members: int | None = None
  _names: ClassVar[tuple[str, ...]] = ()  # axes of the engine's mesh

  @property
  def size(self) -> int:
    """Number of workers of this view."""
    return self._engine_size() if self.members is None else self.members

  @property
  def rank(self) -> jax.Array:
    """Number of this worker within the view, i32[]."""
    # members of a view are `stride` apart, and views of one stride are interleaved
    return self._engine_rank() // self.stride % self.size

  @property
  def divisor(self) -> int:
    """`size`: of a total, for its mean."""
    return self.size

  @property
  def axes(self) -> tuple[str, ...]:
    """Names of the axes all of whose workers belong to this view; empty for a view of some workers."""
    return self._names if self.size == self._engine_size() else ()

  def shift(self, tree: Tree, by: int) -> Tree:
    """Sends `tree` to worker (rank + by) mod size and returns that of worker (rank − by) mod size: one message."""
    return self._send(tree, schedules.ring(self.size, by)) if by % self.size else tree

  def all_to_all(self, rows: Tree) -> Tree:
    """Sends row d of each leaf to worker d and returns those of workers 0 … P − 1: P − 1 messages, as MPI_Alltoall."""
    buffer = jax.vmap(pack)(rows)
    received = self._all_to_all(buffer) if self.size > 1 else buffer
    return jax.vmap(unpack)(received, rows)

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """Sends `tree` along (source, destination) pairs: one message; a worker that is no destination gets zeros.

    Raises:
      ValueError: if a worker is out of range, sends twice or receives twice.
    """
    return self._send(tree, schedules.checked_pairs(pairs, self.size))

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers of the view in rank order."""
    return mark_total(schedules.all_reduce_in_order(self, x, op), self.axes)

  def split(self, teams: int) -> tuple[Self, Self]:
    """(team, member): views of the size / teams workers of this team, and of the workers of this rank in all teams.

    Raises:
      ValueError: if `teams` does not divide `size`, naming the divisors.
    """
    # A team is `length` neighbours; the workers of one rank in all teams are `length`
    # apart.
    length = schedules.team_size(self.size, teams)
    member = dataclasses.replace(self, stride=self.stride * length, members=teams)
    return dataclasses.replace(self, members=length), member

  def _send(self, tree: Tree, pairs: schedules.Pairs) -> Tree:
    """Sends `tree` along pairs of this view, and along the same pairs of all views that tile the engine."""
    return unpack(self._ppermute(pack(tree), self._moves(pairs)), tree)

  def _moves(self, pairs: schedules.Pairs) -> list[tuple[int, int]]:
    """Pairs of this view as pairs of the engine's workers, for all views that tile the engine."""
    return [
      (view[source], view[destination])
      for view in self._views()
      for source, destination in pairs
    ]

  def _views(self) -> list[range]:
    """For each view of this size and stride, the engine's numbers of its workers; these views tile the engine."""
    # Each `span` consecutive workers of the engine form `stride` interleaved views.
    span, engine = self.stride * self.size, self._engine_size()
    starts = (
      first + offset
      for first in range(0, engine, span)
      for offset in range(self.stride)
    )
    return [range(start, start + span, self.stride) for start in starts]

  def _all_to_all(self, buffer: jax.Array) -> jax.Array:
    """`all_to_all` of u32[P, words]: message b goes to worker rank + b, for b = 1 … P − 1."""
    workers = iota(self.size)
    # the home frame: row b is for worker rank + b, row 0 for this worker
    own_row, *others = buffer[(self.rank + workers) % self.size]
    # pairs of each message, in numbers of the view; `_moves` makes them the engine's
    rings = [schedules.ring(self.size, by) for by in range(1, self.size)]
    received = self._ppermutes(others, list(map(self._moves, rings)))
    # The row of worker rank − b is row P − b of the home frame.
    rows = jnp.stack([own_row, *reversed(received)])
    # from the home frame to the order of ranks
    return rows[(workers - self.rank) % self.size]

  def _ppermutes(
    self, buffers: list[jax.Array], moves: list[list[tuple[int, int]]]
  ) -> list[jax.Array]:
    """`_ppermute` of several buffers, each along pairs of its own."""
    return list(map(self._ppermute, buffers, moves))

  def _engine_size(self) -> int:
    """Number of workers of the engine."""
    raise NotImplementedError

  def _engine_rank(self) -> jax.Array:
    """Number of this worker within the engine, i32[]."""
    raise NotImplementedError

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    """Sends a u32[words] along pairs of workers of the engine; a worker that is no destination gets zeros."""
    raise NotImplementedError


def pack(tree: Tree) -> jax.Array:
  """Bit-casts the leaves of a pytree into one u32[words] buffer, in order; short leaves are padded to whole words."""
  words = []
  for leaf in jax.tree.leaves(tree):
    flat = leaf.reshape(-1)
    if jnp.iscomplexobj(flat):
      flat = jnp.stack([flat.real, flat.imag], -1).reshape(-1)
    # 2 of 16 bits, 4 of 8 bits; an entry of 64 bits is two words
    per_word = max(1, _WORD // flat.dtype.itemsize)
    if per_word > 1:
      flat = jnp.pad(flat, (0, -flat.size % per_word))
    words.append(flat.view(jnp.uint32))
  return jnp.concatenate(words)


def unpack(words: jax.Array, like: Tree) -> Tree:
  """The inverse of `pack`, for a pytree with the shapes and dtypes of `like`."""
  leaves, structure = jax.tree.flatten(like)
  sizes = (math.ceil(leaf.size * leaf.dtype.itemsize / _WORD) for leaf in leaves)
  ends = itertools.accumulate(sizes, initial=0)
  unpacked = []
  for leaf, (start, end) in zip(leaves, itertools.pairwise(ends), strict=True):
    # A complex leaf was packed as pairs of real and imaginary part.
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    flat = words[start:end].view(
      jnp.finfo(leaf.dtype).dtype if is_complex else leaf.dtype
    )
    flat = jax.lax.complex(flat[::2], flat[1::2]) if is_complex else flat
    # The last word of a short dtype may hold padding.
    unpacked.append(flat[: leaf.size].reshape(leaf.shape))
  return jax.tree.unflatten(structure, unpacked)


def comm_of(axis: _compat.AxisName | Comm) -> Comm:
  """`axis` if it is a comm, else the comm of the workers along the shard_map axis or axes with this name.

  Raises:
    TypeError: if `axis` is neither.
  """
  if isinstance(axis, str) or (
    isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)
  ):
    return AxisComm(axis)
  if all(hasattr(axis, verb) for verb in ("shift", "permute", "all_reduce", "split")):
    return cast(Comm, axis)
  raise TypeError(
    f"axis={axis!r}: give the name of a shard_map axis, a tuple of such names, or a comm"
  )


def axes_of(comm: Comm) -> tuple[str, ...] | None:
  """Names of the axes all of whose workers belong to a comm; None for a comm that does not name its axes."""
  return getattr(comm, "axes", None)


def number_of_each(comm: Comm, local: jax.Array) -> jax.Array:
  """Gathers the number `local`, i32[…], of each worker in rank order, i32[P, …]: an all-reduce of integers.

  Example:
    >>> number_of_each(SoloComm(3), jnp.int32(7))
    Array([7, 7, 7], dtype=int32)
  """
  # `SoloComm`, of rank 0, takes all workers to have its arrays. Its sum, P times the
  # rows below, would be 0 for all other ranks; its "max" returns `local`.
  if isinstance(comm, SoloComm):
    return jnp.broadcast_to(comm.all_reduce(local, "max"), (comm.size, *local.shape))
  # Each worker sets only the row of its rank, so that the sum is a gather.
  rows = jnp.zeros((comm.size, *local.shape), jnp.int32)
  return comm.all_reduce(rows.at[comm.rank].set(local))


@dataclasses.dataclass(frozen=True)
class AxisComm(CommView):
  """The workers along a named axis of `jax.shard_map`, or every `stride`-th of them.

  Attributes:
    axis: the name of the axis, or a tuple of names (ranks vary slowest along the
      first).
    stride, members: as in `js.comm.CommView`.

  Example:
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> total = lambda x: AxisComm("workers").all_reduce(x)
    >>> program = jax.shard_map(total, mesh=mesh, in_specs=P("workers"), out_specs=P())
    >>> float(jax.jit(program)(jnp.ones(len(jax.devices())))[0]) == len(jax.devices())
    True
  """

  axis: _compat.AxisName

  @property
  def axes(self) -> tuple[str, ...]:
    """The names of `axis` where this view is the whole of it, else ()."""
    return _compat.names_of(self.axis) if self.size == self._engine_size() else ()

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` of all workers of the view by the all-reduce of XLA, in its order of summation."""
    reduce = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    # XLA reduces all views in one operation, each in its group.
    groups = None if self.members is None else [list(view) for view in self._views()]
    return reduce(x, self.axis, axis_index_groups=groups)

  def _engine_size(self) -> int:
    try:
      return jax.lax.axis_size(self.axis)
    except NameError as error:
      # Inside a shard_map over other axes the likely mistake is the name.
      if mapped := jax.sharding.get_abstract_mesh().manual_axes:
        raise other_axes_error(_compat.names_of(self.axis), mapped) from error
      raise ValueError(
        f"axis {self.axis!r} is not mapped here: jaxsparse transforms take the local gradients of one worker, so init "
        f"and update must run inside jax.shard_map over {self.axis!r}; js.init, js.make_train_step and, in a "
        "jax.jit of your own, js.stacked do that for you"
      ) from error

  def _engine_rank(self) -> jax.Array:
    return jax.lax.axis_index(self.axis)

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    return _compat.ppermute(buffer, self.axis, pairs)

  def _all_to_all(self, buffer: jax.Array) -> jax.Array:
    if self.size < self._engine_size():  # under vmap JAX has none of groups
      return super()._all_to_all(buffer)
    return _compat.all_to_all(buffer, self.axis)


@dataclasses.dataclass(frozen=True)
class SimComm(AxisComm):
  """The workers along an axis of `jax.vmap(axis_name=axis)` on one device: bit-identical to shard_map on CPU.

  vmap sums in another order and rejects partial permutations, so this class sums in
  rank order and completes permutations. With `members` it is also an engine for
  `js.init` and `js.make_train_step`: `js.SimComm("workers", members=64)` trains with 64
  workers on one device.

  Example:
    >>> jax.vmap(lambda x: SimComm("workers").shift(x, 1), axis_name="workers")(jnp.arange(4))
    Array([3, 0, 1, 2], dtype=int32)
  """

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` in rank order and in float32, as XLA's all-reduce on CPU does."""
    gathered = jax.lax.all_gather(x, self.axis)  # one array for all workers under vmap
    if self.size == self._engine_size():
      return mark_total(schedules.combine_rows(gathered, op), self.axes)
    # All workers share one array, the totals of all views, and take the total of their
    # view from it; the rows of the own view alone would be an array for each worker.
    # Worker (span · size + member) · stride + offset of the engine is views[span,
    # member, offset].
    views = gathered.reshape(-1, self.size, self.stride, *x.shape)
    totals = schedules.combine_rows(jnp.moveaxis(views, 1, 0), op)
    return totals[
      self._engine_rank() // (self.size * self.stride),
      self._engine_rank() % self.stride,
    ]

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    size = self._engine_size()
    every = set(range(size))
    sources = sorted(every - {source for source, _ in pairs})
    destinations = sorted(every - {destination for _, destination in pairs})
    # Each worker without a destination gets one among the workers without a source.
    idle = zip(sources, destinations, strict=True)
    received = jax.lax.ppermute(buffer, self.axis, [*pairs, *idle])
    if not sources:
      return received
    # Pairs that complete the permutation bring zeros, as a partial one would give.
    receives = jnp.array([worker not in destinations for worker in range(size)])
    is_destination = receives[jax.lax.axis_index(self.axis)]
    return jnp.where(is_destination, received, jnp.zeros_like(received))


@dataclasses.dataclass(frozen=True)
class SoloComm(CommView):
  """One worker without the other `workers` - 1, to time the arithmetic of an update without its messages.

  The others are taken to have the same arrays, so that branches that depend on the data
  of others are those of a usual step: each message returns its own payload, and a sum
  is P times its operand. `message_p` marks messages in the jaxpr.

  Example:
    >>> SoloComm(6).shift(jnp.arange(3), 1), SoloComm(6).all_reduce(jnp.arange(3))
    (Array([0, 1, 2], dtype=int32), Array([ 0,  6, 12], dtype=int32))
  """

  workers: int

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """P times `x`, the sum of P equal arrays; `x` for "max" and "min"."""
    received = message_p.bind(x)
    return received * jnp.asarray(self.size, x.dtype) if op == "sum" else received

  def _engine_size(self) -> int:
    return self.workers

  def _engine_rank(self) -> jax.Array:
    return jnp.int32(0)

  def _ppermute(
    self,
    buffer: jax.Array,
    pairs: list[tuple[int, int]],
  ) -> jax.Array:
    return message_p.bind(buffer)

  def _all_to_all(self, buffer: jax.Array) -> jax.Array:
    return message_p.bind(buffer)
