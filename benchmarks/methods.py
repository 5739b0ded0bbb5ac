"""Methods of training: what workers exchange (a way), how it is changed before, and by which collective.

A label is WAY/CHANGES/COLLECTIVE, all with options:
`local:every=10/warmed_up:steps=100/spardl:density=0.02`. Without a way workers exchange
gradients, and there may be no changes: `dense`, `corrected/spardl:density=0.01`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import jaxsparse as js
from benchmarks import specs
from jaxsparse.collectives._base import collective_of
from jaxsparse.types import Comm

_Transform: TypeAlias = optax.GradientTransformation
# (mesh axis or comm, other densities by names of leaves) -> the transform of a worker
_Exchange: TypeAlias = Callable[[str | Comm, dict[str, float]], _Transform]

AVERAGED_EVERY = 100  # steps, for workers with parameters of their own


def gradients(
  exchange: _Transform, optimizer: _Transform, ending: int = 0
) -> _Transform:
  """Workers exchange gradients; one optimizer follows, the same on all. A2SGD ends as published in step `ending`."""
  return optax.chain(_without_last(exchange, ending) if ending else exchange, optimizer)


def _without_last(exchange: _Transform, steps: int) -> _Transform:
  """The exchange in all steps but the last of so many, in which each worker has its own gradient.

  Models that are averaged before and after that step take a step of SGD with the mean
  gradient.
  """

  # The state is (state of the exchange, number of steps so far).
  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    total, own = exchange.update(grads, state[0], params)
    step = state[1] + 1
    return jax.tree.map(
      lambda total, grad: jnp.where(step < steps, total, grad), total, grads
    ), (own, step)

  return optax.GradientTransformation(
    lambda params: (exchange.init(params), jnp.int32(0)), update
  )


def updates(
  exchange: _Transform,
  optimizer: _Transform,
  rate: float = 1.0,
  apply_residual: bool = False,
  averaged: int = 0,
) -> _Transform:
  """Each worker has an optimizer of its own, and workers exchange its updates in every step."""
  return local(
    exchange, optimizer, 1, rate, apply_residual=apply_residual, averaged=averaged
  )


def local(
  exchange: _Transform,
  optimizer: _Transform,
  every: int = 10,
  rate: float = 1.0,
  momentum: float = 0.0,
  fragments: int = 1,
  delay: int = 0,
  mixing: float = 0.0,
  apply_residual: bool = False,
  averaged: int = 0,
  doubles: int = 0,
) -> _Transform:
  """Likewise, once in `every` steps, doubled each `doubles`; Nesterov `momentum`; average_momentum each `averaged`."""
  if averaged:
    optimizer = js.average_momentum(optimizer, exchange.comm, every=averaged)
  # H at a step: a number, or a schedule if it grows.
  period = (lambda step: every * 2 ** (step // doubles)) if doubles else every
  outer = optax.chain(
    exchange, optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))
  )
  more: dict[str, Any] = {
    "fragments": fragments,
    "delay": delay,
    "mixing": mixing,
    "apply_residual": apply_residual,
  }
  return js.local_steps(optimizer, outer, every=period, **more)


def demo(exchange: _Transform, optimizer: _Transform) -> _Transform:
  """The sign of gradients exchanged by dcttopk:density=0.0078125:decay=0.999; take --optimizer=sgd:0.001 --clip=0."""
  return optax.chain(exchange, optax.scale_by_sign(), optimizer)


def corrected(exchange: _Exchange, momentum: float = 0.9) -> _Exchange:
  """Momentum of each worker's own before the exchange (Deep Gradient Compression); take an optimizer without."""
  return lambda axis, densities: js.momentum_corrected(
    exchange(axis, densities), momentum
  )


def ef21(exchange: _Exchange, momentum: float = 0.9) -> _Exchange:
  """Changes of each worker's mean gradient, added up after the exchange (EF21); take an optimizer with momentum."""
  return lambda axis, densities: js.ef21(exchange(axis, densities), momentum)


def restored(exchange: _Exchange) -> _Exchange:
  """The mean of updates as long as one worker's (norm_restored)."""
  return lambda axis, densities: js.norm_restored(exchange(axis, densities))


def warmed_up(
  exchange: _Exchange, steps: int = 100, density: float = 0.25
) -> _Exchange:
  """Another density in the first steps."""
  return lambda axis, densities: js.warmed_up(
    exchange(axis, densities), {steps: density}
  )


def leaves(
  exchange: _Exchange, names: str = "scale|bias", density: float = 1.0
) -> _Exchange:
  """Another density for leaves whose names match a regular expression; 1 exchanges them densely."""
  return lambda axis, densities: exchange(axis, {names: density, **densities})


WAYS: dict[str, Callable[..., _Transform]] = {
  way.__name__: way for way in (gradients, updates, local, demo)
}
CHANGES: dict[str, Callable[..., _Exchange]] = {
  change.__name__: change for change in (corrected, ef21, restored, warmed_up, leaves)
}
_described = "; ".join(
  f"{name}: {one.__doc__}" for kinds in (WAYS, CHANGES) for name, one in kinds.items()
)
HELP = (
  f"as WAY/CHANGES/COLLECTIVE; ways ({', '.join(WAYS)}) and changes ({', '.join(CHANGES)}): {_described} Without a "
  "way: gradients. Options follow a name: spardl:density=0.01. Repeat it, or separate by commas."
)


