"""The average of a group, as messages between its members; a state machine without a network.

Three members, each the owner of a third of the model, so that each sends 2 n (P − 1)/P words, as in an all-reduce:

    PART   0 -> 1, 2     1 -> 0, 2     2 -> 0, 1     the owner's third of one's own model
    MEAN   0 -> 1, 2     1 -> 0, 2     2 -> 0, 1     the weighted mean of one's own third

An owner adds in the order of the members, so all of them get the same bits. Whoever has all means goes on; if a member
dies before that, the others forget the average and keep their models.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from jaxsparse.partial.controller import Group

Kind = Literal["part", "mean"]


class Piece(NamedTuple):
  """A message of one member to another.

  Attributes:
    to: the member it is for.
    kind: "part" of a model, or "mean" of them all.
    values: f32.

  Example:
    >>> Piece(1, "part", np.zeros(2, np.float32)).to
    1
  """

  to: int
  kind: Kind
  values: np.ndarray


class Average:
  """One group's average at one of its members.

  Args:
    group: who takes part, and with which weights.
    me: this member.
    model: f32[n], its own.
    initial: f32[n], the one that training started from.

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
    self._of = {member: slice(*bounds[i : i + 2]) for i, member in enumerate(group.members)}
    own = self._of[me]
    self._initial = initial[own]
    self._parts = {me: model[own]}
    self.result = np.empty_like(model)
    self._missing = set(group.members)

  @property
  def done(self) -> bool:
    """Whether `result` is the average."""
    return not self._missing

  @property
  def others(self) -> list[int]:
    """The members but this one."""
    return [member for member in self.group.members if member != self._me]

  def needs(self, member: int) -> bool:
    """Whether something has yet to come from a member."""
    return member in self.group.members and (member in self._missing or member not in self._parts)

  def begin(self) -> Iterator[Piece]:
    """What to send first."""
    for member in self.others:
      yield Piece(member, "part", self._model[self._of[member]])
    yield from self._mean()

  def receive(self, member: int, kind: Kind, values: np.ndarray) -> Iterator[Piece]:
    """What to send after this has come.

    Raises:
      ValueError: for what does not belong to this average: not from a member, come before, or of another size.
    """
    size = self._of[self._me if kind == "part" else member] if member in self.others else None
    come = member in self._parts if kind == "part" else member not in self._missing
    if size is None or come or values.shape != self._model[size].shape:
      raise ValueError(f"{kind} of {values.shape} from {member} does not belong to the average of {self.group.members}")
    if kind == "part":
      self._parts[member] = values
      yield from self._mean()
    else:
      self.result[size] = values
      self._missing.remove(member)

  def _mean(self) -> Iterator[Piece]:
    if len(self._parts) < len(self.group.members):
      return
    total = np.float32(self.group.initial) * self._initial if self.group.initial else np.zeros_like(self._initial)
    for member, weight in zip(self.group.members, self.group.weights, strict=True):
      total += np.float32(weight) * self._parts[member]
    self.result[self._of[self._me]] = total
    self._missing.remove(self._me)
    for member in self.others:
      yield Piece(member, "mean", total)
