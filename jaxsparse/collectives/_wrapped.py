"""A collective around another one, which it asks for all that it does not change."""

import dataclasses
from typing import Self

import jax

from jaxsparse.collectives._base import Collective
from jaxsparse.types import Cost, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Collective):
  """A collective that has the properties of another one; subclasses define `reduce`.

  Attributes:
    collective: the other one.
  """

  collective: Collective

  @property
  def name(self) -> str:
    return f"{super().name.removeprefix('_')} {self.collective.name}"

  @property
  def conserves(self) -> bool:
    return self.collective.conserves

  @property
  def replicates(self) -> bool:
    return self.collective.replicates

  @property
  def decay(self) -> float:
    return self.collective.decay

  @property
  def sizes_vary(self) -> bool:
    return self.collective.sizes_vary

  @property
  def mixes_entries(self) -> bool:
    return self.collective.mixes_entries

  def selects(self, n: int, state: State) -> bool | jax.Array:
    return self.collective.selects(n, state)

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
