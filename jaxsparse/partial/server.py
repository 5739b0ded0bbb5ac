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
has not noticed yet, or from a second worker that was given the same number by mistake. It is rejected as "duplicate",
which may be retried; as "taken" once the worker that has joined was heard after it.
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from typing import Self

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages, sockets
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.messages import Answer, Says, Signal
from jaxsparse.partial.sockets import Keys, zmq

LIMIT = 5.0  # seconds without a heartbeat after which the server drops a worker, or a worker misses the controller
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
    times = {"limit": limit, "start_timeout": start_timeout, "now": time.monotonic()}
    self._protocol = ServerProtocol(controller, self._send, **times, first=secrets.randbits(62))
    receive = lambda frames: self._protocol.receive(frames[0], frames[1:], time.monotonic())
    self._socket, self.address = self._network.bind(address, messages.LONGEST, receive)
    self._socket.router_mandatory = True  # a message to a connection that is gone raises an error
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
        self._network.wait(min(0.1, self._limit / 10))
        self._protocol.tick(time.monotonic())
    finally:
      self._network.close(linger=0)

  def _send(self, connection: bytes, frame: bytes) -> bool:
    """Sends without waiting; whether the connection is there. A worker that does not read is dropped soon."""
    try:
      self._socket.send_multipart([connection, frame], zmq.NOBLOCK)
    except zmq.Again:
      pass
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
  seeks: bool = False  # its model is not finite, and there is no donor for it yet
  group: Group | None = None  # the last one
  hellos: int = 0  # how often it has repeated HELLO: each names the next donor, it may not reach all of them
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
    member = self._members.get(worker)
    if says in (Says.HELLO, Says.NOT_FINITE):
      self._take_hello(connection, signal, member)
    elif member is None or member.connection != connection:
      raise Rejected(f"absent: worker {worker} has not joined by this connection, it has to send HELLO")
    elif says in (Says.READY, Says.SYNCHRONIZE):
      groups = (self._controller.ready if says == Says.READY else self._controller.synchronize)(worker, value)
      member.patience = self._now + (self._now - member.step_began)
      member.iteration, member.seeks = value, False
      self._announce(groups)
    elif says == Says.FAILED:
      groups = self._controller.failed(worker, value - self._first)
      self._abort(worker)
      self._announce(groups)
    elif says == Says.BYE:
      self._leave(worker, settled=value)

  def _take_hello(self, connection: bytes, signal: Signal, member: _Member | None) -> None:
    """Joins a worker, or names another donor to one that has joined; it is no donor until it is ready again."""
    says, worker, entries, address = signal
    if member and member.connection != connection:
      asked = member.rivals.setdefault(connection, self._now)
      if member.heard > asked and self._send(member.connection, _BEAT):
        del member.rivals[connection]
        raise Rejected(f"taken: a living worker has the number {worker}, choose another one or end that worker first")
      raise Rejected(f"duplicate: worker {worker} has joined; if it died, it is dropped after {self._limit:g} s")
    if entries != self._entries and any(other != worker for other in self._members):
      raise Rejected(f"unlike: worker {worker} has a model of {entries} entries, the others of {self._entries}")
    if worker in self._controller.alive:
      self._controller.replaced(worker)
    else:
      self._announce(self._controller.join(worker))
    self._entries, hellos = entries, member.hellos + 1 if member else 0
    member = self._members[worker] = _Member(connection, address, self._now, self._now, hellos=hellos)
    donors = sorted((other for other in self._members.values() if other.iteration), key=lambda other: -other.iteration)
    member.seeks = says == Says.NOT_FINITE and not donors
    if not member.seeks:
      donor = donors[hellos % len(donors)].address if donors else None
      self._send(connection, messages.pack_answer(Answer.WELCOME, limit=self._limit, donor=donor))
    elif all(other in self._members and self._members[other].seeks for other in self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

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
