"""The messages of workers and their server as bytes: signals, answers, and pieces of models.

    worker ──> server    kind u8 | worker u16 | value i64 | RoundPosition i64 × 3 | digest i64 | missing i32
                         delivers i64
                         HELLO and NOT_FINITE: address, \\n, alike
    server ──> worker    kind u8 | JSON
                         GROUP: members and weights as runs, [first, length] of each, and the addresses that are new
    worker ──> worker    kind u8 | number i64 | sender u16 | tag u32         and in a second frame, 4-byte words

Integers are big-endian. Bytes are parsed strictly, numbers and sizes within bounds: the
server answers a malformed signal with the reason, a worker ignores a malformed piece,
and a malformed answer with a warning.
"""

import bisect
import contextlib
import enum
import functools
import itertools
import json
import math
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jaxsparse.partial.net import strict_json
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.strict_json import is_number, is_whole

_SIGNAL = struct.Struct("!BHqqqqqiq")  # kind, worker, and the numbers of `_BOUNDS`
_PIECE = struct.Struct("!BqHI")  # kind, number, sender, tag
_PIECE_WORDS = 128  # words of a piece in memory beside its values
_ADDRESS = re.compile(
  r"tcp://([\w.-]{1,200}|\[[\da-fA-F:.%\w]{2,60}\]):(\d{1,5})", re.ASCII
)
# bytes of a signal or a handshake; a connection that sends a longer message is closed
LONGEST = 1 << 21
# fields of GROUP that are sent as runs, and by how much neighbours in a run differ
_RUNS = {"members": 1, "weights": 0}
_MOST_NAMES = 20  # members of a group that a text names
MOST_MEMBERS = 2**16  # in a group: numbers of workers have 16 bits
MOST_ROUNDS = 2**40  # more than a run of a round a millisecond has in 30 years
_MOST = 2**63 - 1  # numbers of groups, and digests, have 62 bits
# the numbers of a signal after its kind and worker, in their order, and their bounds
_BOUNDS = {
  "value": (0, _MOST),
  "round": (0, MOST_ROUNDS),
  "base": (-1, _MOST),  # -1: parts of a worker have different ones
  "last": (0, _MOST),
  "digest": (0, _MOST),
  "missing": (-1, MOST_MEMBERS - 1),
  "delivers": (0, _MOST),
}
_LONGEST_ADDRESSES = 1 << 16  # characters of the addresses of a worker


Content = dict[str, Any]  # the fields of an answer, as JSON has them


class Rejected(ValueError):
  """A message that the server rejects, with the reason; its state has not changed."""


class WorkerGroup(NamedTuple):
  """Workers that exchange; in partial reduce each continues with Σ weights[i] · model[i] + initial · (initial model).

  Attributes:
    members: numbers of the workers, ascending.
    weights: weights of the members' models, or in rounds of their movements, in the
      order of `members`.
    iteration: in partial reduce the largest iteration of the members, from which all
      continue; in rounds the round, from 0.
    initial: weight of the model that training started from; 0 except for dynamic
      weights with `missing="initial"`.
    number: of the group, in messages.
    links: members that are links of rounds, and have moved something; ascending.
    leaving: members that leave rounds for good after this one; ascending.
  """

  members: tuple[int, ...]
  weights: tuple[float, ...]
  iteration: int
  initial: float = 0.0
  number: int = 0
  links: tuple[int, ...] = ()
  leaving: tuple[int, ...] = ()

  @classmethod
  def parse(cls, content: Content) -> Self:
    """The group in the fields of a GROUP answer, as `parse_answer` returns them."""
    # `members` and `weights` are tuples already, `links` and `leaving` lists of JSON.
    return cls(**{name: content[name] for name in cls._fields})._replace(
      links=tuple(content["links"]),
      leaving=tuple(content["leaving"]),
    )

  def has(self, worker: int) -> bool:
    """Whether a worker is a member."""
    # binary search: members are ascending, and may be 65,536
    index = bisect.bisect_left(self.members, worker)
    return self.members[index : index + 1] == (worker,)

  @property
  def names(self) -> str:
    """The members in words, at most the first 20 by number."""
    more = len(self.members) - _MOST_NAMES
    others = f" and {more} others" if more > 0 else ""
    return f"workers {', '.join(map(str, self.members[:_MOST_NAMES]))}{others}"

  @property
  def round(self) -> str:
    """The group of a round in words."""
    return f"round {self.iteration + 1} of {self.names}"


