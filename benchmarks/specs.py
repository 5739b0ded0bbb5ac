"""Parses the flag --algorithm of benchmarks: names of collectives, with options that differ from the defaults."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

import jaxsparse as js
from benchmarks.gathered_rows import GatheredRows
from jaxsparse.collectives import collective_options, make_instance, make_plain
from jaxsparse.collectives._base import collective_of

HELP = (
  "All-reduces to compare, in this order, or 'all'. Repeat it, or separate by commas. Options of one follow its name: "
  "spardl:teams=2:sag=bruck. Beside those of js.collective_names(): gathered_rows, of an embedding as in Horovod"
)
_OTHERS = {"gathered_rows": GatheredRows}


Shapes = tuple[tuple[int, ...], ...]


class Spec(NamedTuple):
  """One algorithm to run."""

  label: str  # as the user wrote it
  name: str  # of the collective
  config: dict[str, Any]  # its options

  @property
  def collective(self) -> js.Collective:
    """The collective with its options."""
    # None for a collective of the library
    other = _OTHERS.get(self.name)
    return (
      make_instance(other, self.config)
      if other
      else js.make_collective(self.name, **self.config)
    )

  def sized(self, n: int, of: Callable[[int], Shapes] | None = None) -> js.Collective:
    """The collective of n entries: where it needs shapes, of the leaves that `of`, or else `shapes`, gives."""
    return (
      self.collective.for_leaves((of or shapes)(n))
      if self.collective.traits.needs_shapes
      else self.collective
    )


def parse(values: list[str], workers: int, **shared: Any) -> list[Spec]:
  """The algorithms that the flag names, each once, checked for `workers` workers before anything runs.

  Args:
    values: what the flag holds: labels, or several in one string with commas.
    workers: number of workers P.
    **shared: options for each collective that has them, unless its label gives its own.
  """
  found = []
  for label in labels_of(values):
    name, own = collective_of(label)
    known = () if name in _OTHERS else collective_options(name)
    spec = Spec(
      label,
      name,
      {option: value for option, value in shared.items() if option in known} | own,
    )
    try:
      # Raises for options that do not fit, for any number of entries; no array is made,
      # as `workers.here` makes the devices later.
      jax.eval_shape(lambda spec=spec: spec.collective.init(1_000_000, workers))
    except TypeError as error:
      raise ValueError(error) from error
    found.append(spec)
  return found


def labels_of(values: list[str]) -> list[str]:
  """The labels that a flag names, each once; "all" stands for every collective."""
  labels = listed(values)
  return list(js.collective_names()) if labels == ["all"] else labels


def listed(values: Sequence[str]) -> list[str]:
  """What a flag names that is repeated, or separated by commas, each once."""
  return list(
    dict.fromkeys(part.strip() for value in values for part in value.split(","))
  )


def of_vectors() -> list[str]:
  """The collectives whose cost depends on the number of entries alone, and not on the shapes of leaves."""
  return [
    name for name in js.collective_names() if not make_plain(name).traits.needs_shapes
  ]


def _vgg16() -> dict[str, tuple[int, ...]]:
  widths = (3, 64, 64, 128, 128, *(256,) * 3, *(512,) * 6)
  shapes: dict[str, tuple[int, ...]] = {}
  for number, (inputs, out) in enumerate(itertools.pairwise(widths)):
    shapes[f"conv{number}"] = (3, 3, inputs, out)
    shapes |= {f"{name}{number}": (out,) for name in ("bias", "scale", "shift")}
  return shapes | {"kernel": (512, 10), "bias": (10,)}


VGG16 = _vgg16()
"""Shapes of the 14,728,266 parameters of VGG-16 for CIFAR-10, with normalization: of collectives that need shapes."""


def shapes(n: int) -> Shapes:
  """Shapes of leaves of n entries: those of VGG-16 in their order, again and again; the last, cut, is a vector.

  Example:
    >>> shapes(1_800)
    ((3, 3, 3, 64), (64,), (8,))
  """
  found, left = list[tuple[int, ...]](), n
  for shape in itertools.cycle(VGG16.values()):
    if (entries := math.prod(shape)) >= left:
      return (*found, shape if entries == left else (left,))
    found, left = [*found, shape], left - entries
  raise AssertionError
