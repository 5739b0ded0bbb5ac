"""The controller over TCP: a small server that takes signals of a few bytes and never sees a model.

    worker 3 ── READY 17 ──────────> ROUTER ─> Controller.ready(3, 17)
    workers 0, 3, 5 <── GROUP … ─────┘            └─> Group((0, 3, 5), …)

It alone decides who is dead: a worker whose connection is gone, or that gives no sign of life for `limit` seconds. The
others form groups without it, and those that average with it now are told to give up; not so if it has said BYE, and
that it owes them nothing: what they wait for is on its way then. A signal that is malformed, unknown, duplicate or
stale is answered with a reason and changes nothing.

A HELLO with the number of a worker that is here may come from its successor, started again after its death, or from a
second worker that was given the same number by mistake. The server probes the worker that is here: if it answers, the
other one is refused with "taken"; until then with "duplicate", and it may ask again.
"""

import threading
import time
from collections.abc import Callable
from typing import NoReturn, Self

import zmq

from jaxsparse.launch import START_TIMEOUT
from jaxsparse.partial import messages
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.messages import Answer, Keys, Says, Signal

_BEAT = messages.answer(Answer.BEAT)
_PROBES = 10  # of each worker's connection in `limit` seconds
LIMIT = 5.0  # seconds without a sign of life after which a worker, or the controller, counts as dead


