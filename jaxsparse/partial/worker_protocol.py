"""The protocol of a worker with the server and other workers: a pure state machine, without sockets and clocks.

Events go in with the time at which they happen:

    Request(READY, model) ──┐                         ┌──> tell(Signal(READY, …))    the server
    ServerMessage(GROUP)  ──┼──> handle(event, now) ──┼──> send(address, piece)      to another member of the group
    Piece(PART, …)        ──┘                         └──> reply(average)            to the training loop

It is in one of these states:

    joining     sends HELLO until the server answers WELCOME; again if the server has dropped this worker
    fetching    waits for the model of the donor, another worker, that WELCOME has named
    joined      serves requests: READY -> GROUP -> pieces -> average
    leaving     in rounds: has said goodbye, and waits for another worker to take over its residual
    ended       the worker has left, was rejected, or has lost the controller; nothing happens any more

A controller that is silent may come back. Until it has been silent for its own limit and `reconnect` seconds more, the
worker goes on sending heartbeats. A controller that was restarted at the same address rejects them; the worker sends
HELLO then, and repeats its open request.

An average fails if the server sends ABORT, or if no piece arrives for `timeout` seconds: the worker keeps its model and
sends FAILED, then READY again. A worker whose model is not finite joins again, with NOT_FINITE in place of HELLO, which
the server answers once it can name a donor. A broken connection does not prove that another worker is dead: one that
leaves in good order closes its connections while its last pieces are still in transit.

A member of a group sends its parts as soon as it hears of the group, which may be before this worker does. Only parts
can be early, since a mean needs the parts of all members; each member sends one; and it waits for one group at a time.
So the early parts of a group of G members have at most (G − 1) ⌈n/G⌉ < n + G entries. Entries beyond that are forged,
and are dropped, so that they cannot fill the memory.
"""

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxsparse.partial.alike import Alike
from jaxsparse.partial.controller import Group
from jaxsparse.partial.exchange import Average
from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal, Stand

_LOG = logging.getLogger(__name__)
_RETRY = 0.2  # seconds between two HELLO, or two NOT_FINITE
_BEATS = 5  # heartbeats in the time after which the server drops a silent worker
_MEMBERS = 2**16  # in a group at most: numbers of workers have 16 bits
_NOWHERE = Stand()
_PULSE = 1.0  # seconds between two heartbeats at most: the next one proves that a second worker has the same number


class Model(NamedTuple):
  """A flat model and the number of iterations that it has been trained for."""

  vector: np.ndarray
  iteration: int


class Request(NamedTuple):
  """Event: the training loop asks for something; every request but BYE has one reply.

  READY averages `model` with a group, SYNCHRONIZE with all workers; NOT_FINITE gets the model of another worker. HELLO
  is open from the beginning: it gets the model to start from. In rounds READY has the `weight` of a step.
  """

  says: Says
  model: Model | None = None
  weight: int = 0


class Unreachable(NamedTuple):
  """Event: the connection to another worker is closed, or cannot be made."""

  address: str


Event = Request | ServerMessage | Piece | Unreachable


