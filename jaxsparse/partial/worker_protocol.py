"""The protocol of a worker with the server and other workers: a pure state machine, without sockets and clocks.

Events go in with the time at which they happen:

    Request(READY, model) ──┐                         ┌──> tell(Signal(READY, …))    the server
    ServerMessage(GROUP)  ──┼──> handle(event, now) ──┼──> send(address, piece)      to another member of the group
    Piece(PART, …)        ──┘                         └──> reply(average)            to the training loop

It is in one of four states:

    hello       sends HELLO until the server answers WELCOME; again if the server has dropped this worker
    fetching    waits for the model of the donor, another worker, that WELCOME names
    joined      serves requests: READY -> GROUP -> pieces -> average
    ended       the worker has left, was rejected, or has lost the controller; nothing happens any more

A controller that is silent may come back. Until it has been silent for its own limit and `reconnect` seconds more, the
worker goes on sending heartbeats. A controller that was restarted at the same address rejects them; the worker sends
HELLO then, and repeats its open request.

An average fails if the server sends ABORT, or if no piece arrives for `timeout` seconds: the worker keeps its model and
sends FAILED, then READY again. A worker whose model is not finite sends NOT_FINITE in place of READY, until WELCOME
names a donor. A broken connection does not prove that another worker is dead: one that leaves in good order closes its
connections while its last pieces are still in transit.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxsparse.partial.controller import Group
from jaxsparse.partial.exchange import Average, Early
from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal

_RETRY = 0.2  # seconds between two HELLO, or two NOT_FINITE
_BEATS = 5  # heartbeats in the time after which the server drops a silent worker


class Model(NamedTuple):
  """A flat model and the number of iterations that it has been trained for."""

  vector: np.ndarray
  iteration: int


class Request(NamedTuple):
  """Event: the training loop asks for something; every request but BYE has one reply.

  READY averages `model` with a group, SYNCHRONIZE with all workers; NOT_FINITE gets the model of another worker.
  """

  says: Says
  model: Model | None = None


class Unreachable(NamedTuple):
  """Event: the connection to another worker is closed; if `refused`, it was never made, and delivered nothing."""

  address: str
  refused: bool


Event = Request | ServerMessage | Piece | Unreachable


class WorkerProtocol:
  """The protocol of one worker; until the first reply, the training loop waits for the model to start from.

  Args:
    number: this worker's.
    initial: f32[n], the model that training starts from.
    address: where other workers reach this one.
    timeout: seconds to wait for WELCOME, and for each message of another worker.
    reconnect: seconds to wait for a controller that has been silent for its limit.
    now: the time, in seconds.
    tell: sends a signal to the server.
    send: sends a piece to the worker at an address; may handle `Unreachable`, not refused, before it returns.
    reply: answers the training loop, where an exception is raised.

  Attributes:
    model: the newest model, for those who fetch it and for the file that is saved when the controller is lost.
    state: see above.
    lost: once the controller is lost, which message has not come for how many seconds.

  Example:
    >>> outlets = {"tell": print, "send": print, "reply": print}
    >>> protocol = WorkerProtocol(3, np.zeros(2, np.float32), "tcp://127.0.0.1:9", 5.0, 60.0, now=0.0, **outlets)
    >>> protocol.tick(0.1)
    Signal(says=<Says.HELLO: 1>, worker=3, value=2, address='tcp://127.0.0.1:9')
    >>> protocol.handle(ServerMessage(Answer.WELCOME, {"limit": 5.0}), 0.2)
    Model(vector=array([0., 0.], dtype=float32), iteration=0)
    >>> protocol.handle(Request(Says.READY, Model(np.ones(2, np.float32), 1)), 0.3)
    Signal(says=<Says.READY: 2>, worker=3, value=1, address='')
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
    self.model, self.lost = Model(initial, 0), ("", 0.0)
    self.state: Literal["hello", "fetching", "joined", "ended"] = "hello"
    self._number, self._initial, self._address = number, initial, address
    self._timeout = self._limit = timeout  # the server states its own limit in WELCOME
    self._reconnect, self._tell_server, self._send, self._reply_to_loop = reconnect, tell, send, reply
    self._request, self._waiting = Says.READY, True  # the last request, and whether it has not been answered yet
    self._average: Average | None = None
    self._members: dict[int, str] = {}  # addresses of the current group's members
    self._settled = 0  # no piece is owed to, or expected from, groups up to this number
    self._early = Early(number, initial.size)
    self._donor = ""  # the address of the worker that is asked for its model
    self._replacement: Model | None = None  # fetched while the training loop computed with a model that is obsolete
    self._now = self._last_tick = now
    self._deadline = now + timeout  # for the next message of the server
    self._patience = now + timeout  # for the next message of another worker
    self._next_signal = now  # when HELLO, NOT_FINITE or BEAT is sent again

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
      case Request():
        self._take_request(event)
      case ServerMessage():
        self._take_server_message(event)
      case Piece(Kind.MODEL, iteration, _, vector):
        if vector.size == self._initial.size:
          self._take_model(Model(vector, iteration))
      case Piece():
        self._take_piece(event)
      case Unreachable():
        self._take_unreachable(event)

  def tick(self, now: float) -> None:
    """Time has passed: repeats signals, and gives up what has taken too long."""
    if self.state == "ended":
      return
    self._now = now
    if now - self._last_tick > self._limit / 2:  # this process was suspended, messages of the server may be unread
      self._deadline = max(self._deadline, now + self._limit)
    self._last_tick = now
    if now > self._deadline:
      silence = self._limit + self._reconnect
      self.lost = ("WELCOME", self._timeout) if self.state == "hello" else ("sign of life", silence)
      self.state = "ended"
    elif now > self._patience and (self.state == "fetching" or self._seeks_donor):
      self._continue_without_donor()
    elif now > self._patience and self._average:
      self._give_up(self._average)
    elif now >= self._next_signal:
      self._repeat_signal()

  def _repeat_signal(self) -> None:
    interval = _RETRY
    if self.state == "hello":
      self._tell(Says.HELLO, self._initial.size, self._address)
    elif self._seeks_donor:
      self._tell(Says.NOT_FINITE)
    else:
      self._tell(Says.BEAT)
      interval = self._limit / _BEATS
    self._next_signal = self._now + interval

  def _continue_without_donor(self) -> None:
    """No donor has sent its model: continues with the own model, if it is finite and trained."""
    if self._waits_for(Says.NOT_FINITE):
      self._fail_to_fetch(f"no model from another worker for {self._timeout:g} s")
    elif self.model.iteration:
      self._join()
    else:
      self._tell(Says.BYE, self._settled)
      self.state = "ended"
      error = f"worker {self._number}: no model from {self._donor} for {self._timeout:g} s"
      self._reply_to_loop(RuntimeError(error))

  # Requests of the training loop.

  def _take_request(self, request: Request) -> None:
    if request.says == Says.BYE:
      self._tell(Says.BYE, self._settled)
      self.state = "ended"
    elif self._replacement and request.says != Says.SYNCHRONIZE:
      self._reply_to_loop(self._replacement)
      self._replacement = None
    else:
      self.model, self._replacement = request.model or self.model, None
      self._request, self._waiting = request.says, True
      if self._seeks_donor:
        self._patience = self._now + self._timeout
      if self.state == "joined":
        self._send_request()

  @property
  def _seeks_donor(self) -> bool:
    """Whether the own model is not finite, and the server has not named a donor yet."""
    return self.state == "joined" and self._waits_for(Says.NOT_FINITE)

  def _waits_for(self, says: Says) -> bool:
    return self._waiting and self._request == says

  def _send_request(self) -> None:
    self._tell(self._request, 0 if self._request == Says.NOT_FINITE else self.model.iteration)

  def _reply(self, model: Model) -> None:
    self.model = model
    if self._waiting:
      self._waiting = False
      self._reply_to_loop(model)

  # Messages of the server.

  def _take_server_message(self, message: ServerMessage) -> None:
    kind, content = message
    if self.state != "hello":
      self._deadline = self._now + self._limit + self._reconnect
    if kind == Answer.WELCOME:
      self._take_welcome(content["limit"], content.get("donor"))
    elif kind == Answer.GROUP and self.state == "joined":
      self._start_average(content)
    elif kind == Answer.ABORT and self._average and self._average.group.number == content["number"]:
      if self._average.needs(content["worker"]):
        self._give_up(self._average)
    elif kind == Answer.REJECTED:
      self._take_rejection(content["reason"])
    elif kind == Answer.PROBE and self.state != "hello":
      self._tell(Says.BEAT)

  def _take_welcome(self, limit: float, donor: str | None) -> None:
    if self.state != "hello" and not self._seeks_donor:  # the answer to a repeated HELLO
      return
    self._limit, self._deadline = limit, self._now + limit + self._reconnect
    self._early.clear()
    if donor and not self._waits_for(Says.SYNCHRONIZE):  # in the average of all it takes part with its own model
      self.state, self._donor = "fetching", donor
      self._send(donor, Piece(Kind.FETCH, 0, self._number))
    else:
      self._join()

  def _join(self) -> None:
    """Joined, and continues with the own model: no other worker has a newer one."""
    self.state = "joined"
    if not self.model.iteration and not self._seeks_donor:
      self._reply(self.model)
    elif self._waiting:
      self._send_request()

  def _take_rejection(self, reason: str) -> None:
    kind = reason.partition(":")[0]
    if kind == "duplicate":
      return  # the server does not know yet whether the worker that has this number is dead
    if kind == "nobody":
      if self._seeks_donor:
        self._fail_to_fetch(reason)
    elif kind == "absent":  # the server has dropped this worker and aborted its group, or is another server
      self._settled = 0
      if self.state != "hello":
        self._average, self._patience = None, self._now + self._timeout
        self._say_hello()
    else:
      if self._waiting or self.state == "hello":  # without an open request, the next one raises the error
        self._waiting = False
        self._reply_to_loop(ValueError(f"worker {self._number}: {reason}"))
      if self.state == "hello":
        self.state = "ended"

  def _say_hello(self) -> None:
    """Asks for WELCOME, and for another donor, while the patience lasts."""
    self.state, self._next_signal, self._deadline = "hello", self._now + _RETRY, self._patience

  def _fail_to_fetch(self, reason: str) -> None:
    self.state, self._waiting = "joined", False
    self._reply_to_loop(FloatingPointError(reason))

  # The average of a group.

  def _start_average(self, content: dict[str, Any]) -> None:
    fields = {name: content[name] for name in Group._fields}
    group = Group(**fields | {"members": tuple(fields["members"]), "weights": tuple(fields["weights"])})
    self._members = dict(zip(group.members, content["addresses"], strict=True))
    average = self._average = Average(group, self._number, self.model.vector, self._initial)
    self._patience = self._now + self._timeout
    self._send_pieces(average.begin())
    for part in self._early.take(group.number):
      self._send_pieces(average.receive(part))
    self._finish(average)

  def _take_piece(self, piece: Piece) -> None:
    if self._average and self._average.group.number == piece.number:
      self._patience = self._now + self._timeout
      self._send_pieces(self._average.receive(piece))
      self._finish(self._average)
    elif piece.number > self._settled and piece.kind == Kind.PART and self._awaits_group:
      self._early.keep(piece)

  @property
  def _awaits_group(self) -> bool:
    """Whether a GROUP message may still be in transit."""
    return self._waiting and self.state == "joined" and self._average is None and not self._seeks_donor

  def _send_pieces(self, pieces: Iterable[tuple[int, Piece]]) -> None:
    for member, piece in pieces:
      self._send(self._members[member], piece)

  def _finish(self, average: Average) -> None:
    if average.done:
      self._settled, self._average = average.group.number, None
      self._reply(Model(average.result, average.group.iteration))

  def _give_up(self, average: Average) -> None:
    """Keeps the own model and asks for another group."""
    self._settled, self._average = average.group.number, None
    self._tell(Says.FAILED, self._settled)
    self._send_request()

  def _take_model(self, model: Model) -> None:
    if self.state != "fetching":
      return
    if self._waits_for(Says.SYNCHRONIZE):  # requested since the fetch began
      self._join()
      return
    self.state = "joined"
    self._replacement = None if self._waiting else model
    self._reply(model)

  def _take_unreachable(self, event: Unreachable) -> None:
    if self.state == "fetching" and event.address == self._donor:
      self._say_hello()
    if self._average and event.refused and event.address in self._members.values():
      self._give_up(self._average)

  def _tell(self, says: Says, value: int = 0, address: str = "") -> None:
    self._tell_server(Signal(says, self._number, value, address))
