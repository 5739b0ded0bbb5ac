"""Runs the exchanges of a worker of rounds in a thread of its own, while its device computes."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays.flatten import all_finite
from jaxsparse.comm.peers import Message
from jaxsparse.partial.net.messages import (
  LEAVING,
  MOST_MEMBERS,
  Group,
  Piece,
  PieceKind,
  RoundPosition,
  WorkerMessage,
)
from jaxsparse.partial.rounds import leaving, links
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep, Result
from jaxsparse.transform.fragments import fill_zeros

_LOG = logging.getLogger(__name__)
_FIRST = 3  # sizes of groups for which a worker compiles before the first round
_all_finite = jax.jit(all_finite)
_any = jax.jit(
  lambda tree: jnp.array([jnp.any(leaf) for leaf in jax.tree.leaves(tree)]).any()
)


class Done(NamedTuple):
  """Event: the exchange of round `number` has ended; `digest` is that of its result, None without one."""

  number: int
  digest: int | None


class Send(NamedTuple):
  """Event: the exchange of a round sends a piece to a member."""

  member: int
  piece: Piece


class Forked(ValueError):
  """The anchor that a worker was started with is of a branch of rounds that the others are not on."""


class Run:
  """The messages of one exchange: the program of the outer step sends and waits.

  After `fail` nothing is sent, and zeros are received at once, so that the program
  ends; its result is dropped.

  Args:
    group: of the round.
    number: of this worker.
    post: gives the protocol an event.
    room: words of each member that may wait for the program to ask for them; more are
      forged, and would fill memory.

  Attributes:
    digest: of the result, 0 until the exchange is done.
    result: of the outer step, None until it is done.
    failed: whether the exchange has ended without a result.
    missing: the member whose message it waits for, None for none.
  """

  def __init__(
    self,
    group: Group,
    number: int,
    post: Callable[[Any], object],
    room: int = sys.maxsize,
  ):
    self.group = group
    self.digest = 0
    self.result: Result | None = None
    self.failed = False
    self.missing: int | None = None
    self._me = number
    self._post = post
    self._changed = threading.Condition()
    self._received: dict[tuple[int, int], Piece] = {}  # by sender and tag
    self._room = dict.fromkeys(group.members, room)
    self._tag = 0

  @property
  def skipped(self) -> bool:
    """Whether the exchange is done, and the outer step was skipped."""
    return self.result is not None and self.result.skipped

  def receive(self, piece: Piece) -> None:
    """Takes a piece of a member."""
    with self._changed:
      key = piece.sender, piece.tag
      is_new = piece.kind == PieceKind.MESSAGE and key not in self._received
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
    """Messages of the program, as `PeerComm.send`; they are numbered alike at all members."""
    first = self._tag + 1
    members = self.group.members
    self._tag += len(messages)
    for tag, (words, destination, _) in enumerate(messages, start=first):
      if (
        destination is not None and members[destination] != self._me and not self.failed
      ):
        values = np.array(words).view(np.float32)  # XLA reuses the buffer of a callback
        self._post(
          Send(
            members[destination],
            Piece(PieceKind.MESSAGE, self.group.number, self._me, values, tag),
          )
        )
    return [
      self._receive(words, source, tag)
      for tag, (words, _, source) in enumerate(messages, start=first)
    ]

  def _receive(self, words: np.ndarray, source: int | None, tag: int) -> np.ndarray:
    """As many words from a member; those given where that is this one, zeros where there are none."""
    if source is None:
      return np.zeros_like(words)
    key = self.group.members[source], tag
    if key[0] == self._me:
      return words
    with self._changed:
      self.missing = key[0]
      self._changed.wait_for(lambda: self.failed or key in self._received)
      self.missing = None
      piece = self._received.pop(key, None)
      if piece:
        self._room[key[0]] += piece.words
    if piece and piece.values.size == words.size:
      return piece.values.view(np.uint32)
    if piece:
      _LOG.warning(
        f"worker {key[0]} sent {piece.values.size} words instead of {words.size} in a round: "
        "do all workers have the same outer chain and the same version of jaxsparse?"
      )
    self.failed = True
    return np.zeros_like(words)


class Exchanger:
  """The anchor of a worker, and its exchanges, one at a time.

  Args:
    outer: the outer step; also an attribute.
    anchor: before the first round.
    number: of this worker.
    is_link: whether it is a link; also an attribute.
    is_restored: whether the anchor is that of a saved state.

  Attributes:
    anchor: after the last round that counted.
    group: of the last round that counted.
    given: θ − θ_w, what this worker gives in the next round.
    delivered: the result of the last round of this worker that counted.
    is_final: whether this worker leaves for good.
    returned: movement of a revoked round, to give again.
    is_stale: whether this worker was in rounds after its state was saved, so that
      nothing of the state but its anchor is left.
  """

  def __init__(
    self,
    outer: OuterStep,
    anchor: Anchor,
    number: int,
    is_link: bool = False,
    is_restored: bool = False,
  ):
    self.outer = outer
    self.anchor = anchor
    self.group = Group((), (), 0)
    self.given = anchor.params
    self.delivered: Result | None = None
    self.is_final = False
    self.is_link = is_link
    self.returned: Any = None
    self.is_stale = False
    self._is_restored = is_restored
    self._number = number
    self._sizes = 1, 1
    self._before: tuple[Anchor, Any] | None = (
      None  # the anchor before the last round, and what was given in it
    )
    self._run: Run | None = None
    self._base = anchor  # before that exchange
    self._thread = futures.ThreadPoolExecutor(1)
    self._compiler = futures.ThreadPoolExecutor(1)
    # gives the protocol an event; to be set before the first exchange
    self.post: Callable[[Any], None]

  @property
  def lineage(self) -> tuple[int, ...]:
    """The ids of the last rounds of the anchor."""
    return self.anchor.lineage.ids

  def begin(self, group: Group) -> Run:
    """Starts the exchange of a group."""
    entries = sum(leaf.size for leaf in jax.tree.leaves(self.anchor.params))
    run = self._run = Run(
      group, self._number, self.post, room=4 * entries + MOST_MEMBERS
    )
    self._base = self.anchor
    self._thread.submit(self._exchange, run, self.anchor, self.given)
    return run

  def _exchange(self, run: Run, anchor: Anchor, given: Any) -> None:
    group = run.group
    rank = group.members.index(self._number)
    try:
      size = len(group.members)
      # a link gives all by itself
      weight = 0.0 if self.is_link else group.weights[rank]
      result = self.outer.run(
        anchor, given, weight, size, rank, group.number, run.exchange
      )
      result = links.add_moved(
        self.outer, anchor, result, given, group, rank, run.exchange
      )
      result = leaving.pass_residuals(self.outer, result, group, rank, run.exchange)
      if not result.skipped:
        moved = result.anchor.has_moved(group.members, group.number)
        result = result._replace(anchor=moved)
      run.result = result
      run.digest = self.outer.digest(run.result.anchor)
      self.post(Done(group.number, None if run.failed else run.digest))
    except Exception as error:  # raised by the training loop
      self.post(error)

  def skip(self) -> int:
    """The outer step of the exchange that is done is skipped after all; the digest of the result."""
    run = self._run
    assert run
    assert run.result
    if not run.skipped:
      run.result = self.outer.skip(self._base, run.result)
      run.digest = self.outer.digest(run.result.anchor)
    return run.digest

  def commit(self) -> RoundPosition:
    """The result of the exchange that is done counts."""
    run = self._run
    assert run is not None
    assert run.result is not None
    if run.skipped:
      _LOG.warning(
        f"worker {self._number}: {run.group.round} is skipped: "
        "the sum of what they gave, or the outer step, is not finite"
      )
    self._before = self.anchor, self.given
    self.anchor = run.result.anchor
    self.delivered = run.result
    self.group = run.group
    self._is_restored = False
    # of the group if a worker is lost, or joins
    for size in (
      self.anchor.size - 1,
      self.anchor.size + 1,
    ):
      self._compiler.submit(self._compile, size)
    return self.anchor.position

  def go_back(self) -> RoundPosition:
    """The result that has counted last differs from that of most members: the anchor is again that before."""
    assert self._before is not None
    before, _ = self._before
    self.anchor = self.outer.with_residual(before, self.anchor)
    return self.anchor.position

  def drop(self) -> None:
    """The exchange that was begun last counts for nobody."""
    if self._run:
      self._run.fail()

  def was_committed(self, model: Piece, position: RoundPosition) -> bool | None:
    """Whether the donor's anchor includes round `position.last`; None if the donor cannot know it yet.

    Raises:
      ValueError: for an anchor of another model.
    """
    anchor = self._unpack(model)
    if anchor.position.round < position.round or anchor.position[:2] == position[:2]:
      return None
    after = self.anchor.lineage.after(position.last)
    # taken for granted if it is too long ago
    is_there = anchor.lineage.at(after.round) in (None, after.id)
    return is_there and anchor.position.round >= after.round

  def _unpack(self, model: Piece) -> Anchor:
    try:
      return self.outer.unpack(model.values.tobytes(), self.anchor)
    except TypeError as error:  # of a header that is none
      raise ValueError(str(error)) from error

  def digest(self) -> int:
    """Of the anchor, as that of the result of its last round."""
    return self.outer.digest(self.anchor)

  def adopt(self, model: Piece, base: int, digest: int) -> RoundPosition:
    """Takes the anchor of a donor; the residual of this worker stays, and what it gives.

    Raises:
      ValueError: for an anchor that is older, or that of round `base` with another
        digest than this one, unless that is not above 0, or of another model.
      Forked: if this worker was started with an anchor of another branch.
    """
    anchor = self._unpack(model)
    position = anchor.position
    if (
      digest > 0
      and position.base == base
      and (found := self.outer.digest(anchor)) != digest
    ):
      raise ValueError(
        f"its digest is {found:x}, that of round {position.round} is {digest:x}"
      )
    own = self.anchor
    if position.round < own.position.round and own.lineage.includes(anchor.lineage):
      raise ValueError(
        f"it is that of round {position.round}, before round {own.position.round} of this worker's"
      )
    if anchor.lineage.conflicts(own.lineage):
      anchor = self._change_branch(anchor)
    if anchor.own != anchor.latest.get(self._number, 0):
      anchor = self._drop_residual(anchor)
    self.anchor = anchor
    self._is_restored = False
    return anchor.position

  def _change_branch(self, anchor: Anchor) -> Anchor:
    """`anchor`, of rounds that this worker's has not been through, which has been through others.

    Where that is the last one alone, it is undone: what was given is given again.
    """
    if self._is_restored:
      was = self.anchor.position.round
      raise Forked(
        f"worker {self._number}: the state is that of round {was} of another branch of this run, of which the others "
        f"know nothing: they have been through other rounds, and are at round {anchor.position.round}. Start this "
        "worker without a state, or all workers from states of the same branch"
      )
    if not self._before:
      return anchor
    before, given = self._before
    if anchor.lineage.conflicts(before.lineage):
      return anchor
    result = self.delivered
    # else the training loop still has what was not delivered
    if result and not result.skipped:
      self.returned = fill_zeros(
        given, self.outer.fragments.part(given, result.fragment)
      )
    self._before = None
    return self.outer.with_residual(anchor, before)

  def _drop_residual(self, anchor: Anchor) -> Anchor:
    """`anchor` without the residual of this worker, which was in other rounds after those of its own anchor."""
    latest = anchor.latest.get(self._number, 0)
    if not anchor.own and not self._is_restored:  # it is new
      return anchor._replace(own=latest)
    self.is_stale = self._is_restored
    what = (
      "its state is of an older round than its last one: the residual and the movement in it"
      if self._is_restored
      else "rounds that it was in do not count for the others: its residual"
    )
    _LOG.warning(
      f"worker {self._number}: {what}, delivered, handed over or lost since, are dropped"
    )
    return self.outer.without_residual(anchor, latest)

  def model(self) -> Piece:
    """The anchor, for a worker that joins or has missed a round."""
    content = self.outer.pack(self.anchor)
    return Piece(
      PieceKind.MODEL,
      self.anchor.position.round,
      self._number,
      np.frombuffer(content, np.float32),
    )

  def compile(self, sizes: tuple[int, int]) -> None:
    """Compiles the outer step for the group that this worker joins, with it and without; at first for the largest.

    Args:
      sizes: the smallest and the largest group.
    """
    self._sizes = sizes
    last = self.anchor.size
    for size in (last, last + 1) if last else range(sizes[1], sizes[1] - _FIRST, -1):
      self._compile(size)

  def _compile(self, size: int) -> None:
    if self._sizes[0] <= size <= self._sizes[1]:
      self.outer.compile(self.anchor, size)

  def prepare(
    self, given: Any, own: Any, post: Callable[[WorkerMessage], None]
  ) -> None:
    """Copies what is to be given to the CPU and calls `post(the request to make)`, in the thread of exchanges.

    Args:
      given: by the worker.
      own: what of it this process exchanges.
      post: is called afterwards.
    """
    finite = _all_finite(given)  # on the device, before the next step that it is given
    moved = self.is_link and _any(given)

    def copy() -> None:
      self.given = self.outer.on_cpu(own)
      kind = WorkerMessage.LINK if moved else WorkerMessage.READY
      if self.is_final:
        kind = LEAVING[kind]
      post(kind if finite else WorkerMessage.NOT_FINITE)

    self._thread.submit(copy)

  def close(self) -> None:
    """Ends the threads; an exchange that runs is dropped."""
    self.drop()
    for thread in (self._thread, self._compiler):
      thread.shutdown(cancel_futures=True)