class WorkerMessage(enum.IntEnum):
  """The kinds of signals, from a worker to the server."""

  # joins; with the address for other workers, what all need alike, and for how long it
  # has asked for a model
  HELLO = 1
  # has done `value` iterations, or in rounds has steps of the weight `value`, and waits
  # for a group
  READY = 2
  # could not exchange with group `value`, for lack of a message of worker `missing`
  FAILED = 3
  BYE = 4  # leaves, and owes no piece to groups up to number `value`
  # heartbeat; in rounds `value` is the weight that the worker has trained for and not
  # delivered
  BEAT = 5
  # has done `value` iterations and waits for the average of all workers
  SYNCHRONIZE = 6
  # HELLO of a worker whose model is not finite: welcome once another worker has a model
  # for it
  NOT_FINITE = 7
  DONE = 8  # has the result of round `value`, with this `digest`
  # asks a server of rounds what it knows of the run; the sender need not be a worker
  STATUS = 9
  # DONE of a part of a worker, to the lead: the outer step of round `value` was skipped
  SKIPPED = 10
  ANSWERED = 11  # a part of a worker to the lead: has an answer for its training loop
  LINK = 12  # READY of a link that has moved something
  LEAVING = 13  # READY of a worker that leaves for good after this round
  LEAVING_LINK = 14  # LINK of one


LEAVING = {
  WorkerMessage.READY: WorkerMessage.LEAVING,
  WorkerMessage.LINK: WorkerMessage.LEAVING_LINK,
}
READY = {*LEAVING, *LEAVING.values()}  # the kinds that ask for a round


class ServerMessage(enum.IntEnum):
  """The kinds of answers, from the server to a worker."""

  # to HELLO; with the limit, and the address of the donor, a worker with the model to
  # start from
  WELCOME = 1
  # a `WorkerGroup` of which the worker is a member, with addresses that it has not been told
  GROUP = 2
  ABORT = 3  # a member of a group sends no more pieces to it; with the numbers of both
  BEAT = 4  # heartbeat; in rounds with the number of workers that are alive
  REJECTED = 5  # to a signal that is rejected; with the reason
  # all members have the result of a round; with its number and digest, and a donor for
  # another digest
  COMMIT = 6
  # to READY of a worker that has missed a round; with the address of a donor
  BEHIND = 7
  STATUS = 8  # to STATUS
  # the lead to another process of its worker: what is `next`, for round `number`, with
  # the reason
  FOLLOW = 9


class Next(enum.StrEnum):
  """What the processes of a worker do together."""

  GO = "go"  # the training loops go on from the anchor
  RESTART = "restart"  # their parameters are not finite
  LATER = "later"  # they train on, nothing is decided yet
  AGAIN = "again"  # their request is made once more
  SKIP = "skip"  # the outer step of a round is skipped, since one process has to
  LOST = "lost"  # they end: a process is lost


class PieceKind(enum.IntEnum):
  """The kinds of pieces, from a worker to another one."""

  # asks for the receiver's model; in rounds once that has been through round `number`,
  # with what `transfers` describes
  FETCH = 1
  MODEL = 2  # to FETCH, a chunk of f32[n]
  # the receiver's shard of the sender's model, for the average of group `number`
  PART = 3
  MEAN = 4  # the sender's shard of that average
  MESSAGE = 5  # `tag` of the sender to the receiver, in the round of group `number`
  WAITS = 6  # to FETCH, once a second while the model of the sender goes to others


class RoundPosition(NamedTuple):
  """How far a worker of rounds is.

  Attributes:
    round: the number of rounds that its anchor has been through.
    base: the number of the group of the last one; 0 before the first.
    last: the number of a group whose result the worker has, without knowing whether it
      counts, 0 for none.
  """

  round: int = 0
  base: int = 0
  last: int = 0

  def compare(self, newest: "RoundPosition") -> str:
    """In words, which anchor a worker that is behind has, and which the others have.

    Args:
      newest: the position of the others.

    Example:
      >>> RoundPosition(5, 17).compare(RoundPosition(6, 23))
      'it has the anchor of round 5, not that of round 6'
      >>> RoundPosition(5, 17).compare(RoundPosition(5, 23))
      'it has an anchor of another round 5 than the others, which does not count'
    """
    if self.base < 0:  # for a worker of several processes
      return f"its processes have different anchors, not that of round {newest.round}"
    if self.round == newest.round:
      return f"it has an anchor of another round {self.round} than the others, which does not count"
    return f"it has the anchor of round {self.round}, not that of round {newest.round}"


