"""One algorithm, one file. A file here is found by its name; nothing else needs to be told of it."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

from jaxsparse.collectives._base import Collective, SparseCollective

__all__ = ["Collective", "SparseCollective", "collective_names", "collective_options", "make_collective"]


@functools.cache
def _kinds() -> dict[str, type[Collective]]:
  """The one concrete `Collective` of each public module of this folder, by module name."""
  kinds = {}
  for module in pkgutil.iter_modules(__path__):
    if not module.name.startswith("_"):
      home = importlib.import_module(f"{__name__}.{module.name}")
      own = [c for _, c in inspect.getmembers(home, inspect.isclass) if c.__module__.startswith(home.__name__)]
      (kinds[module.name],) = [c for c in own if issubclass(c, Collective) and not inspect.isabstract(c)]
  return kinds


def collective_names() -> tuple[str, ...]:
  """The names of all collectives.

  Example:
    >>> "spardl" in collective_names()
    True
  """
  return tuple(sorted(_kinds()))


def collective_options(name: str) -> tuple[str, ...]:
  """The names of the options of a collective.

  Raises:
    ValueError: for an unknown name, with the choices.

  Example:
    >>> collective_options("dense")
    ('dtype',)
  """
  if name not in _kinds():
    raise ValueError(f"unknown collective {name!r}, choose one of {', '.join(collective_names())}")
  return tuple(field.name for field in dataclasses.fields(_kinds()[name]) if field.init)


def make_collective(name: str, **config: Any) -> Collective:
  """The collective of that name.

  Raises:
    ValueError: for an unknown name, or a configuration it rejects.
    TypeError: for an option it does not have; each names the choices.

  Example:
    >>> make_collective("dense", dtype="bfloat16")
    Dense(dtype='bfloat16')
  """
  options = collective_options(name)
  unknown = sorted(set(config) - set(options))
  if unknown:
    raise TypeError(f"{name}: unknown option {', '.join(unknown)}, choose from {', '.join(options)}")
  return _kinds()[name](**config)
