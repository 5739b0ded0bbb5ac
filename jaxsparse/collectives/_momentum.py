"""Momentum of each worker before a sparse exchange, with factor masking (Lin et al., Deep Gradient Compression, §3)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import sparse
from jaxsparse.collectives._wrapped import Wrapped
from jaxsparse.types import Comm, Pending, Reduced, State


class Momentum(NamedTuple):
  """What a worker remembers.

  Attributes:
    momentum: u, f32[n].
    memory: what the collective remembers of this worker.
  """

  momentum: jax.Array
  memory: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrected(Wrapped):
  """A collective that reduces the momentum of each worker in place of its gradient; see `js.momentum_corrected`."""

  momentum: float
  nesterov: bool = False
  masking: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if isinstance(self.collective, Corrected):
      raise ValueError(f"momentum_corrected: {self.collective.name} has a momentum already, give the transform inside")
    if self.masking and self.collective.mixes_entries:
      raise ValueError(
        f"momentum_corrected: masking=True with {self.collective.name}, which delivers a part of every entry, so that "
        "each step would zero all momentum: choose masking=False, or a collective that sends entries"
      )

  @property
  def conserves(self) -> bool:
    return False  # it conserves momentum, not gradients

  def init(self, n: int, size: int) -> State:
    state = self.collective.init(n, size)
    return state._replace(worker=Momentum(jnp.zeros(n, jnp.float32), state.worker))

  def reduce(self, comm: Comm, grads: jax.Array, state: State) -> Reduced:
    before: Momentum = state.worker
    momentum = self.momentum * (before.momentum + grads) if self.nesterov else self.momentum * before.momentum + grads
    sent = momentum + grads if self.nesterov else momentum
    reduced = self.collective.reduce(comm, sent, state._replace(worker=before.memory))
    if self.masking and (selects := self.collective.selects(grads.size, state)) is not False:
      masked = _masked(momentum, sent, state.residual, reduced.state.residual)
      momentum = jnp.where(selects, masked, momentum)
    after = reduced.state._replace(worker=Momentum(momentum, reduced.state.worker))
    return reduced._replace(state=after)


def _masked(momentum: jax.Array, sent: jax.Array, residual: jax.Array, after: jax.Array | Pending) -> jax.Array:
  """The momentum with zeros where the next residual is not `sent + residual`."""
  if not isinstance(after, Pending):
    return jnp.where(after == sent + residual, momentum, 0.0)
  indices, values = after.entries
  left = values != sparse.read_at(sent, indices) + sparse.read_at(residual, indices)
  return sparse.put(momentum, jnp.where(left, indices, momentum.size), 0.0)
