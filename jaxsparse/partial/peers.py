"""Receives messages on a worker's sockets, and connects to other workers.

    Inbox    waits for messages on many sockets, and hands each to the handler of its socket
    Peers    connections to other workers, by address; each is made when something is first sent there

A connection that breaks, or that can't be made, is closed, and the worker is told.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from jaxsparse.partial import messages
from jaxsparse.partial.messages import Keys

Handler = Callable[[list[bytes]], None]
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


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
    """Listens to a socket no more."""
    self._poller.unregister(socket)
    del self._handlers[socket]

  def wait(self, seconds: float, go_on: Callable[[], bool] = lambda: True) -> None:
    """Waits so long for messages, and handles all that have come, or as many as come while `go_on()` is true."""
    for socket, _ in self._poller.poll(round(1000 * seconds)):
      with contextlib.suppress(zmq.Again):
        while (handler := self._handlers.get(socket)) and go_on():  # until it is forgotten, or empty
          handler(socket.recv_multipart(zmq.NOBLOCK))


class _Peer(NamedTuple):
  """A connection to another worker, and the socket that tells when it breaks."""

  socket: zmq.Socket
  monitor: zmq.Socket


class Peers:
  """Connections to other workers.

  Args:
    context: of the sockets.
    keys: of the run, if there are any.
    longest: bytes of the longest message that is taken from another worker.
    inbox: where to listen.
    answered: what to do with an answer of another worker.
    lost: what to do when the connection to an address is closed; the second argument says whether it was never made.

  Example:
    >>> with zmq.Context() as context:
    ...   peers = Peers(context, None, 1000, Inbox(), print, lambda address, never: print("no way to", address))
    ...   peers.send("nonsense", [b"hello"])
    no way to nonsense
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
    """Sends without waiting; the connection is closed if too much is under way, or the address is none."""
    try:
      self._peer(address).socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError:
      self._close(address, never=False)

  def _peer(self, address: str) -> _Peer:
    if address not in self._peers:
      socket = messages.secure(self._context.socket(zmq.DEALER), self._keys, serves=False)
      socket.maxmsgsize = self._longest
      monitor = socket.get_monitor_socket(_LOST)
      self._peers[address] = _Peer(socket, monitor)
      self._inbox.listen(socket, self._answered)
      self._inbox.listen(monitor, lambda frames: self._told(address, parse_monitor_message(frames)["event"]))
      socket.connect(address)
    return self._peers[address]

  def _told(self, address: str, event: int) -> None:
    self._close(address, never=event == zmq.EVENT_CONNECT_RETRIED)

  def _close(self, address: str, never: bool) -> None:
    if peer := self._peers.pop(address, None):
      for socket in peer:
        self._inbox.forget(socket)
      peer.socket.disable_monitor()
      for socket in peer:
        socket.close(linger=0)
    self._lost(address, never)
