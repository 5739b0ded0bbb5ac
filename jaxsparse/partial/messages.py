"""The messages of partial reduce as bytes: signals, answers, and pieces of models.

    worker ──> server    kind u8 | worker u16 | value i64 | Stand i64 × 3    HELLO, NOT_FINITE: address, \\n, alike
    server ──> worker    kind u8 | JSON
    worker ──> worker    kind u8 | number i64 | sender u16 | tag u32         and in a second frame, 4-byte words

Integers are big-endian.

Bytes are parsed strictly. The server answers a malformed signal with the reason, a worker ignores a malformed piece.
"""

import contextlib
import enum
import json
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.partial.alike import Alike
from jaxsparse.partial.controller import Rejected

_SIGNAL, _PIECE = struct.Struct("!BHqqqq"), struct.Struct("!BqHI")
_ADDRESS = re.compile(r"tcp://([\w.-]{1,200}|\[[\da-fA-F:.%\w]{2,60}\]):(\d{1,5})", re.ASCII)
LONGEST = 1 << 21  # bytes of a signal or a handshake; a connection that sends a longer message is closed


class Says(enum.IntEnum):
  """The kinds of signals, from a worker to the server.

  Attributes:
    HELLO: the worker joins; the address for other workers follows, and what all workers need alike.
    READY: it has done `value` iterations and is ready to average with a group. In rounds `value` is the weight of a
      step.
    FAILED: it could not average with group `value`. In rounds with the member whose message is missing.
    BYE: it leaves, and owes no piece to groups up to number `value`.
    BEAT: heartbeat.
    SYNCHRONIZE: it has done `value` iterations and waits for the average of all workers.
    NOT_FINITE: HELLO of a worker whose model is not finite: it is welcome once another worker has a model for it.
    DONE: it has the result of round `value`, and its digest.
  """

  HELLO = 1
  READY = 2
  FAILED = 3
  BYE = 4
  BEAT = 5
  SYNCHRONIZE = 6
  NOT_FINITE = 7
  DONE = 8


class Answer(enum.IntEnum):
  """The kinds of answers, from the server to a worker.

  Attributes:
    WELCOME: answers HELLO; with the limit, and if another worker has a trained model, its address as the donor.
    GROUP: a group of which the worker is a member, with the addresses of all members.
    ABORT: a member of a group sends no more pieces to it; with the numbers of both.
    BEAT: heartbeat; in rounds with the number of workers that are alive.
    REJECTED: answers a signal that is rejected; with the reason.
    COMMIT: all members have the result of a round; with its number and digest, and a donor for those of another digest.
    BEHIND: answers READY of a worker that has missed a round; with the address of a donor.
  """

  WELCOME = 1
  GROUP = 2
  ABORT = 3
  BEAT = 4
  REJECTED = 5
  COMMIT = 6
  BEHIND = 7


class Kind(enum.IntEnum):
  """The kinds of pieces, from a worker to another one.

  Attributes:
    FETCH: asks for the receiver's model, without values; in rounds number is that of the rounds it has been through.
    MODEL: answers FETCH; number is the model's iteration, values are f32[n].
    PART: the receiver's shard of the sender's model, for the average of group `number`.
    MEAN: the sender's shard of that average.
    MESSAGE: message `tag` of the sender to the receiver in round `number`.
    RESIDUAL: the residual of a worker that leaves rounds, for the receiver to take over.
    TAKEN: answers RESIDUAL; number is 1 if the receiver has taken it over, else 0.
  """

  FETCH = 1
  MODEL = 2
  PART = 3
  MEAN = 4
  MESSAGE = 5
  RESIDUAL = 6
  TAKEN = 7


class Stand(NamedTuple):
  """Where a worker of rounds stands.

  Attributes:
    round: the number of rounds that its anchor has been through.
    base: the number of the group of the last one; 0 before the first.
    last: the number of a group whose result the worker has, without knowing whether it counts, 0 for none. In DONE the
      digest of the result. In FAILED 1 + the number of the member whose message is missing, 0 for none.
  """

  round: int = 0
  base: int = 0
  last: int = 0


