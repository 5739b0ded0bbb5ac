"""The protocol of a worker of several processes, its parts: to the server and to other workers they are one.

    parts 1, 2, … ── signals ──> part 0, the lead ── one signal, once all parts have sent theirs ──> server
    all parts <── each answer, with the addresses of the same part of other workers ── lead <── server
    part p ── pieces ──> part p of other workers

Each part runs a `RoundProtocol`, whose server is the lead. A round has a result when
all parts have one, and they adopt it, or drop it, as the server tells them all. The
training loops of all parts call `step` together, and that of the lead decides whether
they go on from a round at this step.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxsparse.partial.net.membership import RETRY
from jaxsparse.partial.net.messages import (
  Answer,
  Next,
  Piece,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds.exchanger import Run
from jaxsparse.partial.rounds.protocol import RoundProtocol


class PartLost(RuntimeError):
  """Another process of this worker is lost, as the message says."""


class Decision(NamedTuple):
  """Event: the training loop of the lead goes on with this answer, and those of the other parts are to do so."""

  answer: Any


@dataclasses.dataclass(eq=False)
class PartProtocol(RoundProtocol):
  """The protocol of a part; its training loop is answered when all parts are, and as the lead decides."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self._reply = self.membership.answer_loop
    self._tell = self.membership.tell_server
    self.membership.answer_loop = self._answer
    self.membership.tell_server = self._tell_lead
    # how often it has joined; the lead ignores HELLO that was sent before the last time
    self._welcomes = 0
    self._skips = (
      0  # the number of the last group in which another part has skipped the outer step
    )
    self._fetched = (
      0  # the digest of the anchor that it has fetched, until a round counts
    )

  def handle(self, event: Any, now: float) -> None:
    """Does what an event asks for.

    Raises:
      PartLost: if the lead says that a part is lost.
    """
    match event:
      case Answer(ServerMessage.DECISION, content):
        self._decide(Next(content["next"]))
      case Answer(ServerMessage.LOST, content) if self.membership.state != "ended":
        raise PartLost(content["reason"])
      case Answer(ServerMessage.SKIP, content) if run := self._run_of(
        content["number"]
      ):
        self._skips = run.group.number
        if self.membership.position.last and not run.skipped:
          self._take_result(run, run.digest)
      case _:
        self._welcomes += (
          isinstance(event, Answer) and event.kind == ServerMessage.WELCOME
        )
        super().handle(event, now)

  def _decide(self, next_: Next) -> None:
    membership = self.membership
    if next_ != Next.AGAIN:
      self._reply(
        {Next.LATER: Next.LATER, Next.RESTART: None}.get(next_, membership.position)
      )
    elif membership.state in ("joined", "fetching"):
      membership.waits = True
      membership.await_peer()
      membership.join_again(RETRY)

  def _tell_lead(self, signal: Signal) -> None:
    if signal.kind == WorkerMessage.HELLO:
      signal = signal._replace(value=self._welcomes)
    self._tell(
      signal
      if signal.kind == WorkerMessage.DONE
      else signal._replace(digest=self._fetched)
    )

  def _adopt(self, piece: Piece) -> RoundPosition:
    position = super()._adopt(piece)
    self._fetched = self.exchange.digest()
    return position

  def _settle(self, run: Run, counts: bool) -> None:
    super()._settle(run, counts)
    self._fetched = 0

  def _answer(self, answer: Any) -> None:
    if isinstance(answer, Exception):
      self._reply(answer)
    elif (
      answer is not None
    ):  # that parameters are not finite all parts find, and the lead decides
      self.membership.tell(WorkerMessage.ANSWERED)

  def _take_result(self, run: Run, digest: int | None) -> None:
    if digest is not None:
      if self._skips == run.group.number:
        digest = self.exchange.skip()
      if run.skipped:
        self.membership.tell(WorkerMessage.SKIPPED, run.group.number)
    super()._take_result(run, digest)
