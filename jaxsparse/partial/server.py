"""The controller over TCP: a small server that accepts signals of a few bytes and never receives a model.

    worker 3 ── READY 17 ──────────> ROUTER ──> ServerProtocol ──> Controller.ready(3, 17)
    workers 0, 3, 5 <── GROUP … ──── ROUTER <── ServerProtocol <── Group((0, 3, 5), …)

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

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Self

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages, sockets
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.messages import Answer, Says, Signal
from jaxsparse.partial.sockets import Keys, zmq

LIMIT = 5.0  # seconds without a heartbeat after which the server drops a worker, or a worker misses the controller
_MOST_AT_ONCE = 1000  # messages that are handled between two heartbeats
_BEAT = messages.pack_answer(Answer.BEAT)
_PROBES = 10  # heartbeats to each worker in `limit` seconds


class Server:
  """Serves a controller until every worker has left.

  Args:
    controller: the state machine; used by nothing else while it is served.
    address: where to listen, `tcp://HOST:PORT`; by default this machine's loopback, on any free port.
    keys: CURVE keys of the run, required for any address but loopback.
    limit: seconds without a heartbeat of a worker's thread after which the worker is dropped.
    start_timeout: seconds after which workers that have never joined are dropped.

  Attributes:
    address: where it listens, with the port.

  Raises:
    ValueError: for an address that requires keys without them, or times that are not above 0.
    ModuleNotFoundError: without pyzmq.
    zmq.ZMQError: if it cannot listen at the address.

  Example:
    >>> import jaxsparse as js
    >>> with js.partial.Server(js.partial.Controller(2, 2)) as server:  # serves in a thread
    ...   server.address.startswith("tcp://127.0.0.1:")
    True
  """

  def __init__(
    self,
    controller: Controller,
    address: str = sockets.LOOPBACK,
    *,
    keys: Keys | None = None,
    limit: float = LIMIT,
    start_timeout: float = START_TIMEOUT,
  ):
    sockets.check_address(address, keys)
    for name, value in (("limit", limit), ("start_timeout", start_timeout)):
      if not value > 0:
        raise ValueError(f"{name}={value!r}, choose more than 0 seconds")
    self._controller, self._limit = controller, limit
    self._network = sockets.Network(keys)
    self._socket = self._network.server(messages.LONGEST)
    self._socket.router_mandatory = True  # a message to a connection that is gone raises an error
    try:
      self._socket.bind(address)
    except zmq.ZMQError:
      self._network.close(linger=0)
      raise
    self.address = sockets.endpoint(self._socket)
    times = {"limit": limit, "start_timeout": start_timeout, "now": time.monotonic()}
    self._protocol = ServerProtocol(controller, self._send, **times, first=secrets.randbits(62))
    self._stop, self._thread = threading.Event(), threading.Thread(target=self.serve, daemon=True)

  @property
  def rejected(self) -> int:
    """How many messages were rejected."""
    return self._protocol.rejected

  def __enter__(self) -> Self:
    """Serves in a thread."""
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops serving."""
    self._stop.set()
    self._thread.join()

  def serve(self) -> None:
    """Serves in this thread until every worker has left or was dropped."""
    try:
      while self._controller.alive and not self._stop.is_set():
        if self._socket.poll(round(1000 * min(0.1, self._limit / 10))):
          self._receive()
        self._protocol.tick(time.monotonic())
    finally:
      self._network.close(linger=0)

  def _receive(self) -> None:
    for _ in range(_MOST_AT_ONCE):
      try:
        connection, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
      except zmq.Again:
        return
      self._protocol.receive(connection, frames, time.monotonic())

  def _send(self, connection: bytes, frame: bytes) -> bool:
    """Sends without waiting; whether the connection is there. A worker that does not read is dropped soon."""
    try:
      self._socket.send_multipart([connection, frame], zmq.NOBLOCK)
    except zmq.Again:
      return True
    except zmq.ZMQError as error:
      if error.errno != zmq.EHOSTUNREACH:
        raise
      return False
    return True


