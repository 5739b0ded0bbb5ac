"""The thread of a worker that owns its sockets: turns messages into events of `WorkerProtocol`, performs its actions.

    training loop ── ask ──────> │        │ <── DEALER ──> server
                  <── answers ── │ thread │ <── ROUTER ─── other workers: pieces of averages, requests for the model
                                 │        │ ─── DEALER ──> other workers: the same, a socket for each (`Peers`)

All decisions are the protocol's; the thread adds the clock and the sockets. Its heartbeats do not depend on what the
training loop does.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import zmq

from jaxsparse.partial import messages, peers
from jaxsparse.partial.events import (
  Action,
  ControllerSilent,
  Event,
  FetchModel,
  Model,
  ModelReceived,
  Reply,
  Request,
  SendPiece,
  ServerMessage,
  Tick,
  Unreachable,
)
from jaxsparse.partial.messages import Keys, Says, Signal
from jaxsparse.partial.peers import Inbox, Peers
from jaxsparse.partial.worker_protocol import WorkerProtocol

RECONNECT = 60.0  # seconds that a worker tries to reach a controller that has been silent for its limit

_LAST_WORDS = 1000  # milliseconds that a leaving worker waits for BYE to be sent: the server may be dead


class ControllerLost(RuntimeError):
  """The controller did not come back, or never answered; the message says where the parameters are saved.

  Example:
    >>> raise ControllerLost("no sign of life from the controller for 65 s")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.runtime.ControllerLost: no sign of life from the controller for 65 s
  """


class Runtime(threading.Thread):
  """The thread; `ask` it from another thread, and `take` the reply.

  Args:
    server: the server's address.
    number: this worker's.
    initial: f32[n], the model that training starts from.
    bind: the address to listen at for other workers.
    keys: of the run, if there are any.
    timeout: see `js.partial.Worker`.
    reconnect: see there.
    save: saves a model when the controller is lost; returns a sentence about where it is, or why it is not saved.

  Example:
    >>> issubclass(Runtime, threading.Thread)
    True
  """

  def __init__(
    self,
    server: str,
    number: int,
    initial: np.ndarray,
    *,
    bind: str,
    keys: Keys | None,
    timeout: float,
    reconnect: float,
    save: Callable[[Model], str],
  ):
    super().__init__(daemon=True, name=f"partial reduce, worker {number}")
    self._answers: queue.SimpleQueue[Model | Exception] = queue.SimpleQueue()
    self._last_answer: Exception = RuntimeError("this worker has left")  # to every request after the end
    self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    self._number, self._address, self._entries, self._save = number, server, initial.size, save
    self._timeout = timeout
    self._context = zmq.Context()
    self._guard = messages.Guard(self._context, keys)
    self._server = messages.secure(self._context.socket(zmq.DEALER), keys, serves=False)
    self._server.connect(server)
    self._data = messages.secure(self._context.socket(zmq.ROUTER), keys, serves=True)
    self._data.maxmsgsize = initial.nbytes + messages.LONGEST
    self._data.bind(bind)
    self._lock, self._closing = threading.Lock(), False  # of `_wake_up`, which the training loop uses
    self._wake_up, self._requested = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
    self._requested.bind("inproc://requests")
    self._wake_up.connect("inproc://requests")
    self._inbox = Inbox()
    self._inbox.listen(self._server, self._from_server)
    self._inbox.listen(self._data, self._from_worker)
    self._inbox.listen(self._requested, lambda _: self._handle(self._requests.get()))
    unreachable = lambda address, refused: self._handle(Unreachable(address, refused))
    self._peers = Peers(self._context, keys, self._data.maxmsgsize, self._inbox, self._from_donor, unreachable)
    self._protocol = WorkerProtocol(
      number, initial, messages.endpoint(self._data), timeout, reconnect, time.monotonic()
    )

  def ask(self, says: Says, model: Model | None = None) -> None:
    """Hands a `Request` to the thread; see there."""
    self._requests.put(Request(says, model))
    with self._lock:
      if not self._closing:
        self._wake_up.send(b"")

  def take(self) -> Model:
    """Waits for the reply to a request, and raises it if it is an exception."""
    answer = self._answers.get()
    if answer is self._last_answer:
      self._answers.put(answer)
    if isinstance(answer, Exception):
      raise answer
    return answer

  def run(self) -> None:
    """Runs the protocol until the worker leaves or the controller is lost."""
    try:
      self._handle(Tick())
      while self._runs():
        self._inbox.wait(self._protocol.interval, self._runs)
        self._handle(Tick())
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
        self._inbox.wait(0.01)
    finally:
      self._guard.stop()
      self._context.destroy(_LAST_WORDS)

  def _runs(self) -> bool:
    return self._protocol.state != "ended"

  def _handle(self, event: Event) -> None:
    for action in self._protocol.handle(event, time.monotonic()):
      self._perform(action)

  def _perform(self, action: Action) -> None:
    match action:
      case Signal():
        with contextlib.suppress(zmq.Again):  # no connection, for lack of keys for example: the deadline will pass
          self._server.send(action.packed(), zmq.NOBLOCK)
      case SendPiece(address, number, kind, values):
        self._peers.send(address, peers.piece(number, kind, self._number, values))
      case FetchModel(address):
        self._peers.send(address, peers.fetch(self._number))
      case Reply(answer):
        self._answers.put(answer)
      case ControllerSilent(awaited, seconds):
        lost = f"no {awaited} from the controller at {self._address} for {seconds:g} s"
        self._last_answer = ControllerLost(f"{lost}; {self._save(self._protocol.model)}")

  def _from_server(self, frames: list[bytes]) -> None:
    self._handle(ServerMessage(*messages.parse_answer(frames[0])))

  def _from_worker(self, frames: list[bytes]) -> None:
    connection, *content = frames
    if peers.is_fetch(content):
      model = self._protocol.model
      self._data.send_multipart([connection, *peers.model(model, self._number)], copy=False)
    elif received := peers.parse_piece(content):
      self._handle(received)

  def _from_donor(self, frames: list[bytes]) -> None:
    if model := peers.parse_model(frames, self._entries):
      self._handle(ModelReceived(model))