class Signal(NamedTuple):
  """A message of a worker to the server: `value` as `WorkerMessage` describes it.

  Attributes:
    address: in HELLO and NOT_FINITE, where other workers reach this one; of each of its
      processes, with commas.
    alike: in HELLO and NOT_FINITE, what all workers need alike.
    position: in rounds, of the sender.
    digest: in DONE the digest of the result, 62 bits; in other signals of a part of a
      worker that of the anchor that it has fetched.
    missing: in FAILED the member whose message is missing, or that cannot be reached;
      -1 for none.
    delivers: in READY the weight of the steps that are wholly delivered by the round.

  Example:
    >>> Signal(WorkerMessage.READY, 3, 17).pack()[:11].hex()
    '0200030000000000000011'
  """

  kind: WorkerMessage
  worker: int
  value: int = 0
  address: str = ""
  position: RoundPosition = RoundPosition()
  alike: Alike = Alike()
  digest: int = 0
  missing: int = -1
  delivers: int = 0

  def pack(self) -> bytes:
    """The bytes of this signal."""
    text = f"{self.address}\n{self.alike}" if self.address else ""
    numbers = _SIGNAL.pack(self.kind, self.worker, *self.numbers)
    return numbers + text.encode()

  @property
  def numbers(self) -> tuple[int, ...]:
    """The numbers after kind and worker, in the order of `_BOUNDS`."""
    return self.value, *self.position, self.digest, self.missing, self.delivers


_JOINING = WorkerMessage.HELLO, WorkerMessage.NOT_FINITE


class Answer(NamedTuple):
  """A message of the server to a worker."""

  kind: ServerMessage
  content: Content


class Piece(NamedTuple):
  """A message of a worker to another one.

  Attributes:
    kind: what it is.
    number: of the group whose exchange it belongs to; in FETCH how many rounds the
      model has to have been through; in MODEL the iteration of the model, or in rounds
      how many rounds it has been through; 0 in WAITS.
    sender: its number.
    values: its 4-byte words.
    tag: in MESSAGE which one of its sender it is; in MODEL how many chunks follow.

  Example:
    >>> parse_piece([bytes(frame) for frame in Piece(PieceKind.PART, 7, 3, np.ones(2, np.float32)).pack()])
    Piece(kind=<PieceKind.PART: 3>, number=7, sender=3, values=array([1., 1.], dtype=float32), tag=0)
  """

  kind: PieceKind
  number: int
  sender: int
  values: np.ndarray = np.empty(0, np.float32)
  tag: int = 0

  @property
  def words(self) -> int:
    """The 4-byte words of memory that this piece takes: of its values, and an estimate of the objects around them."""
    return self.values.size + _PIECE_WORDS

  def pack(self) -> list[bytes | memoryview]:
    """The frames of this piece; the second one is a view of `values`, not a copy."""
    return [
      _PIECE.pack(self.kind, self.number, self.sender, self.tag),
      self.values.data,
    ]


def parse_signal(frames: list[bytes]) -> Signal:
  """Parses a message of a worker to the server.

  Raises:
    Rejected: if it is not exactly one signal, or a number is outside its bounds.
  """
  try:
    # ValueError for any other number of frames
    (frame,) = frames
    head, text = frame[: _SIGNAL.size], frame[_SIGNAL.size :].decode()
    kind, worker, value, *position, digest, missing, delivers = _SIGNAL.unpack(head)
    address, newline, words = text.partition("\n")
    alike = Alike.parse(words) if newline else Alike()
    signal = Signal(
      WorkerMessage(kind),
      worker,
      value,
      address,
      RoundPosition(*position),
      alike,
      digest,
      missing,
      delivers,
    )
    # HELLO and NOT_FINITE need addresses; no other signal has a text.
    if not (_are_addresses(address) if kind in _JOINING else not text):
      raise ValueError(address)
  except (ValueError, struct.error) as error:
    shown = [frame[:60] for frame in frames[:2]]
    raise Rejected(f"malformed: {shown} is no signal") from error
  # Outside `try`: Rejected is a ValueError, and `except` would replace its reason.
  for (name, (least, most)), number in zip(
    _BOUNDS.items(), signal.numbers, strict=True
  ):
    if not least <= number <= most:
      raise Rejected(
        f"malformed: {name}={number} of worker {worker}, choose {least} … {most}"
      )
  return signal


