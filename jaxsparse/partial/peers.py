"""Messages between workers, and the sockets that they travel through.

    Inbox    waits for messages on many sockets, and hands each to the handler of its socket
    Peers    connections to other workers, by address; each is made when something is first sent there

A connection that breaks, cannot be made, or takes no byte for 5 s (on Linux) is closed, and reported to the worker.

The first frame of a message is a header of 11 bytes, kind u8 | number i64 | sender u16, big-endian. The second frame
holds values in f32; FETCH has none.

    kind        number                    values
    1, FETCH    0                                                   asks for the receiver's model
    2, MODEL    iteration of the model    f32[n]                    the answer to FETCH
    3, PART     number of the group       the receiver's shard      of the sender's model
    4, MEAN     number of the group       the sender's shard        of the average
"""

import contextlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from jaxsparse.partial import messages
from jaxsparse.partial.events import Model, PieceReceived
from jaxsparse.partial.exchange import Kind
from jaxsparse.partial.messages import Keys

Handler = Callable[[list[bytes]], None]
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_STALLED = 5000  # milliseconds in which another worker's machine takes no byte before the connection is closed
_HEADER = struct.Struct("!BqH")
_FETCH, _MODEL = 1, 2
_KINDS: dict[int, Kind] = {3: "part", 4: "mean"}
_CODES = {kind: code for code, kind in _KINDS.items()}


def fetch(sender: int) -> list[Any]:
  """The frames of a request for a model.

  Example:
    >>> is_fetch(fetch(3))
    True
  """
  return [_HEADER.pack(_FETCH, 0, sender)]


def is_fetch(frames: list[bytes]) -> bool:
  """Whether a message asks for the model.

  Example:
    >>> is_fetch([b"malformed"])
    False
  """
  return bool(frames) and len(frames[0]) == _HEADER.size and frames[0][0] == _FETCH


def model(content: Model, sender: int) -> list[Any]:
  """The frames of a model.

  Example:
    >>> frames = model(Model(np.ones(2, np.float32), 7), sender=3)
    >>> parse_model([bytes(frame) for frame in frames], entries=2)
    Model(vector=array([1., 1.], dtype=float32), iteration=7)
  """
  return [_HEADER.pack(_MODEL, content.iteration, sender), content.vector.data]


def parse_model(frames: list[bytes], entries: int) -> Model | None:
  """The model in a message; None for any other message.

  Example:
    >>> parse_model([b"malformed"], entries=2)
  """
  if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) != 4 * entries:
    return None
  kind, iteration, _ = _HEADER.unpack(frames[0])
  return Model(np.frombuffer(frames[1], np.float32), iteration) if kind == _MODEL else None


def piece(number: int, kind: Kind, sender: int, values: np.ndarray) -> list[Any]:
  """The frames of a piece of an average.

  Example:
    >>> parse_piece([bytes(frame) for frame in piece(7, "part", 3, np.ones(2, np.float32))])
    PieceReceived(number=7, kind='part', sender=3, values=array([1., 1.], dtype=float32))
  """
  return [_HEADER.pack(_CODES[kind], number, sender), values.data]


def parse_piece(frames: list[bytes]) -> PieceReceived | None:
  """The piece in a message; None for any other message.

  Example:
    >>> parse_piece([b"malformed"])
  """
  if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) % 4:
    return None
  code, number, sender = _HEADER.unpack(frames[0])
  if code not in _KINDS:
    return None
  return PieceReceived(number, _KINDS[code], sender, np.frombuffer(frames[1], np.float32))


