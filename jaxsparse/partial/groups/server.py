"""The server's protocol with the workers of a `Controller`: a state machine without sockets and clocks.

A dead worker joins no more groups, and the members of its current group receive ABORT.
A worker that leaves says in its BYE up to which group it has sent all pieces: the
members of these groups receive no ABORT. The group filter lets a worker that is ready
wait for others no longer than its own last step took.
"""

import dataclasses

from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.net.membership import Member, Members
from jaxsparse.partial.net.messages import (
  Rejected,
  ServerMessage,
  Signal,
  WorkerGroup,
  WorkerMessage,
)


@dataclasses.dataclass
class GroupMember(Member):
  """What the server knows of a worker that has joined."""

  step_began: float = 0.0  # when it joined, or its last group was formed
  # time until which it waits for the group filter once it is ready: as long as its step
  # took
  waits_until: float = 0.0
  iteration: int = 0  # iteration of its model; 0 if that is not trained, or not finite
  seeks: bool = False  # its model is not finite, and there is no donor for it yet
  group: WorkerGroup | None = None  # its last one, numbered as in messages
  # how often it has repeated HELLO; each HELLO gets the next donor, since the worker
  # may not reach all donors
  hellos: int = -1


class GroupServer:
  """The server's protocol.

    receive(connection, frames, now) ──> Controller.ready(…) ──> WorkerGroup(…) ──> send(…) to each member
    tick(now)                        ──> heartbeats, dead workers are dropped, ready workers are released

  Args:
    controller: the state machine that forms groups; over when none of its workers is
      alive.
    members: the workers that have joined; `members.known` has a `GroupMember` of each:
      when its current step began, until when it waits for the filter, the iteration of
      its model (0: it is no donor), whether it seeks a finite model, its last group.
    first: what is added to the controller's numbers of groups in messages. It differs
      between servers at one address: else pieces for a group of an earlier server could
      be taken for those of a group of this one.

  Example:
    >>> from jaxsparse.partial.net import messages
    >>> send = lambda connection, frame: print(connection, messages.parse_answer(frame)) or True
    >>> server = GroupServer(Controller(2, 2), Members(GroupMember, send, limit=5.0, now=0.0))
    >>> server.receive(b"one", [Signal(WorkerMessage.HELLO, 1, 3, "tcp://127.0.0.1:9").pack()], now=0.1)
    b'one' Answer(kind=<ServerMessage.WELCOME: 1>, content={'limit': 5.0, 'donor': None})
  """

  def __init__(
    self, controller: Controller, members: Members[GroupMember], first: int = 0
  ):
    self.members = members
    self._controller = controller
    self._first = first

  def receive(self, connection: bytes, frames: list[bytes], now: float) -> None:
    """Handles a message of a worker: `connection` is its ZeroMQ identity, `now` in seconds."""
    self.members.receive(connection, frames, now, self._handle)

  def tick(self, now: float) -> None:
    """Sends heartbeats, drops dead workers, and releases ready workers that have waited for the filter long enough.

    To be called several times in `limit` seconds.
    """
    for worker in self.members.tick(now):
      self._leave(worker)
    if any(
      self.members.known[worker].waits_until < now
      for worker in self._controller.waiting
    ):
      self._announce(self._controller.release())

  def _handle(self, connection: bytes, signal: Signal) -> None:
    """Does what a signal asks for, or raises Rejected, which `Members.receive` sends to the worker."""
    kind, worker, value = signal[:3]
    if kind in (WorkerMessage.HELLO, WorkerMessage.NOT_FINITE):
      self._take_hello(connection, signal)
      return
    member = self.members.find(connection, worker)
    match kind:
      case WorkerMessage.BYE:
        self._leave(worker, settled=value)
      case WorkerMessage.READY | WorkerMessage.SYNCHRONIZE:
        is_ready = kind == WorkerMessage.READY
        groups = (self._controller.ready if is_ready else self._controller.synchronize)(
          worker, value
        )
        # After the call, as a rejected signal may change nothing. Before `_announce`,
        # which gives all members of a group its iteration.
        member.waits_until = self.members.now + (self.members.now - member.step_began)
        member.iteration = value
        member.seeks = False
        self._announce(groups)
      case WorkerMessage.FAILED:
        # Numbers of groups in messages are higher by `first` than the controller's.
        groups = self._controller.failed(worker, value - self._first)
        # The others wait for pieces of this worker. Before `_announce`, which may set
        # another `member.group`.
        self._abort(worker, member.group)
        self._announce(groups)

  def _take_hello(self, connection: bytes, signal: Signal) -> None:
    """Joins a worker by HELLO or NOT_FINITE, or names another donor to one that has joined.

    The worker is no donor itself until it is ready again.
    """
    worker = signal.worker
    # Once a worker has trained, models may differ: start values are not compared.
    has_trained = any(member.iteration for member in self.members.known.values())
    self.members.check(connection, signal, at_start=not has_trained)
    # The controller counts all workers as alive from the start, before they join.
    if worker in self._controller.alive:
      # forgets the worker's iteration: that of its new model may be smaller
      self._controller.replaced(worker)
    else:
      self._announce(self._controller.join(worker))
    member = self.members.join(connection, signal)
    member.step_began = self.members.now
    member.iteration = 0
    member.group = None
    # `_welcome` names the next donor: the model of the one before may not have come.
    member.hellos += 1
    self._welcome(signal, member)

  def _welcome(self, signal: Signal, member: GroupMember) -> None:
    """Sends WELCOME with the address of a donor, None without one; NOT_FINITE gets no answer until there is a donor.

    Raises:
      Rejected: for NOT_FINITE, if all workers seek a finite model.
    """
    known = self.members.known
    donors = sorted(
      (candidate for candidate in known.values() if candidate.iteration),
      key=lambda candidate: -candidate.iteration,
    )
    member.seeks = signal.kind == WorkerMessage.NOT_FINITE and not donors
    if not member.seeks:
      # `hellos` is 0 at the first HELLO: the most trained donor.
      donor = donors[member.hellos % len(donors)].address if donors else None
      self.members.tell(
        [signal.worker], ServerMessage.WELCOME, limit=self.members.limit, donor=donor
      )
    # The worker has joined, but its request ends with an error.
    elif all(other in known and known[other].seeks for other in self._controller.alive):
      raise Rejected("nobody: no worker has a finite model")

  def _leave(self, worker: int, settled: int = 0) -> None:
    """Removes a worker that leaves or is dead; its last group receives ABORT if pieces of the worker are missing.

    Args:
      worker: the number of the worker.
      settled: it has sent all pieces to groups up to this number; 0 if it is dead.
    """
    groups = self._controller.leave(worker)
    member = self.members.forget(worker)
    if member and member.group and member.group.number > settled:
      self._abort(worker, member.group)
    self._announce(groups)

  def _announce(self, groups: list[WorkerGroup]) -> None:
    """Tells the members of groups that the controller has formed."""
    for formed in groups:
      group = formed._replace(number=formed.number + self._first)
      for worker in group.members:
        member = self.members.known[worker]
        member.iteration = group.iteration
        member.group = group
        member.step_began = self.members.now
      self.members.tell_group(group)

  def _abort(self, worker: int, group: WorkerGroup | None) -> None:
    """Tells the other members of a worker's group that the worker sends no more pieces to it."""
    if group:
      others = [member for member in group.members if member != worker]
      self.members.tell(others, ServerMessage.ABORT, number=group.number, worker=worker)
