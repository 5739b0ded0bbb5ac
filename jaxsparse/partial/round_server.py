"""The server's protocol with the workers of rounds: a state machine without sockets and clocks, as `ServerProtocol` is.

    READY ──> Quorum.ready ──> GROUP to the members ──> DONE of each, with a digest ──> COMMIT to all of them
                         └───> BEHIND, with the address of a donor

After its start a server begins no round for `limit` seconds, unless all workers that may come are there. It asks each
that joins where it stands, since a server before it may have told only some of the members that a round counts.
"""

import collections
import logging
import secrets
from collections.abc import Iterable
from typing import Any

from jaxsparse.partial import messages
from jaxsparse.partial.controller import Group, Rejected
from jaxsparse.partial.messages import Answer, Says, Signal, Stand
from jaxsparse.partial.quorum import Behind, Quorum, Verdict
from jaxsparse.partial.server_protocol import Member, ServerProtocol

_LOG = logging.getLogger(__name__)
_RETURN = 4  # times `limit`, in which a worker that looks for others at another server comes back


class RoundServerProtocol(ServerProtocol):
  """The protocol of a `Quorum`; arguments and methods are those of `ServerProtocol`."""

  _controller: Quorum

  def __init__(self, *arguments: Any, now: float, limit: float, **options: Any):
    super().__init__(*arguments, now=now, limit=limit, **options)
    self._controller.paused, self._resumes, self._started = True, now + limit, False
    self._late: list[int] = []  # workers that are behind, and have not been told so
    self._fetching: dict[int, float] = {}  # since when workers fetch an anchor
    self._donors: dict[int, tuple[int, float]] = {}  # the donor of a worker, and when it was told so
    self._seconds: dict[int, float] = {}  # that the last fetch of a worker has taken
    self._awaited: dict[int, float] = {}  # workers that the next round waits for, until when at most
    self._awaits_since = self._next_wait = now
    self._undecided: dict[int, float] = {}  # when workers last asked whether a round counts that is not known here
    self._sought: float | None = None  # since when nobody has had the anchor of the last round
    self._run = secrets.randbits(62)  # a number of the run, of that which goes on if there was a server before

  def tick(self, now: float) -> None:
    """Also begins the rounds after the first `limit` seconds; a heartbeat says how many workers are there."""
    self._beat = messages.pack_answer(Answer.BEAT, alive=len(self._members))
    self._now = now
    self._started |= now > self._resumes or len(self._members) == self._controller.workers
    self._call_late()
    self._end_waits(worker for worker, until in self._awaited.items() if until < now)
    super().tick(now)

  def _call_late(self) -> None:
    """Workers that are behind fetch the anchor; the next round waits for those whose fetch before came too late.

    Not while a round is under way, after which the anchor would be an old one. Rounds wait for at most four times as
    long as a fetch, and then go on for at least as long as they have waited.
    """
    if self._controller.under_way:
      return
    late, self._late = self._late, []
    for worker in late:
      seconds = 2 * self._seconds.get(worker, 0.0) + self._controller.grace
      since = self._awaits_since if self._awaited else self._now
      if worker in self._seconds and not self._next_wait <= self._now <= since + seconds:
        self._late.append(worker)  # its anchor would be an old one again
        continue
      self._tell_behind([worker])
      if worker in self._seconds:
        self._awaits_since = since
        self._awaited.setdefault(worker, self._now + seconds)
        _LOG.warning(f"the next round waits up to {seconds:.0f} s for worker {worker}, which fetches the anchor")
        self._controller.paused = True

  def _end_waits(self, workers: Iterable[int]) -> None:
    """The next round waits for these no longer."""
    for worker in [*workers]:
      self._awaited.pop(worker, None)
    if self._controller.paused and self._started and not self._awaited:
      self._next_wait = 2 * self._now - self._awaits_since
      self._controller.paused = False
      self._announce(self._controller.begin_if_all_ready())

  def _take_progress(self, signal: Signal, member: Member) -> None:
    says, worker, value, stand = signal.says, signal.worker, signal.value, signal.stand
    if worker in self._fetching and stand.round > member.stand.round:
      self._seconds[worker] = self._now - self._fetching.pop(worker)
      member.stand = Stand(*stand[:2])
    if says == Says.BEAT:
      member.weight = value
    elif says == Says.READY:
      member.stand, member.patience = Stand(*stand[:2]), self._now + self._controller.grace
      try:
        self._announce(self._controller.ready(worker, value, stand))
        self._end_waits([worker])
      except Behind:
        self._late.append(worker)
    elif says == Says.DONE:
      if verdict := self._controller.done(worker, value, digest=stand.last):
        self._commit(verdict)
    elif says == Says.FAILED:
      self._take_failure(worker, value, None if stand.last == 0 else stand.last - 1)
    else:
      raise Rejected(f"unknown: {says!r} in rounds")

  def _take_failure(self, worker: int, number: int, missing: int | None) -> None:
    what = "could not finish its exchange" if missing is None else f"misses a message of worker {missing}"
    self._abort_group(self._controller.failed(worker, number, missing), worker, what)

  def _announce(self, groups: list[Group]) -> None:
    """Also says which workers a round leaves out."""
    for group in groups:
      for worker in self._controller.waiting:
        others = [str(member) for member in group.members if self._controller.have_failed(worker, member)]
        missed = f"it and worker {', '.join(others)} have missed messages of each other"
        _LOG.warning(f"round {group.iteration + 1} leaves out worker {worker}: {missed}")
    super()._announce(groups)

  def _commit(self, verdict: Verdict) -> None:
    """All members have the result of a round; those that are ready for it meanwhile are behind."""
    group, _, differing, behind = verdict
    self._sought = None
    for worker in group.members:
      self._members[worker].weight = 0
      if worker not in differing:
        self._members[worker].stand = self._controller.stand
        self._fetching.pop(worker, None)
    for worker in group.members:
      donor = self._find_donor(worker) if worker in differing else None
      content = {"number": group.number, "donor": donor, **self._last}
      self._send(self._members[worker].connection, messages.pack_answer(Answer.COMMIT, **content))
    self._tell_behind(behind)

  def _tell_behind(self, workers: Iterable[int], newest: str | None = None) -> None:
    """Tells workers that they are behind, with a donor: the one at the address `newest` if only that can be one."""
    last = self._controller.stand.round
    for worker in workers:
      donor = newest or self._find_donor(worker)
      self._fetching.setdefault(worker, self._now)
      was = self._members[worker].stand.round
      _LOG.warning(f"worker {worker} is behind, with the anchor of round {was} in place of {last}: it fetches it")
      content = {"donor": donor, **self._last}
      self._send(self._members[worker].connection, messages.pack_answer(Answer.BEHIND, **content))

  @property
  def _last(self) -> dict[str, int]:
    """The last round, for a worker that checks the anchor of a donor."""
    stand = self._controller.stand
    return {"round": stand.round, "base": stand.base, "digest": self._controller.digest, "run": self._run}

  @property
  def _has_trained(self) -> bool:
    return self._controller.stand.round > 0

  def _join(self, signal: Signal) -> None:
    stand, quorum = signal.stand, self._controller
    if stand.last and stand.last != quorum.stand.base:
      self._undecided[signal.worker] = self._now
      asking = {worker for worker, at in self._undecided.items() if self._now < at + self._limit}
      if not self._started or len(asking.union(quorum.alive)) < quorum.quorum:
        raise Rejected(f"duplicate: whether round {stand.last} counts is known when others are there")
    if stand.round:
      run = signal.alike.run
      if quorum.stand.round and run != self._run:
        raise Rejected(f"unlike: worker {signal.worker} has been in the run {run:x}, the others are in {self._run:x}")
      self._run = run
    waiting = quorum.waiting
    self._late = [worker for worker in self._late if worker != signal.worker]
    self._abort_group(quorum.join(signal.worker, stand), signal.worker, "has joined again")
    self._tell_behind(set(waiting) - {*quorum.waiting, signal.worker}, signal.address)

  def _welcome(self, signal: Signal, member: Member) -> None:
    stand, last = signal.stand, self._controller.stand
    counts = stand.last != 0 and stand.last == last.base
    member.stand = last if counts else Stand(stand.round, stand.base)
    donor = None if member.stand == last else self._find_donor(signal.worker)
    content = {"limit": self._limit, "donor": donor, "number": stand.last if counts else 0, **self._last}
    if donor:
      self._fetching.setdefault(signal.worker, self._now)
    quorum = self._controller
    options = {"grace": quorum.grace, "sizes": [quorum.quorum, quorum.workers]}
    self._send(member.connection, messages.pack_answer(Answer.WELCOME, **content, **options))

  def _find_donor(self, worker: int) -> str | None:
    """The address of one with the anchor of the last round, for a worker: of the donor of fewest others.

    It is another one than before when a worker asks again that was not told just now.

    If there is none for a while, and it is not at another server either, the last round is that of the newest anchor.
    """
    quorum = self._controller
    donors = [other for other, member in self._members.items() if member.stand == quorum.stand]
    if donors:
      self._sought = None
      donor, asked = self._donors.get(worker, (-1, 0.0))
      if donor not in donors or self._now > asked + self._limit / 2:
        loads = collections.Counter(
          donor for fetching, (donor, _) in self._donors.items() if fetching in self._fetching
        )
        donor = min(donors, key=lambda other: (quorum.have_failed(worker, other), loads[other]))
        self._donors[worker] = donor, self._now
      return self._members[donor].address
    self._sought = self._sought or self._now
    if self._started and self._now > self._sought + _RETURN * self._limit:
      quorum.go_back(max(other.stand for other in self._members.values()))
      self._sought = None
    return None

  def _forget(self, worker: int) -> None:
    super()._forget(worker)
    self._late = [other for other in self._late if other != worker]
    for known in (self._fetching, self._seconds, self._donors):
      known.pop(worker, None)
    self._end_waits([worker])

  def _leave(self, worker: int, settled: int | None = None) -> None:
    member = self._members.get(worker)
    if member is None:  # one that was expected, and has never come
      self._forget(worker)
      return
    weight = member.weight if settled is None else None
    if weight is not None:
      _LOG.warning(f"worker {worker} is lost, with what it had trained for {weight} steps")
    group, begun = self._controller.leave(worker, weight)
    self._forget(worker)
    self._abort_group(group, worker, "is lost" if settled is None else "has left")
    self._announce(begun)

  def _abort_group(self, group: Group | None, worker: int, what: str) -> None:
    """Tells the members that the result of a group counts for nobody, also one that joins again and did not know it.

    Args:
      group: None for no group.
      worker: the member that is the reason.
      what: has happened to it.
    """
    if group is None:
      return
    reason = f"worker {worker} {what}"
    _LOG.warning(f"round {group.iteration + 1} of {group.names} counts for nobody: {reason}")
    frame = messages.pack_answer(Answer.ABORT, number=group.number, worker=worker, reason=reason)
    for other in group.members:
      if other in self._members:
        self._send(self._members[other].connection, frame)
    for other in self._controller.waiting:  # or the first member that is ready again would begin with them alone
      self._members[other].patience = self._now + self._controller.grace
