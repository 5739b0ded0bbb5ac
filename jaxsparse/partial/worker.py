"""A worker of partial reduce in a process of its own: no collectives and no barriers, so it can lose any other worker.

The protocol runs in a thread (`jaxsparse.partial.runtime`), so a worker answers other workers while it computes:

    training step ── reduce ──> │ thread │ <── signals, groups ──> server
                 <── average ── │        │ <── pieces of models ──> members of the group, workers that join

Models travel over TCP from host memory to host memory, as `jaxsparse.partial.exchange` describes. JAX's own collectives
are not used, because a process that dies inside one ends or blocks all other processes, and cannot return.
"""

import os
import pathlib
from typing import Any, Self

import jax
import numpy as np

from jaxsparse.flatten import flatten
from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages, saving
from jaxsparse.partial.events import Model
from jaxsparse.partial.finite import Refusals, check_start
from jaxsparse.partial.messages import Keys, Says
from jaxsparse.partial.runtime import RECONNECT, Runtime


class Worker:
  """Takes part in partial reduce, and leaves when its `with` block ends.

  Args:
    address: the server's.
    number: this worker's, 0 … N − 1.
    params: the model that training starts from, the same for all workers.
    save: the file (.npz) to save the parameters to if the controller is lost; `js.partial.restore` reads it.
    bind: the address at which other workers reach this one; by default this machine's loopback, on any free port.
    keys: CURVE keys of the run, required for any address but loopback.
    timeout: seconds to wait for the server's WELCOME; it may have to notice first that a worker with the same number is
      dead. Also the seconds to wait for the next message of another worker that the server takes for alive.
    reconnect: seconds to try to reach the controller again after it has been silent for its limit (5 s). If it comes
      back, or is restarted at the same address, training goes on: this worker joins again with its model, or gets that
      of a worker that did so before it. Else the parameters are saved, and the next call raises ControllerLost.

  Attributes:
    params: the model to begin with: the given one, or that of another worker if training has begun already.
    iteration: the number of iterations that `params` has been trained for.
    refused: how many models of this worker in succession were not finite; see `reduce`.

  Raises:
    ValueError: for an address that requires keys without them, a number that the server does not know or that a living
      worker has, a model whose size differs from the other workers', a model that is not finite, or a negative
      `reconnect`.
    ControllerLost: if WELCOME does not arrive in time.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> controller = js.partial.Controller(2, group_size=2)
    >>> _ = controller.leave(1)  # without the other worker, a group has one member
    >>> with js.partial.Server(controller) as server, js.partial.Worker(server.address, 0, jnp.zeros(3)) as worker:
    ...   worker.reduce(worker.params + 1, worker.iteration + 1)
    (Array([1., 1., 1.], dtype=float32), 1)
  """

  def __init__(
    self,
    address: str,
    number: int,
    params: Any,
    *,
    save: str | os.PathLike[str] | None = None,
    bind: str = messages.LOOPBACK,
    keys: Keys | None = None,
    timeout: float = START_TIMEOUT,
    reconnect: float = RECONNECT,
  ):
    messages.check_address(bind, keys, reachable=True)
    if not reconnect >= 0:
      raise ValueError(f"reconnect={reconnect!r}, choose 0 seconds or more")
    check_start(params)
    vector, self._unflatten = flatten(params)
    self._entries, self._refusals = vector.size, Refusals(number)
    path = None if save is None else pathlib.Path(save)
    if path:
      saving.remove_stale(path)
    save_model = lambda model: saving.save(path, *self._tree(model))
    options: dict[str, Any] = {
      "bind": bind,
      "keys": keys,
      "timeout": timeout,
      "reconnect": reconnect,
      "save": save_model,
    }
    self._runtime = Runtime(address, number, np.asarray(vector), **options)
    self._runtime.start()
    self.params, self.iteration = self._tree(self._runtime.take())

  @property
  def refused(self) -> int:
    """How many models of this worker in succession were not finite; 0 after a finite one."""
    return self._refusals.count

  def reduce(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with a group. If the average fails, it is repeated with another group until one succeeds.

    Parameters with NaN or Inf enter no average: a log message names the worker and the first such leaf, and the worker
    gets the current model of another worker. `refused` is above 0 then; reset the optimizer's state, which may hold NaN
    too.

    Args:
      params: this worker's, after a local step.
      iteration: the number of iterations they have been trained for: one more than the last call returned.

    Returns:
      The average, and the largest iteration of the group. A worker that the server has dropped in the meantime, because
      it was silent, gets the model of another worker instead.

    Raises:
      ControllerLost: if the controller has been silent for its limit and `reconnect` seconds; what `save` names holds
        the parameters of the last call.
      ValueError: for parameters of another size, or an iteration that the controller rejects.
      FloatingPointError: for parameters that are not finite, if no other worker has a finite trained model, or at the
        tenth time in succession.
    """
    return self._average(Says.READY, params, iteration)

  def synchronize(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with all workers that have not left, for an evaluation or at the end; waits until all of them call it.

    Arguments, results and errors are those of `reduce`, which it may follow without a step in between. A worker whose
    parameters are not finite takes part with the model of another worker.
    """
    return self._average(Says.SYNCHRONIZE, params, iteration)

  def leave(self) -> None:
    """Leaves: the other workers continue without this one.

    Waits for its last pieces to be sent, unless a worker that needs them has died, or has taken no byte for 5 s.
    """
    self._runtime.ask(Says.BYE)
    self._runtime.join()

  def __enter__(self) -> Self:
    """The worker."""
    return self

  def __exit__(self, *_: object) -> None:
    """Leaves."""
    self.leave()

  def _average(self, signal: Says, params: Any, iteration: int) -> tuple[Any, int]:
    vector = flatten(params)[0]
    if vector.size != self._entries:
      raise ValueError(f"params have {vector.size} entries, the initial ones have {self._entries}")
    model = Model(np.asarray(vector), iteration)
    if self._refusals.refuse(vector, iteration, self._unflatten):
      self._runtime.ask(Says.NOT_FINITE)
      try:
        model = self._runtime.take()
      except FloatingPointError as error:
        raise self._refusals.no_donor() from error
      if signal == Says.READY:
        return self._tree(model)
    self._runtime.ask(signal, model)
    return self._tree(self._runtime.take())

  def _tree(self, model: Model) -> tuple[Any, int]:
    return self._unflatten(jax.numpy.asarray(model.vector)), model.iteration
