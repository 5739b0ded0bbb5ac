"""Early parts: pieces that arrive before the server has named the group that they belong to.

A member sends its parts as soon as it hears of its group, which may be before another member hears of that group. Only
parts can be early, since a mean needs the parts of all members; each member sends one; and a member waits for one group
at a time. So the early parts of a group of G members have at most (G − 1) ⌈n/G⌉ < n + G entries. Entries
beyond that are forged, and are dropped, so that they cannot fill the memory.
"""

import logging

import numpy as np

_MEMBERS = 2**16  # the sender's number has 16 bits


class Early:
  """The early parts that one worker has received.

  Args:
    worker: the number of this worker.
    entries: n, the size of the model.

  Example:
    >>> early = Early(0, entries=6)
    >>> early.keep(7, sender=2, values=np.ones(3, np.float32))
    >>> early.take(7)
    [(2, array([1., 1., 1.], dtype=float32))]
    >>> early.take(7)
    []
  """

  def __init__(self, worker: int, entries: int):
    self._worker, self._capacity = worker, entries + _MEMBERS
    self.clear()

  def clear(self) -> None:
    """Forgets all parts."""
    self._parts: dict[int, tuple[int, np.ndarray]] = {}  # by sender: number of the group, values
    self._entries = 0
    self._dropped = False

  def keep(self, number: int, sender: int, values: np.ndarray) -> None:
    """Keeps a part of group `number`; it replaces an earlier one of its sender. Beyond the capacity it is dropped."""
    former = self._parts.pop(sender, (0, values[:0]))[1].size
    self._entries += values.size - former
    if self._entries <= self._capacity:
      self._parts[sender] = (number, values)
      return
    self._entries -= values.size
    if not self._dropped:  # log once, there may be many
      self._dropped = True
      logging.getLogger(__name__).warning(
        f"worker {self._worker}: {values.size} entries for group {number} from worker {sender} are dropped; of groups "
        f"that the server has not named yet, at most {self._capacity} entries are kept, more than any group sends"
      )

  def take(self, number: int) -> list[tuple[int, np.ndarray]]:
    """Returns (sender, values) of each part of group `number`, and forgets all parts."""
    parts = [(sender, values) for sender, (group, values) in self._parts.items() if group == number]
    self.clear()
    return parts
