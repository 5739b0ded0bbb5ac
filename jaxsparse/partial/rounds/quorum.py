"""The controller of rounds: decides when a round begins, who takes part, and whether its result counts.

A pure state machine without clock, network or models, as `controller` is. A round is a
group whose result all workers apply, so that their anchors stay equal bit for bit. It
is decided in two phases:

    ready(2, 1) ──> enough are ready ──> WorkerGroup((0, 2, 5), weights, round)
    done(0, …), done(2, …), done(5, …) ──> Verdict: the result counts
    failed(2, …) or leave(2) before all are done ──> the result counts for nobody

Only one round is under way at a time. Workers that become ready meanwhile wait, and
those whose anchor is not that of the last round are told so: they fetch it from another
worker, and keep what they have trained for the next round.

A `Quorum` knows of its workers:

    _present     the numbers of those that have joined, and neither left nor were lost
    _ready       by worker, those that are ready and in no group, longest-waiting first
    _expected    by worker, the weight that it stated last: of all that have been ready
                 since they joined, members of a round and late ones too
    _counted     by worker, the number of the group of its last round that counted
    _digests     by member of the group under way, the digest of its result once it has one
    under_way    the group whose round is under way, or None
    _failed      the last group whose round counts for nobody
    _last_group  the number of the last group; they are consecutive
"""

import collections
import functools
import secrets
from collections.abc import Collection
from typing import Literal, NamedTuple

from jaxsparse.collectives._base import check_whole
from jaxsparse.partial.net.messages import Rejected, RoundPosition, WorkerGroup
from jaxsparse.partial.rounds.lineage import FIRST, Lineage
from jaxsparse.partial.rounds.pairs import Pairs

# seconds; workers wait as long in `queue.get`, which refuses more than some 9e9
_MOST_GRACE = 1e9


class Behind(Exception):
  """A worker is ready whose anchor is not that of the last round."""


class Verdict(NamedTuple):
  """The result of a round counts.

  Attributes:
    group: of the round.
    digest: of the result, that of most members.
    differing: members with another result, which have to fetch this one.
    behind: workers that were ready for a round of the anchor before, which have to
      fetch it, too.
  """

  group: WorkerGroup
  digest: int
  differing: tuple[int, ...]
  behind: tuple[int, ...]


class _Ready(NamedTuple):
  """A worker that is ready: whether it brings what a link has moved, and whether it leaves for good."""

  is_link: bool
  leaves: bool


