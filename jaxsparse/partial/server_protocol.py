"""The server's protocol with the workers of a controller: a state machine without sockets and clocks.

    receive(connection, frames, now) ──> Controller.ready(…) ──> Group(…) ──> send(connection, frame) to each member
    tick(now)                        ──> heartbeats, dead workers are dropped, ready workers are released

The server alone decides that a worker is dead: its connection is gone, or its thread has sent no heartbeat for `limit`
seconds, whatever its training loop does. Other workers form groups without it, and members of its current group receive
ABORT, except if its BYE says that it owes nothing to that group: all that they wait for is in transit then. The group
filter lets a worker that is ready wait for others no longer than its own last step took.

A message that is malformed, or a signal that is unknown, duplicate or stale, is answered by REJECTED with the reason,
and changes nothing.

A HELLO with the number of a worker that has joined comes from its successor, restarted after a crash that the server
has not noticed yet, or from a second worker that was given the same number by mistake. The server sends PROBE to the
worker that has joined. If that answers, HELLO is rejected as "taken"; until then as "duplicate", which may be retried.
"""

from collections.abc import Callable
from typing import NoReturn

from jaxsparse.partial import messages
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.messages import Answer, Says, Signal

_BEAT = messages.answer(Answer.BEAT)
_PROBES = 10  # heartbeats to each worker in `limit` seconds


