"""Workers of a simulation: what they train, and what exchanges and fetches take on their links."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from benchmarks.thousands.virtual import VirtualWorker
from jaxsparse.partial.net.membership import Unreachable
from jaxsparse.partial.net.messages import (
  Piece,
  PieceKind,
  RoundPosition,
  WorkerGroup,
  WorkerMessage,
)
from jaxsparse.partial.net.transfers import PREFIX
from jaxsparse.partial.rounds.protocol import RoundRequest
from jaxsparse.partial.rounds.run import Done

if TYPE_CHECKING:
  from benchmarks.thousands.simulation import Simulation

STALLED = 5.0  # seconds until a connection to a machine that is gone is closed
_ALPHA = 50e-6  # seconds that a worker is busy with a message
_TIMEOUT = 120.0  # that of `js.partial.Rounds`


class Setting(NamedTuple):
  """The setting of a simulation."""

  workers: int
  failures: float  # of a worker in an hour
  seconds: float  # that are measured, after two intervals
  interval: float = 60.0  # seconds of H steps
  delay: float = 0.5  # τ / H
  entries: int = 10_000_000
  collective: str = "onebit"
  site: int = 50  # workers that fail together
  together: float = 0.1  # part of the failures of a worker that are those of its site
  restart: float = 60.0  # seconds from a failure until the next process joins
  straggle: float = 0.01  # part of the intervals of a worker that take twice as long
  jitter: float = 0.01  # standard deviation of the seconds of an interval, relative
  quorum: float = 0.5  # K / P
  grace: float | Literal["auto"] = "auto"
  limit: float = 5.0
  server_rate: float = 1e9 / 8  # bytes a second, each way
  seed: int = 0
  succeeds: bool = (
    False  # whether the next process goes on from what the one before has not delivered
  )
  scenario: str = ""  # of `windows`
  # seconds for which training may stop for a round; None: what the server tells
  wait: float | None = None


class Link(NamedTuple):
  """The link of a worker to the backbone."""

  latency: float  # seconds, one way
  rate: float  # bytes a second, each way


@dataclasses.dataclass(eq=False)
class Run:
  """The part of one member in an exchange; `RoundProtocol` knows it as that of an `Exchanger`."""

  group: WorkerGroup
  digest: int = 0
  missing: int = -1
  active: bool = True

  def receive(self, piece: Piece) -> None:
    """No pieces are simulated."""


class Exchange:
  """The exchange of a round: all members have the result at the same time, or none if one of them is lost."""

  def __init__(self, network: "Simulation", group: WorkerGroup):
    self.group = group
    self._network = network
    self._runs: list[tuple[Member, Run]] = []
    self._lost: list[tuple[Member, float]] = []  # members, and when others notice it
    cost = network.cost(len(group.members))
    links = [network.links[member] for member in group.members]
    # Messages to all others are sent before one is awaited.
    stages = (
      cost.messages - len(links) + 2 if cost.messages >= len(links) else cost.messages
    )
    latency = 2 * max(link.latency for link in links) * stages
    self.seconds = (
      latency
      + _ALPHA * cost.messages
      + 4 * cost.words / min(link.rate for link in links)
    )
    # What each link has moved: a slice to each member, and a slice of each to all, in
    # float32.
    moved = 4 * network.setting.entries / min(link.rate for link in links)
    self.seconds += len(group.links) * (
      4 * max(link.latency for link in links) + 2 * _ALPHA * len(links) + moved
    )
    # of the others to which a member sends
    self.part = min(1.0, cost.messages / max(1, len(links) - 1))

  def begin(self, member: "Member", run: Run) -> None:
    """A member has heard of the round."""
    self._runs.append((member, run))
    for lost, noticed in self._lost:
      self._notice(member, run, lost, noticed)
    if len(self._runs) == len(self.group.members):
      for one, its in self._runs:
        self._network.at(self._network.now + self.seconds, one, one.finish, its)

  def lose(self, lost: "Member", seconds: float) -> None:
    """A member is lost; those that send to it notice it after so many seconds."""
    noticed = self._network.now + seconds
    self._lost.append((lost, noticed))
    for member, run in self._runs:
      self._notice(member, run, lost, noticed)

  def _notice(self, member: "Member", run: Run, lost: "Member", noticed: float) -> None:
    if run.active and not run.digest and self._network.random.random() < self.part:
      at = max(noticed, self._network.now) + member.link.latency
      self._network.at(at, member, member.miss, run, lost.address)


class Member(VirtualWorker):
  """A worker that trains without a pause, but for the time that it waits for a round at the end of an interval."""

  network: "Simulation"

  def __init__(self, network: "Simulation", number: int, undelivered: float = 0.0):
    self.link = network.links[number]
    # whether its machine is gone, so that nobody hears that its connections are closed
    self.is_silent = False
    # seconds that it had trained and not delivered when the interval began
    self._carried = undelivered
    self._given: float | None = None
    self._since: float | None = None  # when the interval began
    self._turn = 0.0  # seconds of the interval
    self._run: Run | None = None
    self._asked_after = 0  # rounds of its anchor when it was ready
    super().__init__(network, number, entries=network.setting.entries, timeout=_TIMEOUT)

  @property
  def undelivered(self) -> float:
    """Seconds that it has trained, and no round has delivered."""
    if self._since is None:
      return self._carried
    elapsed = self.network.now - self._since
    wait = self.network.setting.wait
    if wait is None:
      wait = self.protocol.grace
    whole, rest = divmod(elapsed, self._turn + wait)
    return self._carried + whole * self._turn + min(rest, self._turn)

  def take(self, answer: Any) -> None:
    """The round is applied at the end of the interval, or at once where that is over."""
    if isinstance(answer, Exception):
      raise answer
    end = 0.0 if self._since is None else self._since + self._turn
    self.network.at(max(end, self.network.now), self, self.apply)

  def apply(self) -> None:
    """A new interval begins, and in it an exchange."""
    network = self.network
    trained = self.undelivered
    if self._since is not None:
      network.over += trained - self._carried - self._turn
    self._carried = trained
    self._since = network.now
    self._turn = network.setting.interval * max(
      0.1, network.slowness(self) * network.random.gauss(1, network.setting.jitter)
    )
    network.at(network.now + self._turn * (1 - network.setting.delay), self, self._ask)

  def _ask(self) -> None:
    if self.lives:
      self._given = self.undelivered
      self._asked_after = self.protocol.membership.position.round
      self.protocol.undelivered = round(self._given)
      self.handle(RoundRequest(WorkerMessage.READY, weight=1))

  def make_model(self, peer: VirtualWorker, request: Piece) -> tuple[Piece, float]:
    """A slice of the anchor, or of links of signs: the number of its last group."""
    assert isinstance(peer, Member)
    setting = self.network.setting
    round_, base, _ = self.protocol.membership.position
    start, _, *which = request.values.view(np.int64).tolist()
    bits = 32 if start < 0 else round_ - start  # of an entry
    has_none = start >= 0 and (bits >= 32 or setting.collective != "onebit")
    has_none |= which[1] > 1 and request.number != round_  # the others' is another one
    content = [] if has_none else [base]
    seconds = setting.entries / 8 * bits / min(self.link.rate, peer.link.rate)
    seconds *= not has_none
    values = np.array([0, 0, *which, *content], np.int64).view(np.float32)
    return Piece(PieceKind.MODEL, round_, self.number, values), seconds / which[1]

  def receive(self, sender: VirtualWorker, piece: Piece) -> None:
    """Takes a piece, as an `Endpoint` does; nothing answers for a machine that is gone."""
    if self.dead and self.is_silent:
      self.network.at(
        self.network.now + STALLED, sender, sender.handle, Unreachable(self.address)
      )
    else:
      super().receive(sender, piece)

  def miss(self, run: Run, address: str) -> None:
    """A member of a round cannot be reached."""
    if run.active:
      self.handle(Unreachable(address))

  def finish(self, run: Run) -> None:
    """The exchange has a result."""
    if run.active:
      run.digest = run.group.number
      self.handle(Done(run.group.number, run.digest))

  # What an `Exchanger` does.

  @property
  def lineage(self) -> tuple[int, ...]:
    """The ids of the last rounds of its anchor."""
    return self.network.lineages[self.protocol.membership.position.round].ids

  def begin(self, group: WorkerGroup) -> Run:
    """Takes part in an exchange."""
    self._run = Run(group)
    self.network.find_exchange(group).begin(self, self._run)
    return self._run

  def commit(self) -> RoundPosition:
    """The round counts."""
    assert self._run is not None
    assert self._given is not None
    group = self._run.group
    self.network.deliver(group, self._given)
    if group.iteration > self._asked_after:
      self.network.late += self._given
    self._carried -= self._given
    self._given = None
    return RoundPosition(group.iteration + 1, group.number)

  def drop(self) -> None:
    """The round counts for nobody."""
    if self._run:
      self._run.active = False

  def was_committed(self, piece: Piece, position: RoundPosition) -> bool | None:
    """Whether the donor has been through the round whose result this worker has."""
    return (
      None
      if piece.number <= position.round
      else self.network.bases[position.round + 1] == position.last
    )

  def adopt(self, piece: Piece, base: int, digest: int) -> RoundPosition:
    """The anchor of a donor, unless it is older."""
    place = self.protocol.membership
    if piece.number < place.position.round:
      raise ValueError("it is older")
    bases = {*piece.values[PREFIX:].view(np.int64).tolist()}
    if len(bases) != 1 or piece.values.size < PREFIX + 2 * len(place.donors):
      raise ValueError("a slice is missing")
    base = bases.pop()
    return RoundPosition(piece.number, base)
