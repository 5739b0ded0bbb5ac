"""Virtual time: what happens when, in one order that only the seed decides, and how long workers take for a step."""

import functools
import heapq
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Pace = Callable[[np.random.Generator], float]
Activity = Literal["work", "wait", "average"]


class Span(NamedTuple):
  """What a worker did, for a timeline like the paper's Figure 3.

  Attributes:
    worker: its number.
    activity: "work", its local step; "wait", for others; "average", with them or with the server.
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


def sharing(workers: int, level: int, *, seconds: float = 1.0, jitter: float = 0.1) -> list[Pace]:
  """Step times of the paper's synthetic heterogeneity (§5.2): the last `level` workers share one accelerator.

  A step alone takes `seconds` · exp(jitter · ξ), ξ normal; that of `level` workers who share is `level` times as
  long. Level 1 is homogeneous.

  Args:
    workers: N.
    level: the heterogeneity level HL, 1 … N.
    seconds: median of a step of a worker that has an accelerator for itself.
    jitter: standard deviation of the logarithm.

  Raises:
    ValueError: for a level outside its choices.

  Example:
    >>> import numpy as np
    >>> [pace(np.random.default_rng(0)) for pace in sharing(3, level=2, jitter=0)]
    [1.0, 2.0, 2.0]
  """
  if not 1 <= level <= workers:
    raise ValueError(f"level={level!r}, choose 1 … {workers}, the number of workers")
  alone = [1] * (workers - level)
  return [functools.partial(_lognormal, median=seconds * slow, jitter=jitter) for slow in [*alone, *[level] * level]]


def _lognormal(random: np.random.Generator, median: float, jitter: float) -> float:
  return median * math.exp(jitter * random.standard_normal())


class Clock:
  """Runs what is planned in the order of its time, and of its planning where times are equal.

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
    self._planned: list[tuple[float, int, Callable[[], object]]] = []
    self._count = 0

  def after(self, seconds: float, action: Callable[[], object]) -> None:
    """Plans an action."""
    self._count += 1
    heapq.heappush(self._planned, (self.now + seconds, self._count, action))

  def tick(self) -> bool:
    """Runs the next action; False if there is none."""
    if not self._planned:
      return False
    self.now, _, action = heapq.heappop(self._planned)
    action()
    return True
