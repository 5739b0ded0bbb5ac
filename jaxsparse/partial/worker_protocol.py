"""The protocol of a worker with the server and other workers: a pure state machine, without sockets and clocks.

Events go in with the time at which they happen, actions come out:

    Request(READY, model) ──┐                         ┌──> Signal(READY, …)    to the server
    ServerMessage(GROUP)  ──┼──> handle(event, now) ──┼──> Send(piece)         to another member of the group
    Piece(PART, …)        ──┘                         └──> Reply(average)      to the training loop

It is in one of four states:

    hello       sends HELLO until the server answers WELCOME; again if the server has dropped this worker
    fetching    waits for the model of the donor, another worker, that WELCOME names
    joined      serves requests: READY -> GROUP -> pieces -> average
    ended       the worker has left, was rejected, or has lost the controller; nothing happens any more

A controller that is silent may come back. Until it has been silent for its own limit and `reconnect` seconds more, the
worker goes on sending heartbeats. A controller that was restarted at the same address does not know the worker and
rejects them; the worker sends HELLO then, and repeats its open request.

An average fails if the server sends ABORT, or if no piece arrives for `timeout` seconds: the worker keeps its model and
sends FAILED, then READY again. A worker whose model is not finite sends NOT_FINITE in place of READY, until WELCOME
names a donor.

Only the server decides that a worker is dead. A broken connection between two workers proves less: a worker that leaves
in good order closes its connections while its last pieces are still in transit.
"""

import contextlib
from collections.abc import Iterable
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


class Tick(NamedTuple):
  """Event: time has passed; to be sent at least every `WorkerProtocol.interval` seconds."""


class Request(NamedTuple):
  """Event: the training loop asks for something; every request but BYE is answered by one `Reply`.

  Attributes:
    says: READY, average `model` with a group; SYNCHRONIZE, average it with all workers; NOT_FINITE, get the model of
      another worker; BYE, leave.
    model: for READY and SYNCHRONIZE.
  """

  says: Says
  model: Model | None = None


class Unreachable(NamedTuple):
  """Event: the connection to another worker is closed.

  Attributes:
    address: of the other worker.
    refused: True if the connection could not be made, so that nothing has been delivered; False if it broke, and
      earlier messages may have been delivered.
  """

  address: str
  refused: bool


class Send(NamedTuple):
  """Action: send a piece to another worker."""

  address: str
  piece: Piece


class Reply(NamedTuple):
  """Action: answer the training loop; an exception is raised there."""

  answer: Model | Exception


class ControllerSilent(NamedTuple):
  """Action: the controller is lost, the awaited message has not arrived for so many seconds. The worker has ended."""

  awaited: str
  seconds: float


Event = Tick | Request | ServerMessage | Piece | Unreachable
Action = Signal | Send | Reply | ControllerSilent


