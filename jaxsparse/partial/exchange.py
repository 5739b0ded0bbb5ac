"""The average of a group as messages between its members: a state machine without a network.

An all-reduce in two rounds. Each of G members owns a shard of n/G entries, and sends 2 n (G − 1)/G words. With three:

    PART   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the receiver's shard of the sender's model
    MEAN   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the weighted mean of the sender's shard

The owner of a shard adds in the order of the members, so all members get the same bits. A member has the average when
it has the means of all shards. If another member dies before that, it drops the average and keeps its own model.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from jaxsparse.partial.controller import Group

Kind = Literal["part", "mean"]


class Piece(NamedTuple):
  """A message of one member to another.

  Attributes:
    to: the receiver's number.
    kind: "part", the receiver's shard of the sender's model; "mean", the averaged shard of the sender.
    values: f32[shard].

  Example:
    >>> Piece(1, "part", np.zeros(2, np.float32)).to
    1
  """

  to: int
  kind: Kind
  values: np.ndarray


class Average:
  """The average of one group, as one of its members computes it.

  Args:
    group: the members and their weights.
    me: the number of this member.
    model: f32[n], this member's model.
    initial: f32[n], the model that training started from.

  Attributes:
    group: see above.
    result: f32[n], the average once `done`.

  Example:
    >>> group = Group((0, 1), (0.75, 0.25), 1)
    >>> models = np.zeros(3, np.float32), np.full(3, 4, np.float32)
    >>> zero, one = (Average(group, me, models[me], models[0]) for me in (0, 1))
    >>> for piece in [*zero.begin(), *one.begin()]:
    ...   for answer in (one if piece.to else zero).receive(1 - piece.to, piece.kind, piece.values):
    ...     _ = list((one if answer.to else zero).receive(1 - answer.to, answer.kind, answer.values))
    >>> zero.done, one.result
    (True, array([1., 1., 1.], dtype=float32))
  """

  def __init__(self, group: Group, me: int, model: np.ndarray, initial: np.ndarray):
    self.group, self._me, self._model = group, me, model
    bounds = np.linspace(0, model.size, len(group.members) + 1).astype(int)
    self._shards = {member: slice(*bounds[i : i + 2]) for i, member in enumerate(group.members)}
    own = self._shards[me]
    self._initial = initial[own]
    self._parts = {me: model[own]}
    self.result = np.empty_like(model)
    self._missing = set(group.members)  # owners of the shards that `result` lacks

  @property
  def done(self) -> bool:
    """Whether `result` is complete."""
    return not self._missing

  @property
  def others(self) -> list[int]:
    """All members but this one."""
    return [member for member in self.group.members if member != self._me]

  def needs(self, member: int) -> bool:
    """Whether a message of a member has not arrived yet."""
    return member in self.group.members and (member in self._missing or member not in self._parts)

  def begin(self) -> Iterator[Piece]:
    """Yields the first messages to send."""
    for member in self.others:
      yield Piece(member, "part", self._model[self._shards[member]])
    yield from self._send_mean()

  def receive(self, member: int, kind: Kind, values: np.ndarray) -> Iterator[Piece]:
    """Takes a message, and yields the messages to send next.

    Raises:
      ValueError: for a message that does not belong to this average: not from another member, a duplicate, or of
        another size.
    """
    shard = self._shards[self._me if kind == "part" else member] if member in self.others else None
    duplicate = member in self._parts if kind == "part" else member not in self._missing
    if shard is None or duplicate or values.shape != self._model[shard].shape:
      raise ValueError(f"{kind} of {values.shape} from {member} does not belong to the average of {self.group.members}")
    if kind == "part":
      self._parts[member] = values
      yield from self._send_mean()
    else:
      self.result[shard] = values
      self._missing.remove(member)

  def _send_mean(self) -> Iterator[Piece]:
    """Averages the own shard once all parts of it have arrived."""
    if len(self._parts) < len(self.group.members):
      return
    total = np.float32(self.group.initial) * self._initial if self.group.initial else np.zeros_like(self._initial)
    for member, weight in zip(self.group.members, self.group.weights, strict=True):
      total += np.float32(weight) * self._parts[member]
    self.result[self._shards[self._me]] = total
    self._missing.remove(self._me)
    for member in self.others:
      yield Piece(member, "mean", total)
