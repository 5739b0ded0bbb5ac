"""The thread and the sockets of a worker in a process of its own; all decisions are those of its protocol.

    training loop ── post ─────> │        │ <── DEALER ──> server
                  <── take ───── │ thread │ <── ROUTER ─── other workers: pieces, requests for the model
                                 │        │ ─── DEALER ──> other workers: the same, a socket for each (`Peers`)

The thread answers other workers while the training loop computes; it adds the clock,
and turns messages into events.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.membership import (
  Membership,
  Unreachable,
  WorkerProtocol,
)
from jaxsparse.partial.net.messages import Piece, PieceKind, ServerMessage, Signal
from jaxsparse.partial.net.sockets import Keys, zmq
from jaxsparse.partial.net.transfers import Assembly, Transfers, split

# milliseconds that a leaving worker waits for BYE to be sent: the server may be dead
_LAST_WORDS = 1000
_OF_DONORS = PieceKind.MODEL, PieceKind.WAITS


class ControllerLost(RuntimeError):
  """The server did not come back, or never answered; the message says where the parameters are saved.

  Example:
    >>> raise ControllerLost("no sign of life from the controller for 65 s")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.net.endpoint.ControllerLost: no sign of life from the controller for 65 s
  """


class Endpoint:
  """Runs the protocol of a worker from `start` until the protocol ends.

  Args:
    servers: addresses of the server, and of those that take its place.
    bind: the address at which other workers reach this one.
    keys: CURVE keys of the run.
    longest: bytes of the longest piece.
    timeout: `Membership.timeout` at the start. A worker that leaves waits at most as
      long as it is at the end for its last pieces to be sent.

  Attributes:
    address: where other workers reach this one, with the port.
  """

  def __init__(
    self,
    servers: Sequence[str],
    bind: str,
    keys: Keys | None,
    longest: int,
    timeout: float,
  ):
    sockets.check_address(bind, keys, reachable=True)
    self.timeout = timeout
    self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # to every request after the end
    self._last_answer: Exception = RuntimeError("this worker has left")
    self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._network = sockets.Network(keys)
    self._data, self.address = self._network.bind(
      bind, longest, self._from_worker, closes_stalled=True
    )
    self._transfers = Transfers()
    self._assembly = Assembly(longest // 4)
    self._transfer: zmq.MessageTracker | None = None  # the model that was sent last
    self._servers = itertools.cycle(servers)
    self._connect()
    self._lock = threading.Lock()
    self._closing = False  # guards `_wake_up`, which other threads use
    self._wake_up, posted = (self._network.context.socket(zmq.PAIR) for _ in range(2))
    posted.bind("inproc://events")
    self._wake_up.connect("inproc://events")
    self._network.listen(posted, lambda _: self._handle(self._events.get()))
    self._peers = sockets.Peers(
      self._network,
      longest,
      answered=self._from_peer,
      lost=lambda address: self._handle(Unreachable(address)),
    )

  def start(
    self,
    protocol: WorkerProtocol,
    make_model: Callable[[Piece], Piece],
    lose: Callable[[str], Exception],
    name: str,
  ) -> None:
    """Starts the thread.

    Args:
      protocol: made with the methods of this endpoint.
      make_model: the MODEL that answers a FETCH; other pieces go to the protocol.
      lose: saves what is to be saved after the server was lost, as the message says;
        every request raises the result.
      name: of the thread.
    """
    self._protocol = protocol
    self._make_model = make_model
    self._lose = lose
    self._thread = threading.Thread(target=self._run, daemon=True, name=name)
    self._thread.start()

  def make_membership(self, worker: int, **options: Any) -> Membership:
    """The place of a worker that uses this endpoint, with the options of `Membership`."""
    outlets = self.tell, self._peers.send, self._answers.put
    return Membership(
      worker,
      self.address,
      self.timeout,
      time.monotonic(),
      *outlets,
      disconnect=self._peers.close,
      **options,
    )

  # In other threads.

  def post(self, event: Any) -> None:
    """Gives the protocol an event."""
    self._events.put(event)
    with self._lock:
      # A ZeroMQ socket serves one thread at a time, hence the lock.
      if not self._closing:
        self._wake_up.send(b"")

  def take(self, seconds: float | None = None) -> Any:
    """The answer to the open request, which is raised if it is an exception.

    Raises:
      queue.Empty: if there is none for so many seconds.
    """
    if isinstance(answer := self._answers.get(timeout=seconds), Exception):
      # every later request gets it, too
      if answer is self._last_answer:
        self._answers.put(answer)
      raise answer
    return answer

  def join(self, seconds: float | None = None) -> None:
    """Waits for the end of the thread, for at most so many seconds."""
    self._thread.join(seconds)

  # For the protocol, in the thread.

  def tell(self, signal: Signal) -> None:
    """Sends a signal to the server."""
    # no connection, for lack of keys for example: the deadline will pass
    with contextlib.suppress(zmq.Again):
      self._server.send(signal.pack(), zmq.NOBLOCK)

  def switch(self) -> None:
    """Connects to the next server."""
    self._network.forget(self._server)
    self._connect()

  def _connect(self) -> None:
    """Connects to the next server."""
    self._server = self._network.client()
    self._connected = next(self._servers)
    self._server.connect(self._connected)
    self._network.listen(self._server, self._from_server)

  def _run(self) -> None:
    """Runs the protocol until the worker leaves or the server is lost."""
    try:
      membership = self._protocol.membership
      while membership.state != "ended":
        self._protocol.tick(time.monotonic())
        self._network.wait(membership.interval)
        self._send_model()
      awaited, seconds = membership.lost
      if awaited:
        self._last_answer = self._lose(
          f"no {awaited} from the controller at {self._connected} for {seconds:g} s"
        )
    except Exception as error:  # or the training loop would wait for ever
      self._end_by(error)
    finally:
      self._answers.put(self._last_answer)
      self._close()

  def _end_by(self, error: Exception) -> None:
    """Every request raises this error from now on."""
    self._last_answer = error

  def _close(self) -> None:
    """Closes the sockets after the last pieces have been sent to the workers that take them."""
    with self._lock:
      self._closing = True
    end = time.monotonic() + self._protocol.membership.timeout
    try:
      while self._peers.sending and time.monotonic() < end:
        self._network.wait(0.01)
    finally:
      self._network.close(_LAST_WORDS)

  def _send_model(self) -> None:
    """Sends the model to the next worker that has asked for it, after the one before has it."""
    if self._transfer is None or self._transfer.done:
      self._transfer = None
      if asked := self._transfers.next(
        self._protocol.membership.position.round, time.monotonic()
      ):
        peer, request = asked
        for chunk in split(self._make_model(request)):
          self._transfer = self._send_back(peer, chunk)
    for peer in self._transfers.waiting(time.monotonic()):
      self._send_back(peer, Piece(PieceKind.WAITS, 0, self._protocol.membership.worker))

  def _send_back(self, peer: bytes, piece: Piece) -> "zmq.MessageTracker | None":
    """Sends a piece to a worker that has connected to this one, unless it is gone; only last chunks are tracked."""
    is_last = piece.tag == 0
    with contextlib.suppress(zmq.ZMQError):
      return self._data.send_multipart(
        [peer, *piece.pack()], zmq.NOBLOCK, copy=False, track=is_last
      )
    return None

  def _handle(self, event: Any) -> None:
    self._protocol.handle(event, time.monotonic())

  def _from_server(self, frames: list[bytes]) -> None:
    """Gives the protocol an answer of the server; one that is malformed changes nothing."""
    try:
      answer = messages.parse_answer(frames[0])
      if answer.kind != ServerMessage.STATUS:
        self._handle(answer)
    except messages.Rejected as error:
      self._protocol.membership.warn(f"ignores a message of the server: {error}")

  def _from_worker(self, frames: list[bytes]) -> None:
    connection, *content = frames
    piece = messages.parse_piece(content)
    if piece and piece.kind == PieceKind.FETCH:
      self._transfers.ask(connection, piece, time.monotonic())
    # a model comes from the donor alone, by the connection to it
    elif piece and piece.kind not in _OF_DONORS:
      self._handle(piece)

  def _from_peer(self, address: str, frames: list[bytes]) -> None:
    """A message of a worker by the connection that this one has made to its address."""
    piece = messages.parse_piece(frames)
    if piece is None or piece.kind not in _OF_DONORS:
      self._from_worker([b"", *frames])
      return
    membership = self._protocol.membership
    donors = membership.donors
    if address in donors:
      membership.hear_donor()
      if piece.kind == PieceKind.MODEL and (
        model := self._assembly.add(address, piece, donors)
      ):
        self._handle(model)
