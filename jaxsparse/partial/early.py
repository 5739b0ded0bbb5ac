"""Pieces of models that come before the server has named the group that they are for.

A member that hears of its group first sends its part at once, maybe before another member has heard of the group. Only
parts can be early, for a mean takes the parts of all; each member sends one; and a member waits for one group at a
time. So the early parts of a group of G members have (G − 1) n/G entries together, up to one for rounding each: less
than n + G. More than that is sent by none of them, and is dropped.
"""

import logging

import numpy as np

_MEMBERS = 2**16  # a message has 16 bits for the number of its sender


class Early:
  """The early parts of one worker, as many as there can be.

  Args:
    worker: its number.
    entries: n of the model.

  Example:
    >>> early = Early(0, entries=6)
    >>> early.keep(7, sender=2, values=np.ones(3, np.float32))
    >>> early.take(7)
    [(2, array([1., 1., 1.], dtype=float32))]
    >>> early.take(7)
    []
  """

  def __init__(self, worker: int, entries: int):
    self._worker, self._most = worker, entries + _MEMBERS
    self.clear()

  def clear(self) -> None:
    """Forgets all."""
    self._parts: dict[int, tuple[int, np.ndarray]] = {}  # of each sender: the group's number, the values
    self._entries = 0
    self._dropped = False

  def keep(self, number: int, sender: int, values: np.ndarray) -> None:
    """Keeps a part of group `number` in place of an earlier one of the same sender; too much is dropped, and logged."""
    former = self._parts.pop(sender, (0, values[:0]))[1].size
    self._entries += values.size - former
    if self._entries <= self._most:
      self._parts[sender] = (number, values)
      return
    self._entries -= values.size
    if not self._dropped:  # once, for there may be many
      self._dropped = True
      logging.getLogger(__name__).warning(
        f"worker {self._worker}: {values.size} entries for group {number} from worker {sender} are dropped; parts of "
        f"groups that the server has not named are kept up to {self._most} entries, more than any group sends"
      )

  def take(self, number: int) -> list[tuple[int, np.ndarray]]:
    """(sender, values) of each part of group `number`; parts of other groups are forgotten too."""
    parts = [(sender, values) for sender, (group, values) in self._parts.items() if group == number]
    self.clear()
    return parts
