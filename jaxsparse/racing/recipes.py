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
  - "dense, 16 bits": the optimizer behind an all-reduce of bfloat16
  - "4 bits": the optimizer behind an exchange of gradients in 4 bits
  - "signs": each worker's own optimizer, then an exchange of the signs of its updates
  - "signs, every 4": each worker's own optimizer, then, every 4 steps, an exchange of
    the signs of its movement in these steps

  With "sgd" the last two are "signs", signs of gradients, and "SparDL 1 %", both before
  the optimizer. With "muon" the mean of "signs" is scaled to the length of a worker's
  update (`js.norm_restored`). The result is a dictionary: add methods of your own,
  remove others.

  Args:
    optimizer: "adam", optax's, and where each worker has its own optimizer
      `js.scale_by_window_adam` in its place; "muon", optax's, with Adam at 1/20 of the
      rate for leaves that are no matrices; "sgd"; or a function rate -> optax
      transformation, your own.
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
  # `shared` follows an exchange of gradients. `local` is each worker's own optimizer,
  # before an exchange of updates.
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
  # 1 and 4 are H, the steps from one exchange to the next. Muon normalizes each
  # worker's update, and updates that differ have a shorter mean: True restores its
  # length.
  return methods | {
    "signs": functools.partial(_exchange_updates, local, 1, optimizer == "muon"),
    "signs, every 4": functools.partial(_exchange_updates, local, 4, False),
  }


def _optimizers(
  optimizer: str | Optimizer, workers: int
) -> tuple[Optimizer, Optimizer]:
  """The optimizer after an exchange of gradients, and each worker's own before an exchange; functions of the rate."""
  if callable(optimizer):
    return optimizer, optimizer
  # A worker's own gradients are noisier than their mean: Adam's second moment would be
  # too large. It is taken of averages over a window of P steps.
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
  """Each worker's own optimizer, then in each `every`-th step an exchange of the signs of the worker's movement.

  With `restores` the mean is scaled to the length of one worker's movement.
  """
  signs = make_transform("onebit", axis)
  exchange = norm_restored(signs) if restores else signs
  # Rate 1: the learning rate is in the updates that are exchanged.
  outer = optax.chain(exchange, optax.sgd(1.0))
  # A worker keeps its residual, the movement that signs have not delivered yet, in the
  # parameters that it trains on.
  return local_steps(optimizer(rate), outer, every=every, apply_residual=True)
