"""The protocol of a worker of several processes, its parts: to the server and to other workers they are one.

    parts 1, 2, … ── signals ──> part 0, the lead ── one signal, once all parts have sent theirs ──> server
    all parts <── each answer ── lead <── server
    all parts <── FOLLOW: what they do together ── lead
    part p ── pieces ──> part p of other workers

Each part runs a `RoundProtocol`, whose server is the lead. A round has a result when
all parts have one, and they adopt it, or drop it, as the server tells them all. The
training loops of all parts call `step` together, and that of the lead decides whether
they go on from a round at this step.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.partial.net import messages
from jaxsparse.partial.net.membership import RETRY, Member, Members
from jaxsparse.partial.net.messages import (
  Answer,
  Content,
  Next,
  Piece,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds.protocol import RoundProtocol
from jaxsparse.partial.rounds.run import Run
from jaxsparse.weights.digests import digest

_UNEQUAL = RoundPosition(0, -1)  # no round: parts have different anchors


class PartLost(RuntimeError):
  """Another process of this worker is lost, as the message says."""


class Decision(NamedTuple):
  """Event: the training loop of the lead goes on with this answer, and those of the other parts are to do so.

  Attributes:
    answer: Next.LATER, None where parameters are not finite, else the position reached.
  """

  answer: Any


@dataclasses.dataclass(eq=False)
class PartProtocol(RoundProtocol):
  """The protocol of a part; its training loop gets an answer once all parts have one, as the lead decides.

  Attributes:
    membership: the place at the server, which for all parts but 0 is the lead:
      `tell_server` sends to it. `part` is the number of this process.
    exchange: the `Exchanger` of this part's slices.
    _run: the exchange that runs, or has a result not known to count; or None.
    _welcomes: how often the part has joined.
    _fetched: digest of the anchor that it has fetched; 0: none, or an exchange has
      ended since.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    self.membership.relay = self
    # how often it has joined; the lead ignores HELLO that was sent before the last time
    self._welcomes = 0
    # digest of the anchor that it has fetched; 0 once an exchange has ended since
    self._fetched = 0

  def _take_answer(self, kind: ServerMessage, content: Content) -> None:
    """Does what an answer asks for: of the server, passed on by the lead, or of the lead itself (FOLLOW, with `next`).

    Raises:
      PartLost: if the lead says that a part is lost.
    """
    if kind != ServerMessage.FOLLOW:
      self._welcomes += kind == ServerMessage.WELCOME
      super()._take_answer(kind, content)
      return
    membership = self.membership
    match next_ := Next(content["next"]):
      # The outer step of another part was skipped: this part undoes its own.
      case Next.SKIP:
        if run := self._run_of(content["number"]):
          self._take_result(run, self.exchange.skip())
      # The parts have different anchors, or the lead refuses what they have fetched:
      # each joins again. Its request, which may have an answer already, is open again.
      case Next.AGAIN:
        if membership.state in ("joined", "fetching"):
          membership.waits = True
          membership.await_peer()
          membership.join_again(RETRY)
      case Next.LOST:
        raise PartLost(content["reason"])
      case _:
        # The loop's answer: LATER, None for RESTART, the anchor's position for GO.
        answers = {Next.LATER: Next.LATER, Next.RESTART: None}
        membership.answer_loop(answers.get(next_, membership.position))

  def relay_signal(self, signal: Signal) -> None:
    """Sends a signal to the lead, in place of the server."""
    self.membership.tell_server(self._mark(signal))

  def _mark(self, signal: Signal) -> Signal:
    """A signal of this part for the lead: under the part's number, and with what the lead compares between parts."""
    # The lead knows its parts by their numbers, as a server its workers.
    signal = signal._replace(worker=self.membership.part)
    # DONE has the digest of the result already.
    if signal.kind == WorkerMessage.DONE:
      skips = self._run is not None and self._run.skipped
      return signal._replace(kind=WorkerMessage.SKIPPED) if skips else signal
    # `value` is seconds for a server; the lead ignores HELLO with an older count.
    if signal.kind == WorkerMessage.HELLO:
      signal = signal._replace(value=self._welcomes)
    return signal._replace(digest=self._fetched)

  def _adopt(self, piece: Piece) -> RoundPosition:
    """Takes the anchor of a donor; returns the new position."""
    position = super()._adopt(piece)
    self._fetched = self.exchange.digest()
    return position

  def _settle(self, run: Run, counts: bool) -> None:
    """Ends an exchange: the digest of a fetched anchor, which the lead has compared before it, is not needed again."""
    super()._settle(run, counts)
    self._fetched = 0

  def relay_answer(self, answer: Any) -> None:
    """Tells the lead that there is an answer, which the training loop gets when the lead says so; errors go at once.

    Args:
      answer: an exception, a position, or None where parameters are not finite.
    """
    if isinstance(answer, Exception):
      self.membership.answer_loop(answer)
    # None: all parts find by themselves that parameters are not finite, and the lead
    # tells them when to go on.
    elif answer is not None:
      self.membership.tell(WorkerMessage.ANSWERED)


