"""The model of a network that several communications share, and the event-driven simulation that prices every plan.

A communication of m bytes takes α + β m alone: a start-up of α seconds, which hinders nobody, then its bytes. While s
of them send bytes at the same moment, each takes γ(s) times as long for a byte, with

    γ(s) = 1 + (γ − 1)(s − 1),        γ(1) = 1 and γ(2) = γ, the paper's contention (Section III)

so of the β seconds of a byte (γ − 1) β belong to the network, which all share, and the rest to what each has for
itself: γ = 1 is no contention, γ = 2 a network that does one thing at a time. Two communications with γ = 1.5, the
second ready half-way through the first:

    first     α=======------          = alone, - beside the other one: 1.5 times as slow
    second           α------====

Both end later than alone, each by (γ − 1) times what it sent meanwhile: Eq. 13 of the paper, which charges the second.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

_TINY = np.finfo(float).tiny


class Link(NamedTuple):
  """What communications cost.

  Attributes:
    alpha: seconds until a communication sends its first byte.
    beta: seconds of a byte of one that has the network for itself.
    gamma: two that send at once take so many times as long for a byte.

  Example:
    >>> float(Link(alpha=1e-3, beta=1e-9, gamma=1.5).slowdown(3))
    2.0
  """

  alpha: float
  beta: float
  gamma: float

  def seconds(self, size: float) -> float:
    """Of a communication of so many bytes alone."""
    return self.alpha + self.beta * size

  def slowdown(self, senders: np.ndarray | int) -> np.ndarray | float:
    """γ(s) for s that send at once."""
    return 1 + (self.gamma - 1) * (np.maximum(senders, 1) - 1)


class Flows(NamedTuple):
  """Communications that have started, of r networks that have nothing to do with each other, s in each.

  Attributes:
    now: f64[r], the moment.
    begins: f64[r, s], when each sends its first byte.
    left: f64[r, s], seconds that its bytes will still take alone.
    ends: f64[r, s], when it ended or will end, inf where that depends on what is still to come.

  Example:
    >>> flows = Flows.none(1, 2).started(np.zeros(1), np.array([4e6]), Link(1.0, 1e-6, 2.0))
    >>> flows.projected(2.0).ends
    array([[0., 5.]])
  """

  now: np.ndarray
  begins: np.ndarray
  left: np.ndarray
  ends: np.ndarray

  @classmethod
  def none(cls, networks: int, slots: int) -> Self:
    """Networks on which nothing has been sent yet."""
    zeros = np.zeros((networks, slots))
    return cls(np.zeros(networks), zeros, zeros, zeros)

  def take(self, rows: np.ndarray | slice) -> Self:
    """The networks of these numbers."""
    return type(self)(*(part[rows] for part in self))

  def started(self, when: np.ndarray, size: np.ndarray, link: Link) -> Self:
    """One more communication of `size` bytes on each, at `when`; it takes the slot of the oldest, which has ended."""
    flows = self.at(when, link.gamma)
    begins, left = when + link.alpha, link.beta * size
    append = lambda old, new: np.concatenate([old[:, 1:], new[:, None]], axis=1)
    ends = np.where(left > 0, np.inf, begins)
    return type(self)(when, append(flows.begins, begins), append(flows.left, left), append(flows.ends, ends))

  def projected(self, gamma: float) -> Self:
    """How everything that has started ends if nothing else starts."""
    return self.at(np.full(self.now.shape, np.inf), gamma)

  def at(self, when: np.ndarray, gamma: float) -> Self:
    """The same at `when`, from one event to the next: somebody begins to send, or ends."""
    now, begins, left, ends = self
    link = Link(0.0, 1.0, gamma)
    while np.any(waiting := (left > 0) & (now < when)[:, None]):
      sends = waiting & (begins <= now[:, None])
      slow = link.slowdown(sends.sum(1))[:, None]  # type: ignore[index]
      finish = np.where(sends, now[:, None] + left * slow, np.inf)
      event = np.minimum(when, np.minimum(finish, np.where(waiting & ~sends, begins, np.inf)).min(1))[:, None]
      done = sends & (finish <= event)
      rest = np.maximum(left - np.where(sends, event - now[:, None], 0.0) / slow, _TINY)  # rounding ends nothing
      ends = np.where(done, finish, ends)
      left = np.where(done, 0.0, np.where(sends, rest, left))
      now = np.where(waiting.any(1), event[:, 0], now)
    return type(self)(np.where(np.isfinite(when), when, now), begins, left, ends)


class Sent(NamedTuple):
  """When a group was sent.

  Attributes:
    ready: seconds from the start of backward until its last gradient is there.
    start: until it starts.
    end: until it has been sent.

  Example:
    >>> Sent(ready=1.0, start=1.5, end=2.0).waited
    0.5
  """

  ready: float
  start: float
  end: float

  @property
  def waited(self) -> float:
    """Seconds between ready and start."""
    return self.start - self.ready


def simulate(ready: Sequence[float], sizes: Sequence[float], after: Sequence[int], link: Link) -> tuple[Sent, ...]:
  """Sends groups one after the other, or beside each other, and says when each was under way.

  Group g starts as soon as it is ready, group g − 1 has started, and the groups 0 … after[g] − 1 have been sent.

  Args:
    ready: seconds, of each group.
    sizes: bytes, of each group.
    after: how many groups must have been sent before each starts, at most those before it.
    link: what communications cost.

  Example:
    >>> link = Link(alpha=1.0, beta=1.0, gamma=1.5)
    >>> [sent.end for sent in simulate([0, 0], [4, 4], [0, 1], link)]  # one after the other
    [5.0, 10.0]
    >>> [sent.end for sent in simulate([0, 0], [4, 4], [0, 0], link)]  # at once: α + γ β m
    [7.0, 7.0]
  """
  flows = Flows.none(1, len(ready))
  starts: list[float] = []
  for number, (there, size, first) in enumerate(zip(ready, sizes, after, strict=True)):
    done = flows.projected(link.gamma)
    ends = done.ends[0, len(ready) - number :].tolist()
    starts.append(max([there, *starts[-1:], *ends[:first]]))
    if all(end <= starts[-1] for end in ends):
      flows = done  # nobody is left to go on beside it
    flows = flows.started(np.array(starts[-1:]), np.array([size]), link)
  ends = flows.projected(link.gamma).ends[0]
  return tuple(Sent(float(a), float(b), float(c)) for a, b, c in zip(ready, starts, ends, strict=True))