class Signal(NamedTuple):
  """A message of a worker to the server: `value` as `Says` describes it; HELLO and NOT_FINITE have the rest.

  Attributes:
    address: where other workers reach this one.
    alike: what all workers need alike.

  Example:
    >>> Signal(Says.READY, 3, 17).pack()[:11].hex()
    '0200030000000000000011'
  """

  says: Says
  worker: int
  value: int = 0
  address: str = ""
  stand: Stand = Stand()
  alike: Alike = Alike()

  def pack(self) -> bytes:
    """The bytes of this signal."""
    text = f"{self.address}\n{self.alike}" if self.address else ""
    return _SIGNAL.pack(self.says, self.worker, self.value, *self.stand) + text.encode()


class ServerMessage(NamedTuple):
  """A message of the server to a worker."""

  kind: Answer
  content: dict[str, Any]


class Piece(NamedTuple):
  """A message of a worker to another one.

  Example:
    >>> parse_piece([bytes(frame) for frame in Piece(Kind.PART, 7, 3, np.ones(2, np.float32)).pack()])
    Piece(kind=<Kind.PART: 3>, number=7, sender=3, values=array([1., 1.], dtype=float32), tag=0)
  """

  kind: Kind
  number: int
  sender: int
  values: np.ndarray = np.empty(0, np.float32)
  tag: int = 0

  def pack(self) -> list[Any]:
    """The frames of this piece, without copying the values."""
    return [_PIECE.pack(self.kind, self.number, self.sender, self.tag), self.values.data]


def parse_signal(frames: list[bytes]) -> Signal:
  """Parses a message of a worker to the server.

  Raises:
    Rejected: if it is not exactly one signal.
  """
  with contextlib.suppress(ValueError, struct.error):
    (frame,) = frames
    kind, worker, value, *stand = _SIGNAL.unpack(frame[: _SIGNAL.size])
    address, newline, alike = frame[_SIGNAL.size :].decode().partition("\n")
    signal = Signal(Says(kind), worker, value, address, Stand(*stand), Alike.parse(alike) if newline else Alike())
    found = _ADDRESS.fullmatch(signal.address)  # the server hands it to other workers, which must be able to parse it
    if (found and 0 < int(found[2]) < 2**16) if kind in (Says.HELLO, Says.NOT_FINITE) else not signal.address:
      return signal
  raise Rejected(f"malformed: {frames!r:.100} is no signal")


def parse_piece(frames: list[bytes]) -> Piece | None:
  """The piece in a message of another worker; None for any other message."""
  if len(frames) != 2 or len(frames[0]) != _PIECE.size or len(frames[1]) % 4:
    return None
  kind, number, sender, tag = _PIECE.unpack(frames[0])
  return Piece(Kind(kind), number, sender, np.frombuffer(frames[1], np.float32), tag) if kind in set(Kind) else None


def sender_of(frames: list[bytes]) -> int | None:
  """The number of the worker that a signal or a piece says it is of; None for any other message.

  Example:
    >>> sender_of([Signal(Says.READY, 3, 17).pack()]), sender_of([b"!"])
    (3, None)
  """
  if piece := parse_piece(frames):
    return piece.sender
  with contextlib.suppress(Rejected):
    return parse_signal(frames).worker
  return None


def pack_answer(kind: Answer, **content: Any) -> bytes:
  """The bytes of an answer.

  Example:
    >>> pack_answer(Answer.ABORT, number=3)
    b'\\x03{"number":3}'
  """
  return bytes([kind]) + json.dumps(content, separators=(",", ":")).encode()


def parse_answer(frame: bytes) -> ServerMessage:
  """Parses a message of the server."""
  return ServerMessage(Answer(frame[0]), json.loads(frame[1:]))
