"""The server's protocol with the workers of a controller: a state machine without sockets and clocks.

The server alone decides that a worker is dead: its connection is gone, or its thread has sent no heartbeat for `limit`
seconds, whatever its training loop does. Other workers form groups without it, and members of its current group receive
ABORT, except if its BYE says that it owes nothing to that group: all that they wait for is in transit then. The group
filter lets a worker that is ready wait for others no longer than its own last step took.

A message that is malformed, or a signal that is unknown, duplicate or stale, is answered by REJECTED with the reason,
and changes nothing.

A HELLO with the number of a worker that has joined comes from its successor, restarted after a crash that the server
has not noticed yet, or from a second worker that was given the same number by mistake. It is rejected as "duplicate",
which may be retried; as "taken" once the worker that has joined was heard after it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxsparse.partial import messages
from jaxsparse.partial.alike import Alike
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.messages import Answer, Says, Signal, Stand
from jaxsparse.partial.quorum import Quorum

_BEAT = messages.pack_answer(Answer.BEAT)
_START = Stand()
_PROBES = 10  # heartbeats to each worker in `limit` seconds


@dataclasses.dataclass
class Member:
  """What the server knows of a worker that has joined."""

  connection: bytes
  address: str  # where other workers reach it
  heard: float  # when its last message came
  step_began: float  # when it joined, or its last group was formed
  patience: float = 0.0  # once it is ready: until when it waits for the group filter, as long as its step took
  iteration: int = 0  # of its model; 0 if that is not trained, or not finite
  seeks: bool = False  # its model is not finite, and there is no donor for it yet
  group: Group | None = None  # the last one
  hellos: int = 0  # how often it has repeated HELLO: each names the next donor, it may not reach all of them
  stand: Stand = _START  # in rounds
  weight: int = 0  # in rounds, what it has trained for since it last delivered
  rivals: dict[bytes, float] = dataclasses.field(default_factory=dict)  # since when others send HELLO with its number


class ServerProtocol:
  """The server's protocol with the workers of a controller: a state machine without sockets and clocks.

    receive(connection, frames, now) ──> Controller.ready(…) ──> Group(…) ──> send(connection, frame) to each member
    tick(now)                        ──> heartbeats, dead workers are dropped, ready workers are released

  Args:
    controller: the state machine that forms groups; over when none of its workers is alive.
    send: sends a frame to a connection without waiting; returns False if the connection is gone.
    limit: seconds of silence after which a worker is dropped.
    start_timeout: seconds after which a worker that has never sent HELLO is dropped.
    now: the time, in seconds.
    first: what is added to the numbers of groups in messages. Another one for each server at an address, or pieces for
      a group of a server before it could be taken for those of a group of this one.

  Attributes:
    rejected: how many messages were rejected.

  Example:
    >>> send = lambda connection, frame: print(connection, messages.parse_answer(frame)) or True
    >>> protocol = ServerProtocol(Controller(2, 2), send, limit=5.0, start_timeout=60.0, now=0.0)
    >>> protocol.receive(b"one", [Signal(Says.HELLO, 1, 3, "tcp://127.0.0.1:9").pack()], now=0.1)
    b'one' ServerMessage(kind=<Answer.WELCOME: 1>, content={'limit': 5.0, 'donor': None})
  """

  def __init__(
    self,
    controller: Controller | Quorum,
    send: Callable[[bytes, bytes], bool],
    *,
    limit: float,
    start_timeout: float,
    now: float,
    first: int = 0,
  ):
    self.rejected = 0
    self._controller: Any = controller
    self._send, self._limit, self._first = send, limit, first
    self._alike, self._beat = Alike(), _BEAT  # what the workers that are there have alike; the heartbeat
    self._now = self._last_tick = self._next_probe = now
    self._members: dict[int, Member] = {}
    self._dead_at = dict.fromkeys(controller.alive, now + start_timeout)  # when each is dropped if no message comes

  def receive(self, connection: bytes, frames: list[bytes], now: float) -> None:
    """Handles a message of a connection."""
    self._now = now
    try:
      signal = messages.parse_signal(frames)
      self._handle(connection, signal)
    except Rejected as error:
      self.rejected += 1
      self._send(connection, messages.pack_answer(Answer.REJECTED, reason=str(error)))
      return
    if member := self._members.get(signal.worker):
      member.heard = now
      self._dead_at[signal.worker] = now + self._limit

  def tick(self, now: float) -> None:
    """Sends heartbeats, and drops dead workers; to be called several times in `limit` seconds."""
    self._now = now
    if now - self._last_tick > self._limit / 2:  # this process was suspended, messages of workers may be unread
      self._dead_at = {worker: max(end, now + self._limit) for worker, end in self._dead_at.items()}
    self._last_tick = now
    if now > self._next_probe:
      self._next_probe = now + self._limit / _PROBES
      for worker, member in self._members.items():
        if not self._send(member.connection, self._beat):  # dropped a little later, after its last messages
          self._dead_at[worker] = min(self._dead_at[worker], now + self._limit / _PROBES)
    for worker in [worker for worker, end in self._dead_at.items() if end < now]:
      self._leave(worker)
    if any(self._members[worker].patience < now for worker in self._controller.waiting):
      self._announce(self._controller.release())

  def _handle(self, connection: bytes, signal: Signal) -> None:
    says, worker, value = signal[:3]
    member = self._members.get(worker)
    if says in (Says.HELLO, Says.NOT_FINITE):
      self._take_hello(connection, signal, member)
    elif member is None or member.connection != connection:
      raise Rejected(f"absent: worker {worker} has not joined by this connection, it has to send HELLO")
    elif says == Says.BYE:
      self._leave(worker, settled=value)
    else:
      self._take_progress(signal, member)

  def _take_progress(self, signal: Signal, member: Member) -> None:
    """A worker is ready, or could not average."""
    says, worker, value = signal[:3]
    if says in (Says.READY, Says.SYNCHRONIZE):
      groups = (self._controller.ready if says == Says.READY else self._controller.synchronize)(worker, value)
      member.patience = self._now + (self._now - member.step_began)
      member.iteration, member.seeks = value, False
      self._announce(groups)
    elif says == Says.FAILED:
      groups = self._controller.failed(worker, value - self._first)
      self._abort(worker)
      self._announce(groups)

  def _take_hello(self, connection: bytes, signal: Signal, member: Member | None) -> None:
    """Joins a worker, or names another donor to one that has joined; it is no donor until it is ready again."""
    worker, others = signal.worker, self._members.keys() - {signal.worker}
    if member and member.connection != connection:
      asked = member.rivals.setdefault(connection, self._now)
      if member.heard > asked and self._send(member.connection, self._beat):
        del member.rivals[connection]
        raise Rejected(f"taken: a living worker has the number {worker}, choose another one or end that worker first")
      raise Rejected(f"duplicate: worker {worker} has joined; if it died, it is dropped after {self._limit:g} s")
    at_start = not (signal.stand.round or self._has_trained)
    if others and (found := signal.alike.difference(self._alike, at_start=at_start)):
      raise Rejected(f"unlike: worker {worker} has {found}")
    self._join(signal)
    self._alike, hellos = signal.alike, member.hellos + 1 if member else 0
    member = self._members[worker] = Member(connection, signal.address, self._now, self._now, hellos=hellos)
    self._welcome(signal, member)

  @property
  def _has_trained(self) -> bool:
    """Whether any worker has a model that is not that of the start."""
    return any(member.iteration for member in self._members.values())

  def _join(self, signal: Signal) -> None:
    """The controller gets to know a worker."""
    if signal.worker in self._controller.alive:
      self._controller.replaced(signal.worker)
    else:
      self._announce(self._controller.join(signal.worker))

  def _welcome(self, signal: Signal, member: Member) -> None:
    donors = sorted((other for other in self._members.values() if other.iteration), key=lambda other: -other.iteration)
    member.seeks = signal.says == Says.NOT_FINITE and not donors
    if not member.seeks:
      donor = donors[member.hellos % len(donors)].address if donors else None
      self._send(member.connection, messages.pack_answer(Answer.WELCOME, limit=self._limit, donor=donor))
    elif all(other in self._members and self._members[other].seeks for other in self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

  def _leave(self, worker: int, settled: int | None = None) -> None:
    """Continues without a worker; if it left in good order, it owes nothing to groups up to number `settled`."""
    groups = self._controller.leave(worker)
    self._abort(worker, settled or 0)
    self._forget(worker)
    self._announce(groups)

  def _forget(self, worker: int) -> None:
    self._members.pop(worker, None)
    self._dead_at.pop(worker, None)

  def _announce(self, groups: list[Group]) -> None:
    for formed in groups:
      group = formed._replace(number=formed.number + self._first)
      members = [self._members[worker] for worker in group.members]
      frame = messages.pack_answer(Answer.GROUP, **group._asdict(), addresses=[member.address for member in members])
      for member in members:
        member.iteration, member.group, member.step_began = group.iteration, group, self._now
        self._send(member.connection, frame)

  def _abort(self, worker: int, settled: int = 0) -> None:
    """Tells the members of a worker's group that it sends no more pieces; members that need none are not affected."""
    member = self._members.get(worker)
    if member and (group := member.group):
      frame = messages.pack_answer(Answer.ABORT, number=group.number, worker=worker)
      for other in group.members if group.number > settled else ():
        if other in self._members and other != worker:
          self._send(self._members[other].connection, frame)
