"""What each grace window loses where workers differ: fixed ones, and the one that chooses itself.

Rounds of workers of which, by the scenario,

    equal      all take as long, up to a deviation of 1 %
    slow       one always takes twice as long
    tail       an interval takes x >= 1 times as long with the density 3 / x⁴
    day        half of the workers take half as long again in every second 10 minutes
    newcomer   one has 10 Mbit/s, the others 100 at least; it dies every 10 minutes, and a
               new one fetches the anchor

With a window that chooses itself workers train on where a round is not there at the end
of an interval. Fixed windows are measured both ways: in `training` workers train on, too
(`Rounds(wait=0)`), and in `waiting` they wait for as long as the window, by default.

*Goodput* are the seconds of training that were not lost with a worker, over all seconds.
*Useful* is the goodput, less a fifth of what is late: seconds trained for a round that
entered a later one, and those trained on after an interval, before its round was
applied. A fifth is what it costs in `benchmarks.late`: with a third of the work late the
losses after 300 and 1,000 steps are those of 7 and 6 % fewer steps.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.thousands.members import Link, Member, Setting
from benchmarks.thousands.simulation import Simulation

SCENARIOS = "equal", "slow", "tail", "day", "newcomer"
# seconds of fixed windows
TRAINING = 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 70.0, 100.0
WAITING = 2.0, 5.0, 10.0, 20.0, 70.0
LATE = 0.2  # what a second that is late loses
_PERIOD = 1200.0  # seconds of a day
_LIFE = 600.0  # seconds of a newcomer
_NEW = 1  # its number, or that of the slow worker


class _Scenario(Simulation):
  """Workers that differ."""

  tick = 0.5
  measures_cpu = False

  def begin(self) -> None:
    """Also plans the deaths of the newcomer."""
    if self.setting.scenario == "newcomer":
      self.links = [
        link._replace(rate=max(link.rate, 100e6 / 8)) for link in self.links
      ]
      self.links[_NEW] = Link(50e-3, 10e6 / 8)
      for time in range(1, round(self.setting.seconds / _LIFE) + 1):
        self.at(time * _LIFE, None, self._kill)
    super().begin()

  def _kill(self) -> None:
    self.fail(self.working[_NEW])

  @property
  def undelivered(self) -> float:
    """Seconds that workers have trained, and no round has delivered yet."""
    return sum(process.undelivered for process in self.working if process.lives)

  def slowness(self, member: Member) -> float:
    """How many times as long the next interval of a worker takes."""
    match self.setting.scenario:
      case "slow":
        return 2 if member.number == _NEW else 1
      case "tail":
        return self.random.paretovariate(3)
      case "day":
        is_night = math.sin(2 * math.pi * self.now / _PERIOD) > 0
        return 1.5 if is_night and member.number % 2 else 1
    return super().slowness(member)


def measure(setting: Setting) -> dict[str, float]:
  """Shares of the seconds of all workers in a scenario, counted from the end of its second interval on."""
  network = _Scenario(setting)
  network.run(2 * setting.interval)
  network.restart_counts()
  carried = network.undelivered
  network.run(setting.seconds)
  delivered = sum(network.delivered.values()) + network.undelivered - carried
  late, over, goodput = (
    seconds / (setting.workers * setting.seconds)
    for seconds in (network.late, network.over, delivered)
  )
  return {
    "goodput": goodput,
    "late": late,
    "over": over,
    "useful": goodput - LATE * (late + over),
  }


def compare(
  setting: Setting,
  training: Sequence[float] = TRAINING,
  waiting: Sequence[float] = WAITING,
  seeds: int = 3,
) -> dict[str, Any]:
  """The window that chooses itself, and what is useful with fixed ones: means over seeds, `waiting` of the first."""
  measure_all = lambda count=seeds, **options: _mean(
    [measure(setting._replace(seed=seed, **options)) for seed in range(count)]
  )
  useful = lambda grace, **options: measure_all(grace=grace, **options)["useful"]
  return {
    "seeds": seeds,
    "training": [[grace, useful(grace, wait=0.0)] for grace in training],
    "waiting": [[grace, useful(grace, count=1)] for grace in waiting],
    "auto": measure_all(grace="auto"),
  }


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
  return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