def _are_addresses(text: str) -> bool:
  """Whether a text is the addresses of the processes of a worker, comma-separated, which other workers can parse."""
  if len(text) > _LONGEST_ADDRESSES:
    return False
  matches = [_ADDRESS.fullmatch(address) for address in text.split(",")]
  # group 2 is the port
  return all(match and 0 < int(match[2]) < 2**16 for match in matches)


def parse_piece(frames: list[bytes]) -> Piece | None:
  """The piece in a message of another worker, its values a read-only view of the message; None if it is no piece."""
  # ValueError unless there are two frames, a known kind, and whole 4-byte words
  with contextlib.suppress(ValueError, struct.error):
    head, content = frames
    kind, number, sender, tag = _PIECE.unpack(head)
    values = np.frombuffer(content, np.float32)
    return Piece(PieceKind(kind), number, sender, values, tag)
  return None


def sender_of(frames: list[bytes]) -> int | None:
  """The number of the worker that has sent a signal or a piece, as the message says; None for any other message.

  Example:
    >>> sender_of([Signal(WorkerMessage.READY, 3, 17).pack()]), sender_of([b"!"])
    (3, None)
  """
  if piece := parse_piece(frames):
    return piece.sender
  with contextlib.suppress(Rejected):
    return parse_signal(frames).worker
  return None


def _is_address(value: object) -> bool:
  """Whether a value is the addresses of one worker, or None."""
  return value is None or (isinstance(value, str) and _are_addresses(value))


def _are_donors(value: object) -> bool:
  """Whether a value is the addresses of donors with spaces between them, or None for no donor."""
  return value is None or (
    isinstance(value, str) and all(map(_are_addresses, value.split(" ")))
  )


def _are_workers(value: object) -> bool:
  """Whether a value is a list of 16-bit numbers."""
  return isinstance(value, list) and all(
    is_whole(number, most=MOST_MEMBERS - 1) for number in value
  )


def _are_sizes(value: Any) -> bool:
  """Whether a value is the smallest and the largest size of a group."""
  return _are_workers(value) and len(value) == 2 and 1 <= value[0] <= value[1]


def _are_runs(value: object) -> bool:
  """Whether a value is a list of [first value, length], as `_to_runs` returns it."""
  return isinstance(value, list) and all(
    isinstance(run, list)
    and len(run) == 2
    and is_number(run[0])
    and is_whole(run[1], least=1)
    for run in value
  )


def _are_addresses_of_workers(value: object) -> bool:
  """Whether a value is a JSON object from numbers of workers to their addresses, None for those that have left."""
  return isinstance(value, dict) and all(
    worker.isdecimal() and len(worker) <= 5 and _is_address(address)
    for worker, address in value.items()
  )


# by field of all answers but STATUS: whether a value is valid
_FIELDS: dict[str, Callable[[Any], bool]] = {
  "limit": lambda value: is_number(value) and value > 0,
  "most": lambda value: is_number(value) and value > 0,
  "grace": lambda value: is_number(value) and value >= 0,
  "sizes": _are_sizes,
  "donor": _are_donors,
  "number": is_whole,
  "round": functools.partial(is_whole, most=MOST_ROUNDS),
  "base": is_whole,
  # a part of a worker gets -1 if the parts have another one together
  "digest": functools.partial(is_whole, least=-1),
  "run": is_whole,
  "members": _are_runs,
  "weights": _are_runs,
  "links": _are_workers,
  "leaving": _are_workers,
  "iteration": is_whole,
  "initial": lambda value: is_number(value) and math.isfinite(value),
  "addresses": _are_addresses_of_workers,
  "worker": is_whole,
  "reason": lambda value: isinstance(value, str),
  "alive": is_whole,
  "next": lambda value: value in [*Next],
}
_LAST_ROUND = {"round", "base", "digest", "run"}  # fields that come together
_REQUIRED: dict[ServerMessage, set[str]] = {
  ServerMessage.WELCOME: {"limit", "donor"},
  ServerMessage.GROUP: {*WorkerGroup._fields, "addresses"},
  ServerMessage.ABORT: {"number"},
  ServerMessage.REJECTED: {"reason"},
  ServerMessage.COMMIT: {"number", "donor", *_LAST_ROUND},
  ServerMessage.BEHIND: {"donor", *_LAST_ROUND},
  ServerMessage.FOLLOW: {"next", "number", "reason"},
}


