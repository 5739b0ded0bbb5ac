"""The algorithms, one module or package each: the file name is the algorithm's name, and no registry lists it.

Those of `baselines` are there to compare with.

A collective is a frozen dataclass whose fields are its options; `_base` has the base
classes, and writes a collective and its options as one string. `js.make_transform` and
`js.NAME_transform` turn a collective into an optax transformation
(transform/factories.py).
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from jaxsparse.collectives import baselines
from jaxsparse.collectives._base import (
  Collective,
  SparseCollective,
  collective_of,
  replace_fields,
)

__all__ = [
  "Collective",
  "SparseCollective",
  "collective_names",
  "collective_options",
  "make_collective",
  "make_instance",
  "make_plain",
]


@functools.cache
def _kinds() -> dict[str, type[Collective]]:
  """The concrete `Collective` of each public module or package of this folder and of `baselines`, by its name."""
  # All algorithms are imported here, so not before a name is asked for.
  return dict(map(_kind_of, [*_modules(__name__), *_modules(baselines.__name__)]))


def _modules(package: str) -> list[str]:
  """The full names of the modules of a package, without helpers, whose names begin with an underscore."""
  path = importlib.import_module(package).__path__
  names = [f"{package}.{module.name}" for module in pkgutil.iter_modules(path)]
  # `baselines` is a package of algorithms, whose modules `_kinds` lists separately.
  return [
    name
    for name in names
    if not name.split(".")[-1].startswith("_") and name != baselines.__name__
  ]


def _kind_of(module: str) -> tuple[str, type[Collective]]:
  """The name of a module, without its path, and its class of that name: `Collective.name` is made of the path."""
  own_name = module.split(".")[-1]
  classes = inspect.getmembers(importlib.import_module(module), inspect.isclass)
  # A module may import other collectives, as nbit imports OneBit: `name` tells its own
  # class. A module without one, or with two, fails in this assignment.
  (kind,) = {
    kind
    for _, kind in classes
    if issubclass(kind, Collective)
    and not inspect.isabstract(kind)
    and kind.name == own_name
  }
  return own_name, kind


def collective_names() -> tuple[str, ...]:
  """The names of all collectives.

  Example:
    >>> "spardl" in collective_names()
    True
  """
  return tuple(sorted(_kinds()))


def collective_options(name: str | Collective) -> tuple[str, ...]:
  """The names of all options of a collective; `name` is as in `make_collective`.

  Raises:
    ValueError: for an unknown name, with the choices.
    TypeError: for an unknown option, or something else than a string or a collective.

  Example:
    >>> collective_options("dense"), collective_options("dense:dtype=bfloat16")
    (('dtype',), ('dtype',))
  """
  if isinstance(name, Collective):  # an instance: no options to check
    return _checked_options(name, {})
  # "spardl:teams=2" is ("spardl", {"teams": 2})
  kind_name, options = collective_of(_checked_label(name))
  return _checked_options(_kind(kind_name), options)


def make_collective(name: str | Collective, **config: Any) -> Collective:
  """The collective of a name with the given options. Functions with an argument `collective` accept the same names.

  Args:
    name: one of `js.collective_names()`; or a name with options in one string, as
      "spardl:teams=2:density=0.01"; or an instance of `js.Collective`, also of a class
      of yours, whose options that `config` does not name stay as they are.
    **config: the options.

  Raises:
    ValueError: for an unknown name, a rejected value of an option, naming the choices,
      or an option that the string has already.
    TypeError: for an option that the collective does not have, naming its options, or
      something else than a string or a collective.

  Example:
    >>> half = make_collective("dense", dtype="bfloat16")
    >>> half, make_collective("dense:dtype=bfloat16") == make_collective(half) == half
    (Dense(dtype='bfloat16'), True)
  """
  if isinstance(name, Collective):
    return make_instance(name, config)
  kind_name, options = collective_of(_checked_label(name))
  # An option in the string and in `config` has two values: neither silently wins.
  if twice := sorted(options.keys() & config.keys()):
    raise ValueError(f"{name!r} has {', '.join(twice)} already: give it once")
  return make_instance(_kind(kind_name), options | config)


def _checked_label(name: Any) -> str:
  """`name` if it is a string, a name with or without options; TypeError for anything else, such as a class."""
  if isinstance(name, str):
    return name
  given_type = name.__name__ if isinstance(name, type) else type(name).__name__
  raise TypeError(
    f"a collective is given as a {given_type}: give one of {', '.join(collective_names())}, with options as "
    "'spardl:density=0.01', or an instance of js.Collective, as js.make_collective returns"
  )


def make_plain(name: str) -> Collective:
  """The collective of a name with its defaults, and a density of 1 where it has none.

  Example:
    >>> make_plain("topka").entries(5)
    5
  """
  return make_collective(
    name, **({"density": 1.0} if "density" in collective_options(name) else {})
  )


def make_instance(
  model: type[Collective] | Collective, config: Mapping[str, Any]
) -> Collective:
  """An instance of a class, or a copy of an instance, with these options; TypeError for an option that it lacks.

  Args:
    model: a class, whose other options get their defaults, or an instance, whose other
      options stay as they are.
    config: values of options by name.
  """
  _checked_options(model, config)
  return model(**config) if isinstance(model, type) else replace_fields(model, **config)


def _checked_options(
  model: type[Collective] | Collective, config: Mapping[str, Any]
) -> tuple[str, ...]:
  """The names of all options of a class or of an instance; TypeError if `config` has another name."""
  kind = model if isinstance(model, type) else type(model)
  # Fields with `init=False`, such as the shapes of leaves, are not options.
  options = tuple(inspect.signature(kind).parameters)
  if unknown := sorted(set(config) - set(options)):
    raise TypeError(
      f"{model.name}: unknown option {', '.join(unknown)}, choose from {', '.join(options)}"
    )
  return options


def _kind(name: str) -> type[Collective]:
  """The class of a collective by its name without options; ValueError, with the choices, for an unknown name."""
  if name not in _kinds():
    names = ", ".join(collective_names())
    raise ValueError(
      f"unknown collective {name!r}, choose one of {names}; signs are onebit, plain top-k is topka"
    )
  return _kinds()[name]
