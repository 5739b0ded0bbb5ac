"""The sockets of partial reduce: ZeroMQ over TCP, CURVE keys, and connections to other workers.

A connection to another worker that breaks, cannot be made, or takes no byte for 5 s (on Linux) is closed, and reported.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn


class _Missing:
  """Stands for `zmq` where it is not installed."""

  def __getattr__(self, name: str) -> NoReturn:
    raise ModuleNotFoundError("js.partial.Server and Worker need pyzmq: pip install 'jaxsparse[partial]'", name="zmq")


try:
  import zmq
except ModuleNotFoundError:
  zmq = _Missing()  # type: ignore[assignment]

LOOPBACK = "tcp://127.0.0.1:*"
Handler = Callable[[list[bytes]], None]
_STALLED = 5000  # milliseconds in which another worker's machine takes no byte before the connection is closed


class Keys(NamedTuple):
  """A CURVE key pair that the server and all workers of a run share; anybody who has it can join the run.

  Each key is 40 characters (Z85). Pass them to the workers as secretly as a password.

  Example:
    >>> import tempfile
    >>> import jaxsparse as js
    >>> keys = js.partial.Keys.make()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   keys.write(f"{folder}/keys")
    ...   js.partial.Keys.read(f"{folder}/keys") == keys
    True
  """

  public: bytes
  secret: bytes

  @classmethod
  def make(cls) -> Keys:
    """Makes the keys of a run."""
    return cls(*zmq.curve_keypair())

  @classmethod
  def read(cls, path: str | os.PathLike[str]) -> Keys:
    """Reads keys from a file that `write`, or `python -m jaxsparse.partial --keys=FILE`, has written.

    Raises:
      ValueError: if the file holds anything else.
    """
    words = pathlib.Path(path).read_bytes().split()
    if [len(word) for word in words] != [40, 40]:
      raise ValueError(f"{path} holds no keys, python -m jaxsparse.partial --keys=FILE writes some to a new file")
    return cls(*words)

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes the keys to a new file that only its owner can read.

    Raises:
      FileExistsError: if the file exists: a run may be using it.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
      file.write(b"%s %s\n" % self)


def check_address(address: str, keys: Keys | None, *, reachable: bool = False) -> None:
  """Raises ValueError for an address that is malformed, or that other machines can reach without keys.

  Without keys, anybody who reaches the address could join the run and read the parameters. A `reachable` address is
  handed to other workers, so its host has to name one interface.

  Example:
    >>> check_address("tcp://127.0.0.1:*", None)
    >>> check_address("tcp://*:2900", None)
    Traceback (most recent call last):
    ...
    ValueError: tcp://*:2900 can be reached from other machines: give keys=js.partial.Keys.make(), the same to all
  """
  host, colon, port = address.removeprefix("tcp://").rpartition(":")
  if not address.startswith("tcp://") or not colon or not (port == "*" or port.isdecimal()):
    raise ValueError(f"address={address!r}, choose tcp://HOST:PORT, where PORT may be * for any")
  if reachable and host in ("*", "0.0.0.0", "[::]"):
    raise ValueError(f"address={address!r}: name the address of this machine that the other workers reach")
  try:
    local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
  except ValueError:
    local = False
  if not local and keys is None:
    raise ValueError(f"{address} can be reached from other machines: give keys=js.partial.Keys.make(), the same to all")


class Network:
  """A ZeroMQ context whose sockets encrypt, and admit only peers with the keys of the run; without keys, any peer."""

  def __init__(self, keys: Keys | None):
    self._keys, self.context, self._guard = keys, zmq.Context(), None
    if keys:
      from zmq.auth.thread import ThreadAuthenticator

      self._guard = ThreadAuthenticator(self.context)  # a thread that authenticates clients (ZMTP's ZAP)
      self._guard.start()
      self._guard.configure_curve_callback(domain="jaxsparse", credentials_provider=self)

  def callback(self, domain: str, key: bytes) -> bool:
    """Whether a client with this public key is admitted."""
    del domain
    return self._keys is not None and key == self._keys.public

  def client(self) -> zmq.Socket:
    """A new DEALER, to be connected to a ROUTER of the run."""
    return self._secure(zmq.DEALER)

  def server(self, longest: int) -> zmq.Socket:
    """A new ROUTER, to be bound; it closes connections that send messages of more than so many bytes."""
    socket = self._secure(zmq.ROUTER)
    socket.maxmsgsize = longest
    if self._keys:
      socket.curve_server, socket.zap_domain = True, b"jaxsparse"
    return socket

  def close(self, linger: int) -> None:
    """Closes all sockets; messages of this end may take so many milliseconds more to be sent."""
    if self._guard:
      self._guard.stop()
    self.context.destroy(linger)

  def _secure(self, kind: int) -> zmq.Socket:
    socket = self.context.socket(kind)
    if self._keys:
      socket.curve_publickey, socket.curve_secretkey = self._keys
      if kind == zmq.DEALER:
        socket.curve_serverkey = self._keys.public
    return socket


def endpoint(socket: zmq.Socket) -> str:
  """The address that a socket is bound to, with the port."""
  return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


class Inbox:
  """Waits for messages on many sockets, and hands each to the handler of its socket.

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
  """A connection to another worker."""

  socket: zmq.Socket
  monitor: zmq.Socket  # reports when the connection breaks
  sent: list[zmq.MessageTracker]  # one for each message, done when the message has been handed to the kernel


class Peers:
  """Connections to other workers, by address; each is made when something is first sent there.

  Args:
    network: makes the sockets.
    longest: bytes of the longest message that is accepted from another worker.
    inbox: listens to the sockets.
    answered: is called with the frames of every answer of another worker.
    lost: is called with the address when a connection is closed; the second argument says whether it was refused.
  """

  def __init__(
    self, network: Network, longest: int, inbox: Inbox, answered: Handler, lost: Callable[[str, bool], None]
  ):
    self._network, self._longest, self._inbox = network, longest, inbox
    self._answered, self._lost = answered, lost
    self._peers: dict[str, _Peer] = {}

  def send(self, address: str, frames: list[Any]) -> None:
    """Sends without waiting; closes the connection if its queue is full or the address is malformed."""
    try:
      peer = self._peers.get(address) or self._connect(address)
      message = peer.socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
      peer.sent[:] = [other for other in (*peer.sent, message) if other and not other.done]
    except zmq.ZMQError:
      self._close(address, refused=False)

  @property
  def sending(self) -> bool:
    """Whether messages are in transfer to workers that take them."""
    return not all(message.done for peer in self._peers.values() for message in peer.sent)

  def _connect(self, address: str) -> _Peer:
    from zmq.utils.monitor import parse_monitor_message

    def report(frames: list[bytes]) -> None:
      self._close(address, refused=parse_monitor_message(frames)["event"] == zmq.EVENT_CONNECT_RETRIED)

    socket = self._network.client()
    socket.maxmsgsize = self._longest
    socket.connect_timeout = socket.handshake_ivl = socket.tcp_maxrt = _STALLED
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
    self._peers[address] = _Peer(socket, monitor, [])
    self._inbox.listen(socket, self._answered)
    self._inbox.listen(monitor, report)
    socket.connect(address)
    return self._peers[address]

  def _close(self, address: str, refused: bool) -> None:
    if peer := self._peers.pop(address, None):
      peer.socket.disable_monitor()
      for socket in (peer.socket, peer.monitor):
        self._inbox.forget(socket)
        socket.close(linger=0)
    self._lost(address, refused)
