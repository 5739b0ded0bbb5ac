"""Rounds of P workers in virtual time: links, failures and stragglers are drawn, the protocols are the real ones.

An exchange takes `latency · stages + α · messages + bytes / rate` of the slowest
member's link, by the cost that `js.costs` predicts for the collective; it begins when
all members know of the round, and fails when one of them is lost. What a worker trains
is measured in seconds, and delivered by the rounds that count.
"""

import collections
import math
import time
from random import Random
from typing import Any, NamedTuple

import numpy as np

import jaxsparse as js
from benchmarks.thousands.members import STALLED, Exchange, Link, Member, Setting
from benchmarks.thousands.virtual import Connection, VirtualNetwork
from jaxsparse.partial.net.messages import (
  Answer,
  ServerMessage,
  WorkerGroup,
  WorkerMessage,
)
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.quorum import Quorum

TICK = 0.1  # seconds
# seconds from a worker to the backbone: between two workers 1 to 200 ms
_LATENCIES = (
  0.5e-3,
  100e-3,
)
_RATES = 10e6 / 8, 1000e6 / 8  # bytes a second of a worker's link, each way


class Result(NamedTuple):
  """What was measured; bytes and messages are a second, CPU is that of the server's protocol on this machine."""

  workers: int
  failures: float  # of a worker in an hour
  # of the seconds that all workers would train without failures, from the first round
  # to the last one
  goodput: float
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