class Server:
  """Serves a controller until every worker has left.

  Args:
    controller: the state machine; nobody else may use it while it is served.
    address: where to listen; `tcp://HOST:PORT`, on this machine's loopback and any port by default.
    keys: CURVE keys of the run, needed on any other address than loopback.
    limit: seconds without a sign of life after which a worker is dropped.
    start_timeout: seconds until every worker must have come; those that have not are dropped.

  Attributes:
    address: where it listens.
    taken: signals that were taken.
    rejected: messages that were rejected.

  Raises:
    ValueError: for an address that needs keys and has none, or times that are not above 0.
    zmq.ZMQError: if the address cannot be had.

  Example:
    >>> import jaxsparse as js
    >>> with js.partial.Server(js.partial.Controller(2, 2)) as server:  # serves in a thread
    ...   server.address.startswith("tcp://127.0.0.1:")
    True
  """

  def __init__(
    self,
    controller: Controller,
    address: str = messages.LOOPBACK,
    *,
    keys: Keys | None = None,
    limit: float = LIMIT,
    start_timeout: float = START_TIMEOUT,
  ):
    messages.check_address(address, keys)
    for name, value in (("limit", limit), ("start_timeout", start_timeout)):
      if not value > 0:
        raise ValueError(f"{name}={value!r}, choose more than 0 seconds")
    self._controller, self._limit = controller, limit
    self._context = zmq.Context()
    self._guard = messages.Guard(self._context, keys)
    self._socket = messages.secure(self._context.socket(zmq.ROUTER), keys, serves=True)
    self._socket.linger, self._socket.maxmsgsize = 0, messages.LONGEST
    self._socket.router_mandatory = True  # a message to a connection that is gone is an error then
    try:
      self._socket.bind(address)
    except zmq.ZMQError:
      self._end()
      raise
    self.address = messages.endpoint(self._socket)
    self.taken = self.rejected = 0
    self._peers: dict[int, tuple[bytes, str]] = {}  # of each worker: the connection it came by, and its own address
    self._hellos: dict[int, int] = {}  # how often each has said HELLO again
    self._rivals: dict[
      int, dict[bytes, float]
    ] = {}  # of each worker: when other connections first asked for its number
    self._heard: dict[int, float] = {}  # when each worker last gave a sign of life
    self._entries: int | None = None  # of everybody's model
    self._next_probe, self._looked = 0.0, time.monotonic()
    self._dead_at = dict.fromkeys(controller.alive, time.monotonic() + start_timeout)
    self._iterations: dict[int, int] = {}  # of each worker's model, as far as we know
    self._groups: dict[int, Group] = {}  # the last one of each worker
    self._asking: set[int] = set()  # workers whose models are not finite, and for which there is no donor yet
    self._stop, self._thread = threading.Event(), threading.Thread(target=self.serve, daemon=True)

  def __enter__(self) -> Self:
    """Serves in a thread."""
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops serving."""
    self._stop.set()
    self._thread.join()

  def serve(self) -> None:
    """Serves in this thread until every worker has left, or was dropped."""
    try:
      while self._controller.alive and not self._stop.is_set():
        if self._socket.poll(round(1000 * min(0.1, self._limit / 10))):
          for _ in range(1000):  # then the heartbeats get their turn
            try:
              self._take(*self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
              break
        self._drop_the_dead()
    finally:
      self._end()

  def _end(self) -> None:
    self._guard.stop()
    self._socket.close()
    self._context.term()

  def _take(self, connection: bytes, *frames: bytes) -> None:
    try:
      signal = messages.parse(list(frames))
      if signal.says != Says.HELLO:
        self._check_known(connection, signal.worker)
      self._handlers()[signal.says](connection, signal)
    except Rejected as error:
      self.rejected += 1
      self._send(connection, messages.answer(Answer.REJECTED, reason=str(error)))
      return
    self.taken += 1
    if signal.worker in self._peers:
      self._heard[signal.worker] = time.monotonic()
      self._dead_at[signal.worker] = self._heard[signal.worker] + self._limit

  def _handlers(self) -> dict[Says, Callable[[bytes, Signal], object]]:
    return {
      Says.HELLO: self._hello,
      Says.READY: self._ready,
      Says.SYNCHRONIZE: self._ready,
      Says.FAILED: self._failed,
      Says.NOT_FINITE: self._not_finite,
      Says.BYE: lambda _, signal: self._leave(signal.worker, owes_after=signal.value),
      Says.BEAT: lambda connection, _: self._send(connection, _BEAT),
    }

  def _check_known(self, connection: bytes, worker: int) -> None:
    if worker not in self._peers:
      raise Rejected(f"absent: worker {worker} is not here, it has to say HELLO")
    if self._peers[worker][0] != connection:
      raise Rejected(f"absent: worker {worker} has come by another connection, it has to say HELLO by this one")

  def _hello(self, connection: bytes, signal: Signal) -> None:
    worker = signal.worker
    if worker in self._peers and self._peers[worker][0] != connection:
      self._refuse_rival(connection, worker)
    again = worker in self._peers  # a donor could not be reached: here is the next
    others = [other for other in self._peers if other != worker]
    if others and signal.value != self._entries:
      raise Rejected(f"unlike: worker {worker} has a model of {signal.value} entries, the others of {self._entries}")
    groups = [] if worker in self._controller.alive else self._controller.join(worker)
    self._entries = signal.value
    self._hellos[worker] = self._hellos.get(worker, 0) + 1 if again else 0
    self._peers[worker] = (connection, signal.address)
    self._welcome(worker, self._donor(worker))
    self._announce(groups)

  def _donor(self, worker: int) -> str | None:
    """The address of another worker that has a trained model, the most trained first; another one at each HELLO."""
    donors = [other for other in self._peers if other != worker and self._iterations.get(other)]
    donors.sort(key=lambda other: -self._iterations[other])
    return self._peers[donors[self._hellos[worker] % len(donors)]][1] if donors else None

  def _welcome(self, worker: int, donor: str | None) -> None:
    if donor:
      self._asking.discard(worker)
    welcome = {"limit": self._limit, **({"donor": donor} if donor else {})}
    self._send(self._peers[worker][0], messages.answer(Answer.WELCOME, **welcome))

  def _not_finite(self, _: bytes, signal: Signal) -> None:
    """Names a donor to a worker, which is none itself until it is ready again; without one it has to ask again."""
    worker = signal.worker
    self._controller.replaced(worker)
    self._iterations.pop(worker, None)
    if donor := self._donor(worker):
      self._welcome(worker, donor)
      return
    self._asking.add(worker)
    if self._asking.issuperset(self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

  def _refuse_rival(self, connection: bytes, worker: int) -> NoReturn:
    """Refuses a second worker of one number: for good if the first one is known to live, else until that is known."""
    rivals = self._rivals.setdefault(worker, {})
    asked = rivals.setdefault(connection, time.monotonic())
    connected = self._send(self._peers[worker][0], messages.answer(Answer.PROBE))
    if connected and self._heard[worker] > asked:
      del rivals[connection]
      others = f"choose another number of 0 … {self._controller.workers - 1}"
      raise Rejected(f"taken: a living worker has the number {worker}, {others}, or end that worker first")
    raise Rejected(f"duplicate: worker {worker} is here already; if it died, it is dropped after {self._limit:g} s")

  def _ready(self, _: bytes, signal: Signal) -> None:
    take = self._controller.ready if signal.says == Says.READY else self._controller.synchronize
    groups = take(signal.worker, signal.value)
    self._iterations[signal.worker] = signal.value
    self._asking.discard(signal.worker)
    self._announce(groups)

  def _failed(self, _: bytes, signal: Signal) -> None:
    groups = self._controller.failed(signal.worker, signal.value)
    self._abort(signal.worker)
    self._announce(groups)

  def _leave(self, worker: int, owes_after: int = 0) -> None:
    """Goes on without a worker, which may have more to send to groups that came after number `owes_after`."""
    groups = self._controller.leave(worker)
    self._abort(worker, owes_after)
    for kept in (self._peers, self._dead_at, self._iterations, self._rivals, self._heard):
      kept.pop(worker, None)
    self._asking.discard(worker)
    self._announce(groups)

  def _announce(self, groups: list[Group]) -> None:
    for group in groups:
      addresses = [self._peers[member][1] for member in group.members]
      self._iterations.update(dict.fromkeys(group.members, group.iteration))
      self._groups.update(dict.fromkeys(group.members, group))
      frame = messages.answer(Answer.GROUP, **group._asdict(), addresses=addresses)
      for member in group.members:
        self._send(self._peers[member][0], frame)

  def _abort(self, worker: int, owes_after: int = 0) -> None:
    """Tells the others of a worker's group that no more will come from it; who has all it needs goes on."""
    group = self._groups.pop(worker, None)
    if group and group.number > owes_after:
      for member in group.members:
        if member in self._peers and member != worker:
          self._send(self._peers[member][0], messages.answer(Answer.ABORT, number=group.number, worker=worker))

  def _drop_the_dead(self) -> None:
    now = time.monotonic()
    if now - self._looked > self._limit / 2:  # held up ourselves: the workers may have been there all the time
      self._dead_at = {worker: max(end, now + self._limit) for worker, end in self._dead_at.items()}
    self._looked = now
    if now > self._next_probe:
      self._next_probe = now + self._limit / _PROBES
      gone = [worker for worker, (connection, _) in self._peers.items() if not self._send(connection, _BEAT)]
      for worker in gone:  # only after what it has said last is taken
        self._dead_at[worker] = min(self._dead_at[worker], now + self._limit / _PROBES)
    for worker in [worker for worker, end in self._dead_at.items() if end < now]:
      self._leave(worker)

  def _send(self, connection: bytes, frame: bytes) -> bool:
    """Sends what can be sent at once, for who does not read is soon dropped; whether the connection is there."""
    try:
      self._socket.send_multipart([connection, frame], zmq.NOBLOCK)
    except zmq.Again:
      return True
    except zmq.ZMQError as error:
      if error.errno != zmq.EHOSTUNREACH:
        raise
      return False
    return True
