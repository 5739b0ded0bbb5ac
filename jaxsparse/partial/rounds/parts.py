"""The protocol of a worker of several processes, its parts: to the server and to other workers they are one.

    parts 1, 2, … ── signals ──> part 0, the lead ── one signal, once all parts have sent theirs ──> server
    all parts <── each answer, with the addresses of the same part of other workers ── lead <── server
    all parts <── FOLLOW: what they do together ── lead
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
from jaxsparse.partial.rounds.protocol import RoundProtocol
from jaxsparse.partial.rounds.run import Run


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
    self.membership.relay = self
    # how often it has joined; the lead ignores HELLO that was sent before the last time
    self._welcomes = 0
    # the number of the last group in which another part has skipped the outer step
    self._skips = 0
    # the digest of the anchor that it has fetched, until a round counts
    self._fetched = 0

  def handle(self, event: object, now: float) -> None:
    """Does what an event asks for.

    Raises:
      PartLost: if the lead says that a part is lost.
    """
    match event:
      case Answer(ServerMessage.FOLLOW, content):
        self._follow(Next(content["next"]), content["number"], content["reason"])
      case _:
        self._welcomes += (
          isinstance(event, Answer) and event.kind == ServerMessage.WELCOME
        )
        super().handle(event, now)

  def _follow(self, next_: Next, number: int, reason: str) -> None:
    membership = self.membership
    match next_:
      case Next.SKIP:
        if run := self._run_of(number):
          self._skips = number
          if membership.position.last and not run.skipped:
            self._take_result(run, run.digest)
      case Next.AGAIN:
        if membership.state in ("joined", "fetching"):
          membership.waits = True
          membership.await_peer()
          membership.join_again(RETRY)
      case Next.LOST:
        if membership.state != "ended":
          raise PartLost(reason)
      case _:
        answers = {Next.LATER: Next.LATER, Next.RESTART: None}
        membership.answer_loop(answers.get(next_, membership.position))

  def relay_signal(self, signal: Signal) -> None:
    """Sends a signal to the lead."""
    self.membership.tell_server(self._mark(signal))

  def _mark(self, signal: Signal) -> Signal:
    """A signal with what the lead compares between parts."""
    if signal.kind == WorkerMessage.DONE:
      return signal
    if signal.kind == WorkerMessage.HELLO:
      signal = signal._replace(value=self._welcomes)
    return signal._replace(digest=self._fetched)

  def _adopt(self, piece: Piece) -> RoundPosition:
    position = super()._adopt(piece)
    self._fetched = self.exchange.digest()
    return position

  def _settle(self, run: Run, counts: bool) -> None:
    super()._settle(run, counts)
    self._fetched = 0

  def relay_answer(self, answer: Any) -> None:
    """Tells the lead that there is one, which decides; errors are raised at once."""
    if isinstance(answer, Exception):
      self.membership.answer_loop(answer)
    # None: all parts find that parameters are not finite
    elif answer is not None:
      self.membership.tell(WorkerMessage.ANSWERED)

  def _take_result(self, run: Run, digest: int | None) -> None:
    if digest is not None:
      if self._skips == run.group.number:
        digest = self.exchange.skip()
      if run.skipped:
        self.membership.tell(WorkerMessage.SKIPPED, run.group.number)
    super()._take_result(run, digest)