class Quorum:
  """Begins rounds of the workers that are ready.

  - A round begins as soon as all workers that are there are ready, but for those that
    are new, or at `release`, which the server calls when K workers have been ready for
    the grace window: with all that are ready then.
  - Its members have the same anchor, that of the last round whose result counted.
  - Two workers that have missed messages of each other in a round are not together in
    the next 2 rounds, after the next failure not in 4, then in 8, up to 64 (`Pairs`).
    The one of the two takes part that was in a round longer ago; if that leaves fewer
    than K of all workers, both are tried again.
  - Its result counts when all members have it, and for nobody if one of them is lost
    before.
  - All steps count alike, whether they are delivered early or late: with M workers that
    are there, each with the same batch, the weight of a member is 1/M, and the weights
    of a round without all M sum to less than 1.

  Args:
    workers: numbers that workers may have: 0 … N − 1.
    quorum: K, the number of workers that a round takes. More than N/2 if there is a
      second server, so that they never hold rounds at the same time.
    grace: seconds for which K workers that are ready wait for others; "auto": chosen in
      each round by what workers took before (`Window`).
    first: the number before that of the first group; by default a random one.

  Attributes:
    position: of the last round whose result counted, and `digest` of that; 0 if another
      server knew.
    lineage: of the anchor after that round.
    lost: how many workers were lost, and `lost_weight` the sum of what they had trained
      and not delivered.
    paused: whether no round begins: after its start a server waits for workers that
      know more than others, and later for one that fetches the anchor.
    under_way: the group whose round is under way.
    pairs: of workers that have missed messages of each other.
    over: whether all workers have left, the last one in good order.

  Raises:
    ValueError: for arguments outside these choices.

  Example:
    >>> quorum = Quorum(3, quorum=2, first=6)
    >>> [quorum.join(worker, RoundPosition()) for worker in range(3)]
    [None, None, None]
    >>> quorum.ready(0, 4, RoundPosition()), quorum.ready(2, 1, RoundPosition()), quorum.release()
    ([], [], [WorkerGroup(members=(0, 2), weights=(0.8, 0.2), iteration=0, ...)])
    >>> quorum.done(0, 7, digest=99), quorum.done(2, 7, digest=99).digest, quorum.position
    (None, 99, RoundPosition(round=1, base=7, last=0))
  """

  def __init__(
    self,
    workers: int,
    quorum: int,
    *,
    grace: float | Literal["auto"] = "auto",
    first: int | None = None,
  ):
    check_whole("quorum", 1, workers=workers)
    check_whole("quorum", 1, workers, quorum=quorum)
    is_seconds = isinstance(grace, int | float) and 0 <= grace <= _MOST_GRACE
    if grace != "auto" and not is_seconds:
      raise ValueError(
        f"grace={grace!r}, choose 'auto', or seconds from 0 to {_MOST_GRACE:g}"
      )
    self.workers = workers
    self.quorum = quorum
    self.grace = grace
    self.position = RoundPosition()
    self.lineage = FIRST
    self.digest = 0
    self.lost = 0
    self.lost_weight = 0
    self.over = self.paused = False
    # Another number for each server, or pieces of a group of one before could be taken
    # for those of a later one.
    self._last_group = secrets.randbits(61) if first is None else first
    self._present: set[int] = set()
    # weights of those who have been ready since they joined
    self._expected: dict[int, int] = {}
    self._ready: dict[int, _Ready] = {}  # the longest-waiting first
    self.under_way: WorkerGroup | None = None
    # the last one whose result counts for nobody
    self._failed: WorkerGroup | None = None
    self.pairs = Pairs()
    # by worker the number of the group of its last round that counted
    self._counted: dict[int, int] = {}
    self._digests: dict[int, int] = {}  # by member of the group under way that is done

  @property
  def alive(self) -> tuple[int, ...]:
    """The workers that are there, ascending."""
    return tuple(sorted(self._present))

  @property
  def waiting(self) -> tuple[int, ...]:
    """The workers that are ready and in no group, the longest-waiting first."""
    return tuple(self._ready)

  def join(
    self, worker: int, position: RoundPosition, lineage: Lineage = FIRST
  ) -> WorkerGroup | None:
    """Adds a worker, or adds it anew, ready for nothing; returns the group whose result counts for nobody then.

    Where its anchor has been through more rounds, which include the last one known
    here, these have counted: its position becomes that of the controller.

    Args:
      worker: its number.
      position: of its anchor.
      lineage: of its anchor.

    Returns:
      The group under way, if the worker was a member, since it has lost its exchange;
      else None.
    """
    if worker not in range(self.workers):
      raise Rejected(f"unknown: worker {worker!r}, there are 0 … {self.workers - 1}")
    group = self._drop_round_of(worker)
    self._forget(worker)
    self._present.add(worker)
    self.over = False
    is_newer = position.round > self.position.round and lineage.includes(self.lineage)
    # `go_back` also goes forward. Not while a round is under way, which began at
    # `self.position`: `done` adds it to that.
    if self.under_way is None and is_newer:
      self.go_back(position, lineage)
    return group

  def ready(
    self,
    worker: int,
    weight: int,
    position: RoundPosition,
    *,
    is_link: bool = False,
    leaves: bool = False,
  ) -> list[WorkerGroup]:
    """Notes that a worker has something to deliver; returns the round that begins now, if any.

    Args:
      worker: its number.
      weight: mean weight of its steps, in the unit of those of other workers.
      position: of its anchor.
      is_link: whether it is a link that has moved something.
      leaves: whether it leaves for good after the round.

    Returns:
      A list of the group, or [].

    Raises:
      Behind: if its anchor is not that of the last round.
    """
    self._check(worker)
    if worker in self._ready or self._round_of(worker):
      raise Rejected(f"duplicate: worker {worker} is ready already")
    if weight < 0:
      raise Rejected(f"weight {weight} of worker {worker} must be >= 0")
    # The same round of another group is another anchor: `base` is the group's number.
    if (position.round, position.base) != self.position[:2]:
      raise Behind
    self._ready[worker] = _Ready(is_link, leaves)
    self._expected[worker] = weight
    return self.begin_if_all_ready()

  def begin_if_all_ready(self) -> list[WorkerGroup]:
    """The round of all workers that are there, if all are ready. After round 1, newcomers need not be ready."""
    expected = self._expected if self.position.round else self._present
    # `_ready` is a part of `expected`: as many workers are the same workers
    return self.release() if len(expected) == len(self._ready) else []

  def release(self) -> list[WorkerGroup]:
    """Begins a round of the workers that are ready, if these are a quorum: its group, or []."""
    if self.paused or self.under_way or len(chosen := self._choose()) < self.quorum:
      return []
    self._last_group += 1
    members = tuple(sorted(chosen))
    # Late workers are in the sum: without them the weights add up to less than 1.
    # A total of 0, where nobody has trained, gives all members the same weight.
    total = sum(self._expected.values())
    weights = tuple(
      self._expected[worker] / total if total else 1 / len(members)
      for worker in members
    )
    ready = {worker: self._ready.pop(worker) for worker in members}
    self.under_way = WorkerGroup(
      members,
      weights,
      self.position.round,
      number=self._last_group,
      links=tuple(worker for worker in members if ready[worker].is_link),
      leaving=tuple(worker for worker in members if ready[worker].leaves),
    )
    self._digests = {}
    return [self.under_way]

  def _choose(self) -> Collection[int]:
    """The ready workers that reach each other; all ready ones if too few of the expected workers do."""
    # Greedy: workers that miss the fewest others first, then by how long ago their last
    # round was.
    choose = functools.partial(
      self.pairs.choose, last_group=self._last_group, last_rounds=self._counted
    )
    chosen = choose(self._ready)
    # If late workers could not complete the quorum either, workers that have not
    # reached each other are tried again.
    too_few = len(chosen) < self.quorum and len(choose(self._expected)) < self.quorum
    return self._ready if too_few else chosen

  def go_back(self, position: RoundPosition, lineage: Lineage) -> None:
    """Makes the round of `position` the last one, earlier or later than the last one here; no worker is ready then."""
    # `last`, a round that may count, is the worker's alone.
    self.position = position._replace(last=0)
    self.lineage = lineage
    self.digest = 0  # not known here
    # Ready workers have the anchor of the former position. They are not expected
    # either: rounds would wait for workers that may have claimed that position falsely.
    for worker in self._ready:
      del self._expected[worker]
    self._ready.clear()

  def done(self, worker: int, number: int, digest: int) -> Verdict | None:
    """Notes that a member has the result of its round; returns the verdict once all members have, before that None.

    Args:
      worker: its number.
      number: of the group.
      digest: of its result.
    """
    self._check(worker)
    group = self._round_of(worker)
    if group is None or group.number != number:
      return None  # the round has failed meanwhile
    self._digests[worker] = digest
    if len(self._digests) < len(group.members):
      return None
    # Ties: the result of the member that was done first.
    (agreed, _), *_ = collections.Counter(self._digests.values()).most_common(1)
    differing = tuple(
      worker for worker in group.members if self._digests[worker] != agreed
    )
    verdict = Verdict(group, agreed, differing, self.waiting)
    self.position = RoundPosition(self.position.round + 1, number)
    self.lineage = self.lineage.after(number)
    self.digest = agreed
    self.under_way = None
    # Workers that are ready have the anchor before this round: the verdict names them.
    self._ready.clear()
    self._counted |= dict.fromkeys(group.members, number)
    self.pairs.unite(group)
    return verdict

  def failed(self, worker: int, number: int, missing: int = -1) -> WorkerGroup | None:
    """Ends a round, since a member cannot finish it; returns the group, or None if the round has failed before.

    Args:
      worker: its number.
      number: of the group.
      missing: the member whose message it misses, or that it cannot reach, -1 for none.
        Other members may say so after the first.
    """
    self._check(worker)
    group = self._round_of(worker)
    dropped = self._drop_round_of(worker) if group and group.number == number else None
    failed = self._failed
    # Not only the first report separates two members for the next rounds.
    if (
      failed
      and failed.number == number
      and missing != worker
      and failed.has(worker)
      and failed.has(missing)
    ):
      self.pairs.separate(failed, worker, missing)
    return dropped

  def leave(
    self, worker: int, weight: int | None = None
  ) -> tuple[WorkerGroup | None, list[WorkerGroup]]:
    """Removes a worker that ends, or is lost with what it had trained for `weight` steps or tokens.

    Args:
      worker: its number.
      weight: what a lost worker had not delivered; None for one that ends as it should.

    Returns:
      The group whose result counts for nobody then, and the round that begins now.
    """
    self._check(worker)
    group = self._drop_round_of(worker)
    self._present.discard(worker)
    self._forget(worker)
    self.pairs.forget(worker)
    if weight is not None:
      self.lost += 1
      self.lost_weight += weight
    # The last worker, if it was lost, may be started again, and needs the server.
    self.over = not self._present and weight is None
    return group, self.begin_if_all_ready()

  def _forget(self, worker: int) -> None:
    """Makes a worker neither ready nor expected, until it is ready again."""
    self._expected.pop(worker, None)
    self._ready.pop(worker, None)

  def _check(self, worker: int) -> None:
    """Raises Rejected for a worker that has not joined."""
    if worker not in self._present:
      raise Rejected(f"absent: worker {worker} has to join")

  def _round_of(self, worker: int) -> WorkerGroup | None:
    """The group under way, if a worker is in it."""
    group = self.under_way
    return group if group and group.has(worker) else None

  def _drop_round_of(self, worker: int) -> WorkerGroup | None:
    """The group under way, if a worker is in it: its result counts for nobody from now on."""
    if group := self._round_of(worker):
      self.under_way = None
      self._failed = group
    return group
