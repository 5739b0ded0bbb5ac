"""`js.recipes`: chains of an optimizer and an exchange, by name, for `js.race` and for training."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import optax
import optax.contrib

from jaxsparse._compat import AxisName
from jaxsparse.transform.adam import scale_by_window_adam
from jaxsparse.transform.factories import make_transform
from jaxsparse.transform.local import local_steps
from jaxsparse.transform.restored import norm_restored
from jaxsparse.types import Comm, check_whole

Rate: TypeAlias = jax.Array | float  # traced in a race
Optimizer: TypeAlias = Callable[[Rate], optax.GradientTransformation]
Method: TypeAlias = Callable[[AxisName | Comm, Rate], optax.GradientTransformation]

_NAMES = ("adam", "muon", "sgd")


def recipes(optimizer: str | Optimizer = "adam", *, workers: int) -> dict[str, Method]:
  """Functions `(axis, rate) -> chain` by name: ways to exchange around one optimizer.

  - "dense": the optimizer behind an all-reduce of float32
  - "dense, 16 bits": the same in bfloat16
  - "4 bits": the optimizer behind gradients in 4 bits
  - "signs": each worker's own optimizer, signs of its updates, every step
  - "signs, every 4": the same, exchanged every 4 steps

  With "sgd" the last two are signs of gradients and SparDL at 1 %, before the
  optimizer. With "muon" the mean of signs has the length of a worker's update
  (`js.norm_restored`) where they are exchanged in every step. The result is a
  dictionary: add methods of your own, remove others.

  Args:
    optimizer: "adam", whose workers' own one is `js.scale_by_window_adam`; "muon",
      optax's, with Adam at 1/20 of the rate for leaves that are no matrices; "sgd"; or
      a function rate -> optax transformation, your own.
    workers: number of workers P, the window of Adam.

  Raises:
    ValueError: for another name, or a number of workers below 1.

  Example:
    >>> import optax, jaxsparse as js
    >>> methods = js.recipes("adam", workers=4)
    >>> list(methods)
    ['dense', 'dense, 16 bits', '4 bits', 'signs', 'signs, every 4']
    >>> methods["PowerSGD"] = lambda axis, rate: optax.chain(
    ...   js.powersgd_transform(axis, rank=4), optax.adam(rate))
    >>> tx = methods["signs"]("workers", 1e-3)  # as in training
  """
  check_whole("recipes", 1, workers=workers)
  if not callable(optimizer) and optimizer not in _NAMES:
    raise ValueError(
      f"recipes: optimizer={optimizer!r}, choose one of {', '.join(map(repr, _NAMES))}, or a function of the rate"
    )
  # `shared` follows an exchange of gradients; of `local` each worker has its own.
  shared, local = _optimizers(optimizer, workers)
  before = lambda label: functools.partial(_exchange_gradients, label, shared)
  methods = {
    "dense": before("dense"),
    "dense, 16 bits": before("dense:dtype=bfloat16"),
    "4 bits": before("nbit:bits=4"),
  }
  # Updates of SGD are gradients times the rate: exchanges before and after it are
  # alike.
  if optimizer == "sgd":
    return methods | {
      "signs": before("onebit"),
      "SparDL 1 %": before("spardl:density=0.01"),
    }
  # The number is H, steps from one exchange to the next. Muon normalizes each worker's
  # update, and the mean of updates that differ is shorter: its length is restored.
  return methods | {
    "signs": functools.partial(_exchange_updates, local, 1, optimizer == "muon"),
    "signs, every 4": functools.partial(_exchange_updates, local, 4, False),
  }


def _optimizers(
  optimizer: str | Optimizer, workers: int
) -> tuple[Optimizer, Optimizer]:
  """The optimizer behind an exchange, and that of each worker before one; both are functions of the rate."""
  if callable(optimizer):
    return optimizer, optimizer
  # The second moment of a worker's own gradients would be too large, by their noise.
  if optimizer == "adam":
    return optax.adam, lambda rate: optax.chain(
      scale_by_window_adam(workers), optax.scale_by_learning_rate(rate)
    )
  # Leaves that are no matrices are trained by Adam, at 1/20 of Muon's rate.
  muon = lambda rate: optax.contrib.muon(rate, adam_learning_rate=rate / 20)
  both = muon if optimizer == "muon" else optax.sgd
  return both, both


def _exchange_gradients(
  label: str, optimizer: Optimizer, axis: AxisName | Comm, rate: Rate
) -> optax.GradientTransformation:
  """One optimizer behind an exchange of gradients by the collective of `label`."""
  return optax.chain(make_transform(label, axis), optimizer(rate))


def _exchange_updates(
  optimizer: Optimizer, every: int, restores: bool, axis: AxisName | Comm, rate: Rate
) -> optax.GradientTransformation:
  """An optimizer of each worker's own before an exchange of the signs of what it has moved, in each `every`-th step.

  With `restores` the mean is as long as the movement of one worker.
  """
  signs = make_transform("onebit", axis)
  exchange = norm_restored(signs) if restores else signs
  # Rate 1: the learning rate is in the updates that are exchanged.
  outer = optax.chain(exchange, optax.sgd(1.0))
  # Workers train on with what signs have not delivered of their own movement.
  return local_steps(optimizer(rate), outer, every=every, apply_residual=True)