class ServerProtocol:
  """Serves a controller; over when no worker of it is alive.

  Args:
    controller: the state machine that forms groups.
    send: sends a frame to a connection without waiting; returns False if the connection is gone.
    limit: seconds of silence after which a worker is dropped.
    start_timeout: seconds after which a worker that has never sent HELLO is dropped.
    now: the time, in seconds.
    first: what is added to the numbers of groups in messages. Another one for each server at an address, or pieces for
      a group of a server before it could be taken for those of a group of this one.

  Attributes:
    taken: how many messages were accepted.
    rejected: how many were rejected.

  Example:
    >>> send = lambda connection, frame: print(connection, messages.parse_answer(frame)) or True
    >>> protocol = ServerProtocol(Controller(2, 2), send, limit=5.0, start_timeout=60.0, now=0.0)
    >>> protocol.receive(b"one", [Signal(Says.HELLO, 1, 3, "tcp://127.0.0.1:9").packed()], now=0.1)
    b'one' (<Answer.WELCOME: 1>, {'limit': 5.0})
  """

  def __init__(
    self,
    controller: Controller,
    send: Callable[[bytes, bytes], bool],
    *,
    limit: float,
    start_timeout: float,
    now: float,
    first: int = 0,
  ):
    self.taken = self.rejected = 0
    self._controller, self._send, self._limit, self._first = controller, send, limit, first
    self._entries = 0  # of the model, if any worker has joined
    self._now = self._last_tick = self._next_probe = now
    # Each of the following is by worker.
    self._peers: dict[int, tuple[bytes, str]] = {}  # its connection, and the address that other workers reach it at
    self._heard: dict[int, float] = {}  # when its last message came
    self._dead_at = dict.fromkeys(controller.alive, now + start_timeout)  # when it is dropped if none comes
    self._iterations: dict[int, int] = {}  # of its model, if that has been trained
    self._groups: dict[int, Group] = {}  # its last group
    self._step_began: dict[int, float] = {}  # when it joined, or its last group was formed
    self._patience: dict[int, float] = {}  # until when it waits for the group filter, as long as its step took
    self._hellos: dict[int, int] = {}  # how often it has repeated HELLO
    self._rivals: dict[int, dict[bytes, float]] = {}  # when other connections first sent HELLO with its number
    self._seeking: set[int] = set()  # workers whose models are not finite, and that have been named no donor yet

  def receive(self, connection: bytes, frames: list[bytes], now: float) -> None:
    """Handles a message of a connection."""
    self._now = now
    try:
      signal = messages.parse(frames)
      if signal.says != Says.HELLO:
        self._check_joined(connection, signal.worker)
      self._handle(connection, signal)
    except Rejected as error:
      self.rejected += 1
      self._send(connection, messages.answer(Answer.REJECTED, reason=str(error)))
      return
    self.taken += 1
    if signal.worker in self._peers:
      self._heard[signal.worker] = now
      self._dead_at[signal.worker] = now + self._limit

  def tick(self, now: float) -> None:
    """Sends heartbeats, and drops dead workers; to be called several times in `limit` seconds."""
    self._now = now
    if now - self._last_tick > self._limit / 2:  # this process was suspended, messages of workers may be unread
      self._dead_at = {worker: max(end, now + self._limit) for worker, end in self._dead_at.items()}
    self._last_tick = now
    if now > self._next_probe:
      self._next_probe = now + self._limit / _PROBES
      gone = [worker for worker, (connection, _) in self._peers.items() if not self._send(connection, _BEAT)]
      for worker in gone:  # dropped a little later, after its last messages
        self._dead_at[worker] = min(self._dead_at[worker], now + self._limit / _PROBES)
    for worker in [worker for worker, end in self._dead_at.items() if end < now]:
      self._leave(worker)
    if any(self._patience[worker] < now for worker in self._controller.waiting):
      self._announce(self._controller.release())

  def _check_joined(self, connection: bytes, worker: int) -> None:
    if worker not in self._peers:
      raise Rejected(f"absent: worker {worker} has not joined, it has to send HELLO")
    if self._peers[worker][0] != connection:
      raise Rejected(f"absent: worker {worker} has joined by another connection, it has to send HELLO by this one")

  def _handle(self, connection: bytes, signal: Signal) -> None:
    worker = signal.worker
    match signal.says:
      case Says.HELLO:
        self._hello(connection, signal)
      case Says.READY:
        self._ready(worker, signal.value, self._controller.ready)
      case Says.SYNCHRONIZE:
        self._ready(worker, signal.value, self._controller.synchronize)
      case Says.FAILED:
        groups = self._controller.failed(worker, signal.value - self._first)
        self._abort(worker)
        self._announce(groups)
      case Says.NOT_FINITE:
        self._not_finite(worker)
      case Says.BYE:
        self._leave(worker, settled=signal.value)
      case Says.BEAT:
        self._send(connection, _BEAT)

  def _hello(self, connection: bytes, signal: Signal) -> None:
    worker = signal.worker
    if worker in self._peers and self._peers[worker][0] != connection:
      self._reject_rival(connection, worker)
    repeated = worker in self._peers  # the worker could not reach its donor, and is named another one
    others = [other for other in self._peers if other != worker]
    if others and signal.value != self._entries:
      raise Rejected(f"unlike: worker {worker} has a model of {signal.value} entries, the others of {self._entries}")
    groups = [] if worker in self._controller.alive else self._controller.join(worker)
    self._entries = signal.value
    self._hellos[worker] = self._hellos.get(worker, 0) + 1 if repeated else 0
    self._peers[worker] = (connection, signal.address)
    self._step_began[worker] = self._now
    self._welcome(worker, self._donor(worker))
    self._announce(groups)

  def _donor(self, worker: int) -> str | None:
    """The address of another worker with a trained model, the most trained first, and the next one at each HELLO."""
    donors = [other for other in self._peers if other != worker and self._iterations.get(other)]
    donors.sort(key=lambda other: -self._iterations[other])
    return self._peers[donors[self._hellos[worker] % len(donors)]][1] if donors else None

  def _welcome(self, worker: int, donor: str | None) -> None:
    if donor:
      self._seeking.discard(worker)
    welcome = {"limit": self._limit, **({"donor": donor} if donor else {})}
    self._send(self._peers[worker][0], messages.answer(Answer.WELCOME, **welcome))

  def _not_finite(self, worker: int) -> None:
    """Names a donor to a worker, which is no donor itself until it is ready again; if there is none, it asks again."""
    self._controller.replaced(worker)
    self._iterations.pop(worker, None)
    if donor := self._donor(worker):
      self._welcome(worker, donor)
      return
    self._seeking.add(worker)
    if self._seeking.issuperset(self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

  def _reject_rival(self, connection: bytes, worker: int) -> NoReturn:
    """Rejects a second worker of one number: for good if the first one has proved to be alive, else for now."""
    rivals = self._rivals.setdefault(worker, {})
    asked = rivals.setdefault(connection, self._now)
    connected = self._send(self._peers[worker][0], messages.answer(Answer.PROBE))
    if connected and self._heard[worker] > asked:
      del rivals[connection]
      others = f"choose another number of 0 … {self._controller.workers - 1}"
      raise Rejected(f"taken: a living worker has the number {worker}, {others}, or end that worker first")
    raise Rejected(f"duplicate: worker {worker} has joined already; if it died, it is dropped after {self._limit:g} s")

  def _ready(self, worker: int, iteration: int, signal: Callable[[int, int], list[Group]]) -> None:
    groups = signal(worker, iteration)
    self._patience[worker] = self._now + (self._now - self._step_began[worker])
    self._iterations[worker] = iteration
    self._seeking.discard(worker)
    self._announce(groups)

  def _leave(self, worker: int, settled: int = 0) -> None:
    """Continues without a worker; it owes nothing to groups up to number `settled`."""
    groups = self._controller.leave(worker)
    self._abort(worker, settled)
    known = (self._peers, self._dead_at, self._iterations, self._rivals, self._heard, self._step_began, self._patience)
    for by_worker in known:
      by_worker.pop(worker, None)
    self._seeking.discard(worker)
    self._announce(groups)

  def _announce(self, groups: list[Group]) -> None:
    for formed in groups:
      group = formed._replace(number=formed.number + self._first)
      addresses = [self._peers[member][1] for member in group.members]
      self._iterations.update(dict.fromkeys(group.members, group.iteration))
      self._groups.update(dict.fromkeys(group.members, group))
      self._step_began.update(dict.fromkeys(group.members, self._now))
      frame = messages.answer(Answer.GROUP, **group._asdict(), addresses=addresses)
      for member in group.members:
        self._send(self._peers[member][0], frame)

  def _abort(self, worker: int, settled: int = 0) -> None:
    """Tells the members of a worker's group that it sends no more pieces; members that need none are not affected."""
    group = self._groups.pop(worker, None)
    if group and group.number > settled:
      for member in group.members:
        if member in self._peers and member != worker:
          self._send(self._peers[member][0], messages.answer(Answer.ABORT, number=group.number, worker=worker))
