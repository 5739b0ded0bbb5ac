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
# the kinds of pieces that only a donor sends, as answers to FETCH
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
    servers: addresses of the server, and of the servers that take its place.
    bind: the address at which other workers reach this one.
    keys: CURVE keys of the run; None for none.
    longest: bytes of the longest piece.
    timeout: `Membership.timeout` at the start, in seconds. A worker that leaves waits
      at most for `Membership.timeout` at the end, until its last pieces are sent.

  Attributes:
    address: where other workers reach this one, with the port.
    timeout: as given.
    _events: events of other threads for the protocol; for each, a message by `_wake_up`
      wakes the thread.
    _answers: answers of the protocol for the training loop.
    _last_answer: the exception that every request raises once the protocol has ended.
    _network: the sockets that the thread polls, each with its handler.
    _server, _connected: the socket to the server, and the address that it connects to.
    _data: the ROUTER by which other workers reach this one.
    _peers: sockets to other workers, by address.
    _transfers: requests of other workers for the model.
    _transfer: the tracker of the last chunk of a model in transit, or None.
    _assembly: the chunks of the model that a donor sends to this worker.
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
    # raised by every request after the end
    self._last_answer: Exception = RuntimeError("this worker has left")
    self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._network = sockets.Network(keys)
    self._data, self.address = self._network.bind(
      bind, longest, self._from_worker, closes_stalled=True
    )
    self._transfers = Transfers()
    self._assembly = Assembly(longest // 4)  # in words of 4 bytes
    self._transfer: zmq.MessageTracker | None = None
    self._servers = itertools.cycle(servers)
    self._connect()
    # `_lock` guards `_closing` and `_wake_up`, by which other threads wake the thread:
    # it waits for sockets only.
    self._lock = threading.Lock()
    self._closing = False
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
      protocol: its `membership` is made by `make_membership` of this endpoint.
      make_model: from a FETCH to the MODEL that answers it, called in the thread.
      lose: gets the reason when the server is lost, and returns the error that every
        later request raises; in partial reduce it also saves the model.
      name: of the thread.
    """
    self._protocol = protocol
    self._make_model = make_model
    self._lose = lose
    self._thread = threading.Thread(target=self._run, daemon=True, name=name)
    self._thread.start()

  def make_membership(self, worker: int, **options: Any) -> Membership:
    """The `Membership` of a worker that uses this endpoint; `options` are further fields."""
    # the fields `tell_server`, `send` and `answer_loop`
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
      # A ZeroMQ socket serves one thread at a time, hence the lock. Its message wakes
      # the thread, which then takes one event.
      if not self._closing:
        self._wake_up.send(b"")

  def take(self, seconds: float | None = None) -> Any:
    """Waits for the answer to the open request, which is raised if it is an exception.

    Args:
      seconds: for which it waits; None for ever.

    Raises:
      queue.Empty: if there is none for so many seconds.
    """
    if isinstance(answer := self._answers.get(timeout=seconds), Exception):
      # The thread has ended: every later request gets this answer, too.
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
    # zmq.Again: no connection, for lack of keys for example. The signal is dropped, and
    # the protocol notices that no answer comes.
    with contextlib.suppress(zmq.Again):
      self._server.send(signal.pack(), zmq.NOBLOCK)

  def switch(self) -> None:
    """Closes the connection to the server, and connects to the next one."""
    self._network.forget(self._server)
    self._connect()

  def _connect(self) -> None:
    """Connects to the next server; after the last one comes the first one."""
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
      # the message that did not come for so many seconds; "" if the worker has left, or
      # was rejected
      awaited, seconds = membership.lost
      if awaited:
        self._last_answer = self._lose(
          f"no {awaited} from the controller at {self._connected} for {seconds:g} s"
        )
    except Exception as error:  # raised by the training loop, which waits for an answer
      self._end_by(error)
    finally:
      self._answers.put(self._last_answer)
      self._close()

  def _end_by(self, error: Exception) -> None:
    """From now on every request raises this error; a subclass may end the process as well."""
    self._last_answer = error

  def _close(self) -> None:
    """Closes the sockets after the last pieces have been sent to the workers that take them."""
    # from now on `post` no longer uses its socket
    with self._lock:
      self._closing = True
    end = time.monotonic() + self._protocol.membership.timeout
    try:
      # Broken connections are noticed meanwhile, and their pieces no longer waited for.
      while self._peers.sending and time.monotonic() < end:
        self._network.wait(0.01)
    finally:
      # BYE may take `_LAST_WORDS` ms more to be sent: the server may be dead.
      self._network.close(_LAST_WORDS)

  def _send_model(self) -> None:
    """Sends the model to the next worker that has asked for it, once ZeroMQ has sent the previous copy.

    pyzmq copies a piece below 64 KiB and calls it sent at once: where the last chunk is
    so small, the next worker does not wait. Once a second WAITS goes to the workers
    that have to wait longer.
    """
    if self._transfer is None or self._transfer.done:
      self._transfer = None
      if asked := self._transfers.next(
        self._protocol.membership.position.round, time.monotonic()
      ):
        peer, request = asked
        # All chunks are queued at once; the tracker of the last one remains.
        for chunk in split(self._make_model(request)):
          self._transfer = self._send_back(peer, chunk)
    for peer in self._transfers.waiting(time.monotonic()):
      self._send_back(peer, Piece(PieceKind.WAITS, 0, self._protocol.membership.worker))

  def _send_back(self, peer: bytes, piece: Piece) -> "zmq.MessageTracker | None":
    """Sends a piece by a connection that a worker has made to this one; drops it if the worker is gone.

    Returns:
      The tracker of WAITS, or of the last chunk of a model; None for other chunks, and
      if the piece is dropped.
    """
    is_last = piece.tag == 0  # the tag counts the chunks that follow
    with contextlib.suppress(zmq.ZMQError):
      return self._data.send_multipart(
        [peer, *piece.pack()], zmq.NOBLOCK, copy=False, track=is_last
      )
    return None

  def _handle(self, event: Any) -> None:
    """Gives the protocol an event with the time."""
    self._protocol.handle(event, time.monotonic())

  def _from_server(self, frames: list[bytes]) -> None:
    """Gives the protocol an answer of the server; ignores a malformed one with a warning."""
    try:
      answer = messages.parse_answer(frames[0])
      # STATUS is for people and readers (`Follower`), not for the protocol.
      if answer.kind != ServerMessage.STATUS:
        self._handle(answer)
    except messages.Rejected as error:
      self._protocol.membership.warn(f"ignores a message of the server: {error}")

  def _from_worker(self, frames: list[bytes]) -> None:
    """Takes a message by a connection that another worker made: queues a FETCH, gives other pieces to the protocol."""
    # The first frame is the connection, an identity that ZeroMQ's ROUTER prepends.
    connection, *content = frames
    piece = messages.parse_piece(content)
    if piece and piece.kind == PieceKind.FETCH:
      self._transfers.ask(connection, piece, time.monotonic())
    # MODEL and WAITS count only by the connection that this worker has made to its
    # donor (`_from_peer`).
    elif piece and piece.kind not in _OF_DONORS:
      self._handle(piece)

  def _from_peer(self, address: str, frames: list[bytes]) -> None:
    """Takes a message by this worker's own connection to `address`: assembles the model if a donor sends it."""
    piece = messages.parse_piece(frames)
    # neither MODEL nor WAITS
    if piece is None or piece.kind not in _OF_DONORS:
      self._from_worker([b"", *frames])  # a DEALER prepends no connection
      return
    membership = self._protocol.membership
    donors = membership.donors  # addresses of the donors that are asked now
    if address in donors:
      membership.hear_donor()  # extends deadlines
      # the whole model once its last chunk has come
      if piece.kind == PieceKind.MODEL and (
        model := self._assembly.add(address, piece, donors)
      ):
        self._handle(model)
