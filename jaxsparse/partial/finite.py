"""Models that are not finite never come into an average: the worker itself refuses them, before it signals anything.

A mean with one NaN in it is NaN, so a single worker whose step diverges would ruin the models of its group, and soon of
all. Its worker goes on from a current model of another one instead.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REFUSALS = 10  # models in succession of one worker that are refused before that is an error

_all_finite = jax.jit(lambda vector: jnp.isfinite(vector).all())


def first_not_finite(params: Any) -> str | None:
  """The path of the first leaf that holds NaN or Inf as float32, for example "params['w']"; None if there is none.

  Example:
    >>> first_not_finite({"b": np.zeros(2), "w": np.array([1.0, np.nan])})
    "params['w']"
  """
  with np.errstate(over="ignore"):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
      if not np.isfinite(np.asarray(leaf, np.float32)).all():
        return f"params{jax.tree_util.keystr(path)}"
  return None


def check_start(params: Any) -> None:
  """Raises ValueError if the model that training starts from is not finite, naming the leaf.

  Example:
    >>> check_start({"w": np.array([np.inf])})
    Traceback (most recent call last):
    ...
    ValueError: params['w'] is not finite: training has to start from finite parameters
  """
  if path := first_not_finite(params):
    raise ValueError(f"{path} is not finite: training has to start from finite parameters")


class Refusals:
  """What one worker refuses of its own.

  Args:
    worker: its number.

  Attributes:
    count: how many of its models in succession were refused; 0 after a finite one.

  Example:
    >>> refusals = Refusals(2)
    >>> refusals.refuse(jnp.zeros(2), 7, lambda vector: {"w": vector}), refusals.count
    (False, 0)
  """

  def __init__(self, worker: int):
    self._worker, self.count = worker, 0
    self._last = ""

  def refuse(self, vector: jax.Array, iteration: int, unflatten: Callable[[jax.Array], Any]) -> bool:
    """Whether a model is refused; that is logged.

    Args:
      vector: f32[n], the model.
      iteration: how many iterations it has seen.
      unflatten: makes parameters of it, to name the leaf that is not finite.

    Raises:
      FloatingPointError: for the `REFUSALS`-th in succession.
    """
    if _all_finite(vector):
      self.count = 0
      return False
    self.count += 1
    self._last = f"worker {self._worker}: {first_not_finite(unflatten(vector))} of iteration {iteration} is not finite"
    if self.count >= REFUSALS:
      raise FloatingPointError(
        f"{self._last}, {REFUSALS} times in succession, each time after a step from another worker's finite model: "
        "start the optimizer's state anew when `refused` is above 0, and look at this worker's data"
      )
    logging.getLogger(__name__).warning(
      f"{self._last}; it is in no average, and the worker goes on from another worker's model"
    )
    return True

  def nobody(self) -> FloatingPointError:
    """The error where no other worker has a finite model."""
    return FloatingPointError(
      f"{self._last}, and no other worker has a trained model that is: start again from parameters saved before, with "
      "a smaller learning rate for example"
    )
