"""The thread of a worker that owns its sockets: turns messages into events of `WorkerProtocol`, performs its actions.

    training loop ── ask ──────> │        │ <── DEALER ──> server
                  <── answers ── │ thread │ <── ROUTER ─── other workers: pieces of averages, requests for the model
                                 │        │ ─── DEALER ──> other workers: the same, a socket for each (`Peers`)

All decisions are the protocol's; the thread adds the clock and the sockets, and ends the process if it has to.
"""

import contextlib
import os
import queue
import sys
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

GRACE = 5.0  # seconds for the training loop to make its next call after the controller is lost

_LAST_WORDS = 5000  # milliseconds that a leaving worker waits for BYE to be sent: the server may be dead


class ControllerLost(RuntimeError):
  """The controller is dead, or never answered; the message says where the parameters are saved.

  Example:
    >>> raise ControllerLost("no sign of life from the controller for 5 s")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.runtime.ControllerLost: no sign of life from the controller for 5 s
  """


class Runtime(threading.Thread):
  """The thread; `ask` it from another thread, and take the reply from `answers`.

  Args:
    server: the server's address.
    number: this worker's.
    initial: f32[n], the model that training starts from.
    bind: the address to listen at for other workers.
    keys: of the run, if there are any.
    timeout: see `js.partial.Worker`, as for the next one.
    grace: seconds after which the process ends if the training loop does not take the news that the controller is lost.
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
    grace: float,
    save: Callable[[Model], str],
  ):
    super().__init__(daemon=True, name=f"partial reduce, worker {number}")
    self.answers: queue.SimpleQueue[Model | Exception] = queue.SimpleQueue()
    self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    self._number, self._address, self._entries, self._grace, self._save = number, server, initial.size, grace, save
    self._linger = round(1000 * timeout)  # milliseconds that a leaving worker waits for its last pieces to be sent
    self._context, self._peer_context = zmq.Context(), zmq.Context()  # apart: each lingers for a time of its own
    self._guard = messages.Guard(self._context, keys)
    self._server = messages.secure(self._context.socket(zmq.DEALER), keys, serves=False)
    self._server.connect(server)
    self._data = messages.secure(self._context.socket(zmq.ROUTER), keys, serves=True)
    self._data.maxmsgsize = initial.nbytes + messages.LONGEST
    self._data.bind(bind)
    self._wake_up, self._requested = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
    self._requested.bind("inproc://requests")
    self._wake_up.connect("inproc://requests")
    self._inbox = Inbox()
    self._inbox.listen(self._server, self._from_server)
    self._inbox.listen(self._data, self._from_worker)
    self._inbox.listen(self._requested, lambda _: self._handle(self._requests.get()))
    unreachable = lambda address, refused: self._handle(Unreachable(address, refused))
    self._peers = Peers(self._peer_context, keys, self._data.maxmsgsize, self._inbox, self._from_donor, unreachable)
    self._protocol = WorkerProtocol(number, initial, messages.endpoint(self._data), timeout, time.monotonic())

  def ask(self, says: Says, model: Model | None = None) -> None:
    """Hands a `Request` to the thread; see there."""
    if not self.is_alive():
      self.answers.put(RuntimeError("this worker has left, or was ended"))
    self._requests.put(Request(says, model))
    with contextlib.suppress(zmq.ZMQError):  # the thread has ended; its last reply is in `answers`
      self._wake_up.send(b"", zmq.NOBLOCK)

  def run(self) -> None:
    """Runs the protocol until the worker leaves or the controller is lost."""
    try:
      self._handle(Tick())
      while self._runs():
        self._inbox.wait(self._protocol.interval, self._runs)
        self._handle(Tick())
    except Exception as error:  # or the training loop would wait for ever
      self.answers.put(error)
    finally:
      self._peer_context.destroy(self._linger)  # waits until pieces that other workers may need are sent
      self._guard.stop()
      self._context.destroy(min(self._linger, _LAST_WORDS))

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
        self.answers.put(answer)
      case ControllerSilent(awaited, seconds):
        self._lose_controller(f"no {awaited} from the controller at {self._address} for {seconds:g} s")

  def _lose_controller(self, reason: str) -> None:
    """Saves the model and tells the training loop; ends the process if the loop takes no answer in time."""
    reason = f"{reason}; {self._save(self._protocol.model)}"
    self._linger = 0
    self.answers.put(ControllerLost(reason))
    end = time.monotonic() + self._grace
    while not self.answers.empty() and self._requests.empty():  # a request to leave takes no reply
      if time.monotonic() > end:
        print(f"error: worker {self._number}: {reason}", file=sys.stderr, flush=True)
        os._exit(1)
      time.sleep(0.05)

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
