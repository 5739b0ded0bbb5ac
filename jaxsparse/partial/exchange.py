"""The average of a group as messages between its members, without a network.

An all-reduce in two rounds. Each of G members owns a shard of n/G entries, and sends 2 n (G − 1)/G words. With three:

    PART   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the receiver's shard of the sender's model
    MEAN   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the weighted mean of the sender's shard

The owner of a shard adds in the order of the members, so all members get the same bits. A member has the average when
it has the means of all shards. If another member dies before that, it drops the average and keeps its own model.
"""

import logging
from collections.abc import Iterator

import numpy as np

from jaxsparse.partial.controller import Group
from jaxsparse.partial.messages import Kind, Piece

_MEMBERS = 2**16  # the sender's number has 16 bits


class Average:
  """The average of one group, as one of its members computes it.

  Args:
    group: the members and their weights.
    me: the number of this member.
    model: f32[n], this member's model.
    initial: f32[n], the model that training started from.

  Attributes:
    result: f32[n], the average once `done`.

  Example:
    >>> group = Group((0, 1), (0.75, 0.25), 1)
    >>> models = np.zeros(3, np.float32), np.full(3, 4, np.float32)
    >>> members = [Average(group, me, models[me], models[0]) for me in (0, 1)]
    >>> pieces = [*members[0].begin(), *members[1].begin()]
    >>> while pieces:
    ...   to, piece = pieces.pop()
    ...   pieces += members[to].receive(piece)
    >>> members[0].done, members[1].result
    (True, array([1., 1., 1.], dtype=float32))
  """

  def __init__(self, group: Group, me: int, model: np.ndarray, initial: np.ndarray):
    self.group, self._me, self._model = group, me, model
    bounds = np.linspace(0, model.size, len(group.members) + 1).astype(int)
    self._shards = {member: slice(*bounds[i : i + 2]) for i, member in enumerate(group.members)}
    own = self._shards[me]
    self._initial, self._parts = initial[own], {me: model[own]}
    self.result = np.empty_like(model)
    self._missing = set(group.members)  # owners of the shards that `result` lacks

  @property
  def done(self) -> bool:
    """Whether `result` is complete."""
    return not self._missing

  def needs(self, member: int) -> bool:
    """Whether a message of a member has not arrived yet."""
    return member in self.group.members and (member in self._missing or member not in self._parts)

  def begin(self) -> Iterator[tuple[int, Piece]]:
    """Yields the first pieces to send, each with its receiver."""
    for member, shard in self._shards.items():
      if member != self._me:
        yield member, Piece(Kind.PART, self.group.number, self._me, self._model[shard])
    yield from self._send_mean()

  def receive(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
    """Takes a piece, and yields those to send next.

    Ignores one that does not belong to this average: not from another member, a duplicate, or of another size.
    """
    sender, is_part = piece.sender, piece.kind == Kind.PART
    awaited = sender in self._shards and (sender not in self._parts if is_part else sender in self._missing)
    if not awaited or sender == self._me:
      return
    shard = self._shards[self._me if is_part else sender]
    if piece.values.shape != self._model[shard].shape:
      return
    if is_part:
      self._parts[sender] = piece.values
      yield from self._send_mean()
    else:
      self.result[shard] = piece.values
      self._missing.remove(sender)

  def _send_mean(self) -> Iterator[tuple[int, Piece]]:
    """Averages the own shard once all parts of it have arrived."""
    if len(self._parts) < len(self.group.members):
      return
    total = np.float32(self.group.initial) * self._initial if self.group.initial else np.zeros_like(self._initial)
    for member, weight in zip(self.group.members, self.group.weights, strict=True):
      total += np.float32(weight) * self._parts[member]
    self.result[self._shards[self._me]] = total
    self._missing.remove(self._me)
    for member in self.group.members:
      if member != self._me:
        yield member, Piece(Kind.MEAN, self.group.number, self._me, total)


class Early:
  """Parts that arrive at one worker before the server has named the group that they belong to.

  A member sends its parts as soon as it hears of its group, which may be before another member hears of that group.
  Only parts can be early, since a mean needs the parts of all members; each member sends one; and a member waits for
  one group at a time. So the early parts of a group of G members have at most (G − 1) ⌈n/G⌉ < n + G entries. Entries
  beyond that are forged, and are dropped, so that they cannot fill the memory.
  """

  def __init__(self, worker: int, entries: int):
    self._worker, self._capacity = worker, entries + _MEMBERS
    self.clear()

  def clear(self) -> None:
    """Forgets all parts."""
    self._parts: dict[int, Piece] = {}  # by sender
    self._dropped = False

  def keep(self, part: Piece) -> None:
    """Keeps a part; it replaces an earlier one of its sender. Beyond the capacity it is dropped."""
    self._parts.pop(part.sender, None)
    if part.values.size + sum(other.values.size for other in self._parts.values()) <= self._capacity:
      self._parts[part.sender] = part
    elif not self._dropped:  # log once, there may be many
      self._dropped = True
      logging.getLogger(__name__).warning(
        f"worker {self._worker}: {part.values.size} entries for group {part.number} from worker {part.sender} are "
        f"dropped; of groups that the server has not named yet, at most {self._capacity} entries are kept, more than "
        "any group sends"
      )

  def take(self, number: int) -> list[Piece]:
    """Returns the parts of group `number`, and forgets all parts."""
    parts = [part for part in self._parts.values() if part.number == number]
    self.clear()
    return parts
