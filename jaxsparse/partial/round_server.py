"""The server's protocol with the workers of rounds: a state machine without sockets and clocks, as `ServerProtocol` is.

    READY ──> Quorum.ready ──> GROUP to the members ──> DONE of each, with a digest ──> COMMIT to all of them
                         └───> BEHIND, with the address of a donor

After its start a server begins no round for `limit` seconds, unless all workers that may come are there. It asks each
that joins where it stands, since a server before it may have told only some of the members that a round counts.
"""

import logging
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
    self._controller.paused, self._resumes = True, now + limit
    self._undecided: dict[int, float] = {}  # when workers last asked whether a round counts that is not known here
    self._sought: float | None = None  # since when nobody has had the anchor of the last round

  def tick(self, now: float) -> None:
    """Also begins the rounds after the first `limit` seconds; a heartbeat says how many workers are there."""
    self._beat = messages.pack_answer(Answer.BEAT, alive=len(self._members))
    super().tick(now)
    if self._controller.paused and (now > self._resumes or len(self._members) == self._controller.workers):
      self._controller.paused = False
      self._announce(self._controller.begin_if_all_ready())

  def _take_progress(self, signal: Signal, member: Member) -> None:
    says, worker, value, stand = signal.says, signal.worker, signal.value, signal.stand
    if says == Says.BEAT:
      member.weight = value
    elif says == Says.READY:
      member.stand, member.patience = Stand(*stand[:2]), self._now + self._controller.grace
      try:
        self._announce(self._controller.ready(worker, value, stand))
      except Behind:
        self._tell_behind([worker])
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
    for worker in group.members:
      content = {"number": group.number, "donor": self._find_donor(worker), **self._last}
      self._send(self._members[worker].connection, messages.pack_answer(Answer.COMMIT, **content))
    self._tell_behind(behind)

  def _tell_behind(self, workers: Iterable[int], newest: str | None = None) -> None:
    """Tells workers that they are behind, with a donor: the one at the address `newest` if only that can be one."""
    last = self._controller.stand.round
    for worker in workers:
      donor = newest or self._find_donor(worker)
      was = self._members[worker].stand.round
      _LOG.warning(f"worker {worker} is behind, with the anchor of round {was} in place of {last}: it fetches it")
      content = {"donor": donor, **self._last}
      self._send(self._members[worker].connection, messages.pack_answer(Answer.BEHIND, **content))

  @property
  def _last(self) -> dict[str, int]:
    """The last round, for a worker that checks the anchor of a donor."""
    stand = self._controller.stand
    return {"round": stand.round, "base": stand.base, "digest": self._controller.digest}

  @property
  def _has_trained(self) -> bool:
    return self._controller.stand.round > 0

  def _join(self, signal: Signal) -> None:
    stand, quorum = signal.stand, self._controller
    if stand.last and stand.last != quorum.stand.base:
      self._undecided[signal.worker] = self._now
      asking = {worker for worker, at in self._undecided.items() if self._now < at + self._limit}
      if quorum.paused or len(asking.union(quorum.alive)) < quorum.quorum:
        raise Rejected(f"duplicate: whether round {stand.last} counts is known when others are there")
    waiting = quorum.waiting
    self._abort_group(quorum.join(signal.worker, stand), signal.worker, "has joined again")
    self._tell_behind(set(waiting) - {*quorum.waiting, signal.worker}, signal.address)

  def _welcome(self, signal: Signal, member: Member) -> None:
    stand, last = signal.stand, self._controller.stand
    counts = stand.last != 0 and stand.last == last.base
    member.stand = last if counts else Stand(stand.round, stand.base)
    donor = None if member.stand == last else self._find_donor(signal.worker)
    content = {"limit": self._limit, "donor": donor, "number": stand.last if counts else 0, **self._last}
    quorum = self._controller
    options = {"grace": quorum.grace, "sizes": [quorum.quorum, quorum.workers]}
    self._send(member.connection, messages.pack_answer(Answer.WELCOME, **content, **options))

  def _find_donor(self, worker: int) -> str | None:
    """The address of one with the anchor of the last round, for a worker; another one each time that it joins.

    If there is none for a while, and it is not at another server either, the last round is that of the newest anchor.
    """
    quorum = self._controller
    donors = [other for other, member in self._members.items() if member.stand == quorum.stand]
    if donors:
      self._sought = None
      donors = [other for other in donors if not quorum.have_failed(worker, other)] or donors
      return self._members[donors[(self._members[worker].hellos + worker) % len(donors)]].address
    self._sought = self._sought or self._now
    if not quorum.paused and self._now > self._sought + _RETURN * self._limit:
      quorum.go_back(max(other.stand for other in self._members.values()))
      self._sought = None
    return None

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
