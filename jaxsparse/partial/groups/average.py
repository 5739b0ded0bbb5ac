"""The average of a group as messages between its members, without a network.

An all-reduce in two rounds. Each of G members owns a shard of n/G entries, and sends 2
n (G − 1)/G words. With three:

    PART   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the receiver's shard of the sender's model
    MEAN   0 ─> 1, 2     1 ─> 0, 2     2 ─> 0, 1     the weighted mean of the sender's shard

The owner of a shard adds in the order of the members, so all members get the same bits.
A member has the average when it has the means of all shards. If another member dies
before that, it drops the average and keeps its own model.
"""

from collections.abc import Iterator

import numpy as np

from jaxsparse.partial.net.messages import Piece, PieceKind, WorkerGroup


class Average:
  """The average of one group, as one of its members computes it.

  Args:
    group: the members and their weights.
    me: the number of this member.
    model: f32[n], this member's model.
    initial: f32[n], the model that training started from.

  Attributes:
    group: the members and their weights.
    result: f32[n], the average once `done`; shards without a mean are uninitialized.
    _shards: by member, the slice of the model that it owns.
    _initial: the initial model, in the shard of this member.
    _parts: by member, this one and those whose PART has arrived: its model in the shard
      of this member.
    _missing: owners of the shards whose mean `result` lacks.

  Example:
    >>> group = WorkerGroup((0, 1), (0.75, 0.25), 1)
    >>> models = np.zeros(3, np.float32), np.full(3, 4, np.float32)
    >>> members = [Average(group, me, models[me], models[0]) for me in (0, 1)]
    >>> pieces = [*members[0].begin(), *members[1].begin()]
    >>> while pieces:
    ...   to, piece = pieces.pop()
    ...   pieces += members[to].receive(piece)
    >>> members[0].done, members[1].result
    (True, array([1., 1., 1.], dtype=float32))
  """

  def __init__(
    self, group: WorkerGroup, me: int, model: np.ndarray, initial: np.ndarray
  ):
    self.group = group
    self._me = me
    self._model = model
    bounds = np.linspace(0, model.size, len(group.members) + 1).astype(int)
    self._shards = {
      member: slice(*bounds[rank : rank + 2])
      for rank, member in enumerate(group.members)
    }
    shard = self._shards[me]
    self._initial = initial[shard]
    self._parts = {me: model[shard]}
    self.result = np.empty_like(model)
    self._missing = set(group.members)

  @property
  def done(self) -> bool:
    """Whether `result` is complete."""
    return not self._missing

  def needs(self, group_number: int, member: int) -> bool:
    """Whether this is group `group_number`, and a message of a member has not arrived yet."""
    # the PART and the MEAN of that member
    arrived = member in self._parts and member not in self._missing
    return group_number == self.group.number and member in self._shards and not arrived

  def begin(self) -> Iterator[tuple[int, Piece]]:
    """Yields the first pieces to send, each with its receiver."""
    for member, shard in self._shards.items():
      if member != self._me:
        values = self._model[shard]
        yield member, Piece(PieceKind.PART, self.group.number, self._me, values)
    # Sets `result` of a group of one, which has all parts; sends nothing.
    yield from self._send_mean()

  def receive(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
    """Takes a PART or a MEAN, and yields the pieces to send next, each with its receiver.

    Ignores a piece that is not from another member, a duplicate, and a piece of another
    size.
    """
    # `_parts` has the own part from the start; the own shard is in `_missing` until
    # `_send_mean` has all parts of it.
    sender = piece.sender
    shape = piece.values.shape
    if piece.kind == PieceKind.PART:
      if (
        sender in self._shards
        and sender not in self._parts
        and shape == self._initial.shape
      ):
        self._parts[sender] = piece.values
        yield from self._send_mean()
    elif (
      sender in self._missing
      and sender != self._me
      and shape == self._model[self._shards[sender]].shape
    ):
      self.result[self._shards[sender]] = piece.values
      self._missing.remove(sender)

  def _send_mean(self) -> Iterator[tuple[int, Piece]]:
    """Once all parts of this member's shard are there, averages them and yields the MEAN for each other member."""
    group = self.group
    if len(self._parts) < len(group.members):
      return
    # `group.initial` is the weight of the initial model.
    total = np.float32(group.initial) * self._initial
    # in the order of members, not of arrival: sums of float32 are reproducible
    for member, weight in zip(group.members, group.weights, strict=True):
      total += np.float32(weight) * self._parts[member]
    self.result[self._shards[self._me]] = total
    self._missing.remove(self._me)
    for member in group.members:
      if member != self._me:
        yield member, Piece(PieceKind.MEAN, group.number, self._me, total)
