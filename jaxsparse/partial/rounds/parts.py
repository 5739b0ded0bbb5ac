"""The protocol of a worker of several processes, its parts: to the server and to other workers they are one.

    parts 1, 2, … ── signals ──> part 0, the lead ── one signal, once all parts have sent theirs ──> server
    all parts <── each answer, with the addresses of the same part of other workers ── lead <── server
    part p ── pieces ──> part p of other workers

Each part runs a `RoundProtocol`, whose server is the lead. A round has a result when all parts have one, and they adopt
it, or drop it, as the server tells them all. The training loops of all parts call `step` together, and that of the
lead decides whether they go on from a round at this step.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

from jaxsparse.partial.net.endpoint import PartLost
from jaxsparse.partial.net.membership import RETRY
from jaxsparse.partial.net.messages import Answer, ServerMessage, Signal, WorkerMessage
from jaxsparse.partial.rounds.protocol import RoundProtocol


class Next(enum.StrEnum):
  """What follows from a request of the training loops of all parts."""

  GO = "go"  # it is answered
  RESTART = "restart"  # its parameters are not finite
  LATER = "later"  # nothing yet
  AGAIN = "again"  # it is asked once more


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
    self._welcomes = 0  # how often it has joined; the lead ignores HELLO that was sent before the last time
    self._skips = 0  # the number of the last group in which another part has skipped the outer step

  def handle(self, event: Any, now: float) -> None:
    """Does what an event asks for.

    Raises:
      PartLost: if the lead says that a part is lost.
    """
    match event:
      case Answer(ServerMessage.DECISION, content):
        self._decide(Next(content["next"]))
      case Answer(ServerMessage.LOST, content) if self.membership.state != "leaving":
        raise PartLost(content["reason"])
      case Answer(ServerMessage.SKIP, content) if self._runs(content["number"]):
        self._skips = content["number"]
        if self._run and self.membership.position.last and not self._run.skipped:
          self._take_result(self._skips, self._run.digest)
      case _:
        self._welcomes += isinstance(event, Answer) and event.kind == ServerMessage.WELCOME
        super().handle(event, now)

  def _decide(self, next_: Next) -> None:
    membership = self.membership
    if next_ != Next.AGAIN:
      self._reply({Next.LATER: Next.LATER, Next.RESTART: None}.get(next_, membership.position))
    elif membership.state in ("joined", "fetching"):
      membership.waits = True
      membership.wait()
      membership.join_again(RETRY)

  def _tell_lead(self, signal: Signal) -> None:
    self._tell(signal._replace(value=self._welcomes) if signal.kind == WorkerMessage.HELLO else signal)

  def _answer(self, answer: Any) -> None:
    if isinstance(answer, Exception):
      self._reply(answer)
    elif answer is not None:  # that parameters are not finite all parts find, and the lead decides
      self.membership.tell(WorkerMessage.ANSWERED)

  def _take_result(self, number: int, digest: int | None) -> None:
    if digest is not None:
      assert self._run
      if self._skips == number:
        digest = self.exchange.skip()
      if self._run.skipped:
        self.membership.tell(WorkerMessage.SKIPPED, number)
    super()._take_result(number, digest)
