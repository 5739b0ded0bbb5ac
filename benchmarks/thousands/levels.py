"""Groups of workers whose links hold rounds among groups: both levels at once, the protocols real, in virtual time.

A process of each group has a link in its rounds and is a worker of the rounds among
groups (`Rounds(..., link=True)`). It fails as often as a worker; started again, it
takes its group back to the last round among groups. A site is a group.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.thousands.members import Member, Setting
from benchmarks.thousands.simulation import TICK, Simulation
from jaxsparse.partial.net.messages import RoundPosition, WorkerGroup, WorkerMessage
from jaxsparse.partial.rounds.protocol import RoundRequest

_EVERY = 2  # rounds of a group from one among groups to the next


class Outcome(NamedTuple):
  """The outcome of a simulation."""

  # of the seconds that all workers would train without failures, those that reach all
  # groups
  goodput: float
  group: int  # workers of each
  inner: float  # goodput of groups, mean
  inner_round: float  # seconds from one to the next, mean
  inner_counted: int
  inner_failed: int
  outer: dict[str, Any]  # the `Result` of the rounds among groups


class _Link(Member):
  """The link of a group, always ready; has nothing to deliver of its own."""

  network: "_Group"

  @property
  def undelivered(self) -> float:
    """None."""
    return 0.0

  def apply(self) -> None:
    """Asks for the next round at once."""
    self._given = 0.0
    self.handle(
      RoundRequest(
        WorkerMessage.LINK if self.network.has_moved else WorkerMessage.READY
      )
    )

  def commit(self) -> RoundPosition:
    """The round counts."""
    assert self._run is not None
    if self._run.group.links:
      self.network.has_moved = False
    return super().commit()


class _Group(Simulation):
  """The rounds of a group; its last member is the link."""

  measures_cpu = False

  def __init__(self, setting: Setting, number: int, top: "_Top"):
    self._number = number
    self._top = top
    self.has_moved = (
      False  # whether a round among groups has counted that the link has not delivered
    )
    super().__init__(setting)

  def make_member(self, number: int, undelivered: float) -> Member:
    """The next process of a worker, or of the link: the group goes back to the last round among groups."""
    if number < self.setting.workers - 1:
      return Member(self, number, undelivered)
    self._top.lost_by_groups += self._top.pools[self._number]
    self._top.pools[self._number] = 0.0
    return _Link(self, number, undelivered)

  def deliver(self, group: WorkerGroup, seconds: float) -> None:
    """A round counts for one of its members: the link gives what it has trained to the other groups."""
    super().deliver(group, seconds)
    self._top.pools[self._number] += seconds

  def fail(self, process: Member, is_silent: bool = False) -> None:
    """The process of the link ends at both levels."""
    if process.lives and isinstance(process, _Link):
      self._top.fail(self._top.working[self._number], is_silent)
    super().fail(process, is_silent)


class _Delegate(Member):
  """A group, in the rounds among groups."""

  network: "_Top"

  @property
  def undelivered(self) -> float:
    """Seconds that the workers of the group have trained."""
    return self.network.pools[self.number]

  def commit(self) -> RoundPosition:
    """The round counts."""
    self.network.pools[self.number] -= self._given or 0.0
    self.network.groups[self.number].has_moved = True
    return super().commit()


class _Top(Simulation):
  """The rounds among groups."""

  groups: list[_Group]

  def __init__(self, setting: Setting):
    # by group, seconds that it has delivered and no round among groups
    self.pools = [0.0] * setting.workers
    self.lost_by_groups = 0.0  # seconds
    super().__init__(setting)

  def make_member(self, number: int, undelivered: float) -> Member:
    """The next process of the link of a group."""
    return _Delegate(self, number, undelivered)


def simulate(setting: Setting) -> Outcome:
  """The outcome of so many workers in groups of √P; two intervals among groups pass before anything is counted."""
  size = round(math.sqrt(setting.workers))
  count = -(-setting.workers // size)
  long = setting.interval * _EVERY
  top = _Top(
    setting._replace(workers=count, failures=0.0, interval=long, site=1, succeeds=True)
  )
  own = setting._replace(workers=size + 1, site=size + 1)
  top.groups = [
    _Group(own._replace(seed=setting.seed + 1 + number), number, top)
    for number in range(count)
  ]
  networks: list[Simulation] = [top, *top.groups]

  def run(seconds: float) -> None:
    for _ in range(round(seconds / TICK)):
      for network in networks:
        network.run(TICK)

  run(2 * long)
  for network in networks:
    network.restart_counts()
  top.lost_by_groups = 0.0
  run(setting.seconds)
  outer = top.result()
  found = [group.result() for group in top.groups]
  # a link trains nothing
  inner = float(np.mean([each.goodput for each in found])) * (size + 1) / size
  return Outcome(
    goodput=inner - top.lost_by_groups / (setting.seconds * setting.workers),
    group=size,
    inner=inner,
    inner_round=float(np.mean([each.round or np.nan for each in found])),
    inner_counted=sum(each.counted for each in found),
    inner_failed=sum(each.failed for each in found),
    outer=outer._asdict(),
  )