class Simulation(VirtualNetwork):
  """All workers and their server.

  Attributes:
    tick: seconds between two ticks of the server, and half of those of a worker.
    measures_cpu: whether the CPU time of the server is measured, which takes longer than
      what the server of few workers does.
  """

  tick = TICK
  measures_cpu = True

  def __init__(self, setting: Setting):
    super().__init__()
    self.setting = setting
    self.random = Random(setting.seed)
    draw = lambda low, high: math.exp(
      self.random.uniform(math.log(low), math.log(high))
    )
    self.links = [
      Link(draw(*_LATENCIES), draw(*_RATES)) for _ in range(setting.workers)
    ]
    self.processes = []
    self.servers = [None]
    self._step = 0
    self.bases: dict[int, int] = {}  # by round, the number of its group
    self.lineages = {0: Lineage()}  # by round
    self._costs: dict[int, js.Cost] = {}  # by the number of members
    self._exchange: Exchange | None = None  # that began last
    # until when the server's link is, by direction
    self._busy = {
      "in": 0.0,
      "out": 0.0,
    }
    self.working: list[Any] = [
      None
    ] * setting.workers  # by number, the process that lives, or has just failed
    self.restart_counts()
    self.begin()

  def begin(self) -> None:
    """Starts the server and the workers."""
    setting = self.setting
    quorum = Quorum(
      setting.workers,
      max(1, math.ceil(setting.quorum * setting.workers)),
      grace=setting.grace,
      first=0,
    )
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
    self.late = 0.0  # seconds of training in a round after the one that it was for
    self.over = (
      0.0  # seconds of training after an interval, until its round was applied
    )
    self.counted = collections.Counter[
      int
    ]()  # members of rounds that count, by the number of the group
    # seconds of training in these
    self.delivered = collections.defaultdict[int, float](float)
    self.ended = list[float]()  # when rounds began to count
    self.exchanges = list[float]()  # seconds of each
    self.behind = self.deaths = 0
    self.traffic = {"in": [0, 0], "out": [0, 0]}  # messages and bytes, by direction
    self.burst = 0.0
    self.calls = collections.defaultdict[str, list[float]](lambda: [0, 0.0])

  def cost(self, size: int) -> js.Cost:
    """The cost of an exchange of so many members."""
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

  def find_exchange(self, group: WorkerGroup) -> Exchange:
    """The exchange of a group, which begins with its first member."""
    if self._exchange is None or self._exchange.group.number != group.number:
      self._exchange = Exchange(self, group)
      self.exchanges.append(self._exchange.seconds)
      for member in group.members:
        if (process := self.working[member]).dead:
          self._exchange.lose(process, STALLED if process.is_silent else 0.0)
    return self._exchange

  def deliver(self, group: WorkerGroup, seconds: float) -> None:
    """A round counts for one of its members."""
    if group.number not in self.counted:
      self.ended.append(self.now)
      self.bases[group.iteration + 1] = group.number
      before = self.lineages[group.iteration]
      self.lineages[group.iteration + 1] = before.after(group.number)
    self.counted[group.number] += 1
    self.delivered[group.number] += seconds

  def slowness(self, member: Member) -> float:
    """How many times as long the next interval of a worker takes."""
    return 2 if self.random.random() < self.setting.straggle else 1

  # Failures.

  def make_member(self, number: int, undelivered: float) -> Member:
    """The next process of a worker."""
    return Member(self, number, undelivered)

  def _start(self, number: int, undelivered: float = 0.0) -> None:
    process = self.make_member(number, undelivered)
    self.processes.append(process)
    self.working[number] = process
    if self.setting.failures:
      self._await_failure(1 - self.setting.together, self.fail, process)

  def _await_failure(self, part: float, fail: Any, what: Any) -> None:
    if part > 0:
      self.at(
        self.now + self.random.expovariate(part * self.setting.failures / 3600),
        None,
        fail,
        what,
      )

  def _fail_site(self, site: int) -> None:
    """Power or network of a site is gone, and back when its workers have been started again."""
    size = self.setting.site
    for process in self.working[site * size : (site + 1) * size]:
      self.fail(process, is_silent=True)
    self._await_failure(self.setting.together, self._fail_site, site)

  def fail(self, process: Member, is_silent: bool = False) -> None:
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
      self._exchange.lose(process, STALLED if is_silent else 0.0)
    self.at(self.now + self.setting.restart, None, self._start, process.number, kept)

  # The server.

  def note(self, answer: Answer, frame: bytes) -> None:
    """Counts."""
    self.behind += answer.kind == ServerMessage.BEHIND

  def send(self, connection: Connection, frame: bytes) -> bool:
    """The server does not hear that a connection to a machine is closed that is gone."""
    process = self.processes[connection[1]]
    return (process.dead and process.is_silent) or super().send(connection, frame)

  def cpu_seconds(self) -> float:
    """The CPU time of this thread; 0 where it is not measured."""
    return time.thread_time() if self.measures_cpu else 0.0

  def hear(self, connection: Connection, frame: bytes) -> None:
    """Measures the CPU time."""
    begin = self.cpu_seconds()
    super().hear(connection, frame)
    self._add_call(WorkerMessage(frame[0]).name, begin)

  def tick_server(self) -> None:
    """Measures the CPU time."""
    begin = self.cpu_seconds()
    super().tick_server()
    self._add_call("tick", begin)

  def _add_call(self, kind: str, begin: float) -> None:
    call = self.calls[kind]
    call[0] += 1
    call[1] += self.cpu_seconds() - begin

  def run(self, seconds: float) -> None:
    """Time passes: the server ticks at each step, a worker at each second one."""
    for _ in range(round(seconds / self.tick)):
      self._step += 1
      self.advance(self.tick)
      for process in self.working[self._step % 2 :: 2]:
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


def lockstep(setting: Setting, checkpoint: float = 1.0) -> float:
  """Goodput of training in which all stop when one fails, and go on from the last checkpoint: of the best interval.

  With Λ failures a second of all workers, R seconds to start again and c to write a
  checkpoint, an interval of C seconds takes `(1/Λ + R) (e^{Λ (C + c)} − 1)` in the mean
  (Daly, 2006): `C` over that is the goodput. No worker fails while it starts, and steps
  take no longer with more workers.
  """
  rate = (
    setting.failures
    / 3600
    * (1 - setting.together + setting.together / setting.site)
    * setting.workers
  )
  if not rate:
    return 1.0
  lengths = np.geomspace(0.01, 36000, 2000)
  with np.errstate(over="ignore"):
    return float(
      np.max(
        lengths
        / ((1 / rate + setting.restart) * np.expm1(rate * (lengths + checkpoint)))
      )
    )
