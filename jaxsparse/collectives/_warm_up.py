"""A ladder of densities: a sparse collective that delivers more entries in its first steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._base import SparseCollective, replace_fields
from jaxsparse.collectives._wrapped import Wrapped
from jaxsparse.types import Comm, Counters, Pending, Reduced, Sparse, State, saturated


class Shared(NamedTuple):
  """The state that is the same on every worker.

  Attributes:
    step: i32[], the number of the step.
    collective: what the collective shares.
  """

  step: jax.Array
  collective: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmedUp(Wrapped):
  """A sparse collective with density `densities[i]` before step `steps[i]`, and with its own after the last of them."""

  collective: SparseCollective
  steps: tuple[int, ...]
  densities: tuple[float, ...]

  @property
  def sizes_vary(self) -> bool:
    return True

  def rungs(self) -> list[SparseCollective]:
    """The collective of each density, its own last."""
    return [*(replace_fields(self.collective, density=one, k=None) for one in self.densities), self.collective]

  def selects(self, n: int, state: State) -> bool | jax.Array:
    own = state._replace(shared=state.shared.collective)
    return jnp.array([one.selects(n, own) for one in self.rungs()])[self._rung(state.shared.step)]

  def slots(self, n: int, size: int) -> int:
    return max(one.slots(n, size) for one in self.rungs())

  def init(self, n: int, size: int) -> State:
    first, *others = (one.init(n, size) for one in self.rungs())
    shapes = lambda state: jax.tree.map(jnp.shape, state)
    if any(shapes(other) != shapes(first) for other in others):
      raise ValueError(f"{self.name}: its state has other sizes at other densities, choose other options")
    return first._replace(shared=Shared(jnp.int32(0), first.shared))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    step, shared = state.shared
    inner = state._replace(shared=shared)
    reduced = [lambda one=one: one.reduce(comm, grads, inner) for one in self.rungs()]
    sizes = [_slots(jax.eval_shape(one)) for one in reduced]
    most = max(total for total, _ in sizes), max(entries for _, entries in sizes)
    branches = [lambda one=one: _alike(one(), grads.size, most) for one in reduced]
    after = jax.lax.switch(self._rung(step), branches)
    return after._replace(state=after.state._replace(shared=Shared(step + 1, after.state.shared)))

  def _rung(self, step: jax.Array) -> jax.Array:
    """The number of the collective of a step."""
    return jnp.sum(step >= jnp.array(self.steps, jnp.int32), dtype=jnp.int32)


def _slots(reduced: Reduced) -> tuple[int, int]:
  """The slots of the total and of the pending residual; 0 where they have none."""
  entries = lambda x: x.indices.size if isinstance(x, Sparse) else 0
  residual = reduced.state.residual
  return entries(reduced.total), entries(residual.entries) if isinstance(residual, Pending) else 0


def _alike(reduced: Reduced, n: int, most: tuple[int, int]) -> Reduced:
  """The same result in arrays whose shapes and dtypes depend neither on the density nor on the collective's numbers."""
  wide = lambda entries, slots: sparse.widen(jax.tree.map(jnp.ravel, entries), slots, n)
  total, state, counters = reduced
  if isinstance(total, Sparse):
    total = wide(total, most[0])
  if isinstance(state.residual, Pending):
    state = state._replace(residual=state.residual._replace(entries=wide(state.residual.entries, most[1])))
  cast = lambda x, like: saturated(x, like.dtype).reshape(())
  return Reduced(total, state, jax.tree.map(cast, counters, Counters.zeros()))
