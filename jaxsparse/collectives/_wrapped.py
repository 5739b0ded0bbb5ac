"""Collectives around another one: momentum before the exchange, changes of a mean (EF21), rising sparsity."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse._compat import varying
from jaxsparse.collectives._base import (
  Collective,
  SparseCollective,
  Traits,
  replace_fields,
)
from jaxsparse.types import (
  Comm,
  Cost,
  Counters,
  Reduced,
  Sparse,
  State,
  saturated,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Collective):
  """A collective around another one, which it is like but for what a subclass overrides: `reduce`, at least.

  A subclass whose state is not that of the collective inside overrides `init`, and
  `inner_state` with it. What it changes in the traits it replaces in `traits`.

  Attributes:
    collective: the collective inside.
  """

  collective: Collective

  def __post_init__(self) -> None:
    # An instance's own name, for errors; the class is frozen.
    object.__setattr__(self, "name", f"wrapped {self.collective.name}")
    super().__post_init__()

  @property
  def traits(self) -> Traits:
    return self.collective.traits

  def inner_state(self, state: State) -> State:
    """The state of the collective inside."""
    return state

  def entries(self, n: int) -> int:
    return self.collective.entries(n)

  def is_partial(self, n: int, state: State) -> bool | jax.Array:
    return self.collective.is_partial(n, self.inner_state(state))

  def slots(self, n: int, size: int) -> int:
    return self.collective.slots(n, size)

  def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> Self:
    return self._around(self.collective.for_leaves(shapes))

  def for_groups(self, sizes: Sequence[int]) -> list[Self]:
    return list(map(self._around, self.collective.for_groups(sizes)))

  def for_devices(self, devices: int) -> Self:
    return self._around(self.collective.for_devices(devices))

  def init(self, n: int, size: int) -> State:
    return self.collective.init(n, size)

  def cost(self, n: int, size: int) -> Cost:
    return self.collective.cost(n, size)

  def _around(self, collective: Collective) -> Self:
    return replace_fields(self, collective=collective)


class Momentum(NamedTuple):
  """What a worker remembers: u, f32[n], and the memory of the collective."""

  momentum: jax.Array
  memory: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrected(Wrapped):
  """A collective that reduces the momentum of each worker in place of its gradient; see `js.momentum_corrected`.

  Attributes:
    momentum: the factor m of u ← m u + g; u, f32[n], is the worker's momentum.
    nesterov: whether Nesterov's momentum is sent.
    masking: whether u becomes 0 where entries of this worker are delivered.
  """

  momentum: float
  nesterov: bool = False
  masking: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    _refuse_momentum("momentum_corrected", self.collective)
    if self.masking and self.collective.traits.mixes_entries:
      raise ValueError(
        f"momentum_corrected: masking=True with {self.collective.name}, which delivers a part of every entry, so that "
        "each step would zero all momentum: choose masking=False, or a collective that sends entries"
      )

  @property
  def traits(self) -> Traits:
    # Momentum is conserved, gradients are not.
    return dataclasses.replace(super().traits, conserves=False, has_momentum=True)

  def init(self, n: int, size: int) -> State:
    state = self.collective.init(n, size)
    return state._replace(worker=Momentum(jnp.zeros(n, jnp.float32), state.worker))

  def inner_state(self, state: State) -> State:
    return state._replace(worker=state.worker.memory)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    before: Momentum = state.worker
    # Heavy ball: u ← m u + g, and u is sent. Nesterov: u ← m (u + g), and u + g is
    # sent.
    momentum = (
      self.momentum * (before.momentum + grads)
      if self.nesterov
      else self.momentum * before.momentum + grads
    )
    sent = momentum + grads if self.nesterov else momentum
    reduced = self.collective.reduce(comm, sent, self.inner_state(state))
    # Momentum factor masking (Deep Gradient Compression, §3.3): no momentum is left
    # where an entry was delivered, or it would be added again later. `is_partial` is
    # False where all entries are delivered in every step, which need no masking; True;
    # or bool[] where that depends on the step.
    if self.masking and (is_partial := self.is_partial(grads.size, state)) is not False:
      # 0 where an entry was delivered: there the next residual is not sent + residual
      masked = reduced.mask(momentum, sent, state.residual)
      momentum = jnp.where(is_partial, masked, momentum)
    return reduced._replace(
      state=reduced.state._replace(worker=Momentum(momentum, reduced.state.worker))
    )


def _refuse_momentum(wrapper: str, collective: Collective) -> None:
  """Raises ValueError, in the name of `wrapper`, if the collective inside has a momentum, at any depth."""
  if collective.traits.has_momentum:
    raise ValueError(
      f"{wrapper}: {collective.name} has a momentum already, give the transform inside"
    )


# The share of the known means that a step keeps: rounding errors of large gradients are
# forgotten.
_KEPT = 1 - 2.0**-13


class Mean(NamedTuple):
  """What a worker remembers: its mean gradient, what of it is not delivered, f32[n]; the memory of the collective."""

  mean: jax.Array
  undelivered: jax.Array | None
  memory: Any


class Tracked(NamedTuple):
  """The same on every worker: the sum of the means, as delivered, f32[n]; and what the collective shares."""

  total: jax.Array
  collective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class EF21(Wrapped):
  """A collective that reduces the changes of each worker's mean gradient, and adds them up; see `js.ef21`.

  What is not delivered belongs to a mean, and is no residual: new workers begin with
  means of zero, and owe nothing.

  Attributes:
    momentum: β, the factor of the last mean in v ← β v + (1 − β) g; v is the mean.
  """

  momentum: float

  def __post_init__(self) -> None:
    super().__post_init__()
    _refuse_momentum("ef21", self.collective)
    inner = self.collective.traits
    # A part of a change that is lost would be missing from the sum of means for ever,
    # and workers whose totals differ would add up different sums.
    keeps_all = inner.conserves and inner.decay == 1 and not inner.rounds
    if not (keeps_all and inner.replicates):
      raise ValueError(
        f"ef21: {self.collective.label} loses a part of what it is given, choose a collective that delivers it later"
      )

  @property
  def traits(self) -> Traits:
    # Means of gradients are conserved.
    return dataclasses.replace(
      super().traits, conserves=False, has_momentum=True, tracks_workers=True
    )

  def is_partial(self, n: int, state: State) -> bool:
    return False  # a total is the sum of all changes so far, and has all entries

  def init(self, n: int, size: int) -> State:
    state = self.collective.init(n, size)
    zeros = jnp.zeros(n, jnp.float32)
    # The residual of the collective inside belongs to the mean, so it is kept in
    # `Mean.undelivered`, and the residual of the state is None.
    worker = Mean(mean=zeros, undelivered=state.residual, memory=state.worker)
    return State(None, worker, Tracked(total=zeros, collective=state.shared))

  def inner_state(self, state: State) -> State:
    worker: Mean = state.worker
    # _KEPT = 1 − 2⁻¹³ multiplies the last mean and the last total in `reduce`, too.
    owed = None if worker.undelivered is None else _KEPT * worker.undelivered
    return State(owed, worker.memory, state.shared.collective)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    before: Mean = state.worker
    shared: Tracked = state.shared
    # v ← β v + (1 − β) g; the collective sends the change of v. The last v, its
    # undelivered part (`inner_state`) and the last total are multiplied by _KEPT =
    # 1 − 2⁻¹³, so that rounding errors in the total are forgotten.
    mean = before.mean + (1 - self.momentum) * (grads - before.mean)
    change = mean - _KEPT * before.mean
    # `computed`: arrays in place of a deferred total, as `add_to` needs
    reduced = self.collective.reduce(comm, change, self.inner_state(state)).computed()
    # The sum of all workers' means, as far as it is delivered: the last sum plus the
    # total of the collective inside.
    total, undelivered = reduced.add_to(_KEPT * shared.total)
    worker = Mean(mean, undelivered, reduced.state.worker)
    after = State(None, worker, Tracked(total, reduced.state.shared))
    # Undo the average: total = β · last total + (1 − β) · recent. So an optimizer with
    # momentum β has `total` as its first moment, and a second moment of gradients, not
    # of means.
    recent = (total - self.momentum * shared.total) / (1 - self.momentum)
    return Reduced(recent, after, reduced.counters)


class WarmUp(NamedTuple):
  """The state that is the same on every worker: the number of the step, i32[], and what the collective shares."""

  step: jax.Array
  collective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmedUp(Wrapped):
  """A sparse collective with density `densities[i]` before step `steps[i]`, and with its own after the last of them.

  Attributes:
    collective: the collective inside, with its density from step `steps[-1]` on.
    steps: numbers of steps, ascending.
    densities: as many densities. The collective with each of them is a rung, and so is
      the collective with its own density or k, the last rung.
  """

  collective: SparseCollective
  steps: tuple[int, ...]
  densities: tuple[float, ...]

  @property
  def traits(self) -> Traits:
    return dataclasses.replace(super().traits, sizes_vary=True)

  def rungs(self) -> list[SparseCollective]:
    """The collective of each density, its own last."""
    return [
      *(
        replace_fields(self.collective, density=density, k=None)
        for density in self.densities
      ),
      self.collective,
    ]

  def is_partial(self, n: int, state: State) -> bool | jax.Array:
    # For each rung: does it deliver fewer than n entries? A density of 1 delivers all.
    are_partial = jnp.array([rung.entries(n) < n for rung in self.rungs()])
    return are_partial[self._rung(state.shared.step)]

  def slots(self, n: int, size: int) -> int:
    # Memory is that of the densest rung, whichever runs.
    return max(rung.slots(n, size) for rung in self.rungs())

  def init(self, n: int, size: int) -> State:
    first, *others = (rung.init(n, size) for rung in self.rungs())
    shapes = lambda state: jax.tree.map(jnp.shape, state)
    # The state passes from one density to the next, so its shapes must not change.
    if any(shapes(other) != shapes(first) for other in others):
      raise ValueError(
        f"{self.name}: the sizes of its state depend on the density, choose other options"
      )
    return first._replace(shared=WarmUp(jnp.int32(0), first.shared))

  def inner_state(self, state: State) -> State:
    return state._replace(shared=state.shared.collective)

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    step = state.shared.step
    inner = self.inner_state(state)
    reduces = [
      lambda rung=rung: rung.reduce(comm, grads, inner).computed()
      for rung in self.rungs()
    ]
    # All branches must return the same shapes, so each `Sparse` (a total, entries of a
    # pending residual) gets the slots of the rung where it has most. `slots` is a
    # `Reduced` with their number in place of each `Sparse`, and 0 in place of other
    # arrays.
    most = lambda *leaves: max(
      leaf.indices.size if _is_sparse(leaf) else 0 for leaf in leaves
    )
    slots = jax.tree.map(most, *map(jax.eval_shape, reduces), is_leaf=_is_sparse)
    branches = [
      lambda reduce=reduce: _with_slots(reduce(), grads.size, slots)
      for reduce in reduces
    ]
    after = varying.switch(self._rung(step), branches)
    return after._replace(
      state=after.state._replace(shared=WarmUp(step + 1, after.state.shared))
    )

  def _rung(self, step: jax.Array) -> jax.Array:
    """The number of the collective of a step."""
    reached = step >= jnp.array(self.steps, jnp.int32)
    return jnp.sum(reached, dtype=jnp.int32)


def _is_sparse(x: Any) -> bool:
  return isinstance(x, Sparse)


def _with_slots(reduced: Reduced, n: int, slots: Reduced) -> Reduced:
  """`reduced` with `slots` slots in each `Sparse`, and counters in the dtypes of `Counters`.

  So results of several densities are branches of one `lax.switch`.

  Args:
    reduced: a result with arrays only.
    n: length of the vector, the index of empty slots.
    slots: `reduced` with the number of slots in place of each `Sparse`; other leaves of
      it are not read.
  """

  def widen(x: jax.Array | Sparse, most: int) -> jax.Array | Sparse:
    if not isinstance(x, Sparse):
      return x
    # entries of several rows, with flat indices, as one row
    return sparse.resize(jax.tree.map(jnp.ravel, x), most, n)

  total, state, counters = jax.tree.map(widen, reduced, slots, is_leaf=_is_sparse)
  # Some collectives count in Python numbers, but branches must have the same dtypes:
  # those of `zeros`.
  cast = lambda x, like: saturated(x, like.dtype).reshape(())
  counters = jax.tree.map(cast, counters, Counters.zeros())
  return type(reduced)(total, state, counters)
