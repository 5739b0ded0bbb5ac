"""Virtual time: actions run in the order of their times, and step times of workers are drawn at random."""

import functools
import heapq
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Pace = Callable[[np.random.Generator], float]
Activity = Literal["work", "wait", "average"]


class Span(NamedTuple):
  """An interval of a worker's time, for a timeline like the paper's Figure 3.

  Attributes:
    worker: its number.
    activity: "work", a local step; "wait", for other workers; "average", with other workers or a server.
    start: in seconds.
    end: in seconds.

  Example:
    >>> Span(0, "wait", 1.0, 1.5).activity
    'wait'
  """

  worker: int
  activity: Activity
  start: float
  end: float


def sharing(
  workers: int, level: int, *, seconds: float = 1.0, jitter: float = 0.1, occupancy: float = 1.0
) -> list[Pace]:
  """Step times of the paper's synthetic heterogeneity (§5.2): the last `level` workers share one accelerator.

  A step on an accelerator of one's own takes `seconds` · exp(jitter · ξ), ξ ~ N(0, 1); a step of a worker that shares
  takes 1 + occupancy · (level − 1) times as long: the accelerator does its part of a step for each of
  `level` workers in turn. With level 1 all workers are equally fast.

  Args:
    workers: N.
    level: the heterogeneity level HL, 1 … N.
    seconds: median step time of a worker that does not share.
    jitter: standard deviation of the step time's logarithm. From about 1 on the distribution has a heavy tail, as on
      machines that other jobs share (§5.3): the longest of 16 steps takes several times the median.
    occupancy: fraction of a step in which the accelerator is busy, 0 to 1. The rest (input, host code) does not slow
      down when the accelerator is shared.

  Returns:
    One function for each worker, which draws a step time in seconds from a random generator.

  Raises:
    ValueError: for a level outside 1 … N, or an occupancy outside 0 … 1.

  Example:
    >>> import numpy as np
    >>> [pace(np.random.default_rng(0)) for pace in sharing(3, level=2, jitter=0)]
    [1.0, 2.0, 2.0]
    >>> [pace(np.random.default_rng(0)) for pace in sharing(3, level=2, jitter=0, occupancy=0.5)]
    [1.0, 1.5, 1.5]
  """
  if not 1 <= level <= workers:
    raise ValueError(f"level={level!r}, choose 1 … {workers}, the number of workers")
  if not 0 <= occupancy <= 1:
    raise ValueError(f"occupancy={occupancy!r}, choose 0 … 1")
  slow = [1.0] * (workers - level) + [1 + occupancy * (level - 1)] * level
  return [functools.partial(_lognormal, median=seconds * times, jitter=jitter) for times in slow]


def _lognormal(random: np.random.Generator, median: float, jitter: float) -> float:
  return median * math.exp(jitter * random.standard_normal())


class Clock:
  """Runs scheduled actions by time; actions of equal times run in the order in which they were scheduled.

  Example:
    >>> clock = Clock()
    >>> clock.after(2.0, lambda: print("second at", clock.now))
    >>> clock.after(1.0, lambda: print("first at", clock.now))
    >>> while clock.tick(): pass
    first at 1.0
    second at 2.0
  """

  def __init__(self) -> None:
    self.now = 0.0
    self._scheduled: list[tuple[float, int, Callable[[], object]]] = []
    self._count = 0

  def after(self, seconds: float, action: Callable[[], object]) -> None:
    """Schedules an action in so many seconds."""
    self._count += 1
    heapq.heappush(self._scheduled, (self.now + seconds, self._count, action))

  def tick(self) -> bool:
    """Advances to the next action and runs it; returns False if there is none."""
    if not self._scheduled:
      return False
    self.now, _, action = heapq.heappop(self._scheduled)
    action()
    return True
