"""Rounds of P workers in virtual time: links, failures and stragglers are drawn, the protocols are the real ones.

An exchange takes `latency · stages + α · messages + bytes / rate` of the slowest member's link, by the cost that
`js.costs` predicts for the collective; it begins when all members know of the round, and fails when one of them is
lost. What a worker trains is measured in seconds, and delivered by the rounds that count.
"""

import collections
import dataclasses
import math
import time
import tracemalloc
from random import Random
from typing import Any, NamedTuple

import numpy as np

import jaxsparse as js
from benchmarks.thousands.virtual import Connection, VirtualNetwork, VirtualWorker
from jaxsparse.partial.net.membership import Members, Unreachable
from jaxsparse.partial.net.messages import (
  Answer,
  Group,
  Piece,
  PieceKind,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds.exchanger import Done
from jaxsparse.partial.rounds.protocol import Request
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.server import RoundMember, RoundServer

_TICK = 0.1  # seconds between two ticks of the server, and half of those of a worker
_STALLED = 5.0  # seconds until a connection to a machine that is gone is closed
_ALPHA = 50e-6  # seconds that a worker is busy with a message
_LATENCIES = 0.5e-3, 100e-3  # seconds from a worker to the backbone: between two workers 1 to 200 ms
_RATES = 10e6 / 8, 1000e6 / 8  # bytes a second of a worker's link, each way
_TIMEOUT = 120.0  # that of `js.partial.Rounds`


class Setting(NamedTuple):
  """Of a simulation."""

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
  grace: float = 2.0
  limit: float = 5.0
  server_rate: float = 1e9 / 8  # bytes a second, each way
  seed: int = 0
  succeeds: bool = False  # whether the next process goes on from what the one before has not delivered


class Link(NamedTuple):
  """Of a worker to the backbone."""

  latency: float  # seconds, one way
  rate: float  # bytes a second, each way


class Result(NamedTuple):
  """What was measured; bytes and messages are a second, CPU is that of the server's protocol on this machine."""

  workers: int
  failures: float  # of a worker in an hour
  goodput: float  # of the seconds that all workers would train without failures, from the first round to the last one
  lost: float  # the part that lost workers had not delivered
  round: float | None  # seconds from one that counts to the next
  exchange: float  # seconds, median over all rounds that began
  counted: int  # rounds
  failed: int  # rounds
  members: float  # of a round that counts, mean / P
  deaths: int
  behind: int  # how often workers were told that they are behind
  messages_in: float  # at the server
  messages_out: float
  bytes_in: float
  bytes_out: float
  burst: float  # seconds that its link was busy without a break, at most
  worker_words: int  # that a worker sends in an exchange
  worker_messages: int
  cpu_event: float  # seconds an event
  cpu: float  # seconds a second
  calls: dict[str, list[float]]  # by the kind of event: how many, and seconds of all


@dataclasses.dataclass(eq=False)
class Run:
  """The part of one member in an exchange; `RoundProtocol` knows it as that of an `Exchanger`."""

  group: Group
  digest: int = 0
  missing: int | None = None
  active: bool = True

  def receive(self, piece: Piece) -> None:
    """No pieces are simulated."""


class Exchange:
  """The exchange of a round: all members have the result at the same time, or none if one of them is lost."""

  def __init__(self, network: "Simulation", group: Group):
    self.group = group
    self._network = network
    self._runs: list[tuple[Member, Run]] = []
    self._lost: list[tuple[Member, float]] = []  # members, and when others notice it
    cost = network.cost(len(group.members))
    links = [network.links[member] for member in group.members]
    # Messages to all others are sent before one is awaited.
    stages = cost.messages - len(links) + 2 if cost.messages >= len(links) else cost.messages
    latency = 2 * max(link.latency for link in links) * stages
    self.seconds = latency + _ALPHA * cost.messages + 4 * cost.words / min(link.rate for link in links)
    self.part = min(1.0, cost.messages / max(1, len(links) - 1))  # of the others to which a member sends

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
    self.is_silent = False  # whether its machine is gone, so that nobody hears that its connections are closed
    self._carried = undelivered  # seconds that it had trained and not delivered when the interval began
    self._given: float | None = None
    self._since: float | None = None  # when the interval began
    self._turn = 0.0  # seconds of the interval
    self._run: Run | None = None
    super().__init__(network, number, entries=network.setting.entries, timeout=_TIMEOUT)

  @property
  def undelivered(self) -> float:
    """Seconds that it has trained, and no round has delivered."""
    if self._since is None:
      return self._carried
    elapsed = self.network.now - self._since
    whole, rest = divmod(elapsed, self._turn + self.protocol.grace)
    return self._carried + whole * self._turn + min(rest, self._turn)

  def take(self, answer: Any) -> None:
    """The round is applied at the end of the interval, or at once where that is over."""
    if isinstance(answer, Exception):
      raise answer
    end = 0.0 if self._since is None else self._since + self._turn
    self.network.at(max(end, self.network.now), self, self._apply)

  def _apply(self) -> None:
    """A new interval begins, and in it an exchange."""
    network = self.network
    self._carried = self.undelivered
    self._since = network.now
    slow = 2 if network.random.random() < network.setting.straggle else 1
    self._turn = network.setting.interval * max(0.1, slow * network.random.gauss(1, network.setting.jitter))
    network.at(network.now + self._turn * (1 - network.setting.delay), self, self._ask)

  def _ask(self) -> None:
    if self.lives:
      self._given = self.undelivered
      self.protocol.undelivered = round(self._given)
      self.handle(Request(WorkerMessage.READY, weight=1))

  def make_model(self, peer: VirtualWorker) -> tuple[Piece, float]:
    """The anchor: its round, and the number of its last group."""
    assert isinstance(peer, Member)
    round_, base, _ = self.protocol.membership.position
    seconds = 4 * self.network.setting.entries / min(self.link.rate, peer.link.rate)
    return Piece(PieceKind.MODEL, round_, self.number, np.array([base])), seconds

  def receive(self, sender: VirtualWorker, piece: Piece) -> None:
    """As at an `Endpoint`; nothing answers for a machine that is gone."""
    if self.dead and self.is_silent:
      self.network.at(self.network.now + _STALLED, sender, sender.handle, Unreachable(self.address))
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

  def begin(self, group: Group) -> Run:
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
    self._carried -= self._given
    self._given = None
    return RoundPosition(group.iteration + 1, group.number)

  def drop(self) -> None:
    """The round counts for nobody."""
    if self._run:
      self._run.active = False

  def was_committed(self, piece: Piece, position: RoundPosition) -> bool | None:
    """Whether the donor has been through the round whose result this worker has."""
    return None if piece.number <= position.round else self.network.bases[position.round + 1] == position.last

  def adopt(self, piece: Piece, base: int, digest: int) -> RoundPosition | None:
    """The anchor of a donor, unless it is older."""
    if piece.number < self.protocol.membership.position.round:
      return None
    return RoundPosition(piece.number, int(piece.values[0]))


class Simulation(VirtualNetwork):
  """All workers and their server."""

  def __init__(self, setting: Setting):
    super().__init__()
    self.setting = setting
    self.random = Random(setting.seed)
    draw = lambda low, high: math.exp(self.random.uniform(math.log(low), math.log(high)))
    self.links = [Link(draw(*_LATENCIES), draw(*_RATES)) for _ in range(setting.workers)]
    self.processes = []
    self.servers = [None]
    self.bases: dict[int, int] = {}  # by round, the number of its group
    self._costs: dict[int, js.Cost] = {}  # by the number of members
    self._exchange: Exchange | None = None  # that began last
    self._busy = {"in": 0.0, "out": 0.0}  # until when the server's link is, by direction
    self._working: list[Any] = [None] * setting.workers  # by number, the process that lives, or has just failed
    self.restart_counts()
    self.begin()

  def begin(self) -> None:
    """Starts the server and the workers."""
    setting = self.setting
    quorum = Quorum(setting.workers, max(1, math.ceil(setting.quorum * setting.workers)), grace=setting.grace, first=0)
    self.start_server(0, quorum, setting.limit)
    for number in range(setting.workers):
      self._start(number)
    if setting.failures:
      for site in range(-(-setting.workers // setting.site)):
        self._await_failure(setting.together, self._fail_site, site)

  def restart_counts(self) -> None:
    """From now on what happens is counted."""
    self._begin = self.now
    self.lost = 0.0
    self.counted = collections.Counter[int]()  # members of rounds that count, by the number of the group
    self.delivered = collections.defaultdict[int, float](float)  # seconds of training in these
    self.ended = list[float]()  # when rounds began to count
    self.exchanges = list[float]()  # seconds of each
    self.behind = self.deaths = 0
    self.traffic = {"in": [0, 0], "out": [0, 0]}  # messages and bytes, by direction
    self.burst = 0.0
    self.calls = collections.defaultdict[str, list[float]](lambda: [0, 0.0])

  def cost(self, size: int) -> js.Cost:
    """Of an exchange of so many members."""
    if size not in self._costs:
      name = self.setting.collective if size > 1 else "dense"
      self._costs[size] = js.costs.predict(name, n=self.setting.entries, workers=size)
    return self._costs[size]

  def delay(self, channel: Any, size: int) -> float:
    """Latency, and at the server the time until its link, which all share, has carried the message."""
    latency = sum(end.link.latency for end in channel if isinstance(end, Member))
    if all(isinstance(end, Member) for end in channel):
      return latency
    way = "in" if isinstance(channel[0], Member) else "out"
    traffic = self.traffic[way]
    traffic[0] += 1
    traffic[1] += size
    self._busy[way] = max(self._busy[way], self.now) + size / self.setting.server_rate
    self.burst = max(self.burst, self._busy[way] - self.now)
    return latency + self._busy[way] - self.now

  def find_exchange(self, group: Group) -> Exchange:
    """The exchange of a group, which begins with its first member."""
    if self._exchange is None or self._exchange.group.number != group.number:
      self._exchange = Exchange(self, group)
      self.exchanges.append(self._exchange.seconds)
      for member in group.members:
        if (process := self._working[member]).dead:
          self._exchange.lose(process, _STALLED if process.is_silent else 0.0)
    return self._exchange

  def deliver(self, group: Group, seconds: float) -> None:
    """A round counts for one of its members."""
    if group.number not in self.counted:
      self.ended.append(self.now)
      self.bases[group.iteration + 1] = group.number
    self.counted[group.number] += 1
    self.delivered[group.number] += seconds

  # Failures.

  def _start(self, number: int, undelivered: float = 0.0) -> None:
    process = Member(self, number, undelivered)
    self.processes.append(process)
    self._working[number] = process
    if self.setting.failures:
      self._await_failure(1 - self.setting.together, self._fail, process)

  def _await_failure(self, part: float, fail: Any, what: Any) -> None:
    if part > 0:
      self.at(self.now + self.random.expovariate(part * self.setting.failures / 3600), None, fail, what)

  def _fail_site(self, site: int) -> None:
    """Power or network of a site is gone, and back when its workers have been started again."""
    size = self.setting.site
    for process in self._working[site * size : (site + 1) * size]:
      self._fail(process, is_silent=True)
    self._await_failure(self.setting.together, self._fail_site, site)

  def _fail(self, process: Member, is_silent: bool = False) -> None:
    """A process ends, with what it has not delivered."""
    if not process.lives:
      return
    self.deaths += 1
    succeeds = self.setting.succeeds and not is_silent
    kept = process.undelivered + self.setting.restart if succeeds else 0.0
    self.lost += 0.0 if succeeds else process.undelivered
    process.dead = True
    process.is_silent = is_silent
    process.drop()
    if self._exchange and process.number in self._exchange.group.members:
      self._exchange.lose(process, _STALLED if is_silent else 0.0)
    self.at(self.now + self.setting.restart, None, self._start, process.number, kept)

  # The server.

  def note(self, answer: Answer, frame: bytes) -> None:
    """Counts."""
    self.behind += answer.kind == ServerMessage.BEHIND

  def send(self, connection: Connection, frame: bytes) -> bool:
    """The server does not hear that a connection to a machine is closed that is gone."""
    process = self.processes[connection[1]]
    return (process.dead and process.is_silent) or super().send(connection, frame)

  def hear(self, connection: Connection, frame: bytes) -> None:
    """Measures the CPU time."""
    begin = time.thread_time()
    super().hear(connection, frame)
    self._add_call(WorkerMessage(frame[0]).name, begin)

  def tick_server(self) -> None:
    """Measures the CPU time."""
    begin = time.thread_time()
    super().tick_server()
    self._add_call("tick", begin)

  def _add_call(self, kind: str, begin: float) -> None:
    call = self.calls[kind]
    call[0] += 1
    call[1] += time.thread_time() - begin

  def run(self, seconds: float) -> None:
    """Time passes: the server ticks at each step, a worker at each second one."""
    for step in range(round(seconds / _TICK)):
      self.advance(_TICK)
      for process in self._working[step % 2 :: 2]:
        if process.lives:
          process.tick()
      self.tick_server()

  def result(self) -> Result:
    """What was measured since counts began."""
    seconds = self.now - self._begin
    size = self.setting.workers
    gaps = np.diff(self.ended)
    delivered = sum([*self.delivered.values()][1:])
    cpu = sum(used for _, used in self.calls.values())
    cost = self.cost(size)
    return Result(
      workers=size,
      failures=self.setting.failures,
      goodput=float(delivered / (gaps.sum() * size)) if gaps.size else 0.0,
      lost=self.lost / (seconds * size),
      round=float(np.mean(gaps)) if gaps.size else None,
      exchange=float(np.median(self.exchanges)) if self.exchanges else 0.0,
      counted=len(self.counted),
      failed=len(self.exchanges) - len(self.counted),
      members=float(np.mean([*self.counted.values()])) / size if self.counted else 0.0,
      deaths=self.deaths,
      behind=self.behind,
      messages_in=self.traffic["in"][0] / seconds,
      messages_out=self.traffic["out"][0] / seconds,
      bytes_in=self.traffic["in"][1] / seconds,
      bytes_out=self.traffic["out"][1] / seconds,
      burst=self.burst,
      worker_words=cost.words,
      worker_messages=cost.messages,
      cpu_event=cpu / (self.traffic["in"][0] or 1),
      cpu=cpu / seconds,
      calls={kind: list(call) for kind, call in self.calls.items()},
    )


def simulate(setting: Setting) -> Result:
  """Rounds of so many workers, which join at once; two intervals pass before anything is counted."""
  network = Simulation(setting)
  network.run(2 * setting.interval)
  network.restart_counts()
  network.run(setting.seconds)
  return network.result()


def measure_memory(workers: int) -> float:
  """MB of Python objects of a server, at which so many workers are and are ready for their first round."""
  tracemalloc.start()
  members = Members(RoundMember, lambda *_: True, 5.0, 0.0)
  server = RoundServer(Quorum(workers, quorum=1), members)
  for worker in range(workers):
    connection = worker.to_bytes(5, "big")
    hello = Signal(WorkerMessage.HELLO, worker, 0, f"tcp://10.0.0.1:{worker + 1}")
    for signal in (hello, Signal(WorkerMessage.READY, worker, 1)):
      server.receive(connection, [signal.pack()], 0.0)
  used, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  return used / 1e6


def lockstep(setting: Setting, checkpoint: float = 1.0) -> float:
  """Goodput of training in which all stop when one fails, and go on from the last checkpoint: of the best interval.

  With Λ failures a second of all workers, R seconds to start again and c to write a checkpoint, an interval of C
  seconds takes `(1/Λ + R) (e^{Λ (C + c)} − 1)` in the mean (Daly, 2006): `C` over that is the goodput. No worker fails
  while it starts, and steps take no longer with more workers.
  """
  rate = setting.failures / 3600 * (1 - setting.together + setting.together / setting.site) * setting.workers
  if not rate:
    return 1.0
  lengths = np.geomspace(0.01, 36000, 2000)
  with np.errstate(over="ignore"):
    return float(np.max(lengths / ((1 / rate + setting.restart) * np.expm1(rate * (lengths + checkpoint)))))