class Method(NamedTuple):
  """What is exchanged, and how."""

  label: (
    str  # as the user wrote it; exchanges of gradients by that of the collective alone
  )
  way: str  # one of `WAYS`
  options: dict[str, Any]  # of the way
  spec: specs.Spec  # of the collective
  exchange: _Exchange  # makes the transform of each exchange

  @property
  def every(self) -> int:
    """Steps from one exchange to the next, at first where they grow."""
    # Totals that differ between workers give each its own parameters, which are
    # averaged after every so many steps.
    if not self.spec.collective.traits.replicates:
      return AVERAGED_EVERY
    return int((_defaults(WAYS[self.way]) | self.options).get("every", 1))

  def make(self, axis: str | Comm, optimizer: _Transform) -> _Transform:
    """The optax chain of a worker; `axis` is a mesh axis or a comm."""
    # {}: no other densities of leaves, beside those of the changes
    tx = WAYS[self.way](self.exchange(axis, {}), optimizer, **self.options)
    if self.spec.collective.traits.replicates:
      return tx
    # Workers have parameters of their own. With `ending`, the number of steps, they are
    # averaged before and after the last step, so after `ending` - 1 steps and 1 step.
    ending = self.options.get("ending", 0)
    every = (
      (lambda step: jnp.where(step < ending - 1, ending - 1, 1))
      if ending
      else AVERAGED_EVERY
    )
    return js.local_steps(
      tx, optax.chain(js.dense_transform(axis), optax.sgd(1.0)), every=every
    )


def parse(flag: str, values: list[str], workers: int, **shared: Any) -> list[Method]:
  """The methods that a flag names, each once, checked for `workers` workers before anything runs."""
  labels = [
    label.removeprefix(f"{gradients.__name__}/") for label in specs.labels_of(values)
  ]
  return [_method(flag, label, workers, shared) for label in dict.fromkeys(labels)]


def _method(flag: str, label: str, workers: int, shared: dict[str, Any]) -> Method:
  """The method of a label; ValueError, with the flag, for one that is not valid. `shared` are as for `specs.parse`."""
  # WAY/CHANGES/COLLECTIVE, of which the collective alone has to be there.
  *before, collective = label.split("/")
  parts = [collective_of(part) for part in before]
  # A first part that is no change is the way, even if it is unknown: `_check` says so.
  way, options = (
    parts.pop(0) if parts and parts[0][0] not in CHANGES else ("gradients", {})
  )
  where = f"--{flag}={label}"
  _check(where, "way", WAYS, way, options)
  (spec,) = specs.parse([collective], workers, **shared)

  def plain(axis: str | Comm, densities: dict[str, float]) -> _Transform:
    # Leaves whose names match a key of `densities` are exchanged at that density.
    label = lambda density: (
      "dense" if density == 1 else js.costs.label_of(spec.name, {"density": density})
    )
    special = {names: label(density) for names, density in densities.items()}
    return js.make_transform(spec.name, axis, special=special, **spec.config)

  exchange: _Exchange = plain
  # The last change stands next to the collective, and is applied to it first.
  for name, own in reversed(parts):
    _check(where, "change", CHANGES, name, own)
    exchange = CHANGES[name](exchange, **own)
  if way != "gradients" and not spec.collective.traits.replicates:
    raise ValueError(
      f"{where}: workers exchange gradients by {spec.name}, whose totals differ between them"
    )
  if options.get("ending") and spec.collective.traits.replicates:
    raise ValueError(
      f"{where}: ending is for collectives whose totals differ between workers, not {spec.name}"
    )
  method = Method(label, way, options, spec, exchange)
  # Raises for values of options that do not fit, before anything runs.
  method.make("workers", optax.identity())
  return method


def _check(
  where: str,
  kind: str,
  known: dict[str, Callable[..., Any]],
  name: str,
  options: dict[str, Any],
) -> None:
  """Raises ValueError unless a way, or a change, of this name has these options.

  Args:
    where: the flag and its value, with which the error begins.
    kind: "way" or "change", for the error.
    known: the functions of that kind by name.
    name: the name to look up.
    options: its options; their values are not checked.
  """
  if name not in known:
    raise ValueError(
      f"{where}: unknown {kind} {name!r}, choose one of {', '.join(known)}"
    )
  own = _defaults(known[name])
  if unknown := sorted(set(options) - set(own)):
    raise ValueError(
      f"{where}: {name} has no option {unknown[0]!r}, choose from {', '.join(own) or 'none'}"
    )


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
  """The options of a way or a change, its parameters with a default, and these defaults."""
  parameters = inspect.signature(function).parameters.values()
  return {
    one.name: one.default
    for one in parameters
    if one.default is not inspect.Parameter.empty
  }
