"""The verbs of `types.Comm` on JAX: workers along a shard_map axis, or all of them under vmap on one device."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxsparse import _compat
from jaxsparse.comm.all_reduce import combined
from jaxsparse.comm.replication import mark_total
from jaxsparse.comm.view import View
from jaxsparse.types import Comm, Reduction

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


def _message(buffer: jax.Array) -> jax.Array:
  return buffer


message = jax.jit(_message)  # stands for a message in the jaxpr of a worker alone


def is_message(equation: core.JaxprEqn) -> bool:
  """Whether an equation in the jaxpr of a worker alone stands for a message.

  Example:
    >>> jaxpr = jax.make_jaxpr(lambda x: SoloComm(2).shift(x + 1, 1))(jnp.arange(3)).jaxpr
    >>> sum(is_message(equation) for equation in jaxpr.eqns)
    1
  """
  return equation.params.get("name") == _message.__name__
