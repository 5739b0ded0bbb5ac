"""Methods of the race: what workers exchange (a way), by which collective, as an optax chain.

A label is WAY/COLLECTIVE, both with options: `local:every=10:momentum=0.9/spardl:density=0.02`. Without a way, workers
exchange gradients: `dense`, `spardl:density=0.01`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optax

import jaxsparse as js
from benchmarks import specs
from jaxsparse.types import Comm

_Transform: TypeAlias = optax.GradientTransformation


def gradients(exchange: _Transform, optimizer: _Transform) -> _Transform:
  """Workers exchange gradients; one optimizer, the same on all workers, follows the exchange."""
  return optax.chain(exchange, optimizer)


WAYS: dict[str, Callable[..., _Transform]] = {"gradients": gradients}
HELP = (
  "Methods to race, as WAY/COLLECTIVE; ways: "
  + "; ".join(f"{name}: {str(way.__doc__).splitlines()[0]}" for name, way in WAYS.items())
  + " Without a way: gradients. Options follow a name: spardl:density=0.01. Repeat it, or separate by commas."
)


class Method(NamedTuple):
  """What is exchanged, and by which collective.

  Attributes:
    label: as the user wrote it.
    way: one of `WAYS`.
    options: of the way.
    exchange: the collective.
  """

  label: str
  way: str
  options: dict[str, Any]
  exchange: specs.Spec

  @property
  def every(self) -> int:
    """Steps from one exchange to the next."""
    options = _defaults(self.way) | self.options
    return int(options.get("every", 1))

  def make(self, axis: str | Comm, optimizer: _Transform) -> _Transform:
    """The optax chain of a worker; `axis` is a mesh axis or a comm."""
    exchange = js.make_transform(self.exchange.name, axis, **self.exchange.config)
    return WAYS[self.way](exchange, optimizer, **self.options)


def parse(values: list[str], workers: int) -> list[Method]:
  """The methods that the flag names, each once, checked for `workers` workers before anything runs.

  Raises:
    ValueError: for an unknown way, collective or option, with the choices.

  Example:
    >>> [(one.way, one.exchange.config) for one in parse(["dense,gradients/spardl:density=0.1"], workers=4)]
    [('gradients', {}), ('gradients', {'density': 0.1})]
  """
  labels = [label for value in values for label in value.split(",")]
  return [_method(label, workers) for label in dict.fromkeys(labels)]


def _method(label: str, workers: int) -> Method:
  before, slash, exchange = label.rpartition("/")
  way, options = js.costs.collective_of(before) if slash else ("gradients", {})
  if way not in WAYS:
    raise ValueError(f"--method={label}: unknown way {way!r}, choose one of {', '.join(WAYS)}")
  known = _defaults(way)
  if unknown := sorted(set(options) - set(known)):
    raise ValueError(f"--method={label}: {way} has no option {unknown[0]!r}, choose from {', '.join(known) or 'none'}")
  (spec,) = specs.parse([exchange], workers)
  method = Method(label, way, options, spec)
  method.make("workers", optax.identity())
  return method


def _defaults(way: str) -> dict[str, Any]:
  """The options of a way and what they are by default."""
  parameters = inspect.signature(WAYS[way]).parameters.values()
  return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
