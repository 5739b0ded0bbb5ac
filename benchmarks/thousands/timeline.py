"""Virtual time: events in the order of their times, and channels that keep the order of their messages."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Timeline:
  """Events that happen at a time in seconds; a subclass says how late a message is (`delay`).

  A receiver may be `suspended`: it is given what has come, which is in its list `held`,
  when it goes on.

  Example:
    >>> line = Timeline()
    >>> line.at(2.0, None, print, "two"), line.at(1.0, None, print, "one"), line.advance(1.5)
    one
    (None, None, None)
  """

  def __init__(self) -> None:
    self.now = 0.0
    self.arrivals: dict[Any, float] = {}  # by channel, of the last message
    self._serial = itertools.count()
    self._events: list[Any] = []

  def at(
    self, time: float, receiver: Any, deliver: Callable[..., Any], *content: Any
  ) -> None:
    """Calls `deliver(*content)` at this time, or later if the receiver is suspended then."""
    heapq.heappush(self._events, (time, next(self._serial), receiver, deliver, content))

  def post(
    self,
    channel: Any,
    receiver: Any,
    deliver: Callable[..., Any],
    *content: Any,
    size: int = 0,
  ) -> None:
    """The same once a message of `size` bytes has come through a channel, after those before it."""
    arrival = self.arrivals[channel] = max(
      self.arrivals.get(channel, 0.0), self.now + self.delay(channel, size)
    )
    self.at(arrival, receiver, deliver, *content)

  def delay(self, channel: Any, size: int) -> float:
    """Seconds that a message takes."""
    raise NotImplementedError

  def advance(self, seconds: float) -> None:
    """Time passes."""
    end = self.now + seconds
    while self._events and self._events[0][0] <= end:
      self.now, _, receiver, deliver, content = heapq.heappop(self._events)
      if receiver and receiver.suspended:
        receiver.held.append((deliver, content))
      else:
        deliver(*content)
    self.now = end
