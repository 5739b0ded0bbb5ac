"""The sockets of partial reduce: ZeroMQ over TCP, CURVE keys, and connections to other workers.

A connection to another worker that breaks, cannot be made, or takes no byte for 5 s (on
Linux) is closed, and reported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import stat
import types
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from jaxsparse.launch.environment import is_loopback
from jaxsparse.partial.net.messages import Piece, sender_of


class _Missing:
  """Stands for `zmq` where it is not installed."""

  def __getattr__(self, name: str) -> NoReturn:
    raise ModuleNotFoundError(
      "js.partial.Server and Worker need pyzmq: pip install 'jaxsparse[partial]'",
      name="zmq",
    )


try:
  import zmq
except ModuleNotFoundError:
  zmq = _Missing()  # type: ignore[assignment]

LOOPBACK = "tcp://127.0.0.1:*"
Handler = Callable[[list[bytes]], None]
_MOST_AT_ONCE = 1000  # messages of a socket that are handled in succession
_DOMAIN = "jaxsparse"  # the domain of authentication
# milliseconds in which another worker's machine takes no byte before the connection is
# closed
_STALLED = 5000


class Keys(NamedTuple):
  """A CURVE key pair that the server and all workers of a run share; anybody who has it can join the run.

  Each key is 40 characters (Z85). Pass them to the workers as secretly as a password.
  With `make_own` each worker has a pair of its own besides, so that none can speak for
  another one.

  Attributes:
    public, secret: the pair of the run, by which workers know the server and each
      other.
    own: the pair of this worker, or of the server, public and secret; () where all
      share the pair of the run.
    workers: the public keys of all workers, by number; () where all share the pair.

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
  own: tuple[bytes, ...] = ()
  workers: tuple[bytes, ...] = ()

  @classmethod
  def make(cls) -> Keys:
    """Makes the keys of a run."""
    return cls(*zmq.curve_keypair())

  @classmethod
  def make_own(cls, workers: int) -> list[Keys]:
    """Makes the keys of a run of so many workers: the `Keys` of each worker, and at the end the server's."""
    run = cls.make()
    pairs = [zmq.curve_keypair() for _ in range(workers + 1)]
    return [
      run._replace(own=pair, workers=tuple(public for public, _ in pairs[:-1]))
      for pair in pairs
    ]

  @classmethod
  def read(cls, path: str | os.PathLike[str]) -> Keys:
    """Reads keys from a file that `write`, or `python -m jaxsparse.partial --keys=FILE`, has written.

    The file has one key in each line: public and secret of the run; where workers have
    keys of their own, also public and secret of this worker, then the public keys of
    workers 0, 1, ….

    Raises:
      ValueError: if the file holds anything else.

    Warns:
      UserWarning: if other users of the machine can read the file.
    """
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
      warnings.warn(
        f"{path}: other users can read the keys of the run: chmod 600 {path}",
        stacklevel=2,
      )
    # For an empty file two empty words, which the next test refuses.
    public, secret, *others = words = pathlib.Path(path).read_bytes().split() or [
      b"",
      b"",
    ]
    # `others` is empty, or the pair of a worker and at least one worker's public key.
    if {len(word) for word in words} != {40} or len(others) in (1, 2):
      raise ValueError(
        f"{path} holds no keys, python -m jaxsparse.partial --keys=FILE writes some to a new file"
      )
    return cls(public, secret, tuple(others[:2]), tuple(others[2:]))

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes the keys to a new file that only its owner can read.

    Raises:
      FileExistsError: if the file exists: a run may be using it.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
      file.write(b"\n".join([self.public, self.secret, *self.own, *self.workers, b""]))


def number_of(keys: Keys | None) -> int:
  """The number of the worker whose keys these are; 0 where all workers have the same.

  Raises:
    ValueError: for the server's own keys.
  """
  if not keys or not keys.own:
    return 0
  if keys.own[0] not in keys.workers:
    raise ValueError("keys are the server's own, choose those of a worker")
  return keys.workers.index(keys.own[0])


def check_keys(keys: Keys | None, number: int) -> None:
  """Raises ValueError for keys of another worker than `number`, whose messages the server would drop."""
  owner = number_of(keys)
  if keys and keys.own and owner != number:
    raise ValueError(f"number={number!r}, but keys are those of worker {owner}")


