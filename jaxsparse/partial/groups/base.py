"""What workers in processes and in threads share: `reduce` and `synchronize`, and models that are not finite.

A mean with one NaN is NaN, so one worker whose step diverges would spoil the models of
its group, and soon all models. So models with NaN or Inf enter no average: each worker
checks its own model before it sends a signal, and continues from the current model of
another worker.
"""

import abc
import contextlib
import logging
import operator
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.flatten import flatten
from jaxsparse.partial.groups.controller import MAX_ITERATION
from jaxsparse.partial.net.alike import REFUSALS, check_leaves, first_not_finite
from jaxsparse.partial.net.messages import WorkerMessage
from jaxsparse.types import check_whole

_all_finite = jax.jit(lambda vector: jnp.isfinite(vector).all())


class BaseWorker(abc.ABC):
  """A worker; it leaves when its `with` block ends.

  Args:
    worker: its number.
    params: the model that training starts from.
    unflatten: from f32[n] to parameters of the caller's structure, shapes and dtypes.

  Attributes:
    number: its number.
    refused: how many of its models in succession were not finite.
  """

  def __init__(
    self,
    worker: int,
    params: optax.Params,
    unflatten: Callable[[jax.Array], optax.Params],
  ):
    self.number = worker
    self.refused = 0
    self._start = params
    self._unflatten = unflatten

  def reduce(self, params: optax.Params, iteration: int) -> tuple[optax.Params, int]:
    """Averages with a group. If the average fails, it is repeated with another group until one succeeds.

    Parameters with NaN or Inf enter no average: a log message names the worker and the
    first such leaf, and the worker gets the current model of another worker. `refused`
    is above 0 then; reset the optimizer's state, which may hold NaN too.

    Args:
      params: this worker's, after a local step.
      iteration: the number of iterations they have been trained for: one more than the
        last call returned.

    Returns:
      The average, and the largest iteration of the group. A worker that the server has
      dropped in the meantime, because it was silent, gets the model of another worker
      instead. Parameters are on this worker's device.

    Raises:
      ControllerLost: if the controller has been silent for its limit and `reconnect`
        seconds; what `save` names holds the parameters of the last call.
      ValueError: for parameters with other leaves than at the start, an iteration that
        is no whole number of 0 or more, or that the controller rejects.
      FloatingPointError: for parameters that are not finite, if no other worker has a
        finite trained model, or at the tenth time in succession.
    """
    return self._average(WorkerMessage.READY, params, iteration)

  def synchronize(
    self, params: optax.Params, iteration: int
  ) -> tuple[optax.Params, int]:
    """Averages with all workers that have not left, for an evaluation or at the end; waits until all of them call it.

    Arguments, results and errors are those of `reduce`, which it may follow without a
    step in between. A worker whose parameters are not finite takes part with the model
    of another worker.
    """
    return self._average(WorkerMessage.SYNCHRONIZE, params, iteration)

  @abc.abstractmethod
  def leave(self) -> None:
    """Leaves: the other workers continue without this one."""

  def __enter__(self) -> Self:
    """The worker."""
    return self

  def __exit__(self, *_: object) -> None:
    """Leaves."""
    self.leave()

  def _average(
    self, kind: WorkerMessage, params: optax.Params, iteration: int
  ) -> tuple[optax.Params, int]:
    """The average that `kind` asks for: READY with a group, SYNCHRONIZE with all workers.

    Args:
      kind: READY or SYNCHRONIZE.
      params: parameters of this worker.
      iteration: the number of iterations that they have been trained for.

    Returns:
      The average and its iteration; or the model of another worker and its iteration,
      as `reduce` describes.
    """
    name = "reduce" if kind == WorkerMessage.READY else "synchronize"
    check_leaves(name, params, self._start)
    with contextlib.suppress(TypeError):  # a number of numpy or JAX
      iteration = operator.index(iteration)
    check_whole(name, 0, MAX_ITERATION, iteration=iteration)
    vector = flatten(params)[0]
    if is_finite := bool(_all_finite(vector)):
      self.refused = 0
    else:
      vector, iteration = self._replace(vector, iteration)
    # READY with a model that is not finite returns the model of the other worker. With
    # SYNCHRONIZE all others wait for this worker: it averages with the model it got.
    if kind == WorkerMessage.SYNCHRONIZE or is_finite:
      vector, iteration = self._ask(kind, vector, iteration)
    return self._unflatten(vector), iteration

  def _replace(self, vector: jax.Array, iteration: int) -> tuple[jax.Array, int]:
    """The model of another worker and its iteration, in place of `vector`, which is not finite; warns with the leaf."""
    self.refused += 1
    leaf = first_not_finite(self._unflatten(vector))
    problem = f"worker {self.number}: {leaf} of iteration {iteration} is not finite"
    if self.refused >= REFUSALS:
      raise FloatingPointError(
        f"{problem}, {REFUSALS} times in succession, each time after a step from another worker's finite model: "
        "reset the optimizer's state when `refused` is above 0, and check this worker's data"
      )
    logging.getLogger(__name__).warning(
      f"{problem}; it enters no average, and the worker continues from another worker's model"
    )
    try:
      # Sends no model; raises FloatingPointError if all other workers seek a finite
      # model too, or if none comes in time.
      return self._ask(WorkerMessage.NOT_FINITE, vector, iteration)
    except FloatingPointError as error:
      raise FloatingPointError(
        f"{problem}, and no other worker has a trained model that is: restart from parameters saved "
        "earlier, for example with a smaller learning rate"
      ) from error

  @abc.abstractmethod
  def _ask(
    self, kind: WorkerMessage, vector: jax.Array, iteration: int
  ) -> tuple[jax.Array, int]:
    """A model and its iteration: the average of a group (READY) or of all, or another worker's model (NOT_FINITE).

    Args:
      kind: READY, SYNCHRONIZE or NOT_FINITE.
      vector: f32[n], the model of this worker; not used for NOT_FINITE.
      iteration: the number of iterations that it has been trained for.

    Raises:
      FloatingPointError: for NOT_FINITE, if no other worker has a trained model.
    """
