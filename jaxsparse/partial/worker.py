"""A worker of partial reduce in a process of its own: no collectives and no barriers, so it can lose any other worker.

A thread owns the sockets and answers other workers while the training loop computes. All decisions are those of
`jaxsparse.partial.worker_protocol`; the thread adds the clock, turns messages into events, and actions into messages:

    training loop ── ask ──────> │        │ <── DEALER ──> server
                  <── answers ── │ thread │ <── ROUTER ─── other workers: pieces of averages, requests for the model
                                 │        │ ─── DEALER ──> other workers: the same, a socket for each (`Peers`)

Models travel over TCP from host memory to host memory, as `jaxsparse.partial.exchange` describes. JAX's own collectives
are not used, because a process that dies inside one ends or blocks all other processes, and cannot return.
"""

import contextlib
import os
import pathlib
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages, saving, sockets
from jaxsparse.partial.base import BaseWorker, check_start
from jaxsparse.partial.messages import Kind, Piece, Says, Signal
from jaxsparse.partial.sockets import Keys, zmq
from jaxsparse.partial.worker_protocol import Event, Model, Request, Unreachable, WorkerProtocol
from jaxsparse.sparse.flatten import flatten

RECONNECT = 60.0  # seconds that a worker tries to reach a controller that has been silent for its limit
_LAST_WORDS = 1000  # milliseconds that a leaving worker waits for BYE to be sent: the server may be dead


class ControllerLost(RuntimeError):
  """The controller did not come back, or never answered; the message says where the parameters are saved.

  Example:
    >>> raise ControllerLost("no sign of life from the controller for 65 s")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.worker.ControllerLost: no sign of life from the controller for 65 s
  """


class Worker(BaseWorker):
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
    params: Any,
    *,
    save: str | os.PathLike[str] | None = None,
    bind: str = sockets.LOOPBACK,
    keys: Keys | None = None,
    timeout: float = START_TIMEOUT,
    reconnect: float = RECONNECT,
  ):
    sockets.check_address(bind, keys, reachable=True)
    if not reconnect >= 0:
      raise ValueError(f"reconnect={reconnect!r}, choose 0 seconds or more")
    check_start(params)
    initial, unflatten = flatten(params)
    super().__init__(number, initial.size, unflatten)
    self._file = None if save is None else pathlib.Path(save)
    if self._file:
      saving.remove_temporary(self._file)
    self._controller, self._timeout = address, timeout
    self._answers: queue.SimpleQueue[Model | Exception] = queue.SimpleQueue()
    self._last_answer: Exception = RuntimeError("this worker has left")  # to every request after the end
    self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    longest = initial.nbytes + messages.LONGEST
    self._network = sockets.Network(keys)
    self._data, own = self._network.bind(bind, longest, self._from_worker)
    self._server = self._network.client()
    self._server.connect(address)
    self._network.listen(self._server, lambda frames: self._handle(messages.parse_answer(frames[0])))
    self._lock, self._closing = threading.Lock(), False  # of `_wake_up`, which the training loop uses
    self._wake_up, requested = (self._network.context.socket(zmq.PAIR) for _ in range(2))
    requested.bind("inproc://requests")
    self._wake_up.connect("inproc://requests")
    self._network.listen(requested, lambda _: self._handle(self._requests.get()))
    from_donor = lambda frames: self._from_worker([b"", *frames])
    unreachable = lambda address: self._handle(Unreachable(address))
    self._peers = sockets.Peers(self._network, longest, from_donor, unreachable)
    outlets = self._tell, self._peers.send, self._answers.put
    start = np.asarray(initial)
    self._protocol = WorkerProtocol(number, start, own, timeout, reconnect, time.monotonic(), *outlets)
    self._thread = threading.Thread(target=self._run, daemon=True, name=f"partial reduce, worker {number}")
    self._thread.start()
    vector, self.iteration = self._take()
    self.params = unflatten(vector)

  def leave(self) -> None:
    """Leaves: the other workers continue without this one.

    Waits for its last pieces to be sent, unless a worker that needs them has died, or has taken no byte for 5 s.
    """
    self._post(Request(Says.BYE))
    self._thread.join()

  # In the training loop.

  def _ask(self, says: Says, vector: jax.Array, iteration: int) -> tuple[jax.Array, int]:
    self._post(Request(says, None if says == Says.NOT_FINITE else Model(np.asarray(vector), iteration)))
    return self._take()

  def _post(self, request: Request) -> None:
    self._requests.put(request)
    with self._lock:
      if not self._closing:
        self._wake_up.send(b"")

  def _take(self) -> tuple[jax.Array, int]:
    if isinstance(answer := self._answers.get(), Exception):
      if answer is self._last_answer:
        self._answers.put(answer)
      raise answer
    return jax.numpy.asarray(answer.vector), answer.iteration

  # In the thread.

  def _run(self) -> None:
    """Runs the protocol until the worker leaves or the controller is lost."""
    try:
      while self._protocol.state != "ended":
        self._protocol.tick(time.monotonic())
        self._network.wait(self._protocol.interval)
      (awaited, seconds), (vector, iteration) = self._protocol.lost, self._protocol.model
      if awaited:
        saved = saving.save(self._file, self._unflatten(jax.numpy.asarray(vector)), iteration)
        lost = f"no {awaited} from the controller at {self._controller} for {seconds:g} s"
        self._last_answer = ControllerLost(f"{lost}; {saved}")
    except Exception as error:  # or the training loop would wait for ever
      self._last_answer = error
    finally:
      self._answers.put(self._last_answer)
      self._close()

  def _close(self) -> None:
    """Closes the sockets after the last pieces have been sent to the workers that take them."""
    with self._lock:
      self._closing = True
    end = time.monotonic() + self._timeout
    try:
      while self._peers.sending and time.monotonic() < end:
        self._network.wait(0.01)
    finally:
      self._network.close(_LAST_WORDS)

  def _handle(self, event: Event) -> None:
    self._protocol.handle(event, time.monotonic())

  def _tell(self, signal: Signal) -> None:
    with contextlib.suppress(zmq.Again):  # no connection, for lack of keys for example: the deadline will pass
      self._server.send(signal.pack(), zmq.NOBLOCK)

  def _from_worker(self, frames: list[bytes]) -> None:
    connection, *content = frames
    piece = messages.parse_piece(content)
    if piece and piece.kind == Kind.FETCH:
      vector, iteration = self._protocol.model
      self._data.send_multipart([connection, *Piece(Kind.MODEL, iteration, self.number, vector).pack()], copy=False)
    elif piece:
      self._handle(piece)