def pack_answer(kind: ServerMessage, **content: Any) -> bytes:
  """The bytes of an answer; `content` has its fields.

  Example:
    >>> pack_answer(ServerMessage.ABORT, number=3)
    b'\\x03{"number":3}'
  """
  # Short JSON: runs of consecutive members (step 1), and of equal weights (step 0).
  if kind == ServerMessage.GROUP:
    content |= {name: _to_runs(content[name], step) for name, step in _RUNS.items()}
  return bytes([kind]) + json.dumps(content, separators=(",", ":")).encode()


def parse_answer(frame: bytes) -> Answer:
  """Parses a message of the server.

  Raises:
    Rejected: if the frame is no answer, or a field is missing or outside its bounds.
  """
  try:
    kind = ServerMessage(frame[0])
    content = strict_json.parse(frame[1:])
    if not isinstance(content, dict):
      raise ValueError("no fields")
    # STATUS is for people and readers (`Follower`): its fields are not checked.
    if kind != ServerMessage.STATUS:
      _check_fields(kind, content)
    if kind == ServerMessage.GROUP:
      content = _parse_group(content)
  except (IndexError, ValueError) as error:
    raise Rejected(f"malformed: {frame[:60]!r} is no answer: {error}") from error
  return Answer(kind, content)


def _check_fields(kind: ServerMessage, content: Content) -> None:
  """Raises ValueError for a field that is missing or outside its bounds; unknown fields are allowed."""
  required = _REQUIRED.get(kind, set())
  # round, base, digest and run: one of these fields requires all of them
  if not content.keys().isdisjoint(_LAST_ROUND):
    required = required | _LAST_ROUND
  if missing := required - content.keys():
    raise ValueError(f"{kind.name} without {', '.join(sorted(missing))}")
  # `_FIELDS` has a function for each known field: whether a value is within bounds
  for name, value in content.items():
    if name in _FIELDS and not _FIELDS[name](value):
      raise ValueError(f"{name}={value!r:.60} in {kind.name}")


def _parse_group(content: Content) -> Content:
  """The fields of GROUP, with numbers in place of runs; raises ValueError where they do not fit each other."""
  # members rise by 1 in a run, weights are equal
  members, weights = (_from_runs(content[name], step) for name, step in _RUNS.items())
  is_ascending = all(map(operator.lt, members, members[1:]))
  if (
    not members or not is_ascending or not 0 <= members[0] <= members[-1] < MOST_MEMBERS
  ):
    raise ValueError("members are no ascending numbers of workers")
  if len(weights) != len(members) or not all(map(math.isfinite, weights)):
    raise ValueError("each member has a weight")
  # keys of JSON are strings
  addresses = {int(worker): address for worker, address in content["addresses"].items()}
  return content | {"members": members, "weights": weights, "addresses": addresses}


def _to_runs(values: Sequence[float], step: int) -> list[list[Any]]:
  """The first value and the length of each run of values that rise by `step`.

  Example:
    >>> _to_runs((3, 4, 5, 9), 1), _from_runs([[3, 3], [9, 1]], 1)
    ([[3, 3], [9, 1]], (3, 4, 5, 9))
  """
  # The key of an item (index, value) is constant as long as the values rise by `step`.
  runs = itertools.groupby(enumerate(values), lambda item: item[1] - step * item[0])
  return [[next(run)[1], 1 + sum(1 for _ in run)] for _, run in runs]


def _from_runs(runs: list[list[Any]], step: int) -> tuple[Any, ...]:
  """The inverse of `_to_runs`; raises ValueError for more than 65,536 values."""
  # checked before the tuple is made: a few bytes could ask for a huge one
  if sum(length for _, length in runs) > MOST_MEMBERS:
    raise ValueError(f"more than {MOST_MEMBERS} members")
  return tuple(
    first + step * index for first, length in runs for index in range(length)
  )