class WorkerProtocol:
  """The protocol of one worker; until the first `Reply`, the training loop waits for the model to start from.

  Args:
    number: this worker's.
    initial: f32[n], the model that training starts from.
    address: where other workers reach this one.
    timeout: seconds to wait for WELCOME, and for each message of another worker.
    reconnect: seconds to wait for a controller that has been silent for its limit.
    now: the time, in seconds.

  Attributes:
    model: the newest model, for donors' answers and for the file that is saved when the controller is lost.
    state: see above.

  Example:
    >>> protocol = WorkerProtocol(3, np.zeros(2, np.float32), "tcp://127.0.0.1:9", 5.0, 60.0, now=0.0)
    >>> protocol.handle(Tick(), 0.1)
    [Signal(says=<Says.HELLO: 1>, worker=3, value=2, address='tcp://127.0.0.1:9')]
    >>> protocol.handle(ServerMessage(Answer.WELCOME, {"limit": 5.0}), 0.2)
    [Reply(answer=Model(vector=array([0., 0.], dtype=float32), iteration=0))]
    >>> protocol.handle(Request(Says.READY, Model(np.ones(2, np.float32), 1)), 0.3)
    [Signal(says=<Says.READY: 2>, worker=3, value=1, address='')]
  """

  def __init__(self, number: int, initial: np.ndarray, address: str, timeout: float, reconnect: float, now: float):
    self.model = Model(initial, 0)
    self.state: Literal["hello", "fetching", "joined", "ended"] = "hello"
    self._number, self._initial, self._address = number, initial, address
    self._timeout = self._limit = timeout  # the server states its own limit in WELCOME
    self._reconnect = reconnect
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
    self._actions: list[Action] = []

  @property
  def interval(self) -> float:
    """Seconds between two `Tick` events, at most."""
    return min(_RETRY, self._limit / _BEATS)

  def handle(self, event: Event, now: float) -> list[Action]:
    """The actions that an event asks for, in order."""
    self._now, self._actions = now, []
    if self.state == "ended":
      return []
    match event:
      case Tick():
        self._tick()
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
    return self._actions

  # Time.

  def _tick(self) -> None:
    now = self._now
    if now - self._last_tick > self._limit / 2:  # this process was suspended, messages of the server may be unread
      self._deadline = max(self._deadline, now + self._limit)
    self._last_tick = now
    if now > self._deadline:
      self._lose_controller()
    elif now > self._patience and (self.state == "fetching" or self._seeks_donor):
      self._continue_without_donor()
    elif now > self._patience and self._average:
      self._give_up(self._average)
    elif now >= self._next_signal:
      self._repeat_signal()

  def _repeat_signal(self) -> None:
    interval = _RETRY
    if self.state == "hello":
      self._send(Says.HELLO, self._initial.size, self._address)
    elif self._seeks_donor:
      self._send(Says.NOT_FINITE)
    else:
      self._send(Says.BEAT)
      interval = self._limit / _BEATS
    self._next_signal = self._now + interval

  def _lose_controller(self) -> None:
    silence = self._limit + self._reconnect
    awaited = ("WELCOME", self._timeout) if self.state == "hello" else ("sign of life", silence)
    self.state = "ended"
    self._actions.append(ControllerSilent(*awaited))

  def _continue_without_donor(self) -> None:
    """No donor has sent its model: continues with the own model, if it is finite and trained."""
    if self._waiting and self._request == Says.NOT_FINITE:
      self._fail_to_fetch(f"no model from another worker for {self._timeout:g} s")
    elif self.model.iteration:
      self._join()
    else:
      self._send(Says.BYE, self._settled)
      self.state = "ended"
      error = f"worker {self._number}: no model from {self._donor} for {self._timeout:g} s"
      self._actions.append(Reply(RuntimeError(error)))

  # Requests of the training loop.

  def _take_request(self, request: Request) -> None:
    if request.says == Says.BYE:
      self._send(Says.BYE, self._settled)
      self.state = "ended"
    elif self._replacement and request.says != Says.SYNCHRONIZE:
      self._actions.append(Reply(self._replacement))
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
    return self.state == "joined" and self._waiting and self._request == Says.NOT_FINITE

  @property
  def _synchronizes(self) -> bool:
    """Whether the training loop waits for the average of all, in which this worker takes part with its own model."""
    return self._waiting and self._request == Says.SYNCHRONIZE

  def _send_request(self) -> None:
    self._send(self._request, 0 if self._request == Says.NOT_FINITE else self.model.iteration)

  def _reply(self, model: Model) -> None:
    self.model = model
    if self._waiting:
      self._waiting = False
      self._actions.append(Reply(model))

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
      self._send(Says.BEAT)

  def _take_welcome(self, limit: float, donor: str | None) -> None:
    if self.state != "hello" and not self._seeks_donor:  # the answer to a repeated HELLO
      return
    self._limit, self._deadline = limit, self._now + limit + self._reconnect
    self._early.clear()
    if donor and not self._synchronizes:
      self.state, self._donor = "fetching", donor
      self._actions.append(Send(donor, Piece(Kind.FETCH, 0, self._number)))
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
        self._actions.append(Reply(ValueError(f"worker {self._number}: {reason}")))
      if self.state == "hello":
        self.state = "ended"

  def _say_hello(self) -> None:
    """Asks the server for WELCOME, and for another donor, while the patience lasts."""
    self.state, self._next_signal, self._deadline = "hello", self._now + _RETRY, self._patience

  def _fail_to_fetch(self, reason: str) -> None:
    self.state, self._waiting = "joined", False
    self._actions.append(Reply(FloatingPointError(reason)))

  # The average of a group.

  def _start_average(self, content: dict[str, Any]) -> None:
    fields = {name: content[name] for name in Group._fields}
    group = Group(**fields | {"members": tuple(fields["members"]), "weights": tuple(fields["weights"])})
    self._members = dict(zip(group.members, content["addresses"], strict=True))
    average = self._average = Average(group, self._number, self.model.vector, self._initial)
    self._patience = self._now + self._timeout
    self._send_pieces(average.begin())
    for part in self._early.take(group.number):
      self._add_piece(average, part)
    self._finish(average)

  def _take_piece(self, piece: Piece) -> None:
    if self._average and self._average.group.number == piece.number:
      self._patience = self._now + self._timeout
      self._add_piece(self._average, piece)
      self._finish(self._average)
    elif piece.number > self._settled and piece.kind == Kind.PART and self._awaits_group:
      self._early.keep(piece)

  @property
  def _awaits_group(self) -> bool:
    """Whether the server may have formed a group with this worker, and its GROUP message is still in transit."""
    return self._waiting and self.state == "joined" and self._average is None and not self._seeks_donor

  def _add_piece(self, average: Average, piece: Piece) -> None:
    with contextlib.suppress(ValueError):  # a piece that does not belong to the average changes nothing
      self._send_pieces(average.receive(piece))

  def _send_pieces(self, pieces: Iterable[tuple[int, Piece]]) -> None:
    self._actions.extend(Send(self._members[member], piece) for member, piece in pieces)

  def _finish(self, average: Average) -> None:
    if average.done:
      self._settled, self._average = average.group.number, None
      self._reply(Model(average.result, average.group.iteration))

  def _give_up(self, average: Average) -> None:
    """Keeps the own model and asks for another group."""
    self._settled, self._average = average.group.number, None
    self._send(Says.FAILED, self._settled)
    self._send_request()

  # Models and connections of other workers.

  def _take_model(self, model: Model) -> None:
    if self.state != "fetching":
      return
    if self._synchronizes:  # requested since the fetch began
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

  def _send(self, says: Says, value: int = 0, address: str = "") -> None:
    self._actions.append(Signal(says, self._number, value, address))
