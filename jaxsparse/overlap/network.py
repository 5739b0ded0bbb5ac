"""The model of a network that several communications share, and its event-driven simulation.

One communication of m bytes takes α + β m seconds: a start-up of α seconds, which slows
no other one down, then the transfer. While s transfers overlap, each takes γ(s) times
as long for a byte, with

    γ(s) = 1 + (γ − 1)(s − 1),        γ(1) = 1 and γ(2) = γ, the paper's contention factor (Section III)

Of the β seconds of a byte, (γ − 1) β are spent on a shared resource and the rest on one
of the communication's own: γ = 1 is no contention, γ = 2 a network that is shared
entirely. Two communications with γ = 1.5, the second ready in the middle of the first:

    first     α=======------          = alone, - beside the other one: 1.5 times as slow
    second           α------====

Each ends later than alone by (γ − 1) times the seconds of the bytes that it sent during
the overlap; Eq. 13 of the paper counts this for the second communication only.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jaxsparse.types import Link

_TINY = np.finfo(float).tiny


class Flows(NamedTuple):
  """Started communications of r independent networks, s in each.

  Attributes:
    now: f64[r], the current time in seconds.
    begins: f64[r, s], time of the first byte of each.
    left: f64[r, s], seconds that its remaining bytes would take without overlap.
    ends: f64[r, s], time of its end, inf where that depends on communications that may
      still start.

  Example:
    >>> flows = Flows.empty(1, 2).start(np.zeros(1), np.array([4e6]), Link(1.0, 1e-6, 2.0))
    >>> flows.finish(Link(1.0, 1e-6, 2.0)).ends
    array([[0., 5.]])
  """

  now: np.ndarray
  begins: np.ndarray
  left: np.ndarray
  ends: np.ndarray

  @classmethod
  def empty(cls, networks: int, slots: int) -> Self:
    """Networks without communications, with `slots` slots each."""
    zeros = np.zeros((networks, slots))
    return cls(np.zeros(networks), zeros, zeros, zeros)

  def start(self, when: np.ndarray, size: np.ndarray, link: Link) -> Self:
    """Starts a communication of `size` bytes on each network at `when`: it takes a new last slot, the first one goes.

    Args:
      when: f64[r], seconds, not before `now`.
      size: f64[r], bytes.
      link: α, β, γ.
    """
    flows = self.advance(when, link)
    # the start-up, in which nothing is on the wire
    begins = when + link.alpha
    left = link.beta * size
    # Without bytes it ends with its start-up; else `advance` finds its end.
    new = begins, left, np.where(left > 0, np.inf, begins)
    append = lambda old, column: np.column_stack([old[:, 1:], column])
    return type(self)(when, *map(append, flows[1:], new))

  def finish(self, link: Link) -> Self:
    """The same networks at the end of all started communications, if nothing else starts."""
    return self.advance(np.full(self.now.shape, np.inf), link)

  def advance(self, when: np.ndarray, link: Link) -> Self:
    """The same networks at `when`, f64[r], simulated from event to event: a transfer begins or ends."""
    # Each network has its own time; a pass of the loop moves each to its next event.
    # `waiting`: communications with bytes left on networks that are not yet at `when`.
    now, begins, left, ends = self
    while np.any(waiting := (left > 0) & (now < when)[:, None]):
      sends = waiting & (begins <= now[:, None])
      # s senders of each network: γ(s) times the seconds for each byte
      slow = link.slowdown(sends.sum(1))[:, None]  # type: ignore[index]
      finish = np.where(sends, now[:, None] + left * slow, np.inf)
      begin = np.where(waiting & ~sends, begins, np.inf)
      # the next time at which a transfer begins or ends, or the time that is asked for
      event = np.minimum(when, np.minimum(finish, begin).min(1))[:, None]
      done = sends & (finish <= event)
      passed = np.where(sends, event - now[:, None], 0.0)
      # Above 0 despite rounding, as a transfer that is not done counts by `left > 0`.
      rest = np.maximum(left - passed / slow, _TINY)
      ends = np.where(done, finish, ends)
      left = np.where(done, 0.0, np.where(sends, rest, left))
      # Networks where nothing is left to send keep their time.
      now = np.where(waiting.any(1), event[:, 0], now)
    # `finish` asks for infinity: the time is then that of the last event
    now = np.where(np.isfinite(when), when, now)
    return type(self)(now, begins, left, ends)


class Sent(NamedTuple):
  """Times of the communication of a group, in seconds from the start of backward.

  Attributes:
    ready: time at which its last gradient is ready.
    start: start of the communication.
    end: end of the communication.
  """

  ready: float
  start: float
  end: float


class Simulation(NamedTuple):
  """What `simulate` found, for each group.

  Attributes:
    after: the numbers of the groups that must have ended before it starts.
    timeline: its times.
  """

  after: tuple[tuple[int, ...], ...]
  timeline: tuple[Sent, ...]


def simulate(
  ready: Sequence[float],
  sizes: Sequence[float],
  at_once: Sequence[bool],
  link: Link,
  ways: int = 2,
) -> Simulation:
  """Simulates the communications of groups, and finds which ones each has to wait for.

  A group starts as soon as it is ready, the group before it has started, and all groups
  that it waits for have ended. It waits for all groups before it; with `at_once`, not
  for the `ways` − 1 of them that will end last. It also waits for the groups that the
  group before it waits for.

  Args:
    ready: seconds until each group is ready, ascending.
    sizes: bytes of each group.
    at_once: whether each group starts before all groups before it have ended.
    link: α, β, γ of communications.
    ways: maximum number of communications at the same time.

  Example:
    >>> link = Link(alpha=1.0, beta=1.0, gamma=1.5)
    >>> [sent.end for sent in simulate([0, 0], [4, 4], [False, False], link).timeline]  # one after the other
    [5.0, 10.0]
    >>> [sent.end for sent in simulate([0, 0], [4, 4], [True, True], link).timeline]  # at once: α + γ β m
    [7.0, 7.0]
    >>> simulate([0, 0, 0], [9, 1, 1], [True] * 3, link).after  # the third waits for the second, which is shorter
    ((), (), (1,))
  """
  count = len(ready)
  flows = Flows.empty(1, count)
  starts = list[float]()
  # for each group, the groups that it waits for; first an empty set, of no group
  after = [set[int]()]
  groups = zip(ready, sizes, at_once, strict=True)
  for group, (ready_at, size, early) in enumerate(groups):
    # The groups before are in the last slots. Their ends, if nothing else starts:
    ends = flows.finish(link).ends[0, count - group :]
    # An early group overlaps with the `ways` − 1 groups before it that end last.
    by_end = np.argsort(ends, kind="stable").tolist()
    overlapping = by_end[max(0, group - ways + 1) :] if early else []
    after.append({*range(group)} - {*overlapping} | after[-1])
    ends_before = [ends[earlier] for earlier in after[-1]]
    starts.append(max([float(ready_at), *starts[-1:], *ends_before]))
    flows = flows.start(np.array(starts[-1:]), np.array([size]), link)
  ends = flows.finish(link).ends[0].tolist()
  waits = tuple(tuple(sorted(earlier)) for earlier in after[1:])
  return Simulation(
    waits, tuple(map(Sent, map(float, ready), map(float, starts), ends))
  )