def check_address(
  address: str, keys: Keys | None, *, reachable: bool = False, any_port: bool = True
) -> None:
  """Raises ValueError for an address that is malformed, or that other machines can reach without keys.

  Without keys, anybody who reaches the address could join the run and read the
  parameters.

  Args:
    address: tcp://HOST:PORT.
    keys: CURVE keys of the run; None for none, which only loopback allows.
    reachable: whether others connect to this address: the host must not be * or 0.0.0.0
      then, which mean all interfaces.
    any_port: whether the port may be *, which means any free one.

  Example:
    >>> check_address("tcp://127.0.0.1:*", None)
    >>> check_address("tcp://*:2900", None)
    Traceback (most recent call last):
    ...
    ValueError: tcp://*:2900 can be reached from other machines: give keys=js.partial.Keys.make(), the same to all
  """
  host, colon, port = address.removeprefix("tcp://").rpartition(":")
  is_port = (any_port and port == "*") or (port.isdecimal() and 0 < int(port) < 2**16)
  if not address.startswith("tcp://") or not colon or not is_port:
    or_any = ", or * for any" if any_port else ""
    raise ValueError(
      f"address={address!r}, choose tcp://HOST:PORT with a PORT of 1 … 65535{or_any}"
    )
  if ":" in host:
    raise ValueError(
      f"address={address!r} is one of IPv6: give the name of the host or an address of IPv4"
    )
  if reachable and host in ("*", "0.0.0.0"):
    raise ValueError(
      f"address={address!r}: name the host by which other processes reach it"
    )
  if keys is None and not is_loopback(host):
    raise ValueError(
      f"{address} can be reached from other machines: give keys=js.partial.Keys.make(), the same to all"
    )


def servers(address: str | Sequence[str], keys: Keys | None) -> list[str]:
  """Checks addresses as `check_address`, and lists them: of a server, then of servers that may take its place.

  Example:
    >>> servers("tcp://127.0.0.1:2900", None)
    ['tcp://127.0.0.1:2900']
  """
  addresses = [address] if isinstance(address, str) else list(address)
  for server in addresses or [""]:  # no address at all is refused like an empty one
    check_address(server, keys, reachable=True, any_port=False)
  return addresses


class Network:
  """Sockets that encrypt, and admit only peers with keys of the run; without keys, any peer.

  Where workers have keys of their own, a message is dropped if it names another sender
  than the owner of the key.

  Args:
    keys: of the run; None for none.

  Attributes:
    context: the ZeroMQ context of all its sockets.
    _handlers: by socket to which it listens: what is called with the frames of a
      message.
    _bound: ROUTERs whose clients have keys of their own, by which senders are checked.
    _guard: the thread that admits clients by their keys; only with keys.

  Example:
    >>> network = Network(None)
    >>> router, address = network.bind(LOOPBACK, longest=100, handler=lambda frames: print(frames[1:]))
    >>> client = network.client()
    >>> _ = client.connect(address), client.send(b"hello"), network.wait(1.0)
    [b'hello']
    >>> network.close(linger=0)
  """

  def __init__(self, keys: Keys | None):
    self._keys = keys
    self.context = zmq.Context()
    # A worker has two sockets for each other worker; ZeroMQ's default is 1023 in all.
    self.context.max_sockets = self.context.get(zmq.SOCKET_LIMIT)
    self._poller = zmq.Poller()
    self._handlers = dict[zmq.Socket, Handler]()
    self._bound = set[zmq.Socket]()
    if keys:
      from zmq.auth.thread import ThreadAuthenticator

      # public keys of clients that may connect: the workers' own, or that of the run
      admitted = keys.workers or (keys.public,)
      # pyzmq calls `callback(domain, key)` with the public key of each client
      admits = types.SimpleNamespace(callback=lambda _, key: key in admitted)
      # a thread that authenticates clients (ZeroMQ's protocol ZAP)
      self._guard = ThreadAuthenticator(self.context)
      self._guard.start()
      self._guard.configure_curve_callback(domain=_DOMAIN, credentials_provider=admits)

  def client(self) -> zmq.Socket:
    """A new DEALER, to be connected to a ROUTER of the run."""
    socket = self.context.socket(zmq.DEALER)
    if self._keys:
      socket.curve_publickey, socket.curve_secretkey = self._keys.own or self._keys[:2]
      # ROUTERs have the pair of the run
      socket.curve_serverkey = self._keys.public
    return socket

  def bind(
    self, address: str, longest: int, handler: Handler, *, closes_stalled: bool = False
  ) -> tuple[zmq.Socket, str]:
    """A ROUTER that is bound and listened to, and its address with the port.

    Args:
      address: as `check_address` allows it.
      longest: bytes of a message; the connection that sends a longer one is closed.
      handler: gets the frames of each message; the first one is the connection.
      closes_stalled: whether a connection is closed whose peer takes no byte for 5 s.
    """
    socket = self.context.socket(zmq.ROUTER)
    socket.maxmsgsize = longest
    # a message to a connection that is gone raises an error
    socket.router_mandatory = True
    if closes_stalled:
      socket.tcp_maxrt = _STALLED
      socket.sndhwm = 0  # no limit: the queue takes all chunks of a model at once
    if self._keys:
      socket.curve_publickey, socket.curve_secretkey = self._keys[:2]
      socket.curve_server = True
      socket.zap_domain = _DOMAIN.encode()
      if self._keys.workers:
        self._bound.add(socket)
    try:
      socket.bind(address)
    except zmq.ZMQError:
      self.close(linger=0)  # the caller's constructor fails: nobody else can close it
      raise
    self.listen(socket, handler)
    return socket, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

  def listen(self, socket: zmq.Socket, handler: Handler) -> None:
    """From now on messages of `socket` go to `handler`."""
    self._poller.register(socket, zmq.POLLIN)
    self._handlers[socket] = handler

  def forget(self, socket: zmq.Socket) -> None:
    """Closes a socket that it listens to."""
    self._poller.unregister(socket)
    del self._handlers[socket]
    socket.close(linger=0)

  def wait(self, seconds: float) -> None:
    """Waits for messages for at most `seconds`, then handles those that have arrived."""
    # At most `_MOST_AT_ONCE` messages of a socket are handled before those of the next:
    # else one sender could keep the others waiting.
    for socket, _ in self._poller.poll(round(1000 * seconds)):
      with contextlib.suppress(zmq.Again):  # raised when the socket is empty
        for _ in range(_MOST_AT_ONCE):
          if socket not in self._handlers:  # a handler has closed it
            break
          if frames := self._receive(socket):
            self._handlers[socket](frames)

  def _receive(self, socket: zmq.Socket) -> list[bytes]:
    """The frames of the next message; [] if it names another sender than the worker whose key has encrypted it.

    Processes of one worker have the same key, and name their parts to its lead: from
    this worker's own key every sender is taken.

    Raises:
      zmq.Again: if there is none.
    """
    if socket not in self._bound:
      return socket.recv_multipart(zmq.NOBLOCK)
    # `copy=False` gives frames in place of bytes: their property User-Id is the
    # client's public key. The first frame is the connection.
    received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    frames = [frame.bytes for frame in received]
    key = str(received[-1].get("User-Id")).encode()
    _, _, own, workers = self._keys  # type: ignore[misc]
    is_own = key in own[:1]
    return frames if is_own or sender_of(frames[1:]) == workers.index(key) else []

  def close(self, linger: int) -> None:
    """Closes all sockets; unsent messages are dropped after `linger` milliseconds."""
    if self._keys:
      self._guard.stop()
    self.context.destroy(linger)


