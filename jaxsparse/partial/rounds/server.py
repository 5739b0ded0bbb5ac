"""The server's protocol with the workers of rounds: a state machine without sockets and clocks.

    READY ──> Quorum.ready ──> GROUP to the members ──> DONE of each, with a digest ──> COMMIT to all of them
                         └───> BEHIND, with the address of a donor

After its start a server begins no round for `limit` seconds, unless all workers that
may come are there. It asks each that joins for its position, since a server before it
may have told only some of the members that a round counts.

Of each worker that has joined the server has a `RoundMember`, among other things with:

    position           of its anchor: how many rounds, and the number of the last group
    branch             of its anchor: the run, and the ids of the rounds
    weight             of the steps that it has not delivered
    delivers           weight of the steps that its next round delivers
    is_late            it was ready with an old anchor, and has not been told so
    donor              the worker from which it fetches the anchor, told at
                       `donor_named`; None: no worker
    fetches_since      since when it lacks an anchor that it is to fetch; None: it does not
    in_vain_since      since when it has asked donors again and again; None: it has not
    fetch_seconds      how long its last fetch has taken; 0 before the first
    links_since        the round of the anchor that it came with, or fetched: it may lack
                       the links of earlier rounds
    waits_until        until when it waits for others, once it is ready
    awaited_until      until when the next round waits for it; 0: it does not
"""

import collections
import dataclasses
import logging
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxsparse.partial.net import messages
from jaxsparse.partial.net.log import Warnings
from jaxsparse.partial.net.membership import Member, Members
from jaxsparse.partial.net.messages import (
  Rejected,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerGroup,
  WorkerMessage,
)
from jaxsparse.partial.net.transfers import MOST_DONORS
from jaxsparse.partial.rounds.lineage import FIRST, Lineage
from jaxsparse.partial.rounds.quorum import Behind, Quorum, Verdict
from jaxsparse.partial.rounds.window import Window

_START = RoundPosition()
_MOST_WEIGHT = 2**47  # weight of a step, with 16 fractional bits
_RECENT = 20  # rounds whose seconds are averaged in a status
# times `limit`, in which a worker that looks for others at another server comes back
_RETURN = 4


class _Branch(NamedTuple):
  """The rounds that an anchor has been through, of a run, which begins anew at round 0."""

  run: int  # random number of the run; 0 before a worker knows it
  lineage: Lineage

  def conflicts(self, other: "_Branch") -> bool:
    """Whether neither has been through the rounds of the other."""
    # An anchor of round 0 belongs to no run yet.
    have_begun = self.lineage.round > 0 and other.lineage.round > 0
    is_other_run = have_begun and self.run != other.run
    return is_other_run or self.lineage.conflicts(other.lineage)


_NO_ROUND = _Branch(0, FIRST)


@dataclasses.dataclass
class RoundMember(Member):
  """What the server knows of a worker from when it joins until it leaves, or is lost."""

  position: RoundPosition = _START
  branch: _Branch = _NO_ROUND  # branch of its anchor
  weight: int = 0  # sum of the weights of the steps that it has not delivered
  delivers: int = 0  # weight of the steps that its next round delivers
  waits_until: float = 0.0  # once it is ready: until when it waits for others
  is_late: bool = False  # it is behind, and has not been told so
  is_link: bool = False  # it has brought what a link has moved
  donor: int | None = None  # worker from which it fetches an anchor; None: from nobody
  donor_named: float = 0.0  # when it was told this donor
  # since when it has asked donors again and again; None if it has not
  in_vain_since: float | None = None
  # since when it lacks an anchor that it fetches, or has no donor for; None otherwise
  fetches_since: float | None = None
  # round of the anchor that it came with, or fetched: it may lack links to earlier ones
  links_since: int = 0
  fetch_seconds: float = 0.0  # seconds of its last fetch, 0 before the first
  awaited_until: float = 0.0  # until when the next round waits for it, 0: it does not


class _Rival(NamedTuple):
  """A worker of another branch of rounds that asks to join: since when, when last, and its branch."""

  since: float
  heard: float
  branch: _Branch


