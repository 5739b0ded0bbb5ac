"""The messages of one exchange: what the outer step's program sends, waits for and receives."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxsparse.comm.peers import Message
from jaxsparse.partial.net.messages import Piece, PieceKind, WorkerGroup
from jaxsparse.partial.rounds.outer_step import Result

_LOG = logging.getLogger(__name__)


class Done(NamedTuple):
  """Event: the exchange of a group has ended; `digest` is that of its result, None without one."""

  group_number: int
  digest: int | None


class Outgoing(NamedTuple):
  """Event: the exchange of a round sends a piece to a member."""

  member: int
  piece: Piece


class Run:
  """The messages of one exchange: the program of the outer step sends and waits.

  After `fail` nothing is sent, and zeros are received at once, so that the program
  ends; its result is dropped.

  Args:
    group: of the round.
    worker: its number.
    post: gives the protocol an event.
    room: words of each member that may wait for the program to ask for them; more are
      forged, and would fill memory.

  Attributes:
    digest: of the result, 0 until the exchange is done.
    result: of the outer step, None until it is done.
    failed: whether the exchange has ended without a result.
    missing: the member whose message it waits for, -1 for none.
    _changed: guards and signals `failed` and `_received`, which another thread, that of
      the protocol, changes.
    _received: pieces for which the program has not asked yet, by sender and tag.
    _room: by member the words of its pieces that may be added to `_received`.
    _tag: number of the last message of the program.
  """

  def __init__(
    self,
    group: WorkerGroup,
    worker: int,
    post: Callable[[Done | Outgoing], object],
    room: int = sys.maxsize,
  ):
    self.group = group
    self.digest = 0
    self.result: Result | None = None
    self.failed = False
    self.missing = -1
    self._me = worker  # its number, not its rank
    self._post = post
    self._changed = threading.Condition()
    self._received: dict[tuple[int, int], Piece] = {}  # by sender and tag
    self._room = dict.fromkeys(group.members, room)
    self._tag = 0  # number of the program's last message

  @property
  def skipped(self) -> bool:
    """Whether the exchange is done, and the outer step was skipped."""
    return self.result is not None and self.result.skipped

  def receive(self, piece: Piece) -> None:
    """Takes a piece of a member; the thread of the protocol calls it."""
    with self._changed:
      key = piece.sender, piece.tag
      is_new = piece.kind == PieceKind.MESSAGE and key not in self._received
      # no room for a sender that is no member
      if is_new and piece.words <= self._room.get(piece.sender, -1):
        self._room[piece.sender] -= piece.words
        self._received[key] = piece
        self._changed.notify()

  def fail(self) -> None:
    """Ends the exchange without a result."""
    with self._changed:
      self.failed = True
      self._changed.notify()

  def exchange(self, messages: Sequence[Message]) -> list[np.ndarray]:
    """Sends messages of the program, and returns those received, as `PeerComm.send`.

    Args:
      messages: (words, destination, source) each: u32[m] for the member of rank
        `destination`, and the rank of the member that sends u32[m] here; None: nobody.
        All members number their messages alike: equal numbers are matched.
    """
    first = self._tag + 1
    members = self.group.members
    self._tag += len(messages)
    for tag, (words, destination, _) in enumerate(messages, start=first):
      if (
        destination is not None and members[destination] != self._me and not self.failed
      ):
        values = np.array(words).view(np.float32)  # XLA reuses the buffer of a callback
        self._post(
          Outgoing(
            members[destination],
            Piece(PieceKind.MESSAGE, self.group.number, self._me, values, tag),
          )
        )
    # All messages are sent before one is awaited, or members would wait for each other.
    return [
      self._receive(words, source, tag)
      for tag, (words, _, source) in enumerate(messages, start=first)
    ]

  def _receive(self, words: np.ndarray, source: int | None, tag: int) -> np.ndarray:
    """u32[m] words from a member; `words` where it is this worker, zeros without a source or after a failure.

    Args:
      words: u32[m], what this worker sends in this message: as many come back.
      source: rank of the member in the group; None for no one.
      tag: number of the message.
    """
    if source is None:
      return np.zeros_like(words)
    key = self.group.members[source], tag  # the sender's number, not its rank
    if key[0] == self._me:
      return words
    with self._changed:
      self.missing = key[0]
      self._changed.wait_for(lambda: self.failed or key in self._received)
      self.missing = -1
      piece = self._received.pop(key, None)
      # The piece waits no longer: its words are free for others of its sender.
      if piece:
        self._room[key[0]] += piece.words
    if piece and piece.values.size == words.size:
      return piece.values.view(np.uint32)
    if piece:
      _LOG.warning(
        f"worker {key[0]} sent {piece.values.size} words instead of {words.size} in a round: "
        "do all workers have the same outer chain and the same version of jaxsparse?"
      )
    # `fail` was called, or the sender has another program: the result would be wrong.
    self.failed = True
    return np.zeros_like(words)
