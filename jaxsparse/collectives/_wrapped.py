"""Collectives around another one: momentum before the exchange, changes of a mean (EF21), rising sparsity."""

import dataclasses
import operator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import Collective, SparseCollective, replace_fields
from jaxsparse.comm import varying
from jaxsparse.select.accumulator import materialize
from jaxsparse.sparse import flatten
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Pending,
  Reduced,
  Sparse,
  State,
  saturated,
)


def _of_inner(name: str) -> Any:
  """A property that is that of the collective inside."""
  return property(operator.attrgetter(f"collective.{name}"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Collective):
  """A collective that has the properties of another one; subclasses define `reduce`."""

  collective: Collective

  def __post_init__(self) -> None:
    object.__setattr__(self, "name", f"wrapped {self.collective.name}")
    super().__post_init__()

  conserves = _of_inner("conserves")
  replicates = _of_inner("replicates")
  differentiable = _of_inner("differentiable")
  moves_zeros = _of_inner("moves_zeros")
  scaled = _of_inner("scaled")
  decay = _of_inner("decay")
  sizes_vary = _of_inner("sizes_vary")
  mixes_entries = _of_inner("mixes_entries")
  tracks_workers = _of_inner("tracks_workers")

  def slots(self, n: int, size: int) -> int:
    return self.collective.slots(n, size)

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return dataclasses.replace(self, collective=self.collective.for_leaves(shapes))

  def for_devices(self, devices: int) -> Self:
    return dataclasses.replace(self, collective=self.collective.for_devices(devices))

  def init(self, n: int, size: int) -> State:
    return self.collective.init(n, size)

  def cost(self, n: int, size: int) -> Cost:
    return self.collective.cost(n, size)


class Momentum(NamedTuple):
  """What a worker remembers: u, f32[n], and the memory of the collective."""

  momentum: jax.Array
  memory: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrected(Wrapped):
  """A collective that reduces the momentum of each worker in place of its gradient; see `js.momentum_corrected`."""

  conserves = False  # it conserves momentum, not gradients
  momentum: float
  nesterov: bool = False
  masking: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if isinstance(self.collective, Corrected):
      raise ValueError(
        f"momentum_corrected: {self.collective.name} has a momentum already, give the transform inside"
      )
    if self.masking and self.collective.mixes_entries:
      raise ValueError(
        f"momentum_corrected: masking=True with {self.collective.name}, which delivers a part of every entry, so that "
        "each step would zero all momentum: choose masking=False, or a collective that sends entries"
      )

  def init(self, n: int, size: int) -> State:
    state = self.collective.init(n, size)
    return state._replace(worker=Momentum(jnp.zeros(n, jnp.float32), state.worker))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    before: Momentum = state.worker
    momentum = (
      self.momentum * (before.momentum + grads)
      if self.nesterov
      else self.momentum * before.momentum + grads
    )
    sent = momentum + grads if self.nesterov else momentum
    reduced = self.collective.reduce(comm, sent, state._replace(worker=before.memory))
    if (
      self.masking
      and (is_partial := self.collective.is_partial(grads.size, state)) is not False
    ):
      masked = _mask_momentum(momentum, sent, state.residual, reduced.state.residual)
      momentum = jnp.where(is_partial, masked, momentum)
    return reduced._replace(
      state=reduced.state._replace(worker=Momentum(momentum, reduced.state.worker))
    )


def _mask_momentum(
  momentum: jax.Array, sent: jax.Array, residual: jax.Array, after: jax.Array | Pending
) -> jax.Array:
  """The momentum with zeros where the next residual is not `sent + residual`."""
  if not isinstance(after, Pending):
    return jnp.where(after == sent + residual, momentum, 0.0)
  indices, values = after.entries
  left = values != sparse.read_at(sent, indices) + sparse.read_at(residual, indices)
  return sparse.put(momentum, jnp.where(left, indices, momentum.size), 0.0)


# of what is known, in each step: rounding errors of large gradients are forgotten
_KEPT = 1 - 2.0**-13


class Mean(NamedTuple):
  """What a worker remembers: its mean gradient, what of it is not delivered, f32[n]; the memory of the collective."""

  mean: jax.Array
  undelivered: jax.Array | None
  memory: Any


class Tracked(NamedTuple):
  """The same on every worker: the sum of the means, as delivered, f32[n]; the steps; and what the collective shares."""

  total: jax.Array
  step: jax.Array
  collective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class EF21(Wrapped):
  """A collective that reduces the changes of each worker's mean gradient, and adds them up; see `js.ef21`.

  What is not delivered belongs to a mean, and is no residual: new workers begin with
  means of zero, and owe nothing.
  """

  conserves = False  # it conserves means of gradients
  tracks_workers = True
  momentum: float

  def __post_init__(self) -> None:
    super().__post_init__()
    inner = self.collective
    if isinstance(inner, Corrected | EF21):
      raise ValueError(
        f"ef21: {inner.name} has a momentum already, give the transform inside"
      )
    # of dense, without a residual
    rounds = getattr(inner, "dtype", "float32") != "float32"
    if rounds or not (inner.conserves and inner.replicates and inner.decay == 1):
      raise ValueError(
        f"ef21: {inner.label} loses a part of what it is given, choose a collective that delivers it later"
      )

  def init(self, n: int, size: int) -> State:
    state = self.collective.init(n, size)
    zeros = jnp.zeros(n, jnp.float32)
    return State(
      None,
      Mean(zeros, state.residual, state.worker),
      Tracked(zeros, jnp.int32(0), state.shared),
    )

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    own = state.worker
    shared = state.shared
    mean = own.mean + (1 - self.momentum) * (grads - own.mean)
    owed = None if own.undelivered is None else _KEPT * own.undelivered
    inner = State(owed, own.memory, shared.collective)
    reduced = self.collective.reduce(comm, mean - _KEPT * own.mean, inner).computed()
    delivered = reduced.total
    left = reduced.state.residual
    if isinstance(left, Pending):
      left = materialize(left, jnp.bool_(True), 1.0)
    if isinstance(delivered, Sparse):
      total = sparse.add(_KEPT * shared.total, delivered.indices, delivered.values)
      # NaN may lie in an empty slot
      total = jnp.where(flatten.all_finite(delivered.values), total, jnp.nan)
    else:
      total = _KEPT * shared.total + delivered
    step = shared.step + 1
    after = State(
      None,
      Mean(mean, left, reduced.state.worker),
      Tracked(total, step, reduced.state.shared),
    )
    bias = 1 - jnp.float32(self.momentum) ** step.astype(jnp.float32)
    return Reduced(total / bias, after, reduced.counters)


class WarmUp(NamedTuple):
  """The state that is the same on every worker: the number of the step, i32[], and what the collective shares."""

  step: jax.Array
  collective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmedUp(Wrapped):
  """A sparse collective with density `densities[i]` before step `steps[i]`, and with its own after the last of them."""

  collective: SparseCollective
  steps: tuple[int, ...]
  densities: tuple[float, ...]

  sizes_vary = True

  def rungs(self) -> list[SparseCollective]:
    """The collective of each density, its own last."""
    return [
      *(replace_fields(self.collective, density=one, k=None) for one in self.densities),
      self.collective,
    ]

  def is_partial(self, n: int, state: State) -> bool | jax.Array:
    return jnp.array([one.entries(n) < n for one in self.rungs()])[
      self._rung(state.shared.step)
    ]

  def slots(self, n: int, size: int) -> int:
    return max(one.slots(n, size) for one in self.rungs())

  def init(self, n: int, size: int) -> State:
    first, *others = (one.init(n, size) for one in self.rungs())
    shapes = lambda state: jax.tree.map(jnp.shape, state)
    if any(shapes(other) != shapes(first) for other in others):
      raise ValueError(
        f"{self.name}: the sizes of its state depend on the density, choose other options"
      )
    return first._replace(shared=WarmUp(jnp.int32(0), first.shared))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    step, shared = state.shared
    inner = state._replace(shared=shared)
    reduced = [
      lambda one=one: one.reduce(comm, grads, inner).computed() for one in self.rungs()
    ]
    count = lambda *rungs: max(
      one.indices.size if _is_sparse(one) else 0 for one in rungs
    )
    slots = jax.tree.map(count, *map(jax.eval_shape, reduced), is_leaf=_is_sparse)
    branches = [
      lambda one=one: _with_slots(one(), grads.size, slots) for one in reduced
    ]
    after = varying.switch(self._rung(step), branches)
    return after._replace(
      state=after.state._replace(shared=WarmUp(step + 1, after.state.shared))
    )

  def _rung(self, step: jax.Array) -> jax.Array:
    """The number of the collective of a step."""
    return jnp.sum(step >= jnp.array(self.steps, jnp.int32), dtype=jnp.int32)


def _is_sparse(x: Any) -> bool:
  return isinstance(x, Sparse)


def _with_slots(reduced: Reduced, n: int, slots: Reduced) -> Reduced:
  """The same result, with so many slots of entries, in dtypes that do not depend on the collective's numbers."""
  widen = lambda x, most: (
    sparse.resize(jax.tree.map(jnp.ravel, x), most, n) if _is_sparse(x) else x
  )
  total, state, counters = jax.tree.map(widen, reduced, slots, is_leaf=_is_sparse)
  cast = lambda x, like: saturated(x, like.dtype).reshape(())
  return Reduced(total, state, jax.tree.map(cast, counters, Counters.zeros()))