class RoundServer:
  """The server's protocol: a `Quorum` decides which rounds begin, and count.

  All times are seconds of one clock, as `now` is.

  Attributes:
    members: the connections; `members.tell` sends an answer to workers that are there.
    _known: the `RoundMember` of each worker that has joined, by its number.
    _quorum: its `position` is the last round that counted, its `waiting` the workers
      that are ready and in no group, the longest-waiting first.
    _last: fields of answers that describe the last round: round, base, digest, run, and
      `grace`, how long training may wait for the next round.
    _branch: the rounds that count, as far as this server knows.
    _window: how long workers that are ready wait for others.
    _limit: seconds of silence after which a worker is lost.
    _started: whether rounds may begin: all workers are there, or `_limit` has passed.
    _stayed: workers connected ever since the last round; None: that was not held here.
    _run: random number of the run.
    _sought: since when nobody has had the anchor of the last round; None: one has it.
    _awaits_since: since when the next round waits for workers that fetch.
    _next_wait: from when on it may do so again.
    _undecided: when workers last asked whether a round counts that is not known here.
    _rivals: workers that ask to join with an anchor of another branch of rounds.
    _disbelieved: workers that had a later anchor, as they said, for which K workers
      asked in vain.
    _ended: when each of the last rounds that counted ended.
  """

  def __init__(self, quorum: Quorum, members: Members[RoundMember]):
    now = members.now
    self.members = members
    self._known = members.known
    self._limit = members.limit
    self._log = Warnings(logging.getLogger(__name__))
    self._began = now
    # workers connected ever since the last round; None: that was not held here
    self._stayed: set[int] | None = None
    self._quorum = quorum
    quorum.paused = True
    self._resumes = now + members.limit
    self._started = False
    # since when the next round waits for workers that fetch; when it may do so again
    self._awaits_since = now
    self._next_wait = now
    # when workers last asked whether a round counts that is not known here
    self._undecided = dict[int, float]()
    self._rivals = dict[int, _Rival]()
    # workers that had a later anchor, as they said, for which K workers asked in vain
    self._disbelieved = set[int]()
    # since when nobody has had the anchor of the last round
    self._sought: float | None = None
    # a random number of the run; an earlier server's, once a worker of its run joins
    self._run = secrets.randbits(62)
    # when the last rounds that counted ended
    self._ended = collections.deque[float](maxlen=_RECENT)
    self._window = Window(quorum.grace, quorum.quorum)
    self._counted = 0  # rounds
    self._failed = 0  # rounds
    self._delivered = 0  # the weight of steps

  def receive(self, connection: bytes, frames: list[bytes], now: float) -> None:
    """Handles a message of a connection."""
    self.members.receive(connection, frames, now, self._handle)

  def tick(self, now: float) -> None:
    """Sends heartbeats, drops dead workers, and begins rounds; to be called several times in `limit` seconds."""
    self.members.now = now
    # A new server first waits for workers that know of later rounds than others.
    self._started |= now > self._resumes or len(self._known) == self._quorum.workers
    self._call_late()
    self._end_waits(member for member in self._awaited if member.awaited_until < now)
    # Sends heartbeats, with the number of workers; returns those that are dead.
    for worker in self.members.tick(now, alive=len(self._known)):
      self._leave(worker)
    waiting = self._quorum.waiting
    # The worker that completed the quorum, and those ready after it. The first of them
    # waits for others until its `waits_until`.
    enough = waiting[self._quorum.quorum - 1 :]
    if not enough:
      self._window.close(now)
    elif (
      self._window.is_over(len(waiting), self._known.keys() - waiting, now)
      and self._known[enough[0]].waits_until < now
    ):
      self._announce(self._quorum.release())

  def status(self) -> dict[str, Any]:
    """What `jaxsparse.partial.rounds.status` shows: of this server, and of each worker in ascending order."""
    now = self._now
    ended = self._ended
    between = len(ended) - 1
    return {
      # round, base and digest, by which a `Follower` checks an anchor
      **self._last,
      # in place of the integer of `_last`
      "run": f"{self._run:x}",
      "since": now - ended[-1] if ended else None,
      "seconds": (ended[-1] - ended[0]) / between if between > 0 else None,
      "window": self._window.seconds,
      "turn": self._window.usual or None,
      "rounds_counted": self._counted,
      "rounds_failed": self._failed,
      "steps_delivered": self._delivered,
      "steps_lost": self._quorum.lost_weight,
      "workers": [
        {
          "worker": worker,
          "doing": self._doing_of(worker, member),
          "link": member.is_link,
          "round": member.position.round,
          "base": member.position.base,
          "undelivered": member.weight,
          "silent": now - member.heard,
          "limit": self.members.limit_of(member),
          "address": member.address,
        }
        for worker, member in sorted(self._known.items())
      ],
    }

  def _doing_of(self, worker: int, member: RoundMember) -> str:
    """What a worker does, in words, for `status`."""
    group = self._quorum.under_way
    if group and group.has(worker):
      return "exchanges"
    if worker in self._quorum.waiting:
      return "waits for others"
    if member.fetches_since is not None:
      return "fetches the anchor"
    if member.is_late:
      return "is behind"
    # A link does not train: it passes movement on between the groups that it is in.
    return "waits for its groups" if member.is_link else "trains"

  def _handle(self, connection: bytes, signal: Signal) -> None:
    """Does what a signal asks for; raises Rejected, with the reason, for one that may not come now."""
    # `value`: in BEAT the weight not delivered, in DONE and FAILED the group's number
    kind, worker, value = signal[:3]
    if kind == WorkerMessage.HELLO:
      self._take_hello(connection, signal)
      return
    if kind == WorkerMessage.STATUS:
      answer = messages.pack_answer(ServerMessage.STATUS, **self.status())
      self.members.send(connection, answer)
      return
    member = self.members.find(connection, worker)
    # No signal says that an anchor was fetched: the next one has another position, of
    # which the first two fields, round and base, identify the anchor.
    has_moved_on = signal.position[:2] != member.position[:2]
    is_known = 0 < signal.position.round <= self._quorum.position.round
    if member.fetches_since is not None and has_moved_on and is_known:
      member.fetch_seconds = self._now - member.fetches_since
      member.fetches_since = None
      member.donor = member.in_vain_since = None
      member.links_since = signal.position.round
      # `last`, a round that may count, is only compared when a worker joins.
      member.position = signal.position._replace(last=0)
      lineage = self._quorum.lineage.cut(signal.position.round)
      member.branch = _Branch(self._run, lineage)
    match kind:
      case WorkerMessage.BYE:
        self._leave(worker, lost=False)
      case WorkerMessage.BEAT:
        member.weight = value
      case _ if kind in messages.READY:
        self._take_ready(signal, member)
      case WorkerMessage.DONE:
        # None until all members are done
        if verdict := self._quorum.done(worker, value, digest=signal.digest):
          self._commit(verdict)
      case WorkerMessage.FAILED:
        what = (
          "could not finish its exchange"
          if signal.missing < 0
          else f"misses a message of worker {signal.missing}"
        )
        self._abort(self._quorum.failed(worker, value, signal.missing), worker, what)
      case _:
        raise Rejected(f"unknown: {kind!r} in rounds")

  # Workers that are behind.

  @property
  def _awaited(self) -> list[RoundMember]:
    """The workers that the next round waits for."""
    return [member for member in self._known.values() if member.awaited_until]

  def _take_ready(self, signal: Signal, member: RoundMember) -> None:
    """Begins a round if all are ready with this worker; one that is behind is told so later, by `_call_late`."""
    if not signal.value <= _MOST_WEIGHT:
      raise Rejected(
        f"malformed: weight {signal.value} of worker {signal.worker}, choose 0 … {_MOST_WEIGHT}"
      )
    # A position later than the quorum's is not believed: only that of HELLO is checked.
    if signal.position.round <= self._quorum.position.round:
      member.position = signal.position._replace(last=0)
    leaves = signal.kind in messages.LEAVING.values()
    member.delivers = signal.delivers
    self._window.end(signal.worker, self._now)
    # A worker that leaves waits twice as long, for one that takes over its residual.
    member.waits_until = self._now + (1 + leaves) * self._window.least
    is_link = signal.kind in (WorkerMessage.LINK, WorkerMessage.LEAVING_LINK)
    member.is_link |= is_link
    try:
      begun = self._quorum.ready(
        *(signal.worker, signal.value, signal.position),
        is_link=is_link,
        leaves=leaves,
      )
      self._announce(begun)
      self._end_waits([member])
    except Behind:
      member.is_late = True

  def _call_late(self) -> None:
    """Tells workers that are behind to fetch the anchor; the next round waits for those that have fetched one before.

    Not while a round is under way, after which the anchor would be an old one. Rounds
    wait for at most four times as long as a fetch, and then go on for at least as long
    as they have waited.
    """
    if self._quorum.under_way:
      return
    now = self._now
    for worker, member in self._known.items():
      if not member.is_late:
        continue
      seconds = 2 * member.fetch_seconds + self._window.least
      # when the wait for workers that fetch began, or begins
      since = self._awaits_since if self._awaited else now
      # A worker that has not fetched before is told at once, and rounds do not wait.
      if member.fetch_seconds and not self._next_wait <= now <= since + seconds:
        continue  # its anchor would be an old one again
      member.is_late = False
      self._tell_behind([worker])
      if member.fetch_seconds:
        self._awaits_since = since
        member.awaited_until = member.awaited_until or now + seconds
        self._warn(
          ("waits", worker),
          f"the next round waits up to {seconds:.1f} s for worker {worker}, which fetches the anchor",
        )
        self._quorum.paused = True

  def _end_waits(self, members: Iterable[RoundMember] = ()) -> None:
    """Ends the wait of the next round for these workers; rounds go on if it waits for nobody else."""
    for member in members:
      member.awaited_until = 0.0
    if self._quorum.paused and self._started and not self._awaited:
      # Rounds go on for as long as this wait has lasted before there is another one.
      self._next_wait = 2 * self._now - self._awaits_since
      self._quorum.paused = False
      self._announce(self._quorum.begin_if_all_ready())

  def _tell_behind(self, workers: Iterable[int], newest: str | None = None) -> None:
    """Tells workers that they are behind, with the addresses of donors, from which they fetch the anchor.

    Args:
      workers: their numbers.
      newest: address of a worker that joins now, the only one with the newest anchor;
        None: `_find_donor` chooses.
    """
    for worker in workers:
      # None: no worker that is there has the anchor of the last round.
      donor = newest or self._find_donor(worker)
      member = self._known[worker]
      # A worker that got no donor asks again, several times a second: one warning is
      # enough.
      if donor or member.fetches_since is None:
        what = "it fetches that" if donor else "no worker that is there has that"
        self._warn(
          ("behind", worker, what),
          f"worker {worker} is behind: {member.position.compare(self._quorum.position)}; {what}",
        )
      # From now on the worker lacks the anchor, with or without a donor.
      if member.fetches_since is None:
        member.fetches_since = self._now
      # `_last`: the last round, by whose digest the worker checks the anchor.
      self.members.tell([worker], ServerMessage.BEHIND, donor=donor, **self._last)

  def _find_donor(self, worker: int) -> str | None:
    """The addresses, with spaces, of donors of the last round's anchor for a worker; None if nobody has that anchor.

    The worker asks the first donor for links, and all for a slice of the anchor each.

    The first donor is one that serves the fewest others, and among these one that has
    the links since the worker's anchor. A worker that asks again after a while may get
    another donor than before.

    If nobody has the anchor for a while, in which a donor might come from another
    server, the last round becomes that of the newest anchor.
    """
    known = self._known
    now = self._now
    donors = [
      donor
      for donor, member in known.items()
      if member.position == self._quorum.position
    ]
    if donors:
      self._sought = None
      member = known[worker]
      # A worker that was told just now has not had the time to fetch.
      asks_again = now > member.donor_named + self._limit / 2
      if member.donor in donors and asks_again:
        member.in_vain_since = member.in_vain_since or now
        if self._disbelieve(donors):
          return None
      # how many others fetch from each donor
      loads = collections.Counter(
        peer.donor
        for peer in known.values()
        if peer.fetches_since is not None and peer is not member
      )
      apart = [donor for donor in donors if self._quorum.pairs.are_apart(worker, donor)]
      since = member.in_vain_since or now
      # The donor from which the worker has got nothing for too long; None without one.
      was = member.donor if now > since + self._limit else None
      # False comes before True: the donor asked in vain is last, and before it donors
      # that this worker may not reach.
      donors.sort(
        key=lambda donor: (
          donor == was,
          donor in apart,
          loads[donor],
          known[donor].links_since > member.position.round,
        )
      )
      if member.donor not in donors or asks_again:
        member.donor = donors[0]
        member.donor_named = now
      others = [donor for donor in donors if donor not in (member.donor, *apart)]
      # Slices of busy donors would come later, and be of another round.
      most = 1 if loads else MOST_DONORS
      chosen = [member.donor, *others][:most]
      return " ".join(known[donor].address for donor in chosen)
    # Nobody here has the anchor: if no worker comes with it for a while, the run goes
    # back to the newest anchor that is here.
    self._sought = self._sought or now
    if self._started and now > self._sought + _RETURN * self._limit:
      self._go_back_to_newest([*known.values()])
    return None

  def _disbelieve(self, donors: list[int]) -> bool:
    """Goes back to the newest other anchor if few donors have not given theirs to K workers for a while; whether so.

    Only for a last round at an earlier server: no worker but these donors says that it
    has counted.

    Args:
      donors: workers with the anchor of the last round.
    """
    quorum = self._quorum.quorum
    patience = _RETURN * self._limit
    in_vain = [
      member
      for member in self._known.values()
      if member.in_vain_since is not None
      and self._now > member.in_vain_since + patience
    ]
    are_outnumbered = len(donors) < quorum <= len(in_vain)
    # `_stayed` is a set if the last round was held here: then it has counted.
    if self._stayed is not None or not are_outnumbered:
      return False
    self._disbelieved.update(donors)
    self._warn(
      ("disbelieved", *donors),
      f"worker {', '.join(map(str, donors))} alone has the anchor of round {self._quorum.position.round}, and gives it "
      f"to nobody: {len(in_vain)} workers go on without it",
    )
    self._go_back_to_newest(in_vain)
    return True

  def _go_back_to_newest(self, members: list[RoundMember]) -> None:
    """Makes the last round that of the newest anchor of these workers, on this branch if one has such an anchor."""
    ours = self._branch
    # Tuples compare from the left: an anchor of this branch is preferred to a newer one
    # of another branch.
    newest = max(
      members,
      key=lambda member: (not ours.conflicts(member.branch), member.position),
    )
    # 0: an anchor of round 0 belongs to no run
    self._run = newest.branch.run or self._run
    self._quorum.go_back(newest.position, newest.branch.lineage)
    self._stayed = None
    self._sought = None
    for member in members:
      member.in_vain_since = None

  @property
  def _now(self) -> float:
    return self.members.now

  @property
  def _branch(self) -> _Branch:
    return _Branch(self._run, self._quorum.lineage)

  @property
  def _last(self) -> dict[str, float]:
    """The last round, for a worker that checks the anchor of a donor, and how long to wait for the next one."""
    position = self._quorum.position
    return {
      "round": position.round,
      "base": position.base,
      "digest": self._quorum.digest,
      "run": self._run,
      "grace": self._window.wait,
    }

  # Rounds that begin, count, or count for nobody.

  def _announce(self, groups: list[WorkerGroup]) -> None:
    """Tells the members of rounds that begin, a list of one group or none; logs which ready workers are left out."""
    for group in groups:
      self._window.close(self._now)
      for worker in self._quorum.waiting:
        others = [
          str(member)
          for member in group.members
          if self._quorum.pairs.are_apart(worker, member)
        ]
        self._warn(
          ("left out", worker, *others),
          f"round {group.iteration + 1} leaves out worker {worker}: "
          f"it and worker {', '.join(others)} have missed messages of each other",
        )
      self.members.tell_group(group)

  def _commit(self, verdict: Verdict) -> None:
    """Tells the members that their round counts; workers that became ready meanwhile are behind."""
    self._sought = None
    known = self._known
    group = verdict.group
    self._counted += 1
    self._stayed = set(known)
    self._ended.append(self._now)
    self._window.begin(group.members, self._now)
    # A member whose result differs from that of most keeps its former position, and is
    # told a donor below.
    agreeing = [worker for worker in group.members if worker not in verdict.differing]
    for worker in group.members:
      self._delivered += known[worker].delivers
      known[worker].weight = 0
    for worker in agreeing:
      member = known[worker]
      member.position = self._quorum.position
      member.branch = self._branch
      member.fetches_since = None
    # `_last` describes this round now, with the digest of most members' result.
    facts = {"number": group.number, **self._last}
    self.members.tell(agreeing, ServerMessage.COMMIT, donor=None, **facts)
    for worker in verdict.differing:
      self._warn(
        ("differs", worker),
        f"the result of worker {worker} differs from that of most members, and it fetches theirs: "
        "CPUs with different instructions need XLA_FLAGS=--xla_cpu_max_isa=AVX2, or the most that all have",
      )
      self.members.tell(
        [worker], ServerMessage.COMMIT, donor=self._find_donor(worker), **facts
      )
    for worker in verdict.behind:
      known[worker].is_late = True
    self._call_late()

  def _abort(self, group: WorkerGroup | None, worker: int, what: str) -> None:
    """Tells the members, also one that joins again now, that the result of their round counts for nobody.

    Args:
      group: None for no group.
      worker: the member that is the reason.
      what: has happened to it.
    """
    if group is None:
      return
    self._failed += 1
    reason = f"worker {worker} {what}"
    self._warn(("aborted", reason), f"{group.round} counts for nobody: {reason}")
    self.members.tell(
      group.members,
      ServerMessage.ABORT,
      number=group.number,
      worker=worker,
      reason=reason,
    )
    # Ready workers wait once more: else the first member that is ready again would
    # begin a round with them alone.
    for waiting in self._quorum.waiting:
      self._known[waiting].waits_until = self._now + self._window.least

  # Workers that join and leave.

  def _take_hello(self, connection: bytes, signal: Signal) -> None:
    """Joins a worker, or joins it again; it gets a donor unless it has the anchor of the last round."""
    worker = signal.worker
    rounds = signal.position.round  # how many its anchor has been through
    quorum = self._quorum
    waiting = quorum.waiting
    # Start values are compared while nobody has been in a round: later a worker takes
    # the anchor.
    self.members.check(
      connection, signal, at_start=rounds == quorum.position.round == 0
    )
    self._check_round(signal)
    branch = _Branch(signal.alike.run, Lineage(rounds, signal.alike.lineage))
    self._check_branch(worker, signal.position, branch)
    self._check_claim(signal, branch)
    # The worker may join: the checks above have not raised.
    last = quorum.position
    group = quorum.join(worker, signal.position, branch.lineage)
    self._abort(group, worker, "has joined again")
    # The quorum has moved on to a later round of this worker, held at another server.
    if quorum.position != last:
      self._stayed = None
    # A new server learns the run's number; `_check_branch` has refused another run.
    if rounds:
      self._run = branch.run
    # Where the last round of this worker has become that of the quorum, nobody is ready
    # any more: the workers that were ready are told to fetch its anchor.
    if not quorum.waiting:
      self._tell_behind(set(waiting) - {worker}, signal.address)
    was = self._known.get(worker)
    # On another connection it may have been at another server meanwhile.
    if self._stayed and not (was and was.connection == connection):
      self._stayed.discard(worker)
    member = self.members.join(connection, signal)
    member.is_late = False
    member.weight = 0  # its heartbeats tell what it has not delivered
    # A worker that has just come may have no links to its anchor.
    if was is None:
      member.links_since = rounds
    # A worker that lost the server after its last exchange does not know whether that
    # round counts: it does if it is the last round here.
    undecided = signal.position.last
    has_counted = undecided != 0 and undecided == quorum.position.base
    member.position = (
      quorum.position if has_counted else signal.position._replace(last=0)
    )
    member.branch = self._branch if has_counted else branch
    self._welcome(signal, member, undecided if has_counted else 0)

  def _welcome(self, signal: Signal, member: RoundMember, counted: int) -> None:
    """Answers HELLO.

    Args:
      signal: its value is for how many seconds the worker has been fetching the anchor.
      member: the worker.
      counted: the number of a round that counts without the worker having heard so, or
        0.
    """
    quorum = self._quorum
    donor = None
    if member.position != quorum.position:
      donor = self._find_donor(signal.worker)
    # The worker may have asked another server before: only the time since this server
    # began counts.
    if donor and member.fetches_since is None:
      fetching = min(signal.value, self._now - self._began)
      member.fetches_since = self._now - fetching
    self.members.tell(
      [signal.worker],
      ServerMessage.WELCOME,
      donor=donor,
      number=counted,
      limit=self._limit,
      most=self.members.most,
      sizes=[quorum.quorum, quorum.workers],
      **self._last,
    )

  def _check_claim(self, signal: Signal, branch: _Branch) -> None:
    """Raises Rejected for a worker that says it has been through later rounds than can have counted.

    Later rounds than here can only be those of a second server, whose quorum was not
    here meanwhile; with a quorum of at most half the workers there is no second server.
    A worker of another branch is not refused here: it is behind.
    """
    quorum = self._quorum
    worker = signal.worker
    if signal.position.round <= quorum.position.round:
      self._disbelieved.discard(worker)
      return
    if self._branch.conflicts(branch):
      return
    # Workers that have stayed here were in no round elsewhere since the last one.
    stayed = self._stayed or set()
    # how many may have held rounds at another server since the last one here
    elsewhere = quorum.workers - len(stayed - {worker})
    has_no_quorum = elsewhere < quorum.quorum or 2 * quorum.quorum <= quorum.workers
    if worker in self._disbelieved or (self._stayed is not None and has_no_quorum):
      reason = (
        f"worker {worker} says that it has been through {signal.position.round} rounds, "
        f"but no more than {quorum.position.round} have counted"
      )
      self._warn(("claim", worker), f"{reason}: it is refused")
      raise Rejected(f"duplicate: {reason}")

  def _warn(self, kind: tuple[object, ...], text: str) -> None:
    """Logs a warning; one of the same kind, perhaps with other numbers, is repeated rarely."""
    self._log.say(kind, text, self._now)

  def _check_round(self, signal: Signal) -> None:
    """Raises Rejected for a worker whose last round nobody here can judge yet."""
    position = signal.position
    # no undecided round, or the last one here, which has counted
    if position.last in (0, self._quorum.position.base):
      return
    if signal.worker < self._quorum.workers:
      self._undecided[signal.worker] = self._now
    # Workers that are rejected below ask again, several times a second: they count as
    # here.
    self._undecided = {
      worker: at
      for worker, at in self._undecided.items()
      if at > self._now - self._limit
    }
    here = self._undecided.keys() | self._quorum.alive
    if not self._started or len(here) < self._quorum.quorum:
      raise Rejected(
        f"duplicate: whether round {position.last} counts is known when others are there"
      )

  def _check_branch(
    self, worker: int, position: RoundPosition, branch: _Branch
  ) -> None:
    """Raises Rejected for a worker of another branch of rounds while it is open which branch goes on.

    The worker's branch goes on if it has a quorum, and more workers than this server's
    branch. Otherwise this server's branch goes on, without a quorum only after a while:
    the worker is behind then, or is refused if it is of another run.
    """
    quorum = self._quorum
    now = self._now
    if not self._branch.conflicts(branch) or worker >= quorum.workers:
      self._rivals.pop(worker, None)
      return
    since = self._rivals[worker].since if worker in self._rivals else now
    self._rivals = {
      peer: rival
      for peer, rival in self._rivals.items()
      if rival.heard > now - self._limit
    } | {worker: _Rival(since, now, branch)}
    known = {peer: member.branch for peer, member in self._known.items()}
    known |= {peer: rival.branch for peer, rival in self._rivals.items()}
    # How many workers, here or asking to join, do not conflict with each side. An
    # anchor before the fork counts for both.
    ours, theirs = (
      sum(
        not (side.conflicts(other) or other.conflicts(side)) for other in known.values()
      )
      for side in (self._branch, branch)
    )
    branches = f"worker {worker} is at round {position.round} of another branch than round {quorum.position.round}"
    if theirs >= quorum.quorum and theirs > ours and not quorum.under_way:
      self._warn(
        ("branch", worker),
        f"{branches}, on which are {theirs} workers, and {ours} on this one",
      )
      self._run = branch.run
      quorum.go_back(position, branch.lineage)
      self._stayed = None
      return
    # Undecided: wait as long as workers at another server take to come back.
    if not (self._started and ours >= quorum.quorum) and (
      now <= since + _RETURN * self._limit
    ):
      self._warn(
        ("branch waits", worker), f"{branches}, and waits until most workers are there"
      )
      raise Rejected(f"duplicate: {branches}")
    if branch.run != self._run:
      raise Rejected(
        f"unlike: worker {worker} has been in the run {branch.run:x}, the others are in {self._run:x}"
      )

  def _leave(self, worker: int, *, lost: bool = True) -> None:
    """Removes a worker; the steps that a lost one has not delivered are counted for `status`."""
    member = self.members.forget(worker)  # None: it has never joined
    self._window.forget(worker)
    if member:
      if self._stayed:
        self._stayed.discard(worker)
      if lost:
        self._warn(
          ("lost", worker),
          f"worker {worker} is lost, with what it had trained for {member.weight} steps",
        )
      group, begun = self._quorum.leave(worker, member.weight if lost else None)
      self._abort(group, worker, "is lost" if lost else "has left")
      self._announce(begun)
    self._end_waits()
