"""Methods of the race: what workers exchange (a way), by which collective, as an optax chain.

A label is WAY/COLLECTIVE, both with options: `local:every=10:momentum=0.9/spardl:density=0.02`. Without a way, workers
exchange gradients: `dense`, `spardl:density=0.01`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optax

import jaxsparse as js
from benchmarks import specs, training
from jaxsparse.types import Comm

_Transform: TypeAlias = optax.GradientTransformation


def gradients(exchange: _Transform, optimizer: _Transform) -> _Transform:
  """Workers exchange gradients; one optimizer, the same on all workers, follows the exchange."""
  return optax.chain(exchange, optimizer)


def corrected(exchange: _Transform, optimizer: _Transform, momentum: float = 0.9) -> _Transform:
  """Workers exchange gradients with momentum of each worker's own; the optimizer has none."""
  return optax.chain(js.momentum_corrected(exchange, momentum), optimizer)


def updates(exchange: _Transform, optimizer: _Transform, rate: float = 1.0) -> _Transform:
  """Each worker has an optimizer of its own, and workers exchange its updates in every step."""
  return js.local_steps(optimizer, optax.chain(exchange, optax.sgd(rate)), every=1)


def local(
  exchange: _Transform,
  optimizer: _Transform,
  every: int = 10,
  rate: float = 1.0,
  momentum: float = 0.0,
  fragments: int = 1,
  delay: int = 0,
  mixing: float = 0.0,
) -> _Transform:
  """Likewise, but workers exchange what they have moved once in `every` steps; Nesterov momentum of DiLoCo after it."""
  outer = optax.chain(exchange, optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum)))
  return js.local_steps(optimizer, outer, every=every, fragments=fragments, delay=delay, mixing=mixing)


def diloco(exchange: _Transform, optimizer: _Transform, every: int = 30) -> _Transform:
  """Local steps with the outer step of DiLoCo."""
  return local(exchange, optimizer, every, rate=0.7, momentum=0.9)


def streaming(exchange: _Transform, optimizer: _Transform, every: int = 30, fragments: int = 3) -> _Transform:
  """DiLoCo in fragments that are exchanged in turn, each applied a step later and mixed by half."""
  return local(exchange, optimizer, every, 0.7, 0.9, fragments, delay=1, mixing=0.5)


def demo(exchange: _Transform, optimizer: _Transform) -> _Transform:
  """The sign of gradients exchanged by dcttopk:density=0.0078125:decay=0.999; take --optimizer=sgd:0.001 --clip=0."""
  return optax.chain(exchange, optax.scale_by_sign(), optimizer)


WAYS: dict[str, Callable[..., _Transform]] = {
  way.__name__: way for way in (gradients, corrected, updates, local, diloco, streaming, demo)
}
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
    if not self.exchange.collective.replicates:
      return training.AVERAGED_EVERY
    options = _defaults(self.way) | self.options
    return int(options.get("every", 1))

  def make(self, axis: str | Comm, optimizer: _Transform) -> _Transform:
    """The optax chain of a worker; `axis` is a mesh axis or a comm."""
    exchange = js.make_transform(self.exchange.name, axis, **self.exchange.config)
    return training.averaged(WAYS[self.way](exchange, optimizer, **self.options), self.exchange.collective, axis)


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
  if way != "gradients" and not spec.collective.replicates:
    raise ValueError(f"--method={label}: workers exchange gradients by {spec.name}, whose totals differ between them")
  method = Method(label, way, options, spec)
  method.make("workers", optax.identity())
  return method


def _defaults(way: str) -> dict[str, Any]:
  """The options of a way and what they are by default."""
  parameters = inspect.signature(WAYS[way]).parameters.values()
  return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
