"""A worker of partial reduce in a process of its own: no collective, no barrier, and no peer that it could not lose.

A thread does all the talking (`jaxsparse.partial.talk`), so a worker is alive while it computes:

    training step ── reduce ──> │ thread │ <── signals, groups ──> server
                 <── average ── │        │ <── pieces of models ──> members of the group, and who joins

Models travel over TCP from host memory to host memory, in pieces, as `jaxsparse.partial.exchange` says. Why not in
JAX's own collectives: `python -m benchmarks.survival` shows what becomes of those when a peer dies and comes back.
"""

import os
import pathlib
from typing import Any, Self

import jax
import numpy as np

from jaxsparse.flatten import flatten
from jaxsparse.launch import START_TIMEOUT
from jaxsparse.partial import messages, saving
from jaxsparse.partial.events import Model
from jaxsparse.partial.finite import Refusals, check_start
from jaxsparse.partial.messages import Keys, Says
from jaxsparse.partial.runtime import GRACE, Runtime


class Worker:
  """Takes part in partial reduce, and leaves when its `with` block ends.

  Args:
    address: of the server.
    number: this worker's, 0 … N − 1.
    params: the model that training starts from, the same at every worker.
    save: the file (.npz) for the parameters if the controller dies; `js.partial.restore` reads it.
    bind: where other workers reach this one; on this machine's loopback and any port by default.
    keys: CURVE keys of the run, needed on any other address than loopback.
    timeout: seconds until the server must have taken this worker; it may have to forget a dead one of its number first.
      So long, too, a worker waits for the next message of another one that the server says is alive.
    grace: seconds that a worker gets to come to `reduce` after the controller's death, before its process is ended.

  Attributes:
    params: to begin with: the given ones, or a current model of another worker if training is under way.
    iteration: of them.
    refused: how many models of this worker in succession were not finite; see `reduce`.

  Raises:
    ValueError: for an address that needs keys and has none, a number that the server does not know or that a living
      worker has, a model of another size than that of the other workers, or one that is not finite.
    ControllerLost: if the server does not take this worker in time.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> controller = js.partial.Controller(2, group_size=2)
    >>> _ = controller.leave(1)  # the other one does not come, so groups are of one
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
    grace: float = GRACE,
  ):
    messages.check_address(bind, keys, reachable=True)
    check_start(params)
    vector, self._unflatten = flatten(params)
    self._entries, self._refusals = vector.size, Refusals(number)
    path = None if save is None else pathlib.Path(save)
    if path:
      saving.remove_stale(path)
    save_model = lambda model: saving.save(path, *self._tree(model))
    options: dict[str, Any] = {"bind": bind, "keys": keys, "timeout": timeout, "grace": grace, "save": save_model}
    self._runtime = Runtime(address, number, np.asarray(vector), **options)
    self._runtime.start()
    self.params, self.iteration = self._tree(self._answer())

  @property
  def refused(self) -> int:
    """How many models of this worker in succession were not finite; 0 after a finite one."""
    return self._refusals.count

  def reduce(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with a group; returns when one has come to an end, however many have failed before.

    Parameters that hold NaN or Inf are in no average: that is logged, with the worker and the first such leaf, and the
    worker gets a current model of another one. `refused` is above 0 then. The state of the optimizer may hold NaN as
    well, so start it anew.

    Args:
      params: of this worker, after a local step.
      iteration: how many iterations they have seen: one more than what came with them from the last call.

    Returns:
      The average, and the largest iteration of the group. A worker that was taken for dead meanwhile gets another one's
      model.

    Raises:
      ControllerLost: if the controller has died; `params` are saved then.
      ValueError: for parameters of another size, or an iteration that the controller rejects.
      FloatingPointError: for parameters that are not finite, if no other worker has a trained model that is, or the
        tenth time in succession.
    """
    return self._average(Says.READY, params, iteration)

  def synchronize(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with all workers that have not left, for an evaluation or at the end; waits until all of them do.

    The arguments, what is returned and raised are those of `reduce`. It may follow that without a step between. A
    worker whose parameters are not finite takes part with the model that it gets from another worker.
    """
    return self._average(Says.SYNCHRONIZE, params, iteration)

  def leave(self) -> None:
    """Ends taking part; the others go on without this worker."""
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
      raise ValueError(f"params have {vector.size} entries, those to begin with {self._entries}")
    model = Model(np.asarray(vector), iteration)
    if self._refusals.refuse(vector, iteration, self._unflatten):
      self._runtime.ask(Says.NOT_FINITE)
      try:
        model = self._answer()
      except FloatingPointError as error:
        raise self._refusals.nobody() from error
      if signal == Says.READY:
        return self._tree(model)
    self._runtime.ask(signal, model)
    return self._tree(self._answer())

  def _answer(self) -> Model:
    answer = self._runtime.answers.get()
    if isinstance(answer, Exception):
      raise answer
    return answer

  def _tree(self, model: Model) -> tuple[Any, int]:
    return self._unflatten(jax.numpy.asarray(model.vector)), model.iteration
