"""How long ready workers wait for others: a window that is given, or one chosen from how long each took before.

A worker that waits delivers its work later, and one that is late does so by a round
later. The window is that of the smallest sum of both, in seconds of workers:

    w = argmin_w  Σ_{i: t_i <= w} (w - t_i)  +  C · |{i: t_i > w}|

where t_i is 0 for a worker that is ready, and for another one the seconds until it is,
as probable as they have been, and C is what late work costs.
"""

import collections
import statistics
from collections.abc import Iterable
from typing import Literal

import numpy as np

# seconds of a turn, while the usual ones are not known
FIRST = 2.0
# cost C of late work, in usual turns: it misses the next turn, and enters the round
# after that turn
_LATE = 2
_RECENT = 5  # turns of a worker, whose median is usual: it follows day and night
_RATIOS = 512  # turns of all workers that say how far they are from usual ones
_LEVELS = (np.arange(16) + 0.5) / 16  # quantiles of these


class Window:
  """Decides when enough workers that are ready wait no longer.

  A turn of a worker is from when a round of it counts until it is ready. With the
  median of its last turns, and the quantiles q of (turn / median) of all workers, a
  worker is expected `median · q` seconds after its turn has begun, each as probable,
  but those that have passed. The window is open for at most C.

  Args:
    grace: seconds of the window, or "auto".
    quorum: K, how many workers are enough.

  Attributes:
    usual: seconds of a turn: the K-th smallest of the medians of workers; 0 while they
      are not known.
    seconds: that the last window was open.
    _grace: seconds of a given window; None for "auto".
    _opened: when the window was opened, as enough workers are ready; None while closed.
    _until: when the end of an open window is computed anew.
    _begun: by worker when its turn began, until it is ready.
    _turns: by worker the seconds of its last turns.
    _ratios: seconds / median of that worker, of the last turns of all workers.

  Example:
    >>> window = Window("auto", quorum=1)
    >>> for time in (0.0, 100.0, 200.0):
    ...   window.begin((0, 1), time)
    ...   window.end(0, time + 30)
    ...   window.end(1, time + 40) if time < 200.0 else None
    >>> window.usual, window.choose(1, {1}, 230.0)
    (30.0, 10.0)
  """

  def __init__(self, grace: float | Literal["auto"], quorum: int):
    self._grace = None if grace == "auto" else grace
    self._quorum = quorum
    self.usual = 0.0
    self.seconds = 0.0
    self._opened: float | None = None  # when enough workers were ready
    self._until = 0.0  # when it is decided anew
    self._begun = dict[int, float]()  # by worker: when its turn began
    self._turns = dict[int, collections.deque[float]]()  # by worker: seconds
    # 1: the first turns are expected to be usual ones
    self._ratios = collections.deque([1.0], _RATIOS)

  @property
  def least(self) -> float:
    """Seconds for which each worker that is ready waits at least: so long others take to be ready after a failure."""
    # A tenth of a usual turn, but at most `FIRST`; `FIRST` also where `usual` is 0, not
    # known.
    auto = min(FIRST, self.usual / 10) or FIRST
    return auto if self._grace is None else self._grace

  @property
  def wait(self) -> float:
    """Seconds for which training may stop for a round: none where a turn takes `FIRST` seconds or more."""
    auto = max(0.0, FIRST - self.usual)
    return auto if self._grace is None else self._grace

  def begin(self, workers: Iterable[int], now: float) -> None:
    """Begins a turn of each of these workers, since a round of theirs counts; computes `usual` anew."""
    self._begun |= dict.fromkeys(workers, now)
    # After the K-th smallest median as many workers as a round takes are ready.
    medians = sorted(map(statistics.median, self._turns.values()))
    if len(medians) >= self._quorum:
      self.usual = medians[self._quorum - 1]

  def end(self, worker: int, now: float) -> None:
    """Ends the turn of a worker that is ready: keeps its seconds, and their ratio to the median of its turns."""
    # None: no round of it has counted since it joined, or since it was ready last.
    if (begun := self._begun.pop(worker, None)) is None:
      return
    turns = self._turns.setdefault(worker, collections.deque(maxlen=_RECENT))
    # Compared with the turns before this one; a median of 0 s is replaced by 1 s.
    if turns:
      self._ratios.append((now - begun) / (statistics.median(turns) or 1.0))
    turns.append(now - begun)

  def forget(self, worker: int) -> None:
    """Drops what is known of a worker that has left."""
    self._begun.pop(worker, None)
    self._turns.pop(worker, None)

  def close(self, now: float) -> None:
    """Closes the window, as a round begins or fewer workers than enough are ready; keeps how long it was open."""
    if self._opened is not None:
      self.seconds = now - self._opened
      self._opened = None

  def is_over(self, ready: int, away: Iterable[int], now: float) -> bool:
    """Whether the workers that are ready, which are enough, wait no longer for those that are away.

    Args:
      ready: how many workers are ready.
      away: the other workers.
      now: in seconds.
    """
    # The first call since `close`: the window opens.
    if self._opened is None:
      self._opened = self._until = now
    # A given window is over here at once: the server also awaits `waits_until` of the
    # worker that opened it. One of "auto" is chosen anew when it ends, since more
    # workers may be ready by then.
    if now >= self._until and self._grace is None:
      end = self._opened + _LATE * self.usual
      self._until = min(now + self.choose(ready, away, now), end)
    return now >= self._until

  def choose(self, ready: int, away: Iterable[int], now: float) -> float:
    """Seconds from now for which the window is to be open at the least cost; 0 if no worker is expected.

    Args:
      ready: how many workers are ready.
      away: the other workers, of which those in a turn of known length are expected.
      now: in seconds.
    """
    known = sorted(self._begun.keys() & self._turns.keys() & {*away})
    if not known:
      return 0.0
    # f64[workers, levels]: seconds from now until each worker is expected; all levels
    # are equally probable.
    ratios = np.quantile(self._ratios, _LEVELS)
    rows = [
      self._begun[worker] - now + statistics.median(self._turns[worker]) * ratios
      for worker in known
    ]
    expected = np.array(rows)
    # Times that have passed do not count; the others of a row have probabilities that
    # add up to 1.
    ahead = expected > 0
    parts = ahead / np.maximum(ahead.sum(1, keepdims=True), 1)
    # All times at which the window might end, with the number of workers that come
    # then: those that are ready at 0, and a fraction of an expected one at each of its
    # times.
    times = np.append(0.0, np.maximum(expected, 0.0))
    order = np.argsort(times, kind="stable")
    times = times[order]
    workers = np.append(float(ready), parts)[order]
    # The cost of an end at each time w: Σ (w − t_i) over the workers that have come by
    # then, and C, that is `_LATE * usual`, for each of the others.
    come = np.cumsum(workers)
    waiting = times * come - np.cumsum(times * workers)
    late = _LATE * self.usual * (come[-1] - come)
    return float(times[np.argmin(waiting + late)])
