"""A worker of partial reduce in a process of its own: no collectives and no barriers, so it can lose any other worker.

A thread owns the sockets and answers other workers while the training loop computes
(`Endpoint`). All decisions are those of `protocol`. Models travel over TCP from host
memory to host memory, as `average` describes. JAX's own collectives are not used: a
process that dies inside one ends or blocks all other processes, and cannot return.
"""

import os
import pathlib

import jax
import numpy as np
import optax

from jaxsparse.arrays.flatten import flatten
from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial.groups import saving
from jaxsparse.partial.groups.base import BaseWorker
from jaxsparse.partial.groups.protocol import GroupProtocol, GroupRequest, Model
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.alike import Alike, check_start
from jaxsparse.partial.net.endpoint import ControllerLost, Endpoint
from jaxsparse.partial.net.messages import Piece, PieceKind, WorkerMessage
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.types import check_whole

# seconds that a worker tries to reach a controller that has been silent for its limit
RECONNECT = 60.0


class Worker(BaseWorker):
  """Takes part in partial reduce, and leaves when its `with` block ends.

  Args:
    address: the server's.
    number: this worker's, 0 … N − 1.
    params: the model that training starts from, the same for all workers.
    save: the file (.npz) to save the parameters to if the controller is lost;
      `js.partial.restore` reads it.
    bind: the address at which other workers reach this one; by default this machine's
      loopback, on any free port.
    keys: CURVE keys of the run, required for any address but loopback.
    timeout: seconds to wait for the server's WELCOME; it may have to notice first that
      a worker with the same number is dead. Also the seconds to wait for the next
      message of another worker that the server takes for alive.
    reconnect: seconds to try to reach the controller again after it has been silent for
      its limit (5 s). If it comes back, or is restarted at the same address, training
      goes on: this worker joins again with its model, or gets that of a worker that did
      so before it. Else the parameters are saved, and the next call raises
      ControllerLost.

  Attributes:
    params: the model to begin with: the given one, or that of another worker if
      training has begun already.
    iteration: the number of iterations that `params` has been trained for.
    refused: how many models of this worker in succession were not finite; see `reduce`.

  Raises:
    ValueError: for an address that requires keys without them, keys of another worker,
      a number that the server does not know or that a living worker has, a model whose
      leaves, or at the start values, differ from the other workers', a model that is
      not finite, or a negative `reconnect`.
    ModuleNotFoundError: without pyzmq.
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
    params: optax.Params,
    *,
    save: str | os.PathLike[str] | None = None,
    bind: str = sockets.LOOPBACK,
    keys: Keys | None = None,
    timeout: float = START_TIMEOUT,
    reconnect: float = RECONNECT,
  ):
    check_whole("Worker", 0, messages.MOST_MEMBERS - 1, number=number)
    sockets.check_keys(keys, number)
    if not reconnect >= 0:
      raise ValueError(f"reconnect={reconnect!r}, choose 0 seconds or more")
    check_start(params)
    initial, unflatten = flatten(params)
    super().__init__(number, params, unflatten)
    self._file = None if save is None else pathlib.Path(save)
    if self._file:
      # Temporary files are left by a process that was killed while it wrote.
      saving.remove_temporary(self._file)
    # The longest message is the model of a donor.
    endpoint = self._endpoint = Endpoint(
      sockets.servers(address, keys),
      bind,
      keys,
      initial.nbytes + messages.LONGEST,
      timeout,
    )
    # `limit` holds until WELCOME, which states the limit of the server.
    membership = endpoint.make_membership(
      number, limit=timeout, reconnect=reconnect, alike=Alike.of(params)
    )
    self._protocol = GroupProtocol(membership, np.asarray(initial))
    # `_model` answers a FETCH; `_lose` saves the model if the server is lost.
    endpoint.start(
      self._protocol,
      self._model,
      self._lose,
      f"partial reduce, worker {number}",
    )
    # the answer to HELLO: the initial model, or that of a donor
    vector, self.iteration = self._take()
    self.params = unflatten(vector)

  def leave(self) -> None:
    """Leaves: the other workers continue without this one.

    Waits for its last pieces to be sent, unless a worker that needs them has died, or
    has taken no byte for 5 s.
    """
    self._endpoint.post(GroupRequest(WorkerMessage.BYE))
    self._endpoint.join()

  def _ask(
    self, kind: WorkerMessage, vector: jax.Array, iteration: int
  ) -> tuple[jax.Array, int]:
    # NOT_FINITE has no model: the protocol keeps the last finite one, for other workers
    # and for the file.
    self._endpoint.post(
      GroupRequest(
        kind,
        None
        if kind == WorkerMessage.NOT_FINITE
        else Model(np.asarray(vector), iteration),
      )
    )
    return self._take()

  def _take(self) -> tuple[jax.Array, int]:
    """Waits for the answer to the open request, a model and its iteration; raises it if it is an exception."""
    answer = self._endpoint.take()
    return jax.numpy.asarray(answer.vector), answer.iteration

  def _model(self, _: Piece) -> Piece:
    """The MODEL that answers a FETCH of another worker; the endpoint's thread calls it."""
    vector, iteration = self._protocol.model
    return Piece(PieceKind.MODEL, iteration, self.number, vector)

  def _lose(self, message: str) -> ControllerLost:
    """Saves the model once the server is lost; returns the error, which the endpoint raises in every request."""
    vector, iteration = self._protocol.model
    saved = saving.save(
      self._file, self._unflatten(jax.numpy.asarray(vector)), iteration
    )
    return ControllerLost(f"{message}; {saved}")
