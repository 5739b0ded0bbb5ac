"""Recipes of trainings: the optimizer, the schedule of its rate, and clipping."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

import jaxsparse as js
from benchmarks import specs
from jaxsparse.collectives._base import collective_of


def window_adam(
  rate: Any, window: int = 4, b1: float = 0.9, b2: float = 0.999
) -> optax.GradientTransformation:
  """Adam with the second moment of averages over a window of gradients."""
  return optax.chain(
    js.scale_by_window_adam(window, b1, b2), optax.scale_by_learning_rate(rate)
  )


def muon(
  rate: Any,
  adam: float = 0.001,
  only: str = "",
  rows: int = 0,
  steps: int = 5,
  beta: float = 0.95,
) -> optax.GradientTransformation:
  """Muon for matrices whose names match `only`, and Adam with a constant rate of its own for everything else.

  With `rows`, each block of so many rows or columns of a matrix, along its longer side,
  is orthogonalized by itself.
  """

  def sides(params: Any) -> Any:
    """For each leaf the axes (rows, columns) of its matrix; None for a leaf that Adam trains."""
    is_chosen = lambda path, leaf: (
      leaf.ndim >= 2 and re.search(only, jax.tree_util.keystr(path))
    )
    chosen = lambda path, leaf: (
      optax.contrib.MuonDimensionNumbers(-2, -1) if is_chosen(path, leaf) else None
    )
    return jax.tree_util.tree_map_with_path(chosen, params)

  given = {
    "ns_steps": steps,
    "beta": beta,
    "adam_learning_rate": adam,
    "muon_weight_dimension_numbers": sides,
  }
  tx = optax.contrib.muon(rate, **given)
  return in_blocks(tx, rows) if rows else tx


def in_blocks(
  inner: optax.GradientTransformation, rows: int
) -> optax.GradientTransformation:
  """`inner` with each matrix as f32[blocks, rows, shorter side]; one whose longer side `rows` does not divide whole."""

  def split(leaf: jax.Array) -> jax.Array:
    if leaf.ndim != 2 or max(leaf.shape) % rows:
      return leaf
    # The longer side comes first, and is cut into blocks of `rows`.
    long = leaf if leaf.shape[0] >= leaf.shape[1] else leaf.T
    return long.reshape(-1, rows, long.shape[1])

  def join(blocks: jax.Array, like: jax.Array) -> jax.Array:
    # A wide matrix was transposed, unless it was left whole (2 axes).
    is_wide = like.ndim == 2 and like.shape[0] < like.shape[1] and blocks.ndim == 3
    return blocks.reshape(like.shape[::-1]).T if is_wide else blocks.reshape(like.shape)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = inner.update(
      jax.tree.map(split, grads), state, jax.tree.map(split, params)
    )
    return jax.tree.map(join, updates, grads), state

  return optax.GradientTransformation(
    lambda params: inner.init(jax.tree.map(split, params)), update
  )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "sgd": optax.sgd,
  "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
  "adam": optax.adam,
  "adamw": optax.adamw,
  "rmsprop": lambda rate: optax.adam(rate, b1=0.0),
  "lars": optax.lars,
  "lion": optax.lion,
  "adabelief": optax.adabelief,
  "adafactor": optax.adafactor,
  "window_adam": window_adam,
  "muon": muon,
}
_EXAMPLE = "window_adam:0.001:window=4"
HELP = f"Any of {', '.join(OPTIMIZERS)}, as in adam:0.001 or {_EXAMPLE}, separated by commas."


class Optimizer(NamedTuple):
  """The optimizer behind the all-reduce."""

  name: str  # one of `OPTIMIZERS`
  rate: float  # peak learning rate
  options: tuple[tuple[str, Any], ...] = ()  # of the optimizer, besides the rate

  def __str__(self) -> str:
    return ":".join(
      [
        self.name,
        f"{self.rate:g}",
        *(f"{option}={value}" for option, value in self.options),
      ]
    )

  def make(self, rate: Any) -> optax.GradientTransformation:
    """The optax transformation, with this rate or schedule."""
    return OPTIMIZERS[self.name](rate, **dict(self.options))


def parse_optimizers(values: Sequence[str], rate: float) -> list[Optimizer]:
  """The optimizers that the flag names, each once; `rate` is for those that name none of their own."""
  return list(dict.fromkeys(_optimizer(label, rate) for label in specs.listed(values)))


def _optimizer(label: str, rate: float) -> Optimizer:
  """The optimizer of a label, name:rate:option=value, where the rate may be left out; ValueError for a wrong one."""
  name, *parts = label.split(":")
  if name not in OPTIMIZERS:
    raise ValueError(f"--optimizer={label}, choose one of {', '.join(OPTIMIZERS)}")
  own = parts.pop(0) if parts and "=" not in parts[0] else rate
  try:
    optimizer = Optimizer(
      name, float(own), tuple(collective_of(":".join([name, *parts]))[1].items())
    )
    if not 0 < optimizer.rate < math.inf:
      raise ValueError(f"learning rate {own}, choose a positive one")
    # Raises for options that the optimizer does not take; no array is made.
    jax.eval_shape(
      optimizer.make(optimizer.rate).init,
      {"w": jax.ShapeDtypeStruct((64, 64), "float32")},
    )
  except (TypeError, ValueError, re.error) as error:
    raise ValueError(
      f"--optimizer={label}: {error}; write name:rate:option=value, as in {_EXAMPLE}"
    ) from None
  return optimizer


SCHEDULES: dict[
  str, Callable[[float, int], optax.Schedule]
] = {  # of the peak rate and the steps
  "constant": lambda rate, _: optax.constant_schedule(rate),
  "cosine": optax.cosine_decay_schedule,
  "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
  "polynomial": lambda rate, steps: optax.polynomial_schedule(rate, 0.0, 2, steps),
  "step": lambda rate, steps: optax.piecewise_constant_schedule(
    rate, {2 * steps // 3: 0.1}
  ),
  "early_step": lambda rate, steps: optax.piecewise_constant_schedule(
    rate, {steps // 3: 0.1}
  ),
}


class Recipe(NamedTuple):
  """What a worker does with a gradient, besides the exchange."""

  optimizer: Optimizer  # with its peak rate
  schedule: str = "constant"  # one of `SCHEDULES`
  warm_up: int = 0  # steps in which the rate rises from 0
  clip: float = 0.0  # largest norm of a gradient, 0 for any
  steps: int = 1  # of the schedule

  def __str__(self) -> str:
    parts = [
      f"{self.schedule} rate"
      + (f" over {self.steps} steps" if self.schedule != "constant" else "")
    ]
    parts += [f"{self.warm_up} steps of warm-up"] * bool(self.warm_up)
    parts += [f"clipping at {self.clip:g}"] * bool(self.clip)
    return ", ".join(parts)

  def schedule_of(self) -> optax.Schedule:
    """The rate at each step."""
    # The schedule counts the steps of the warm-up, too, in which it is not used.
    whole = SCHEDULES[self.schedule](self.optimizer.rate, self.steps)
    if not self.warm_up:
      return whole
    rising = optax.linear_schedule(0.0, self.optimizer.rate, self.warm_up)
    return lambda step: optax.tree.where(step < self.warm_up, rising(step), whole(step))

  def make(self) -> optax.GradientTransformation:
    """The optimizer behind the clipping."""
    clip = [optax.clip_by_global_norm(self.clip)] if self.clip else []
    return optax.chain(*clip, self.optimizer.make(self.schedule_of()))
