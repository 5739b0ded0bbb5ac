"""The table that the laws are tested over: every collective that exists, with every choice of its options."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxsparse.collectives import Collective, SparseCollective, _base, _kinds, make_collective

WORKERS = (1, 2, 3, 5, 6, 7, 8, 13, 16)


class Case(NamedTuple):
  """A collective and its options, without the number of entries to deliver."""

  name: str
  options: tuple[tuple[str, Any], ...]

  def __str__(self) -> str:
    return "-".join([self.name, *(str(value) for _, value in self.options)])

  @property
  def is_sparse(self) -> bool:
    return issubclass(_kinds()[self.name], SparseCollective)

  def config(self, **entries: Any) -> dict[str, Any]:
    """The configuration; `entries` (density or k) are for sparse collectives only."""
    return dict(self.options) | (entries if self.is_sparse else {})

  def make(self, **entries: Any) -> Collective:
    return make_collective(self.name, **self.config(**entries))


def all_cases() -> list[Case]:
  cases = []
  for name, kind in sorted(_kinds().items()):
    choices = _base.choices_of(kind)
    cases += [Case(name, tuple(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())]
  return cases


CASES = all_cases()
CONSERVING = [case for case in CASES if case.make(density=0.5).conserves]


@functools.cache
def mesh_of(workers: int) -> Mesh:
  return Mesh(np.array(jax.devices()[:workers]), ("workers",))


def integers(seed: int, *shape: int) -> np.ndarray:
  """Small whole numbers, whose sums are exact in every dtype that travels."""
  return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normals(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bits(x: Any) -> np.ndarray:
  return np.asarray(x).view(np.uint32)
