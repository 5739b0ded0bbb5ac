"""The verbs of `types.Comm` on JAX: along a shard_map axis, under vmap on one device, or for one worker alone."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from jaxsparse import _compat
from jaxsparse.comm.all_reduce import combined
from jaxsparse.comm.markers import message_p
from jaxsparse.comm.replication import mark_total, other_axes
from jaxsparse.comm.view import View
from jaxsparse.types import Comm, Reduction


def comm_of(axis: _compat.AxisName | Comm) -> Comm:
  """`axis` if it is a comm, else the comm of the workers along the shard_map axis, or axes, of this name.

  Raises:
    TypeError: if `axis` is neither.
  """
  if isinstance(axis, str) or (isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)):
    return AxisComm(axis)
  if all(hasattr(axis, verb) for verb in ("shift", "permute", "all_reduce", "split")):
    return cast(Comm, axis)
  raise TypeError(f"axis={axis!r}: give the name of a shard_map axis, a tuple of such names, or a comm")


def number_of_each(comm: Comm, number: jax.Array) -> jax.Array:
  """Gathers one number, i32[], of each worker in rank order, i32[P]: an all-reduce of P integers.

  Example:
    >>> number_of_each(SoloComm(3), jnp.int32(7))
    Array([7, 7, 7], dtype=int32)
  """
  if isinstance(comm, SoloComm):  # P times a vector with one number at rank 0 would be zero at all other ranks
    return jnp.broadcast_to(comm.all_reduce(number, "max"), comm.size)
  return comm.all_reduce(jnp.zeros(comm.size, jnp.int32).at[comm.rank].set(number))


def axes_of(comm: Comm) -> tuple[str, ...] | None:
  """Names of the axes all of whose workers belong to a comm; None for a comm that does not name its axes."""
  return getattr(comm, "axes", None)


@dataclasses.dataclass(frozen=True)
class AxisComm(View):
  """The workers along a named axis of `jax.shard_map`, or every `stride`-th of them.

  Attributes:
    axis: the name of the axis, or a tuple of names (ranks vary slowest along the first).
    stride: distance on the axis between neighbours of this view.
    members: number of workers of this view; None for the whole axis.

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
    """Combines `x` of all workers of the view by the all-reduce of XLA, in its order of summation."""
    reduce = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    return reduce(x, self.axis, axis_index_groups=self._groups())

  def _everyone(self) -> int:
    try:
      return jax.lax.axis_size(self.axis)
    except NameError as error:
      if mapped := jax.sharding.get_abstract_mesh().manual_axes:
        raise other_axes(self._names(), mapped) from error
      raise ValueError(
        f"axis {self.axis!r} is not mapped here: jaxsparse transforms take the local gradients of one worker, so init "
        f"and update must run inside jax.shard_map over {self.axis!r}; js.init and js.make_train_step do that for you"
      ) from error

  def _names(self) -> tuple[str, ...]:
    return _compat.names_of(self.axis)

  def _position(self) -> jax.Array:
    return jax.lax.axis_index(self.axis)

  def _groups(self) -> list[list[int]] | None:
    """Axis indices of each of the views that tile the axis; None where one view is the whole axis."""
    if self.members is None:
      return None
    span = self.stride * self.members
    return [list(range(start, start + span, self.stride)) for start in self._starts()]

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    return _compat.ppermute(buffer, self.axis, pairs)


@dataclasses.dataclass(frozen=True)
class SimComm(AxisComm):
  """The workers along an axis of `jax.vmap(axis_name=axis)` on one device: bit-identical to shard_map on CPU.

  vmap sums in another order and rejects partial permutations, so this class sums in rank order and completes
  permutations. With `members` it is also an engine for `js.init` and `js.make_train_step`:
  `js.SimComm("workers", members=64)` trains with 64 workers on one device.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: SimComm("workers").shift(x, 1), axis_name="workers")(jnp.arange(4))
    Array([3, 0, 1, 2], dtype=int32)
  """

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """Combines `x` in rank order and in float32, as XLA's all-reduce on CPU does."""
    gathered = jax.lax.all_gather(x, self.axis)  # one array for all workers under vmap
    if self.size == self._everyone():
      return mark_total(combined(gathered, op), self.axes)
    # All views are reduced at once. For the rows of its view alone, each worker would have an array of its own.
    views = gathered.reshape(-1, self.size, self.stride, *x.shape)
    totals = combined(jnp.moveaxis(views, 1, 0), op)
    return totals[self._position() // (self.size * self.stride), self._position() % self.stride]

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
  """One worker without the other `workers` - 1, to time the arithmetic of an update without its messages.

  The others are taken to have the same arrays: each message returns its own payload, and a sum over workers is P times
  its operand. So an algorithm whose branches depend on the data of others, such as Ok-Topk, takes the branches of a
  usual step. The results of an update are meaningless. `message_p` marks each message in the jaxpr.

  Example:
    >>> import jax.numpy as jnp
    >>> SoloComm(6).shift(jnp.arange(3), 1), SoloComm(6).all_reduce(jnp.arange(3))
    (Array([0, 1, 2], dtype=int32), Array([ 0,  6, 12], dtype=int32))
  """

  workers: int
  stride: int = 1
  members: int | None = None

  def all_reduce(self, x: jax.Array, op: Reduction = "sum") -> jax.Array:
    """P times `x`, the sum of P equal arrays; `x` for "max" and "min"."""
    received = message_p.bind(x)
    return received * jnp.asarray(self.size, x.dtype) if op == "sum" else received

  def _everyone(self) -> int:
    return self.workers

  def _position(self) -> jax.Array:
    return jnp.int32(0)

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    del pairs
    return message_p.bind(buffer)