def _digest_of(parts: dict[int, Signal]) -> int:
  """The digest of a worker's result or anchor: that of the digests in one signal of each part, in order."""
  return digest([np.array([signal.digest for _, signal in sorted(parts.items())])])


@dataclasses.dataclass(eq=False, kw_only=True)
class LeadProtocol(PartProtocol):
  """The protocol of part 0, through which all parts reach the server.

  Part 0 is also a part as the others are: its own signals come by `relay_signal`.

  Args:
    others: the other parts, by their numbers, as a server has its workers.
    addresses: of all parts, in the order of their numbers.

  Attributes:
    _all: the numbers of all parts.
    _joined: how often all parts have joined together, as their `_welcomes`.
    _answers: answers to part 0, which it handles after what it does now.
    _last_signals: the last signal of each part, with its position.
    _joining: HELLO of the parts that have sent one since all have joined last.
    _ready: the parts that have asked for the next round.
    _answered: the parts that have an answer for their training loops.
    _group: number of the group under way; 0: none.
    _results: the signal of each part that has a result of this group.
    _last: position of the last round of all workers, as the server says, and
      `_digest_of_last` of the anchor after it; 0: the server does not know.
    _digest_of_all: the digest of all parts that the server was told last.
    _refused: whether the anchor that the parts have fetched has another digest.
    _has_left: whether the server was told BYE.
  """

  others: Members[Member]
  addresses: list[str]

  def __post_init__(self) -> None:
    super().__post_init__()
    self._joined = 0  # how often all parts have joined together
    self._all = set(range(len(self.addresses)))
    self._answers = collections.deque[Answer]()  # to this part, after what it does now
    self._last_signals = dict[int, Signal]()  # signal of each part, with its position
    self._joining = dict[int, Signal]()  # HELLO of the parts that join
    self._ready = set[int]()
    self._answered = set[int]()
    self._group = 0  # number of the group under way, 0 for none
    self._results = dict[int, Signal]()  # results of the parts in that group
    self._digest_of_last = 0  # digest of the last round of all, as the server says
    # whether the anchor that all parts have fetched has another digest
    self._refused = False
    self._digest_of_all = 0  # digest that the server was told last
    self._has_left = False

  def handle(self, event: object, now: float) -> None:
    """Does what an event asks for, also at the other parts."""
    match event:
      # The training loop of the lead goes on; the other parts wait for what it does.
      case Decision(answer):
        # Any other answer is a position.
        choice = {Next.LATER: Next.LATER, None: Next.RESTART}.get(answer, Next.GO)
        self._lead(self._all - {0}, choice)
      # The server's heartbeats are for the lead alone: `Members` sends the parts their
      # own.
      case Answer(kind, content) if kind != ServerMessage.BEAT:
        self._pass_on(kind, content)
      case _:
        super().handle(event, now)
    # Answers to part 0 that were queued meanwhile.
    self._handle_own(now)

  def tick(self, now: float) -> None:
    """Time has passed.

    Raises:
      PartLost: if another part is silent.
    """
    super().tick(now)
    # the limit that the server has stated in its last WELCOME
    self.others.limit = self.membership.limit
    for part in self.others.tick(now):
      self.others.forget(part)
      if self.membership.state != "ended":
        reason = f"part {part} of worker {self.membership.worker} is lost, and with it this worker"
        self._lead(self._all - {0}, Next.LOST, reason=reason)
        raise PartLost(reason)
    self._handle_own(now)

  def hear_part(self, connection: bytes, frames: list[bytes], now: float) -> None:
    """Handles a signal of another part."""
    self.membership.now = now
    self.others.receive(connection, frames, now, self._hear)
    self._handle_own(now)

  def _hear(self, connection: bytes, signal: Signal) -> None:
    """Takes a signal of another part.

    Raises:
      Rejected: for a process that is no other part: another number or address.
    """
    # `[1:]`: part 0 is this process.
    if (
      signal.kind == WorkerMessage.HELLO
      and (signal.worker, signal.address) in [*enumerate(self.addresses)][1:]
    ):
      self.others.join(connection, signal)
    self.others.find(connection, signal.worker)
    self._take_signal(signal)

  def relay_signal(self, signal: Signal) -> None:
    """Takes a signal of this part."""
    self._take_signal(self._mark(signal))

  def relay_answer(self, answer: Any) -> None:
    """Takes an answer as other parts do, and tells the loop of parameters that are not finite."""
    # The lead's loop posts a `Decision` on None, too: the other parts wait for that.
    if answer is None:
      self.membership.answer_loop(None)
    else:
      super().relay_answer(answer)

  def _handle_own(self, now: float) -> None:
    """Handles the answers to part 0, and those that follow from them."""
    while self._answers:
      super().handle(self._answers.popleft(), now)

  def _lead(
    self, parts: set[int], next_: Next, group: int = 0, reason: str = ""
  ) -> None:
    """Tells parts what they do together.

    Args:
      parts: their numbers; 0 is this process.
      next_: what they do.
      group: number of the round's group, for Next.SKIP.
      reason: for Next.LOST.
    """
    self._tell_parts(
      parts, ServerMessage.FOLLOW, next=next_, number=group, reason=reason
    )

  def _tell_parts(self, parts: set[int], kind: ServerMessage, **content: Any) -> None:
    """Sends an answer to parts; that to part 0, this process, is queued for `_handle_own`."""
    self.others.tell(parts, kind, **content)
    if 0 in parts:
      self._answers.append(Answer(kind, content))

  # From the parts to the server.

  def _take_signal(self, signal: Signal) -> None:
    """Takes a signal of a part; the server gets one for all: HELLO, READY and DONE once all parts have sent theirs."""
    part = signal.worker
    self._last_signals[part] = signal
    match signal.kind:
      # HELLO with another value was sent before the parts joined last
      case WorkerMessage.HELLO if signal.value == self._joined:
        self._take_hello(signal)
      case kind if kind in messages.READY:
        self._ready.add(part)
        # `_agree` also empties the set once all parts are in it.
        if self._agree(self._ready):
          self._pass_to_server(signal)
      case WorkerMessage.DONE | WorkerMessage.SKIPPED if signal.value == self._group:
        self._results[part] = signal
        if self._results.keys() == self._all:
          self._take_results(signal)
      # The first failure of a part ends the round for all: later ones find no group.
      case WorkerMessage.FAILED if signal.value == self._group:
        self._group = 0
        self._pass_to_server(signal)
      # The answer to the lead's loop, whose `Decision` tells the other parts.
      case WorkerMessage.ANSWERED:
        self._answered.add(part)
        if self._agree(self._answered):
          self.membership.answer_loop(signal.position)
      # one heartbeat a worker: those of other parts tell the lead alone that they live
      case WorkerMessage.BEAT if part == 0:
        self._pass_to_server(signal)
      case WorkerMessage.BYE:
        self._take_bye(signal)

  def _take_hello(self, signal: Signal) -> None:
    """Joins at the server once all parts have sent HELLO; the first HELLO of a part lets the others join again."""
    part = signal.worker
    is_new = part not in self._joining
    self._joining[part] = signal
    self._ready.discard(part)  # it has to ask for a round again
    others = self._all - self._joining.keys()
    if is_new:
      # "absent" lets them say HELLO, as if the server had dropped them
      reason = "absent: another part of this worker has to join again"
      self._tell_parts(others, ServerMessage.REJECTED, reason=reason)
    # Parts repeat HELLO until they are welcome: of the repetitions that of part 0 is
    # passed on.
    if not others and (is_new or part == 0):
      # What the server compares between workers, with the start values of all parts.
      first, *rest = (self._joining[part].alike for part in sorted(self._all))
      address = ",".join(self.addresses)
      # `_pass_to_server` sets the number of the worker, and its position.
      signal = signal._replace(address=address, alike=first.joined(rest))
      # The value of HELLO: for how many seconds this worker has been fetching an
      # anchor.
      self._pass_to_server(signal._replace(value=self.membership.fetching))

  def _take_results(self, last: Signal) -> None:
    """All parts have a result: that of the worker, after all have skipped the outer step if one has."""
    skipped = {
      part: result
      for part, result in self._results.items()
      if result.kind == WorkerMessage.SKIPPED
    }
    moving = self._all - skipped.keys()
    # Some parts have skipped the outer step, as their slices of the total are not
    # finite, and others not.
    if skipped and moving:
      # Parts that have moved send their results again once they have skipped.
      self._results = skipped
      self._lead(moving, Next.SKIP, last.value)
    else:
      self._digest_of_all = _digest_of(self._results)
      done = last._replace(kind=WorkerMessage.DONE, digest=self._digest_of_all)
      self._pass_to_server(done)

  def _agree(self, parts: set[int]) -> bool:
    """Whether all parts have come to a point, and have one anchor; if their anchors differ, all fetch again.

    Once all are there, it empties the set, and sets `_refused`: whether the anchor that
    they have fetched has another digest than that of the last round. `_position` is
    `_UNEQUAL` then, which the server finds behind, and the parts fetch again.

    Args:
      parts: the parts that have come to the point.
    """
    if parts != self._all:
      return False
    parts.clear()
    self._refused = False
    # The server knows the digest of all parts together, so no part alone can check its
    # own: the lead does, where all have fetched the anchor of the last round.
    fetched = _digest_of(self._last_signals)
    # A part that has not fetched the anchor has sent the digest 0. `[:2]` is round and
    # base: the anchor is that of the last round.
    if (
      all(signal.digest for signal in self._last_signals.values())
      and self._digest_of_last not in (0, fetched)
      and self._position[:2] == self._last[:2]
    ):
      self._refused = True
      self.membership.warn(
        f"refuses an anchor for all its parts: its digest is {fetched:x}, "
        f"that of round {self._last.round} is {self._digest_of_last:x}"
      )
    if self._position == _UNEQUAL:
      self._lead(self._all, Next.AGAIN)
      return False
    return True

  def _take_bye(self, signal: Signal) -> None:
    """The worker leaves with its first part; the exchanges of the others are dropped."""
    self.others.forget(signal.worker)
    if not self._has_left:
      if self._group:
        self._tell_parts(
          self._all - {signal.worker},
          ServerMessage.ABORT,
          number=self._group,
          reason="this worker leaves",
        )
        self._group = 0
      self._pass_to_server(signal)
      self._has_left = True

  @property
  def _position(self) -> RoundPosition:
    """The position of the worker: that of all parts, or `_UNEQUAL`."""
    # Round and base must be equal. `last`, a round that may count, is left out: maybe
    # only some parts have its result.
    positions = {signal.position for signal in self._last_signals.values()}
    if self._refused or len({position[:2] for position in positions}) > 1:
      return _UNEQUAL
    position, *others = positions
    return position._replace(last=0) if others else position

  def _pass_to_server(self, signal: Signal) -> None:
    """Sends a signal of a part to the server as that of the worker; nothing after BYE."""
    if not self._has_left:
      worker = self.membership.worker
      signal = signal._replace(worker=worker, position=self._position)
      self.membership.tell_server(signal)

  # From the server to the parts.

  def _pass_on(self, kind: ServerMessage, content: Content) -> None:
    """Passes an answer of the server on to all parts, without what they cannot check alone."""
    if kind == ServerMessage.WELCOME:
      # The answer to a repeated HELLO: not all parts wait for one.
      if self._joining.keys() != self._all:
        return
      self._joining.clear()
      self._joined += 1
    if kind == ServerMessage.GROUP:
      self._group = content["number"]
      self._results = {}
    # After WELCOME no group is under way; ABORT or COMMIT names the one that is over.
    elif kind == ServerMessage.WELCOME or content.get("number") == self._group:
      self._group = 0
    # The server's digest is that of all parts together. Parts get 0, which they do not
    # compare, or -1 where the parts have another result.
    if "digest" in content:
      self._digest_of_last = content["digest"]
      content = content | {
        "digest": 0 if content["digest"] in (0, self._digest_of_all) else -1
      }
    self._tell_parts(self._all, kind, **content)
