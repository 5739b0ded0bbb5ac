"""The anchor of a worker, with its round and its residual: one object owns them, and nothing else changes them.

    event                              the anchor, its round and the residual after it
    begin, drop                        as before
    commit, a result that most have    those of the result
    commit, then go_back               of the round before; the residual of the result is kept
    adopt, of the own branch           those of the donor; the own residual
    adopt, the last round is undone    those of the donor; the residual before that round, and `returned`
    adopt, of another branch           those of the donor; no residual

An exchange that is under way has no part in this until its round counts.
"""

import logging

import numpy as np
import optax

from jaxsparse.partial.net.messages import Piece, PieceKind, RoundPosition, WorkerGroup
from jaxsparse.partial.rounds.checks import SavedState
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep, Result
from jaxsparse.transform.fragments import fill_zeros

_LOG = logging.getLogger(__name__)


class Forked(ValueError):
  """The anchor that a worker was started with is of a branch of rounds that the others are not on."""


class OwnAnchor:
  """What a worker has of its rounds.

  Args:
    outer: the outer step; also an attribute.
    anchor: before the first round.
    worker: its number.

  Attributes:
    anchor: after the last round that counted, with the residual of this worker.
    group: of the last round that counted.
    given: θ − θ_w, what this worker gives in the next round.
    delivered: the result of the last round of this worker that counted.
    returned: movement of a revoked round, to give again.
    is_stale: whether this worker was in rounds after its state was saved, so that
      nothing of the state but its anchor is left.
  """

  def __init__(self, outer: OuterStep, anchor: Anchor, worker: int):
    self.outer = outer
    self.anchor = anchor
    self.group = WorkerGroup((), (), 0)
    self.given = anchor.params
    self.delivered: Result | None = None
    self.returned: optax.Params | None = None
    self.is_stale = False
    self._is_restored = False
    self._number = worker
    # the anchor before the last round, and what was given in it
    self._before: tuple[Anchor, optax.Params] | None = None

  def restore(self, state: SavedState) -> None:
    """Begins with what `arrays` was."""
    saved = self.outer.unpack(np.asarray(state["anchor"]).tobytes(), self.anchor)
    saved = self.outer.add_residual(saved, state["residual"])
    self.anchor = saved._replace(residual_group=int(state["latest"]))
    self._is_restored = True

  @property
  def arrays(self) -> SavedState:
    """The anchor and the residual, to save."""
    return {
      "anchor": np.frombuffer(self.outer.pack(self.anchor), np.uint8),
      "residual": self.outer.residual(self.anchor),
      "latest": np.int64(self.anchor.residual_group),
    }

  def replace(self, group: WorkerGroup, result: Result) -> RoundPosition:
    """The result of a round counts."""
    self._before = self.anchor, self.given
    self.anchor = result.anchor
    self.delivered = result
    self.group = group
    self._is_restored = False
    return self.anchor.position

  @property
  def lineage(self) -> tuple[int, ...]:
    """The ids of the last rounds of the anchor."""
    return self.anchor.lineage.ids

  def go_back(self) -> RoundPosition:
    """The result that has counted last differs from that of most members: the anchor is again that before."""
    assert self._before is not None
    before, _ = self._before
    self.anchor = self.outer.with_residual(before, self.anchor)
    return self.anchor.position

  def was_committed(self, model: Piece, position: RoundPosition) -> bool | None:
    """Whether the donor's anchor includes round `position.last`; None if the donor cannot know it yet.

    Raises:
      ValueError: for an anchor of another model.
    """
    anchor = self._unpack(model)
    if anchor.position.round < position.round or anchor.position[:2] == position[:2]:
      return None
    after = self.anchor.lineage.after(position.last)
    # taken for granted if it is too long ago
    is_there = anchor.lineage.at(after.round) in (None, after.id)
    return is_there and anchor.position.round >= after.round

  def _unpack(self, model: Piece) -> Anchor:
    try:
      return self.outer.unpack(model.values.tobytes(), self.anchor)
    except TypeError as error:  # the header is none
      raise ValueError(str(error)) from error

  def digest(self) -> int:
    """Of the anchor, as that of the result of its last round."""
    return self.outer.digest(self.anchor)

  def adopt(self, model: Piece, base: int, digest: int) -> RoundPosition:
    """Takes the anchor of a donor; the residual of this worker stays, and what it gives.

    Raises:
      ValueError: for an anchor that is older, or that of round `base` with another
        digest than this one, unless that is not above 0, or of another model.
      Forked: if this worker was started with an anchor of another branch.
    """
    anchor = self._unpack(model)
    position = anchor.position
    if (
      digest > 0
      and position.base == base
      and (digest_of_donor := self.outer.digest(anchor)) != digest
    ):
      raise ValueError(
        f"its digest is {digest_of_donor:x}, that of round {position.round} is {digest:x}"
      )
    mine = self.anchor
    if position.round < mine.position.round and mine.lineage.includes(anchor.lineage):
      raise ValueError(
        f"it is that of round {position.round}, before round {mine.position.round} of this worker's"
      )
    if anchor.lineage.conflicts(mine.lineage):
      anchor = self._change_branch(anchor)
    if anchor.residual_group != anchor.latest.get(self._number, 0):
      anchor = self._drop_residual(anchor)
    self.anchor = anchor
    self._is_restored = False
    return anchor.position

  def _change_branch(self, anchor: Anchor) -> Anchor:
    """`anchor`, of rounds that this worker's has not been through, which has been through others.

    Where that is the last one alone, it is undone: what was given is given again.
    """
    if self._is_restored:
      was = self.anchor.position.round
      raise Forked(
        f"worker {self._number}: the state is that of round {was} of another branch of this run, of which the others "
        f"know nothing: they have been through other rounds, and are at round {anchor.position.round}. Start this "
        "worker without a state, or all workers from states of the same branch"
      )
    if not self._before:
      return anchor
    before, given = self._before
    if anchor.lineage.conflicts(before.lineage):
      return anchor
    result = self.delivered
    # else the training loop still has what was not delivered
    if result and not result.skipped:
      self.returned = fill_zeros(
        given, self.outer.fragments.part(given, result.fragment)
      )
    self._before = None
    return self.outer.with_residual(anchor, before)

  def _drop_residual(self, anchor: Anchor) -> Anchor:
    """`anchor` without the residual of this worker, which was in other rounds after those of its own anchor."""
    latest = anchor.latest.get(self._number, 0)
    if not anchor.residual_group and not self._is_restored:  # it is new
      return anchor._replace(residual_group=latest)
    self.is_stale = self._is_restored
    what = (
      "its state is of an older round than its last one: the residual and the movement in it"
      if self._is_restored
      else "rounds that it was in do not count for the others: its residual"
    )
    _LOG.warning(
      f"worker {self._number}: {what}, delivered, handed over or lost since, are dropped"
    )
    return self.outer.without_residual(anchor, latest)

  def model(self) -> Piece:
    """The anchor, for a worker that joins or has missed a round."""
    content = self.outer.pack(self.anchor)
    return Piece(
      PieceKind.MODEL,
      self.anchor.position.round,
      self._number,
      np.frombuffer(content, np.float32),
    )
