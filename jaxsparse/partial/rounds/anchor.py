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

import collections
import logging
from collections.abc import Iterable

import numpy as np
import optax

from jaxsparse.partial.net.messages import Piece, PieceKind, RoundPosition, WorkerGroup
from jaxsparse.partial.net.transfers import MOST_DONORS, PREFIX
from jaxsparse.partial.rounds import chain
from jaxsparse.partial.rounds.chain import RoundLink
from jaxsparse.partial.rounds.checks import SavedState
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep, Result
from jaxsparse.transform.fragments import fill_zeros
from jaxsparse.weights import digests

_LOG = logging.getLogger(__name__)
_NO_WORDS = np.empty(0, np.uint32)


class Forked(ValueError):
  """The anchor that a worker was started with is of a branch of rounds that the others are not on."""


class OwnAnchor:
  """Owns the anchor and the residual of a worker, can undo its last round, and keeps links for other workers.

  Args:
    outer: the outer step; also an attribute.
    anchor: before the first round; as an attribute after the last one that counted.
      `residual_group`, and in its outer state the residual, `worker` arrays and
      counters, are of this worker alone; all else is equal on all workers.
    worker: its number; −1 for a reader, which is no worker.

  Attributes:
    group: of the last round of this worker that counted; without members before it.
    delta: θ − θ_w, f32, what this worker gives in the next round.
    delivered: the `Result` of the last round of this worker that counted.
    returned: movement of a revoked round, to give again; None: there is none.
    is_stale: whether this worker was in rounds after its state was saved, so that
      nothing of the state but its anchor is left.
    _is_restored: whether the anchor is that of a saved state, with no round since.
    _before: the anchor before the last round of this worker, and the `delta` that it
      gave then; None before that round, and once `_change_branch` has undone it.
    _links: the last rounds, oldest first, for workers that have missed them.
    _digest: of the anchor, which `digest` returns; None if not computed yet.
  """

  def __init__(self, outer: OuterStep, anchor: Anchor, worker: int):
    self.outer = outer
    self.anchor = anchor
    self.group = WorkerGroup((), (), 0)
    # a placeholder: `Exchanger.prepare` sets it before each round
    self.delta = anchor.params
    self.delivered: Result | None = None
    self.returned: optax.Params | None = None
    self.is_stale = False
    self._is_restored = False
    self._worker = worker
    # the anchor before the last round, and what was given in that round
    self._before: tuple[Anchor, optax.Params] | None = None
    # The newest rounds, for workers that are behind: together at most as many bytes as
    # `anchor`. (Links of a chain of rounds, not members that are links.)
    self._links = collections.deque[RoundLink]()

  @property
  def anchor(self) -> Anchor:
    """The anchor after the last round that counted, with the residual of this worker."""
    return self._anchor

  @anchor.setter
  def anchor(self, anchor: Anchor) -> None:
    self._anchor = anchor
    self._digest: int | None = None  # another anchor, another digest

  def restore(self, state: SavedState) -> None:
    """Replaces the anchor and the residual by those of a saved state, which has the entries of `arrays`.

    To be called before the first round, when there is nothing to undo.
    """
    saved = self.outer.unpack(np.asarray(state["anchor"]).tobytes(), self.anchor)
    # `unpack` keeps the residual of this worker, zeros before its first round.
    saved = self.outer.add_residual(saved, state["residual"])
    # `latest`: the group of the last round of this residual
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

  def replace(self, group: WorkerGroup, result: Result, digest: int) -> RoundPosition:
    """Makes the result of a round that counts the anchor; returns its position.

    Args:
      group: of the round.
      result: of this worker.
      digest: of the result's anchor.
    """
    self._before = self.anchor, self.delta
    self.anchor = result.anchor
    self._digest = digest
    self.delivered = result._replace(totals=())  # totals are large
    self.group = group
    self._is_restored = False
    self._keep([RoundLink.of(group, result)])
    return self.anchor.position

  def _keep(self, links: Iterable[RoundLink]) -> None:
    """Adds links; drops the oldest while all together have more bytes than the anchor, which is sent instead."""
    self._links.extend(links)
    most = self.outer.size(self.anchor)
    # A link that is not packed yet has 0 bytes, and counts next time.
    while sum(link.nbytes for link in self._links) > most:
      self._links.popleft()

  @property
  def lineage(self) -> tuple[int, ...]:
    """The ids of the last rounds of the anchor."""
    return self.anchor.lineage.ids

  def go_back(self) -> RoundPosition:
    """Undoes the last round, since its result here differs from that of most members, which this worker will fetch.

    Returns:
      The position before the round. The residual is that of the round, which counts.
    """
    assert self._before
    before, _ = self._before
    # the link of the round whose result differs
    self._links.pop()
    self.anchor = self.outer.with_residual(before, self.anchor)
    return self.anchor.position

  def was_committed(self, model: Piece, position: RoundPosition) -> bool | None:
    """Whether the donor's anchor includes round `position.last`; None if the donor cannot know it yet.

    Args:
      model: the anchor of a donor, or links, as the donor sends it.
      position: of this worker, whose `last` is a round of which it has a result without
        knowing whether the round counts.

    Raises:
      ValueError: for an anchor of another model.
    """
    anchor, *_ = self._unpack(model)
    # `[:2]` is round and base. A donor with the anchor of this worker may still wait to
    # hear whether round `last` counts.
    if anchor.position.round < position.round or anchor.position[:2] == position[:2]:
      return None
    # the lineage of this worker if round `last` counts
    after = self.anchor.lineage.after(position.last)
    # `at` is None for a round too old for the lineage, which is taken as included, and
    # for one not reached, which the next line excludes.
    is_there = anchor.lineage.at(after.round) in (None, after.id)
    return is_there and anchor.position.round >= after.round

  def _unpack(self, model: Piece) -> tuple[Anchor, int, list[RoundLink]]:
    """The donor's anchor with this worker's residual, the anchor's digest, and the links applied; [] if it came whole.

    Args:
      model: four i64, of which digest and number of words are checked; then the words
        of an anchor or of links.

    Raises:
      ValueError: for bytes of neither, or an anchor with another digest than the one
        that is sent.
    """
    prefix, words = np.split(model.values.view(np.uint32), [PREFIX])
    links = list[RoundLink]()
    try:
      digest, size, *_ = prefix.view(np.int64).tolist()
      if size != words.size:
        raise ValueError(f"{words.size} words, its donor has {size}")
      if words[0] == 0:  # links: an anchor begins with another word
        anchor, links = self._follow(*chain.parse(words))
        # The donor's digest is that of its whole anchor, also where it sends links.
        computed = self.outer.digest(anchor)
      else:
        computed = digests.digest([words])
        anchor = self.outer.unpack(words.tobytes(), self.anchor)
    # The bytes may be forged: whatever parsing raises is a refusal.
    except (IndexError, RecursionError, StopIteration, TypeError) as error:
      raise ValueError(str(error)) from error
    if computed != digest:
      raise ValueError(f"its digest is {computed:x}, its donor says {digest:x}")
    return anchor, digest, links

  def _follow(
    self, start: Lineage, links: list[RoundLink]
  ) -> tuple[Anchor, list[RoundLink]]:
    """Applies the links of the rounds that this worker has missed to its anchor; returns the result and these links.

    Args:
      start: lineage of the anchor from which the links lead on.
      links: of all rounds after `start`, oldest first.
    """
    anchor = self.anchor
    if not anchor.lineage.includes(start):
      raise ValueError(f"its links begin at another round {start.round}")
    # Links may begin before the last round of this worker. Where its own rounds are of
    # another branch, the digest of the result differs.
    missed = links[anchor.position.round - start.round :]
    for link in missed:
      anchor = link.follow(self.outer, anchor)
    return anchor, missed

  def digest(self) -> int:
    """The digest of the anchor, 62 bits, computed once: `model` sends it with each answer."""
    if self._digest is None:
      self._digest = self.outer.digest(self.anchor)
    return self._digest

  def adopt(self, model: Piece, base: int, digest: int) -> RoundPosition:
    """Takes the anchor of a donor; the residual of this worker stays, and what it gives.

    Args:
      model: the anchor, or links to it, as the donor sends it.
      base: number of the group of the last round, as the server says.
      digest: of the anchor after that round, as the server says; 0 if the server does
        not know it. A part of a worker has 0 or −1 here, since its lead compares the
        digest. Neither value is compared.

    Returns:
      The position of this worker with the new anchor.

    Raises:
      ValueError: for an anchor that is older, or is that of group `base` and has
        another digest, or is of another model.
      Forked: if this worker was started with an anchor of another branch.
    """
    # The new anchor with this worker's residual; links are [] where it was sent whole.
    anchor, digest_of_donor, links = self._unpack(model)
    position = anchor.position
    if digest > 0 and position.base == base and digest_of_donor != digest:
      raise ValueError(
        f"its digest is {digest_of_donor:x}, that of round {position.round} is {digest:x}"
      )
    local = self.anchor
    if position.round < local.position.round and local.lineage.includes(anchor.lineage):
      raise ValueError(
        f"it is that of round {position.round}, before round {local.position.round} of this worker's"
      )
    if anchor.lineage.conflicts(local.lineage):
      anchor = self._change_branch(anchor)
    # The residual here is not that after this worker's last round, as the run knows it:
    # that round was a later one, or a round of this residual does not count.
    if anchor.residual_group != anchor.latest.get(self._worker, 0):
      anchor = self._drop_residual(anchor)
    # Another anchor, sent whole: earlier links do not lead to it.
    if not links and position != local.position:
      self._links.clear()
    self.anchor = anchor
    self._keep(links)
    self._is_restored = False  # from now on this worker is in the run of the others
    return anchor.position

  def _change_branch(self, anchor: Anchor) -> Anchor:
    """Returns `anchor`, of a donor on another branch: both have been through rounds that the other has not.

    Where only the last round of this worker is not of the donor's branch, it is undone:
    its movement is given again, and `anchor` has the residual before it.

    Raises:
      Forked: if this worker's anchor is that of a saved state.
    """
    if self._is_restored:
      was = self.anchor.position.round
      raise Forked(
        f"worker {self._worker}: the state is that of round {was} of another branch of this run, of which the others "
        f"know nothing: they have been through other rounds, and are at round {anchor.position.round}. Start this "
        "worker without a state, or all workers from states of the same branch"
      )
    # Returns unless exactly the last round can be undone: `adopt` then drops the
    # residual if it is outdated.
    if not self._before:
      return anchor
    before, delta = self._before
    if anchor.lineage.conflicts(before.lineage):
      return anchor
    result = self.delivered
    # The training loop no longer has the movement of the fragment that the round has
    # delivered. A skipped round has delivered nothing.
    if result and not result.skipped:
      self.returned = fill_zeros(
        delta, self.outer.fragments.part(delta, result.fragment)
      )
    self._before = None
    return self.outer.with_residual(anchor, before)

  def _drop_residual(self, anchor: Anchor) -> Anchor:
    """`anchor` without the residual of this worker.

    Called where `residual_group`, the group after whose round the residual was left, is
    not `latest`, the last group of this worker as the run knows it. If the residual
    stayed, its entries could be delivered twice.
    """
    latest = anchor.latest.get(self._worker, 0)
    # `residual_group` is 0 where the worker is started anew: it has no residual.
    if not anchor.residual_group and not self._is_restored:
      return anchor._replace(residual_group=latest)
    self.is_stale = self._is_restored
    what = (
      "its state is of an older round than its last one: the residual and the movement in it"
      if self._is_restored
      else "rounds that it was in do not count for the others: its residual"
    )
    _LOG.warning(
      f"worker {self._worker}: {what}, delivered, handed over or lost since, are dropped"
    )
    return self.outer.without_residual(anchor, latest)

  def model(self, request: Piece) -> Piece:
    """The answer to FETCH: a slice of the anchor, or the links of the rounds that a worker has missed.

    It begins with four i64: the digest of the anchor, the number of words of all
    slices, the index of this slice, and the number of slices. Nothing follows where the
    links are not here or as large as the anchor: the worker then asks for the anchor.
    Nor does anything follow where it asks for a slice of another round's anchor.

    Args:
      request: FETCH, with four i64 as its values: the round of the worker's anchor,
        from which links lead on, −1 to ask for the anchor; the id of that round; the
        index of the slice; the number of slices. Its `number` is the round asked for.
    """
    # A request without these integers gets the whole anchor in one slice.
    round_, id_, index, count = -1, 0, 0, 1
    if request.values.size == PREFIX:
      round_, id_, index, count = request.values.view(np.int64).tolist()
    if not 0 <= index < count <= MOST_DONORS:
      index, count = 0, 1
    is_late = count > 1 and request.number != self.anchor.position.round
    # Other donors send slices of the anchor of the round asked for: a slice of another
    # anchor does not fit them.
    if is_late:
      words = _NO_WORDS
    elif round_ < 0:
      words = np.frombuffer(self.outer.pack(self.anchor), np.uint32)
    else:
      words = self._links_from(Lineage(round_, (id_,)))
    # i64[4], 8 words: without links the answer is these alone.
    prefix = np.array([self.digest(), words.size, index, count], np.int64)
    start, end = (words.size * cut // count for cut in (index, index + 1))
    values = np.concatenate([prefix.view(np.uint32), words[start:end]])
    return Piece(
      PieceKind.MODEL,
      self.anchor.position.round,
      self._worker,
      values.view(np.float32),
    )

  def _links_from(self, start: Lineage) -> np.ndarray:
    """u32[m], the links of all rounds after `start`, if they are here and shorter than the anchor; else no words."""
    count = self.anchor.position.round - start.round
    # With a count below 1 these links are wrong, but `is_known` is false.
    links = [*self._links][-count:]
    is_known = 0 < count == len(links) and self.anchor.lineage.includes(start)
    # None: not packed yet, or at least as many bytes as an anchor
    if is_known and all(link.words is not None for link in links):
      words = chain.pack(start, links)
      if words.nbytes < self.outer.size(self.anchor):
        return words
    return _NO_WORDS