class Inbox:
  """Waits for messages on many sockets.

  Example:
    >>> with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
    ...   _ = one.bind("inproc://example"), other.connect("inproc://example")
    ...   inbox = Inbox()
    ...   inbox.listen(one, print)
    ...   other.send(b"hello")
    ...   inbox.wait(1.0)
    [b'hello']
  """

  def __init__(self) -> None:
    self._poller = zmq.Poller()
    self._handlers: dict[zmq.Socket, Handler] = {}

  def listen(self, socket: zmq.Socket, handler: Handler) -> None:
    """From now on messages of `socket` go to `handler`."""
    self._poller.register(socket, zmq.POLLIN)
    self._handlers[socket] = handler

  def forget(self, socket: zmq.Socket) -> None:
    """Stops listening to a socket."""
    self._poller.unregister(socket)
    del self._handlers[socket]

  def wait(self, seconds: float, go_on: Callable[[], bool] = lambda: True) -> None:
    """Waits for messages for at most `seconds`, then handles all that have arrived while `go_on()` is true."""
    for socket, _ in self._poller.poll(round(1000 * seconds)):
      with contextlib.suppress(zmq.Again):
        while (handler := self._handlers.get(socket)) and go_on():  # until it is forgotten, or empty
          handler(socket.recv_multipart(zmq.NOBLOCK))


class _Peer(NamedTuple):
  """A connection to another worker.

  Attributes:
    socket: of the connection.
    monitor: the socket that reports when the connection breaks.
    sent: one tracker for each message, done when the message has been handed to the kernel.
  """

  socket: zmq.Socket
  monitor: zmq.Socket
  sent: list[zmq.MessageTracker]


class Peers:
  """Connections to other workers.

  Args:
    context: of the sockets.
    keys: of the run, if there are any.
    longest: bytes of the longest message that is accepted from another worker.
    inbox: listens to the sockets.
    answered: is called with the frames of every answer of another worker.
    lost: is called with the address when a connection is closed; the second argument says whether it was refused.

  Example:
    >>> with zmq.Context() as context:
    ...   peers = Peers(context, None, 1000, Inbox(), print, lambda address, refused: print("cannot reach", address))
    ...   peers.send("nonsense", [b"hello"])
    cannot reach nonsense
  """

  def __init__(
    self,
    context: zmq.Context,
    keys: Keys | None,
    longest: int,
    inbox: Inbox,
    answered: Handler,
    lost: Callable[[str, bool], None],
  ):
    self._context, self._keys, self._longest, self._inbox = context, keys, longest, inbox
    self._answered, self._lost = answered, lost
    self._peers: dict[str, _Peer] = {}

  def send(self, address: str, frames: list[Any]) -> None:
    """Sends without waiting; closes the connection if its queue is full or the address is malformed."""
    try:
      peer = self._peer(address)
      message = peer.socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
      peer.sent[:] = [other for other in (*peer.sent, message) if other and not other.done]
    except zmq.ZMQError:
      self._close(address, refused=False)

  @property
  def sending(self) -> bool:
    """Whether messages are in transfer to workers that take them."""
    return not all(message.done for peer in self._peers.values() for message in peer.sent)

  def _peer(self, address: str) -> _Peer:
    if address not in self._peers:
      socket = messages.secure(self._context.socket(zmq.DEALER), self._keys, serves=False)
      socket.maxmsgsize = self._longest
      socket.connect_timeout = socket.handshake_ivl = socket.tcp_maxrt = _STALLED
      monitor = socket.get_monitor_socket(_LOST)
      self._peers[address] = _Peer(socket, monitor, [])
      self._inbox.listen(socket, self._answered)
      self._inbox.listen(monitor, lambda frames: self._report(address, parse_monitor_message(frames)["event"]))
      socket.connect(address)
    return self._peers[address]

  def _report(self, address: str, event: int) -> None:
    self._close(address, refused=event == zmq.EVENT_CONNECT_RETRIED)

  def _close(self, address: str, refused: bool) -> None:
    if peer := self._peers.pop(address, None):
      for socket in (peer.socket, peer.monitor):
        self._inbox.forget(socket)
      peer.socket.disable_monitor()
      for socket in (peer.socket, peer.monitor):
        socket.close(linger=0)
    self._lost(address, refused)
