"""Models with NaN or Inf enter no average: each worker checks its own model before it sends a signal.

A mean with one NaN is NaN, so one worker whose step diverges would spoil the models of its group, and soon all models.
Instead, that worker continues from the current model of another worker.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REFUSALS = 10  # so many models of one worker in succession that are not finite raise an error

_all_finite = jax.jit(lambda vector: jnp.isfinite(vector).all())


def first_not_finite(params: Any) -> str | None:
  """The path of the first leaf with NaN or Inf (in float32), for example "params['w']"; None if there is none.

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
  """Raises ValueError with the name of the leaf if the model that training starts from is not finite.

  Example:
    >>> check_start({"w": np.array([np.inf])})
    Traceback (most recent call last):
    ...
    ValueError: params['w'] is not finite: training has to start from finite parameters
  """
  if path := first_not_finite(params):
    raise ValueError(f"{path} is not finite: training has to start from finite parameters")


class Refusals:
  """Checks the models of one worker, and counts those that are not finite.

  Args:
    worker: its number.

  Attributes:
    count: how many models in succession were not finite; 0 after a finite one.

  Example:
    >>> refusals = Refusals(2)
    >>> refusals.refuse(jnp.zeros(2), 7, lambda vector: {"w": vector}), refusals.count
    (False, 0)
  """

  def __init__(self, worker: int):
    self._worker, self.count = worker, 0
    self._last = ""

  def refuse(self, vector: jax.Array, iteration: int, unflatten: Callable[[jax.Array], Any]) -> bool:
    """Returns whether a model is not finite, and logs it then.

    Args:
      vector: f32[n], the model.
      iteration: the number of iterations that it has been trained for.
      unflatten: converts the vector to parameters, to name the leaf that is not finite.

    Raises:
      FloatingPointError: for the `REFUSALS`-th such model in succession.
    """
    if _all_finite(vector):
      self.count = 0
      return False
    self.count += 1
    self._last = f"worker {self._worker}: {first_not_finite(unflatten(vector))} of iteration {iteration} is not finite"
    if self.count >= REFUSALS:
      raise FloatingPointError(
        f"{self._last}, {REFUSALS} times in succession, each time after a step from another worker's finite model: "
        "reset the optimizer's state when `refused` is above 0, and check this worker's data"
      )
    logging.getLogger(__name__).warning(
      f"{self._last}; it enters no average, and the worker continues from another worker's model"
    )
    return True

  def no_donor(self) -> FloatingPointError:
    """The error to raise if no other worker has a finite model."""
    return FloatingPointError(
      f"{self._last}, and no other worker has a trained model that is: restart from parameters saved earlier, for "
      "example with a smaller learning rate"
    )