def tell(router: zmq.Socket, connection: bytes, frame: bytes) -> bool:
  """Sends a frame by a ROUTER without waiting; False if the connection is gone, or its queue is full."""
  try:
    router.send_multipart([connection, frame], zmq.NOBLOCK)
  except zmq.ZMQError as error:
    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
      raise
    return False
  return True


class Peers:
  """Connections to other workers, by address; each is made when something is first sent there.

  Args:
    network: makes the sockets, and listens to them.
    longest: bytes of the longest message that is accepted from another worker.
    answered: is called with the address and the frames of every answer of another
      worker.
    lost: is called with the address when a connection is closed.

  Attributes:
    _peers: by address, a DEALER and its monitor, a socket that reports when the
      connection breaks.
    _sent: address and tracker of messages that ZeroMQ may not have sent yet.
  """

  def __init__(
    self,
    network: Network,
    longest: int,
    answered: Callable[[str, list[bytes]], None],
    lost: Callable[[str], None],
  ):
    self._network = network
    self._longest = longest
    self._answered = answered
    self._lost = lost
    self._peers = dict[str, tuple[zmq.Socket, zmq.Socket]]()
    self._sent: list[tuple[str, zmq.MessageTracker]] = []

  def send(self, address: str, piece: Piece) -> None:
    """Sends without waiting; closes the connection if its queue is full or the address is malformed.

    The values of the piece are not copied: nobody may change them, now or later.
    """
    try:
      socket, _ = self._peers.get(address) or self._connect(address)
      message = socket.send_multipart(piece.pack(), zmq.NOBLOCK, copy=False, track=True)
      # Drops messages that are sent; a worker that leaves waits for the others.
      # With `track=True` there is always a tracker, though the type also allows None.
      self._sent = [
        (to, sent)
        for to, sent in (*self._sent, (address, message))
        if sent and not sent.done
      ]
    except zmq.ZMQError:
      self.close(address)

  @property
  def sending(self) -> bool:
    """Whether messages are not sent yet to workers that take them."""
    # Messages by closed connections do not count: nobody takes them.
    return not all(message.done for to, message in self._sent if to in self._peers)

  def _connect(self, address: str) -> tuple[zmq.Socket, zmq.Socket]:
    """Connects to an address: its DEALER and the monitor; raises zmq.ZMQError if it is malformed."""
    socket = self._network.client()
    socket.maxmsgsize = self._longest
    socket.connect_timeout = socket.handshake_ivl = socket.tcp_maxrt = _STALLED
    # has a message when the connection breaks, or an attempt to make it has failed
    monitor = socket.get_monitor_socket(
      zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
    )
    # before `connect`, which may raise: then `close` finds both sockets
    self._peers[address] = socket, monitor
    self._network.listen(socket, functools.partial(self._answered, address))
    self._network.listen(monitor, lambda _: self.close(address))
    socket.connect(address)
    return self._peers[address]

  def close(self, address: str) -> None:
    """Closes the connection to an address, and calls `lost`; a later `send` makes another connection."""
    if address in self._peers:
      socket, monitor = self._peers.pop(address)
      socket.disable_monitor()
      self._network.forget(socket)
      self._network.forget(monitor)
    # also after `_connect` has failed to make the sockets
    self._lost(address)