@dataclasses.dataclass
class _Member:
  """What the server knows of a worker that has joined."""

  connection: bytes
  address: str  # where other workers reach it
  heard: float  # when its last message came
  step_began: float  # when it joined, or its last group was formed
  patience: float = 0.0  # once it is ready: until when it waits for the group filter, as long as its step took
  iteration: int = 0  # of its model; 0 if that is not trained, or not finite
  seeks: bool = False  # its model is not finite, and it has been named no donor yet
  group: Group | None = None  # the last one
  hellos: int = 0  # how often it has repeated HELLO
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
    b'one' ServerMessage(kind=<Answer.WELCOME: 1>, content={'limit': 5.0})
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
    self.rejected = 0
    self._controller, self._send, self._limit, self._first = controller, send, limit, first
    self._entries = 0  # of the model, if any worker has joined
    self._now = self._last_tick = self._next_probe = now
    self._members: dict[int, _Member] = {}
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
        if not self._send(member.connection, _BEAT):  # dropped a little later, after its last messages
          self._dead_at[worker] = min(self._dead_at[worker], now + self._limit / _PROBES)
    for worker in [worker for worker, end in self._dead_at.items() if end < now]:
      self._leave(worker)
    if any(self._members[worker].patience < now for worker in self._controller.waiting):
      self._announce(self._controller.release())

  def _handle(self, connection: bytes, signal: Signal) -> None:
    says, worker, value, _ = signal
    if says == Says.HELLO:
      self._take_hello(connection, signal)
      return
    if worker not in self._members:
      raise Rejected(f"absent: worker {worker} has not joined, it has to send HELLO")
    if self._members[worker].connection != connection:
      raise Rejected(f"absent: worker {worker} has joined by another connection, it has to send HELLO by this one")
    match says:
      case Says.READY:
        self._take_ready(worker, value, self._controller.ready)
      case Says.SYNCHRONIZE:
        self._take_ready(worker, value, self._controller.synchronize)
      case Says.FAILED:
        groups = self._controller.failed(worker, value - self._first)
        self._abort(worker)
        self._announce(groups)
      case Says.NOT_FINITE:
        self._take_not_finite(worker)
      case Says.BYE:
        self._leave(worker, settled=value)
      case Says.BEAT:
        self._send(connection, _BEAT)

  def _take_hello(self, connection: bytes, signal: Signal) -> None:
    worker, member = signal.worker, self._members.get(signal.worker)
    if member and member.connection != connection:
      self._reject_rival(connection, worker, member)
    if signal.value != self._entries and any(other != worker for other in self._members):
      raise Rejected(f"unlike: worker {worker} has a model of {signal.value} entries, the others of {self._entries}")
    groups = [] if worker in self._controller.alive else self._controller.join(worker)
    self._entries = signal.value
    if member:  # it could not reach its donor, and is named another one
      member.address, member.step_began, member.hellos = signal.address, self._now, member.hellos + 1
    else:
      self._members[worker] = _Member(connection, signal.address, self._now, self._now)
    self._send_welcome(worker, self._find_donor(worker))
    self._announce(groups)

  def _find_donor(self, worker: int) -> str | None:
    """The address of another worker with a trained model, the most trained first, and the next one at each HELLO."""
    donors = [member for other, member in self._members.items() if other != worker and member.iteration]
    donors.sort(key=lambda member: -member.iteration)
    return donors[self._members[worker].hellos % len(donors)].address if donors else None

  def _send_welcome(self, worker: int, donor: str | None) -> None:
    member = self._members[worker]
    member.seeks = member.seeks and not donor
    welcome = {"limit": self._limit, **({"donor": donor} if donor else {})}
    self._send(member.connection, messages.pack_answer(Answer.WELCOME, **welcome))

  def _take_not_finite(self, worker: int) -> None:
    """Names a donor to a worker, which is no donor itself until it is ready again; if there is none, it asks again."""
    self._controller.replaced(worker)
    member = self._members[worker]
    member.iteration = 0
    if donor := self._find_donor(worker):
      self._send_welcome(worker, donor)
      return
    member.seeks = True
    if all(other in self._members and self._members[other].seeks for other in self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

  def _reject_rival(self, connection: bytes, worker: int, member: _Member) -> NoReturn:
    """Rejects a second worker of one number: for good if the first one has proved to be alive, else for now."""
    asked = member.rivals.setdefault(connection, self._now)
    connected = self._send(member.connection, messages.pack_answer(Answer.PROBE))
    if connected and member.heard > asked:
      del member.rivals[connection]
      others = f"choose another number of 0 … {self._controller.workers - 1}"
      raise Rejected(f"taken: a living worker has the number {worker}, {others}, or end that worker first")
    raise Rejected(f"duplicate: worker {worker} has joined already; if it died, it is dropped after {self._limit:g} s")

  def _take_ready(self, worker: int, iteration: int, signal: Callable[[int, int], list[Group]]) -> None:
    groups, member = signal(worker, iteration), self._members[worker]
    member.patience = self._now + (self._now - member.step_began)
    member.iteration, member.seeks = iteration, False
    self._announce(groups)

  def _leave(self, worker: int, settled: int = 0) -> None:
    """Continues without a worker; it owes nothing to groups up to number `settled`."""
    groups = self._controller.leave(worker)
    self._abort(worker, settled)
    self._members.pop(worker, None)
    self._dead_at.pop(worker, None)
    self._announce(groups)

  def _announce(self, groups: list[Group]) -> None:
    for formed in groups:
      group = formed._replace(number=formed.number + self._first)
      members = [self._members[worker] for worker in group.members]
      addresses = [member.address for member in members]
      frame = messages.pack_answer(Answer.GROUP, **group._asdict(), addresses=addresses)
      for member in members:
        member.iteration, member.group, member.step_began = group.iteration, group, self._now
        self._send(member.connection, frame)

  def _abort(self, worker: int, settled: int = 0) -> None:
    """Tells the members of a worker's group that it sends no more pieces; members that need none are not affected."""
    member = self._members.get(worker)
    group = member.group if member else None
    if member and group:
      member.group = None
      frame = messages.pack_answer(Answer.ABORT, number=group.number, worker=worker)
      for other in group.members if group.number > settled else ():
        if other in self._members and other != worker:
          self._send(self._members[other].connection, frame)
