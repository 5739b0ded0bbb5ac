"""Messages between workers and the server: signals of 11 bytes, answers in JSON; and the keys that protect them.

    worker ──> server    kind u8 | worker u16 | value i64, big-endian        HELLO: followed by the worker's address
    server ──> worker    kind u8 | JSON

A signal is parsed strictly: any other bytes are rejected with a reason, and change nothing.
"""

import enum
import ipaddress
import json
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import zmq

from jaxsparse.partial.controller import Rejected

LOOPBACK = "tcp://127.0.0.1:*"
_SIGNAL = struct.Struct("!BHq")
_ADDRESS = re.compile(r"tcp://([\w.-]{1,200}|\[[\da-fA-F:.%\w]{2,60}\]):(\d{1,5})", re.ASCII)
LONGEST = 4096  # bytes of a signal or a handshake; a connection that sends a longer message is closed


class Says(enum.IntEnum):
  """The kinds of signals, from a worker to the server.

  Attributes:
    HELLO: the worker joins, with a model of `value` entries; the address for other workers follows.
    READY: it has done `value` iterations and is ready to average with a group.
    FAILED: it could not average with group `value`.
    BYE: it leaves, and owes no piece to groups up to number `value`.
    BEAT: heartbeat; value 0.
    SYNCHRONIZE: it has done `value` iterations and waits for the average of all workers.
    NOT_FINITE: its model is not finite, and it needs the model of another worker; value 0.

  Example:
    >>> Says(2).name
    'READY'
  """

  HELLO = 1
  READY = 2
  FAILED = 3
  BYE = 4
  BEAT = 5
  SYNCHRONIZE = 6
  NOT_FINITE = 7


class Answer(enum.IntEnum):
  """The kinds of answers, from the server to a worker.

  Attributes:
    WELCOME: answers HELLO, and NOT_FINITE if another worker has a model; with the limit, and the donor's address.
    GROUP: a group of which the worker is a member, with the addresses of all members.
    ABORT: a member of a group sends no more pieces to it; with the numbers of both.
    BEAT: heartbeat; answers BEAT, and is sent periodically.
    REJECTED: answers a signal that is rejected; with the reason.
    PROBE: asks for BEAT at once, since another connection sends HELLO with this worker's number.

  Example:
    >>> Answer(5).name
    'REJECTED'
  """

  WELCOME = 1
  GROUP = 2
  ABORT = 3
  BEAT = 4
  REJECTED = 5
  PROBE = 6


class Signal(NamedTuple):
  """A message of a worker to the server.

  Attributes:
    says: its kind.
    worker: the sender's number.
    value: see `Says`.
    address: where other workers reach the sender; for HELLO only.

  Example:
    >>> Signal(Says.READY, 3, 17).packed().hex()
    '0200030000000000000011'
  """

  says: Says
  worker: int
  value: int = 0
  address: str = ""

  def packed(self) -> bytes:
    """The bytes of this signal."""
    return _SIGNAL.pack(self.says, self.worker, self.value) + self.address.encode()


def parse(frames: list[bytes]) -> Signal:
  """Parses a message of a worker.

  Raises:
    Rejected: if it is not exactly one signal.

  Example:
    >>> parse([bytes.fromhex("0200030000000000000011")])
    Signal(says=<Says.READY: 2>, worker=3, value=17, address='')
  """
  if len(frames) != 1:
    raise Rejected(f"malformed: a message of {len(frames)} frames, send one")
  (frame,) = frames
  if len(frame) < _SIGNAL.size:
    raise Rejected(f"malformed: {len(frame)} bytes, a signal has {_SIGNAL.size}")
  kind, worker, value = _SIGNAL.unpack_from(frame)
  if kind not in set(Says):
    raise Rejected(f"malformed: a signal of kind {kind}, choose from {', '.join(f'{s} ({s.name})' for s in Says)}")
  rest = frame[_SIGNAL.size :]
  if kind != Says.HELLO and rest:
    raise Rejected(f"malformed: {len(frame)} bytes, {Says(kind).name} has {_SIGNAL.size}")
  if kind in (Says.BEAT, Says.NOT_FINITE) and value:
    raise Rejected(f"malformed: {Says(kind).name} with value {value}, send 0")
  try:
    address = rest.decode("ascii")
  except UnicodeDecodeError:
    raise Rejected("malformed: HELLO with an address that is not ASCII") from None
  if kind == Says.HELLO and not _can_be_reached(address):
    raise Rejected(f"malformed: HELLO with address {address[:40]!r}, send tcp://HOST:PORT")
  return Signal(Says(kind), worker, value, address)


def _can_be_reached(address: str) -> bool:
  """Whether an address is well-formed; the server hands it to other workers, which must be able to parse it."""
  found = _ADDRESS.fullmatch(address)
  return found is not None and 0 < int(found[2]) < 2**16


