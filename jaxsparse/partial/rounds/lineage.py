"""The rounds that an anchor has been through: ids that are chained from round to round."""

from typing import NamedTuple

from jaxsparse.weights.digests import chained

# rounds that a worker may be apart from others, and still learn that it is on their
# branch
MOST_IDS = 256


class Lineage(NamedTuple):
  """The rounds of an anchor: the id of a round is a digest of the id before and of the number of its group.

  Anchors with the same id have been through the same rounds, all of them.

  Attributes:
    round: how many rounds there have been.
    ids: of the last rounds, 62 bits each, oldest first.

  Example:
    >>> early = Lineage().after(5).after(6)
    >>> late, other = early.after(7), Lineage().after(5).after(16).after(17)
    >>> late.includes(early), early.includes(late), late.conflicts(early), late.conflicts(other)
    (True, False, False, True)
  """

  round: int = 0
  ids: tuple[int, ...] = ()

  @property
  def id(self) -> int | None:
    """The id of the last round; 0 before the first one."""
    return self.at(self.round)

  def at(self, round_: int) -> int | None:
    """The id after so many rounds; None where that is too long ago, or not reached."""
    if round_ == 0:
      return 0
    later = self.round - round_  # rounds after that one: the last id is of `self.round`
    return self.ids[-1 - later] if 0 <= later < len(self.ids) else None

  def after(self, group: int) -> "Lineage":
    """The lineage after one round more, of the group with the number `group`."""
    id_ = chained(self.id or 0, group)
    return Lineage(self.round + 1, (*self.ids, id_)[-MOST_IDS:])

  def cut(self, round_: int) -> "Lineage":
    """The lineage after the first `round_` of these rounds."""
    dropped = max(0, self.round - round_)
    return Lineage(round_, self.ids[: max(0, len(self.ids) - dropped)])

  def includes(self, other: "Lineage") -> bool:
    """Whether an anchor of this lineage is known to have been through all rounds of another one."""
    return other.id is not None and self.at(other.round) == other.id

  def conflicts(self, other: "Lineage") -> bool:
    """Whether neither has been through the rounds of the other.

    A longer one has to show that it includes the shorter one, which may be of a time
    that the longer one does not know any more: the shorter anchor is only replaced.
    """
    if other.round > self.round:
      return not other.includes(self)
    # None: too long ago for this one to know, which is no conflict.
    return self.at(other.round) not in (None, other.id)


FIRST = Lineage()  # before the first round