class WorkerProtocol:
  """The protocol of one worker.

  Args:
    number: this worker's.
    initial: f32[n], the model that training starts from.
    address: where other workers reach this one.
    timeout: seconds to wait for WELCOME, and for each message of another worker.
    reconnect: seconds to wait for a controller that has been silent for its limit.
    now: the time, in seconds.
    tell: sends a signal to the server.
    send: sends a piece to the worker at an address; may handle `Unreachable` before it returns.
    reply: answers the training loop, where an exception is raised.

  Attributes:
    model: the newest model, for those who fetch it and for the file that is saved when the controller is lost.
    alike: what all workers need alike.
    state: see above.
    stand: in rounds where the worker stands.
    lost: once the controller is lost, which message has not come for how many seconds.

  Example:
    >>> outlets = {"tell": print, "send": print, "reply": print}
    >>> protocol = WorkerProtocol(3, np.zeros(2, np.float32), "tcp://127.0.0.1:9", 5.0, 60.0, now=0.0, **outlets)
    >>> protocol.tick(0.1)
    Signal(says=<Says.HELLO: 1>, worker=3, value=0, address='tcp://127.0.0.1:9', stand=Stand(...), alike=Alike(...))
    >>> protocol.handle(ServerMessage(Answer.WELCOME, {"limit": 5.0, "donor": None}), 0.2)
    Model(vector=array([0., 0.], dtype=float32), iteration=0)
    >>> protocol.handle(Request(Says.READY, Model(np.ones(2, np.float32), 1)), 0.3)
    Signal(says=<Says.READY: 2>, worker=3, value=1, address='', stand=Stand(...), alike=Alike(...))
  """

  def __init__(
    self,
    number: int,
    initial: np.ndarray,
    address: str,
    timeout: float,
    reconnect: float,
    now: float,
    tell: Callable[[Signal], None],
    send: Callable[[str, Piece], None],
    reply: Callable[[Model | Exception], None],
  ):
    self.model, self.lost, self.alike = Model(initial, 0), ("", 0.0), Alike()
    self.stand, self._last_round = Stand(), 0  # in rounds: where the worker stands, and the last round of all
    self.state: Literal["joining", "fetching", "joined", "leaving", "ended"] = "joining"
    self._number, self._initial, self._address = number, initial, address
    self._timeout = self._limit = timeout  # the server states its own limit in WELCOME
    self._reconnect, self._tell_server, self._send, self._reply_to_loop = reconnect, tell, send, reply
    self._request, self._waiting = Says.HELLO, True  # the last request, and whether it has not been answered yet
    self._average: Any = None  # in progress, with the methods of `Average`; the request is open
    self._members: dict[int, str] = {}  # addresses of the current group's members
    self._settled = 0  # no piece is owed to, or expected from, groups up to this number
    self._early: dict[tuple[int, int], Piece] = {}  # by sender and tag, for a group that the server has not named yet
    self._most_early = initial.size + _MEMBERS  # entries
    self._donor: str | None = None  # the address of the worker whose model has to replace the own one
    self._now = self._last_tick = self._next_signal = now  # HELLO, NOT_FINITE or BEAT is sent at `_next_signal`
    self._deadline = now + timeout  # for the next message of the server
    self._patience = now + timeout  # for WELCOME, and for the next message of another worker

  @property
  def interval(self) -> float:
    """Seconds between two calls of `tick`, at most."""
    return min(_RETRY, self._limit / _BEATS)

  def handle(self, event: Event, now: float) -> None:
    """Does what an event asks for; nothing after the end."""
    if self.state == "ended":
      return
    self._now = now
    match event:
      case Request(Says.BYE):
        self._leave()
      case Request():
        self._take_request(event)
      case ServerMessage():
        self._take_server_message(event)
      case Piece(Kind.MODEL):
        if self.state == "fetching":
          self._take_model(event)
      case Piece():
        self._take_piece(event)
      case Unreachable(address):
        if self.state == "fetching" and address == self._donor:
          self._join_again(_RETRY)

  def tick(self, now: float) -> None:
    """Time has passed: repeats signals, and gives up what has taken too long."""
    if self.state == "ended":
      return
    self._now = now
    if now - self._last_tick > self._limit / 2:  # this process was suspended, messages may be unread
      self._deadline, self._patience = (max(end, now + self._limit) for end in (self._deadline, self._patience))
    self._last_tick = now
    if now > self._patience and (self._average or self.state != "joined"):
      self._give_up()
    elif now > self._deadline:
      self._miss_server()
    elif now >= self._next_signal:
      self._repeat_signal()

  def _miss_server(self) -> None:
    """The server has been silent for too long."""
    self.state, self.lost = "ended", ("sign of life", self._limit + self._reconnect)

  def _repeat_signal(self) -> None:
    if self.state == "joining":
      says = Says.NOT_FINITE if self._waits_for(Says.NOT_FINITE) else Says.HELLO
      self._tell(says, address=self._address)
      self._next_signal = self._now + _RETRY
    else:
      self._tell(Says.BEAT)
      self._next_signal = self._now + min(self._limit / _BEATS, _PULSE)

  def _give_up(self) -> None:
    """Goes on without the message that has not come for `timeout` seconds, if possible."""
    if self._average:
      self._fail(self._average, f"no message of a member for {self._timeout:g} s")
    elif self._waits_for(Says.NOT_FINITE):
      self._reply(FloatingPointError(f"no model from another worker for {self._timeout:g} s"))
    elif self.state == "joining":
      self.state, self.lost = "ended", ("WELCOME", self._timeout)
    elif self._request == Says.HELLO:  # the donor's model is that to start from
      self._reply(RuntimeError(f"worker {self._number}: no model from {self._donor} for {self._timeout:g} s"))
      self._leave()
    else:
      self._donor = None
      self._begin_request()

  def _waits_for(self, says: Says) -> bool:
    return self._waiting and self._request == says

  # Requests of the training loop.

  def _take_request(self, request: Request) -> None:
    self._request, self._waiting, self.model = request.says, True, request.model or self.model
    if self.state == "joined":
      self._patience = self._now + self._timeout
      self._begin_request()

  def _begin_request(self) -> None:
    """Asks the donor, if there is one, or the server for what the open request is to be answered with."""
    self.state = "joined"
    if self._donor and self._request != Says.SYNCHRONIZE:  # in the average of all it takes part with its own model
      self.state = "fetching"
      self._send(self._donor, Piece(Kind.FETCH, self._last_round, self._number))
    elif self._request == Says.HELLO:
      self._reply(self.model)
    elif self._request == Says.NOT_FINITE:
      self._join_again(0)
    else:
      self._signal_request()

  def _signal_request(self) -> None:
    self._tell(self._request, self.model.iteration)

  def _take_model(self, piece: Piece) -> None:
    """The model of the donor answers the open request."""
    if piece.values.size == self._initial.size:
      self._reply(Model(piece.values, piece.number))

  def _join_again(self, delay: float) -> None:
    self.state, self._next_signal = "joining", self._now + delay

  def _leave(self) -> None:
    self._tell(Says.BYE, self._settled)
    self.state = "ended"

  def _reply(self, answer: Model | Exception) -> None:
    self.state, self._waiting, self._donor = "joined", False, None
    if isinstance(answer, Model):
      self.model = answer
    self._reply_to_loop(answer)

  # Messages of the server.

  def _take_server_message(self, message: ServerMessage) -> None:
    kind, content = message
    if kind == Answer.WELCOME and self.state == "joining":
      self._limit, self._donor, self._early = content["limit"], content["donor"], {}
      self.state = "joined"
      if self._waiting:
        self._begin_request()
    elif kind == Answer.GROUP and self._awaits_group:
      self._start_average(content)
    elif kind == Answer.ABORT and self._average and self._average.needs(content["number"], content["worker"]):
      self._fail(self._average, content.get("reason", f"worker {content['worker']} is lost"))
    elif kind == Answer.REJECTED:
      self._take_rejection(content["reason"])
    self._deadline = self._now + self._limit + self._reconnect

  def _take_rejection(self, reason: str) -> None:
    kind = reason.partition(":")[0]
    if kind == "absent":  # the server has dropped this worker and aborted its group, or is another server
      self._settled = 0
      if self.state != "joining":
        self._lose_place()
        self._patience = self._now + self._timeout
        self._join_again(_RETRY)
    elif kind == "nobody":
      if self._waits_for(Says.NOT_FINITE):
        self._reply(FloatingPointError(reason))
    elif kind != "duplicate" and (self._awaits_group or self.state == "joining"):
      refused = self.state == "joining"
      self._reply(ValueError(f"worker {self._number}: {reason}"))  # if no request is open, the next one raises it
      self.state = "ended" if refused else "joined"

  def _lose_place(self) -> None:
    """The server no longer counts on this worker in a group."""
    self._average = None

  # The average of a group.

  @property
  def _awaits_group(self) -> bool:
    """Whether a GROUP message may still be in transit."""
    return self.state == "joined" and self._waiting and self._average is None

  def _may_come(self, number: int) -> bool:
    """Whether this is the number of a group that this worker does not know yet, so that it keeps early pieces."""
    return number > self._settled

  def _start_average(self, content: dict[str, Any]) -> None:
    group = Group(**{name: content[name] for name in Group._fields})
    group = group._replace(members=tuple(group.members), weights=tuple(group.weights))
    self._members = dict(zip(group.members, content["addresses"], strict=True))
    average = self._average = self._begin_average(group)
    early, self._early = list(self._early.values()), {}
    received = [average.receive(part) for part in early if part.number == group.number]
    self._progress(average, itertools.chain(average.begin(), *received))

  def _begin_average(self, group: Group) -> Any:
    """What computes the average of a group."""
    return Average(group, self._number, self.model.vector, self._initial)

  def _take_piece(self, piece: Piece) -> None:
    if self._average and self._average.group.number == piece.number:
      self._progress(self._average, self._average.receive(piece))
    elif self._may_come(piece.number) and piece.kind != Kind.MEAN and self._awaits_group:
      self._early.pop((piece.sender, piece.tag), None)
      if piece.values.size + sum(other.values.size for other in self._early.values()) <= self._most_early:
        self._early[piece.sender, piece.tag] = piece

  def _progress(self, average: Any, pieces: Iterable[tuple[int, Piece]]) -> None:
    """Sends pieces, and answers the request if the average is done."""
    self._patience = self._now + self._timeout
    for member, piece in pieces:
      self._send(self._members[member], piece)
    if average.done:
      self._settled, self._average = average.group.number, None
      self._reply(Model(average.result, average.group.iteration))

  def _fail(self, average: Any, reason: str) -> None:
    """Keeps the own model and asks for another group."""
    _LOG.warning(f"worker {self._number}: no average of {average.group.names}: {reason}")
    self._settled, self._average = average.group.number, None
    self._tell(Says.FAILED, self._settled)
    self._begin_request()

  def _tell(self, says: Says, value: int = 0, address: str = "", stand: Stand = _NOWHERE) -> None:
    self._tell_server(Signal(says, self._number, value, address, stand, self.alike if address else Alike()))