def answer(kind: Answer, **content: Any) -> bytes:
  """The bytes of an answer.

  Example:
    >>> answer(Answer.ABORT, number=3)
    b'\\x03{"number":3}'
  """
  return bytes([kind]) + json.dumps(content, separators=(",", ":")).encode()


def parse_answer(frame: bytes) -> tuple[Answer, dict[str, Any]]:
  """Parses a message of the server.

  Example:
    >>> parse_answer(answer(Answer.ABORT, number=3))
    (<Answer.ABORT: 3>, {'number': 3})
  """
  return Answer(frame[0]), json.loads(frame[1:])


class Keys(NamedTuple):
  """A CURVE key pair that the server and all workers of a run share; make it with `js.partial.make_keys`.

  Attributes:
    public: 40 characters (Z85).
    secret: 40 characters; anybody who has it can join the run.

  Example:
    >>> import jaxsparse as js
    >>> len(js.partial.make_keys().secret)
    40
  """

  public: bytes
  secret: bytes


def make_keys() -> Keys:
  """Makes a key pair for a run; pass it to the workers as secretly as a password.

  Example:
    >>> make_keys() == make_keys()
    False
  """
  return Keys(*zmq.curve_keypair())


def write_keys(keys: Keys, path: str | os.PathLike[str]) -> None:
  """Writes keys to a new file that only its owner can read.

  Raises:
    FileExistsError: if the file exists: a run may be using it.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   write_keys(make_keys(), f"{folder}/keys")
    ...   len(read_keys(f"{folder}/keys").public)
    40
  """
  with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
    file.write(b"%s %s\n" % keys)


def read_keys(path: str | os.PathLike[str]) -> Keys:
  """Reads keys from a file that `write_keys`, or `python -m jaxsparse.partial --keys=FILE`, has written.

  Raises:
    ValueError: if the file holds anything else.

  Example:
    >>> read_keys("/dev/null")
    Traceback (most recent call last):
    ...
    ValueError: /dev/null holds no keys, python -m jaxsparse.partial --keys=FILE writes some to a new file
  """
  words = pathlib.Path(path).read_bytes().split()
  if [len(word) for word in words] != [40, 40]:
    raise ValueError(f"{path} holds no keys, python -m jaxsparse.partial --keys=FILE writes some to a new file")
  return Keys(*words)


def check_address(address: str, keys: Keys | None, *, reachable: bool = False) -> None:
  """Raises ValueError for an address that other machines can reach without keys, or that is malformed.

  Without keys, anybody who reaches the address could join the run and read the parameters.

  Args:
    address: `tcp://HOST:PORT`.
    keys: of the run, if there are any.
    reachable: whether the address is handed to other workers, so that HOST has to name one interface.

  Raises:
    ValueError: see above.

  Example:
    >>> check_address("tcp://127.0.0.1:*", None)
    >>> check_address("tcp://*:2900", None)
    Traceback (most recent call last):
    ...
    ValueError: tcp://*:2900 can be reached from other machines: give keys=js.partial.make_keys(), the same to all
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
    raise ValueError(f"{address} can be reached from other machines: give keys=js.partial.make_keys(), the same to all")


def secure(socket: zmq.Socket, keys: Keys | None, *, serves: bool) -> zmq.Socket:
  """Makes a socket encrypt, and authenticate its peers by the keys of the run; without keys, does nothing."""
  if keys:
    socket.curve_publickey, socket.curve_secretkey = keys
    if serves:
      socket.curve_server = True
      socket.zap_domain = b"jaxsparse"  # so that `Guard` authenticates clients
    else:
      socket.curve_serverkey = keys.public
  return socket


def endpoint(socket: zmq.Socket) -> str:
  """The address that a socket is bound to, with the port.

  Example:
    >>> with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
    ...   _ = socket.bind(LOOPBACK)
    ...   endpoint(socket).startswith("tcp://127.0.0.1:")
    True
  """
  name = socket.get(zmq.LAST_ENDPOINT)
  assert isinstance(name, bytes)
  return name.rstrip(b"\0").decode()


class Guard:
  """Admits only clients with the keys of the run to the sockets of a context (ZMTP's ZAP); a thread of its own."""

  def __init__(self, context: zmq.Context, keys: Keys | None):
    self._keys, self._thread = keys, None
    if keys:
      from zmq.auth.thread import ThreadAuthenticator

      self._thread = ThreadAuthenticator(context)
      self._thread.start()
      self._thread.configure_curve_callback(domain="jaxsparse", credentials_provider=self)

  def callback(self, domain: str, key: bytes) -> bool:
    """Whether a client with this public key is admitted."""
    del domain
    return self._keys is not None and key == self._keys.public

  def stop(self) -> None:
    """Stops the thread."""
    if self._thread:
      self._thread.stop()
