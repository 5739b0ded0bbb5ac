"""Rounds in virtual time: real protocols of workers and server, over a network that delays, crashes and suspends.

What a round delivers is abstract: a worker makes units of mass, gives those that it has
in a round, and half of them are delivered, or all where it is a link. An anchor is the
sequence of the rounds that it has been through. Whatever the schedule:

- the workers that have been through the same round have been through the same rounds
  before, and equal results;
- a living worker has what it has made and what the rounds of its anchor have not
  delivered, to the unit;
- a worker that lives, or has left in good order, has delivered what it gave in each
  round that counts;
- what a worker that leaves has not delivered passes to one other worker;
- with a residual a worker goes on that is what its last round left, or with none:
  also one that is started again with any state that it has saved;
- a reader has an anchor that workers have, and soon a later one;
- when it is quiet, all living workers go on from round to round, and no exchange waits
  for its timeout.
"""

import collections
import functools
import math
import re
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxsparse as js
from benchmarks.thousands.virtual import VirtualNetwork, VirtualWorker
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.membership import Members, Membership, Unreachable
from jaxsparse.partial.net.messages import (
  Answer,
  Piece,
  PieceKind,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerGroup,
  WorkerMessage,
)
from jaxsparse.partial.net.transfers import PREFIX
from jaxsparse.partial.rounds.anchor import Forked
from jaxsparse.partial.rounds.follower import Follower
from jaxsparse.partial.rounds.lineage import FIRST, Lineage
from jaxsparse.partial.rounds.protocol import RoundProtocol, RoundRequest
from jaxsparse.partial.rounds.run import Done, Outgoing
from jaxsparse.partial.rounds.server import RoundMember, RoundServer
from tests.partial import protocols_test
from tests.partial.protocols_test import LATENCY, LIMIT, TIMEOUT

ROUNDS, GRACE, CUT, STALLED = 6, 2.0, 3 * LIMIT, 5.0
PASSING = ["suspended", "resume", "serve", "cut"]
LASTING = ["dead", "restart", "leaves"]
ONE_SERVER = st.lists(st.sampled_from(PASSING + LASTING), max_size=10) | st.lists(
  st.just("diverges"), max_size=8
)
# New workers could be a quorum at the one server while those that have trained are at
# the other: nobody could tell.
TWO_SERVERS = st.lists(st.sampled_from(PASSING), max_size=10)
DISTURBED = st.tuples(st.just(1), ONE_SERVER) | st.tuples(st.just(2), TWO_SERVERS)
RETURNING = st.lists(
  st.sampled_from([*PASSING, *LASTING, "returns", "returns"]), max_size=12
)


class Sent(NamedTuple):
  """What a donor sends: its anchor, and the round where its links begin, or None."""

  anchor: tuple[int, ...]
  digest: int
  start: int | None
  is_broken: bool


def unpack(models, piece, donors, own):
  """What donors have sent, whose digest proves it: links lead on from the own anchor alone."""
  numbers = piece.values[PREFIX:].astype(int)
  if not numbers.size or numbers.size < donors:
    raise ValueError("a slice is missing")
  first, *others = (models[number] for number in numbers)
  start = first.start or 0
  is_own = start <= len(own) and own[:start] == first.anchor[:start]
  if first.is_broken or not is_own or any(other != first for other in others):
    raise ValueError("it has another digest")
  return first


class Run:
  """An exchange: each member sends what it gives to all others."""

  def __init__(self, process, group):
    self.process, self.group, self.digest, self.active = process, group, 0, True
    self.is_quiet = bool(process.network.goal)
    self.skipped = process.skips(group.number)
    own = (
      (process.residual, process.offered)
      if process.is_link
      else (process.offered + process.residual, 0)
    )
    # of which half is delivered, and what a link has moved
    self.parts = {process.number: own}
    self.anchor, self.residual = process.anchor, process.residual

  @property
  def heirs(self):
    """Of the members that leave: who takes over their residuals, if one stays."""
    leaving = self.group.leaving
    staying = [member for member in self.group.members if member not in leaving]
    if self.skipped or not staying:
      return {}
    return {
      member: staying[number % len(staying)] for number, member in enumerate(leaving)
    }

  def keeps(self, member):
    """Of what a member has, and has given in the round, the part that is not delivered."""
    own = 0 if member in self.heirs else self.parts[member][0] // 2
    return own + sum(
      self.parts[other][0] // 2 for other, heir in self.heirs.items() if heir == member
    )

  @property
  def missing(self):
    return next(
      (member for member in self.group.members if member not in self.parts), -1
    )

  def begin(self):
    for member in self.group.members:
      if member != self.process.number:
        values = np.array(self.parts[self.process.number], np.float32)
        piece = Piece(
          PieceKind.MESSAGE, self.group.number, self.process.number, values, tag=1
        )
        self.process.network.at(
          self.process.network.now,
          self.process,
          self.process.finish,
          self,
          Outgoing(member, piece),
        )
    self.finish()

  def receive(self, piece):
    self.parts.setdefault(piece.sender, tuple(map(int, piece.values)))
    self.finish()

  def finish(self):
    if len(self.parts) == len(self.group.members) and not self.digest:
      number = self.group.number
      total = sum(map(self.delivers, self.parts))
      assert (
        self.process.network.totals.setdefault(
          (self.anchor, number, self.process.part), total
        )
        == total
      )
      self.wrong, self.process.diverges = self.process.diverges, False
      self.process.network.wrong[number] += self.wrong
      event = Done(number, self.hash())
      self.process.network.at(
        self.process.network.now + LATENCY,
        self.process,
        self.process.finish,
        self,
        event,
      )

  def delivers(self, member):
    part, whole = self.parts[member]
    return part - part // 2 + (whole if member in self.group.links else 0)

  def hash(self):
    """Makes the digest, of a result that is not 0."""
    content = (
      *self.anchor,
      self.group.number,
      self.wrong and 1 + self.process.serial,
      self.skipped,
    )
    self.digest = hash(content) % 2**62 + 1
    return self.digest


class Process(VirtualWorker):
  """One process of a worker; its state is what an `Exchanger` has."""

  part = 0
  delivers = True  # in a last round before it leaves

  def __init__(self, network, number):
    self.is_link = number in network.links
    self.kept = Random(len(network.processes)).choice(network.kept)
    self.failed = self.diverges = self.wrong = self.leaves = self.left = False
    self.made = self.moved = self.offered = self.residual = self.anchor_digest = 0
    self.anchor, self.run, self.before = (), None, None
    self.own, self.is_restored, self.is_final = 0, False, False
    self.first_run = 0  # of the state that it begins with
    self.leaves_at = None
    self.delivered = {}  # by the anchor after the round, also what passes to others
    self.restore(network.restores.pop(number, None))
    super().__init__(network, number, entries=1000, timeout=TIMEOUT)

  def skips(self, number):
    """Whether the outer step of a round is skipped here."""
    return False

  def save(self):
    """What a file of this worker has."""
    run = self.protocol.membership.alike.run
    return self.anchor, self.anchor_digest, self.moved, self.residual, self.own, run

  def restore(self, state):
    """Begins with what a file has."""
    if state:
      *own, self.first_run = state
      self.anchor, self.anchor_digest, self.moved, self.residual, self.own = own
      self.made = self.moved + self.residual
      self.is_restored = True

  def make_protocol(self, place, *facts):
    place.position = self.position
    place.alike = place.alike._replace(run=self.first_run)
    return super().make_protocol(place, *facts)

  @property
  def position(self):
    return RoundPosition(len(self.anchor), self.anchor[-1] if self.anchor else 0)

  @property
  def lineage(self):
    return lineage_of(self.anchor).ids

  def latest(self, anchor):
    """The number of the last round of an anchor with this worker in which it moved."""
    groups = self.network.groups
    rounds = [number for number in anchor if self.number in groups.get(number, ())]
    return rounds[-1] if rounds else 0

  def handle(self, event):
    try:
      super().handle(event)
    except Forked:
      self.network.refused.append(self)
    self.dead = self.dead or self.protocol.membership.state == "ended"

  def tell(self, signal):
    self.left |= signal.kind == WorkerMessage.BYE
    super().tell(signal)

  def send(self, address, piece):
    if (self.serial, int(address.rpartition(":")[2]) - 1) in self.network.severed:
      self.network.at(
        self.network.now + STALLED, self, self.handle, Unreachable(address)
      )
    else:
      super().send(address, piece)

  def finish(self, run, event):
    if run.active:
      self.handle(event)

  def make_model(self, peer, request):
    """A slice of links, if it has them, or of the anchor."""
    network = self.network
    round_, id_, *which = request.values.view(np.int64).tolist()
    missed = len(self.anchor) - round_
    is_known = lineage_of(self.anchor).includes(Lineage(round_, (id_,)))
    has_links = 0 < missed <= self.kept and is_known
    network.returns += has_links
    is_broken = (
      has_links and network.broken and network.random.random() < network.broken
    )
    prefix = np.array([0, 0, *which], np.int64).view(np.float32)
    is_late = which[1] > 1 and request.number != len(self.anchor)
    if (round_ >= 0 and not has_links) or is_late:
      return Piece(PieceKind.MODEL, 0, self.number, prefix), 0.0
    start = round_ if has_links else None
    network.models.append(Sent(self.anchor, self.anchor_digest, start, is_broken))
    network.fetched[peer.serial].append(network.now)
    values = np.array([*prefix, len(network.models) - 1], np.float32)
    seconds = network.transfer * (0.1 if has_links else 1) / which[1]
    return Piece(PieceKind.MODEL, 0, self.number, values), seconds

  def unpack(self, piece):
    donors = self.protocol.membership.donors
    return unpack(self.network.models, piece, len(donors), self.anchor)

  # What an `Exchanger` does.

  def begin(self, group):
    self.run = Run(self, group)
    self.network.members[group.number].append(self)
    self.run.begin()
    return self.run

  def commit(self):
    run = self.run
    number = run.group.number
    self.before = self.anchor, self.moved, self.offered, self.residual, self.own
    self.anchor = *run.anchor, number
    self.anchor_digest = run.digest
    self.is_restored = False
    if run.skipped:
      self.moved, delivered = self.moved + self.offered, 0
    else:
      has = self.residual + self.offered
      self.network.groups[number] = run.group.members
      self.residual, self.own = run.keeps(self.number), number
      delivered = has - self.residual
      self.network.residuals[number, self.number, self.part] = (
        self.before[3],
        self.residual,
      )
    self.offered = 0
    self.delivered[self.anchor] = delivered
    self.wrong = run.wrong
    return self.position

  def go_back(self):
    self.anchor = self.anchor[:-1]
    return self.position

  def drop(self):
    if self.run:
      self.run.active = False

  def was_committed(self, piece, position):
    anchor = self.unpack(piece).anchor
    if len(anchor) < position.round or anchor == self.anchor:
      return None
    return position.last in anchor[position.round :][:1]

  def adopt(self, piece, base, digest):
    anchor, anchor_digest, *_ = self.unpack(piece)
    if len(anchor) < len(self.anchor) and anchor == self.anchor[: len(anchor)]:
      raise ValueError("it is older")
    self.wrong = False
    self.anchor_digest = anchor_digest
    if self.anchor != anchor[: len(self.anchor)]:
      if self.is_restored:
        raise Forked
      before, _, offered, residual, own = self.before or (self.anchor, 0, 0, 0, 0)
      if before == anchor[: len(before)]:  # the last round does not count
        self.moved, self.residual, self.own = self.moved + offered, residual, own
        del self.delivered[self.anchor]
      else:
        self.forget_branch(anchor)
    if self.own != self.latest(anchor):
      self.drop_residual(anchor)
    self.anchor = anchor
    self.is_restored = False
    return self.position

  def forget_branch(self, anchor):
    """Rounds of a branch that others have left do not count."""
    self.delivered = {
      rounds: delivered
      for rounds, delivered in self.delivered.items()
      if rounds == anchor[: len(rounds)]
    }
    kept = self.moved + self.offered + self.residual
    self.made = kept + sum(self.delivered.values())

  def drop_residual(self, anchor):
    lost = self.residual + (self.moved if self.is_restored else 0)
    self.made -= lost
    self.residual, self.own = 0, self.latest(anchor)
    self.moved = 0 if self.is_restored else self.moved

  def digest(self):
    return self.anchor_digest

  # The training loop.

  def take(self, answer):
    if isinstance(answer, Exception):
      self.failed = True
      return
    assert self.offered == 0
    if self.run and 2 * self.network.wrong[self.run.group.number] < len(
      self.run.group.members
    ):
      assert not self.wrong  # it has the anchor of the majority
    if not self.run or self.protocol._run is None:
      self.network.saved[self.number].append(self.save())
    if self.is_final:
      self.leaves_at = self.network.now
      return
    until = self.network.now + 2 * LATENCY * self.network.random.random()
    self.network.at(until, self, self.next)

  def next(self):
    made = self.network.random.randint(1, 100)
    self.made, self.moved = self.made + made, self.moved + made
    self.offered, self.moved = self.moved, 0
    self.is_final = self.leaves and self.delivers
    kind = WorkerMessage.LINK if self.is_link else WorkerMessage.READY
    kind = messages.LEAVING[kind] if self.is_final else kind
    self.handle(RoundRequest(kind, weight=int(not self.is_link)))

  def tick(self):
    now = self.network.now
    if self.leaves and self.leaves_at is None:
      patience = 2 * LIMIT * self.network.random.random()
      self.leaves_at = now + (patience if self.delivers else 0)
    if self.leaves and now >= self.leaves_at and not self.protocol._leaves:
      self.handle(RoundRequest(WorkerMessage.BYE))
    run = self.protocol._run
    super().tick()
    # it ends without its server: a restart replaces it
    self.dead = self.dead or self.protocol.membership.state == "ended"
    # else it has waited for its timeout
    assert not run or self.protocol._run is run or not run.is_quiet
    self.check()

  def check(self):
    assert self.made == self.moved + self.offered + self.residual + sum(
      self.delivered.values()
    )
    for anchor in self.delivered:  # but for a round whose result has to be fetched
      assert anchor == self.anchor[: len(anchor)] or anchor[:-1] == self.anchor
    known = self.network.anchors.setdefault(self.anchor[-1:], self.anchor)
    assert known == self.anchor


class Read(NamedTuple):
  """The anchor of a reader."""

  rounds: tuple[int, ...] = ()
  digest: int = 0
  params: tuple[()] = ()

  @property
  def position(self):
    return RoundPosition(len(self.rounds), self.rounds[-1] if self.rounds else 0)

  @property
  def lineage(self):
    return lineage_of(self.rounds)


class Reader(Follower):
  """A real follower: it asks a server once a second, and donors a little later, when they may have gone on."""

  def __init__(self, network):
    self.network = network
    self.random = Random(network.random.getrandbits(32))
    self.serial = self._worker = -1
    self.anchor, self._replica = Read(), self
    self.refusals = []
    self._rate, self._next, self._in_vain, self._dtypes = math.inf, 0.0, 0, ()
    self._publish()
    self.begin()

  def begin(self):
    network = self.network
    _, server = self.random.choice(network.servers)
    status = server.status()
    network.at(network.now + LATENCY * self.random.random(), None, self.read, status)
    network.at(network.now + 1.0, None, self.begin)

  def read(self, status):
    self._ask = lambda: status
    published = self.latest()
    self.refusals += self.refused
    rounds = self.anchor.rounds
    assert published.version == len(rounds)
    # what it has read is what workers have
    known = self.network.anchors.setdefault(rounds[-1:], rounds)
    assert known == rounds

  def check_is_late(self, anchor):
    """It has one of the last rounds of an anchor, which has `ROUNDS` in the quiet time."""
    assert self.anchor.rounds[-1] in anchor[-ROUNDS:]

  def _exchange(self, donors, requests):
    """As of a worker, without the time that it takes."""
    slices = []
    for donor, request in requests:
      process = self.network.process_at(donor)
      if not process or not process.lives or process.suspended:
        raise TimeoutError(donor)
      slices.append(process.make_model(self, request)[0].values)
    first, *others = slices
    values = [first, *(other[PREFIX:] for other in others)]
    model = Piece(PieceKind.MODEL, 0, -1, np.concatenate(values))
    self.donors = len(donors)
    return model

  def adopt(self, piece, base, digest):
    sent = unpack(self.network.models, piece, self.donors, self.anchor.rounds)
    anchor = Read(sent.anchor, sent.digest)
    if digest > 0 and anchor.position.base == base and sent.digest != digest:
      raise ValueError("it has another digest")
    if anchor.rounds == self.anchor.rounds[: len(anchor.rounds)]:
      raise ValueError("it is older")
    self.anchor = anchor


class Network(VirtualNetwork, protocols_test.Network):
  """With one or two servers of rounds."""

  kind = Process
  kept = 0, 2, 100  # links of a donor
  grace = GRACE
  most = 1.0  # times `LIMIT`, after which one is dropped that was silent before

  def __init__(self, random, workers, quorum, servers, links=()):
    self.links = links  # their numbers
    # results that differ, by the number of the group
    self.wrong = collections.Counter()
    # by worker, what it has saved, and what it is started with
    self.saved, self.restores = collections.defaultdict(list), {}
    self.refused = []  # processes that were started with states of another branch
    self.groups = {}  # members of rounds that moved, by the number of the group
    # of a member of a round before and after it, by number, worker and part
    self.residuals = {}
    # processes, by the number of the group
    self.members = collections.defaultdict(list)
    self.totals, self.models, self.anchors, self.goal, self.cut = {}, [], {}, 0, {}
    self.returns = 0  # slices of links
    self.broken = 0.1  # of these
    # of rounds that began, and of those that count
    self.numbers = {
      ServerMessage.GROUP: set(),
      ServerMessage.COMMIT: set(),
    }
    self.transfer = 0.0  # seconds that an anchor takes on its way to another process
    # by the serial number of a process, when anchors were sent to it
    self.fetched = collections.defaultdict(list)
    # pairs of processes, by serial, of which the first one does not reach the second
    # one
    self.severed = set()
    self.behind = 0  # how often workers were told so, and a donor
    self.servers = [None] * servers  # a controller and its server each
    super().__init__(random, workers, quorum, entries=1000)

  def post(self, channel, receiver, deliver, *content, size=0):
    """Through links that are cut messages come once they are mended."""
    mended = max(self.cut.get(end, 0.0) for end in channel)
    self.arrivals[channel] = max(self.arrivals.get(channel, 0.0), mended)
    super().post(channel, receiver, deliver, *content)

  def note(self, answer, frame):
    if answer.kind in self.numbers:
      self.numbers[answer.kind].add(answer.content["number"])
    self.behind += (
      answer.kind == ServerMessage.BEHIND and answer.content["donor"] is not None
    )

  def disturb(self, kind):
    """Also: the links of a process, or of a server, are cut for a while."""
    servers = range(len(self.servers))
    if kind == "cut":
      end = self.random.choice([*servers, *self.living()])
      self.cut[end] = self.now + CUT * self.random.random()
    elif kind == "serve":
      self.start(self.random.choice(servers))
    elif kind == "returns":
      away = self.saved.keys() - {process.number for process in self.living()}
      if away:
        number = self.random.choice(sorted(away))
        self.restores[number] = self.random.choice(self.saved[number])
        self.processes.append(self.kind(self, number))
    else:
      super().disturb(kind)

  def serve(self):
    for number in range(len(self.servers)):
      self.start(number)

  def start(self, number):
    """A server that knows nobody."""
    controller = js.partial.Quorum(
      self.workers, self.size, grace=self.grace, first=self.random.getrandbits(40)
    )
    self.start_server(number, controller, LIMIT, self.most)


class AutoNetwork(Network):
  """With windows that choose themselves."""

  grace = "auto"


@settings(max_examples=2 * settings().max_examples)
@given(
  st.integers(0, 2**32 - 1),
  st.integers(1, 5),
  DISTURBED | st.tuples(st.just(1), RETURNING),
  st.sets(st.integers(0, 4), max_size=2),
  st.sampled_from([1.0, 2.0]),
)
@example(
  1165,
  3,
  (
    1,
    [
      *("resume", "cut", "leaves", "serve", "resume", "returns"),
      *("cut", "returns", "returns", "cut", "resume", "suspended"),
    ],
  ),
  set(),
  1.0,
)
def test_anchors_agree_nothing_is_lost_and_rounds_go_on(
  seed, workers, disturbed, links, most
):
  """A random schedule with the disturbances in it, then a quiet one for `ROUNDS` rounds more."""
  random, (servers, disturbances) = Random(seed), disturbed
  make = type("Network", (Network if seed % 2 else AutoNetwork,), {"most": most})
  network = make(random, workers, workers // 2 + 1, servers, links)
  for kind in disturbances:
    network.at(random.random() * 30, None, network.disturb, kind)
  reader = Reader(network)
  run_until_goal(network)
  for process in network.processes:
    assert process.dead or not process.failed
    if not process.dead:
      process.check()
  anchor = network.living()[0].anchor
  reader.check_is_late(anchor)
  check_residuals(network, anchor)
  # With two servers that are cut off one after the other each could answer a worker
  # otherwise.
  knows = lambda process: process.left or (process.lives and servers == 1)
  for length, number in enumerate(anchor, start=1):
    members = [
      process
      for process in network.members[number]
      if knows(process) and len(process.anchor) >= length
    ]
    assert all(anchor[:length] in process.delivered for process in members)


def check_residuals(network, anchor):
  """A worker begins a round with the residual that its round before has left, or with none."""
  for worker in range(network.workers):
    left = 0
    for number in anchor:
      if worker in network.groups.get(number, ()):
        before, after = network.residuals.get((number, worker, 0), (0, 0))
        assert before in (0, left)
        left = after


@functools.cache
def lineage_of(anchor):
  return lineage_of(anchor[:-1]).after(anchor[-1]) if anchor else FIRST


def run_until_goal(network, seconds=110):
  """A schedule with disturbances, then a quiet one until all that live have been through `ROUNDS` rounds more."""
  rounds = lambda: [len(process.anchor) for process in network.living()]
  while not network.goal or min(rounds()) < network.goal:
    network.advance()
    if not network.living():  # the only worker was new, and could reach no server
      network.processes.append(network.kind(network, 0))
    if network.now > 31 + CUT and not network.goal:
      network.goal = ROUNDS + max(rounds())
      network.disturb("resume")
    if network.goal:
      network.disturb("restart")
      for number, (controller, _) in enumerate(network.servers):
        # the last worker that was there has left, those that were cut off come back
        if controller.over:
          network.start(number)
    assert network.now < seconds + CUT


def begin_again(network, states):
  """All are dead: a server that knows nothing, and workers with what they have saved, by number."""
  for process in network.processes:
    process.dead = True
  network.start(0)
  join(network, states)


def join(network, states):
  for number, state in states.items():
    network.restores[number] = state
    network.processes.append(Process(network, number))


@pytest.mark.parametrize("comes", ["first", "late", "with a new server", "cut off"])
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 2**32 - 1))
def test_rounds_that_a_quorum_has_been_through_are_not_undone_by_a_worker_of_others(
  comes, seed
):
  """Worker 2 has been through more rounds than the files of the others, who have gone on from these."""
  network = Network(Random(seed), 3, 2, servers=1)
  reader = Reader(network)
  go_on(network, 3)
  early = {number: network.saved[number][-1] for number in (0, 1)}
  go_on(network, 9)
  late = {2: network.saved[2][-1]}
  if comes == "first":  # nobody has gone on: the others go on from its anchor
    begin_again(network, late)
    begun = network.now
    run_until(network, lambda: network.now > begun + 3 * LATENCY)
    join(network, early)
    go_on(network, len(late[2][0]) + 2)
    assert all(
      process.anchor[: len(late[2][0])] == late[2][0] for process in network.living()
    )
    assert not network.refused
    return
  begin_again(network, early)
  go_on(network, 7)
  counted = network.living()[0].anchor
  if comes == "with a new server":
    network.start(0)
  join(network, late)
  if comes == "cut off":  # it was in rounds in this life: it need not be started again
    network.processes[-1].is_restored = False
  go_on(network, 20)
  assert all(
    process.anchor[: len(counted)][:-1] == counted[:-1] for process in network.living()
  )
  assert [process.number for process in network.refused] == (
    [] if comes == "cut off" else [2]
  )
  reader.check_is_late(network.living()[0].anchor)
  check_residuals(network, network.living()[0].anchor)


def go_on(network, rounds):
  """Until all that live have been through so many rounds."""
  return run_until(
    network,
    lambda: all(len(process.anchor) >= rounds for process in network.living()),
    seconds=150,
  )


def run_until(network, happened, seconds=60):
  """Time passes until something has happened."""
  end = network.now + seconds
  while not happened():
    network.advance()
    assert network.now < end
  return network.now


@pytest.mark.parametrize("disturbance", ["dead", "suspended", "leaves", "restart"])
@pytest.mark.parametrize("seed", range(4))
def test_the_server_and_workers_say_why_a_round_counts_for_nobody_and_who_is_behind(
  seed, disturbance, caplog, monkeypatch
):
  monkeypatch.setattr(Network, "kept", (100,))  # no donor is asked in vain
  network = Network(Random(seed), 4, 2, servers=1)
  network.broken = 0.0
  for time in (10, 20, 30, 40):
    network.at(
      time, None, network.disturb, disturbance if disturbance != "restart" else "dead"
    )
    network.at(
      time + 8,
      None,
      network.disturb,
      "restart" if disturbance == "restart" else "resume",
    )
  run_until(
    network, lambda: network.now > 60 and not network.servers[0][0].under_way, 100
  )
  logged = lambda name, text: [
    line
    for *where, line in caplog.record_tuples
    if where[0].endswith(name) and text in line
  ]
  aborted = [
    line
    for line in logged("rounds.server", "counts for nobody")
    if "could not" not in line
  ]
  assert len(
    network.numbers[ServerMessage.GROUP] - network.numbers[ServerMessage.COMMIT]
  ) == len(logged("rounds.server", "counts for nobody"))
  assert all(
    re.fullmatch(
      r"round \d+ of workers [\d, ]+ counts for nobody: worker \d (is lost|has .*|misses .* worker \d)",
      x,
    )
    for x in aborted
  )
  assert network.behind == len(logged("rounds.server", "; it fetches that"))
  if disturbance == "dead":  # the members that live all say so
    assert aborted
    what = lambda lines: {re.search("round .* nobody", line)[0] for line in lines}
    assert what(aborted) == what(logged("rounds.protocol", "counts for nobody"))


def test_a_message_that_takes_longer_than_the_timeout_is_waited_for():
  network = Network(Random(0), 3, 3, servers=1)
  process = network.processes[0]
  run_until(network, lambda: process.protocol._run)
  place = process.protocol.membership
  send = lambda entries: process.handle(
    Outgoing(
      1,
      Piece(
        PieceKind.MESSAGE,
        process.protocol._run.group.number,
        0,
        np.zeros(entries, np.float32),
        tag=2,
      ),
    )
  )
  send(1000)
  assert place.peer_until == place.now + TIMEOUT
  send(6_250_000)  # 25 MB to a group of three, at 5 Mbit/s
  send(1000)  # while that is under way
  assert place.peer_until == place.now + 120


@pytest.mark.parametrize("severed", ["pair", "address", "two pairs"])
@settings(max_examples=settings().max_examples // 2)
@example(5607, 5)
@example(20352, 3)
@given(st.integers(0, 2**32 - 1), st.integers(3, 6))
def test_workers_that_do_not_reach_each_other_stop_no_round_of_the_others(
  severed, seed, workers
):
  """A round counts each `seconds`, with each worker that reaches most others twice to three times as late at most.

  With two pairs a round more may fail before one counts.
  """
  # READY, GROUP, messages, their loss, JOIN, WELCOME and the request of an anchor
  turn = STALLED + GRACE + 7 * LATENCY
  random, seconds = Random(seed), 2 * turn
  network = Network(random, workers, max(2, workers // 2), servers=1)
  Reader(network)
  run_until(network, lambda: network.now > 10)
  first, second, third, *_ = order = random.sample(range(workers), workers)
  if severed == "address":  # nobody reaches the first one, which reaches the others
    network.severed = {(other, first) for other in order[1:]}
  else:
    cut = [{first, second}, {first, third}][: 1 + (severed == "two pairs")]
    network.severed = {
      (one, other) for one in order for other in order if {one, other} in cut
    }
  until = {None: seconds + turn * (severed == "two pairs")} | {
    number: (3 if {number, first} <= {first, second} else 2) * seconds
    for number in order
  }
  if severed != "pair":
    del until[first]
  last, counted = dict.fromkeys(until, network.now), dict.fromkeys(until, 0)
  while network.now < 100:
    network.advance()
    for number in until:
      rounds = len(
        network.numbers[ServerMessage.COMMIT]
        if number is None
        else network.processes[number].delivered
      )
      if rounds > counted[number]:
        last[number], counted[number] = network.now, rounds
      assert network.now < last[number] + until[number]
  for process in network.processes:
    assert process.lives
    process.check()


@pytest.mark.parametrize("transfer", [0.5, 5.0, 15.0, 1.5 * TIMEOUT])
@pytest.mark.parametrize("event", ["joins", "stopped", "two join"])
@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@example(184, 3)  # a worker that is ready while each round is under way
@example(2139095041, 4)  # one that was stopped while it fetched the anchor
def test_a_worker_that_joins_or_was_stopped_is_in_a_round_after_two_transfers_of_the_anchor(
  event, transfer, seed, workers
):
  """Also where it takes longer than a round. Some need more: who was behind when it was stopped, and with the timeout.

  The rounds of the others wait for it for a stated time at most.
  """
  network = Network(Random(seed), workers + 2, 2, servers=1)
  network.transfer = transfer
  network.broken = 0.0
  Reader(network)
  new = [network.processes.pop() for _ in range(2)]
  run_until(network, lambda: network.now > 20)
  if event == "stopped":
    new = network.processes[-1:]
    network.processes[-1].suspended = True
    run_until(network, lambda: network.now > 28)
    network.disturb("resume")
  else:
    for number in range(1 + (event == "two join")):
      network.processes.append(Process(network, workers + number))
    new = network.processes[workers:]
  end = (
    network.now
    + (10 if transfer > TIMEOUT else 2) * transfer
    + 3 * LIMIT
    + 30 * LATENCY
  )
  before, last, rounds = [set(process.delivered) for process in new], network.now, 0
  while any(
    set(process.delivered) <= known for process, known in zip(new, before, strict=True)
  ):
    network.advance()
    assert network.now < end
    if len(network.numbers[ServerMessage.COMMIT]) > rounds:
      rounds, last = len(network.numbers[ServerMessage.COMMIT]), network.now
    assert network.now < last + 4 * transfer + 15 * LATENCY
  for process in network.processes:
    process.check()


@pytest.mark.parametrize("late", [[], [3]])
def test_k_workers_that_are_ready_wait_for_others_however_long_one_of_them_has_waited(
  late,
):
  sent = []
  send = lambda worker, frame: (
    sent.append((worker, messages.parse_answer(frame))) or True
  )
  server = RoundServer(
    js.partial.Quorum(4, quorum=3, grace=GRACE),
    Members(RoundMember, send, 10 * LIMIT, 0.0),
  )
  tell = lambda kind, worker, now, **facts: server.receive(
    worker, [Signal(kind, worker, 1, **facts).pack()], now
  )
  members = lambda: {
    worker for worker, answer in sent if answer.kind == ServerMessage.GROUP
  }
  for worker in range(4):
    tell(WorkerMessage.HELLO, worker, 0.0, address="tcp://a:1")
  server.tick(0.0)
  for worker, now in ((0, 1.0), (1, 10.0), (2, 10.0)):
    tell(WorkerMessage.READY, worker, now)
  server.tick(10.0 + 0.9 * GRACE)
  assert members() == set()
  for worker in late:
    tell(WorkerMessage.READY, worker, 10.0 + 0.9 * GRACE)
  server.tick(10.0 + 1.1 * GRACE)
  assert members() == {0, 1, 2, *late}


def test_the_server_names_a_worker_whose_result_differs(caplog):
  sent = []
  send = lambda _, frame: sent.append(messages.parse_answer(frame)) or True
  server = RoundServer(
    js.partial.Quorum(3, quorum=3, grace=GRACE),
    Members(RoundMember, send, 10 * LIMIT, 0.0),
  )
  tell = lambda worker, *facts, **more: server.receive(
    worker, [Signal(facts[0], worker, *facts[1:], **more).pack()], 1.0
  )
  for worker in range(3):
    tell(worker, WorkerMessage.HELLO, address="tcp://a:1")
  server.tick(1.0)
  for worker in range(3):
    tell(worker, WorkerMessage.READY, 1)
  number = next(
    answer.content["number"] for answer in sent if answer.kind == ServerMessage.GROUP
  )
  for worker, digest in enumerate([7, 8, 7]):
    tell(worker, WorkerMessage.DONE, number, digest=digest)
  assert "the result of worker 1 differs" in caplog.text
  assert caplog.text.count("differs") == 1


class Pieces:
  """An exchange that takes pieces, and an anchor that no round changes."""

  digest = 7
  lineage = ()
  is_dropped = False

  def begin(self, group):
    self.group, self.received = group, []
    return self

  def receive(self, piece):
    self.received.append(piece)

  def commit(self):
    return RoundPosition(1, self.group.number)

  def drop(self):
    self.is_dropped = True


def protocol_in_a_round(signals):
  """The protocol of worker 0, in round 5 with worker 1, and its exchange."""
  quiet = lambda *_: None
  place = Membership(0, "tcp://a", TIMEOUT, 0.0, signals.append, quiet, quiet, TIMEOUT)
  exchange = Pieces()
  protocol = RoundProtocol(place, exchange, 4, quiet)
  options = {
    "grace": GRACE,
    "sizes": [1, 2],
    "round": 0,
    "base": 0,
    "digest": 0,
    "run": 7,
  }
  group = {
    "members": (0, 1),
    "weights": (0.5, 0.5),
    "iteration": 0,
    "initial": 0.0,
    "number": 5,
    "links": [],
    "leaving": [],
  }
  for event in (
    Answer(
      ServerMessage.WELCOME, {"limit": LIMIT, "donor": None, "number": 0, **options}
    ),
    RoundRequest(WorkerMessage.READY, weight=1),
    Answer(ServerMessage.GROUP, {**group, "addresses": {0: "tcp://a", 1: "tcp://b"}}),
  ):
    protocol.handle(event, 0.0)
  return protocol, exchange


def test_a_round_that_is_aborted_after_its_result_is_not_asked_about():
  """The stand in a signal names a last round only while the worker does not know whether it counts."""
  signals = []
  protocol, _ = protocol_in_a_round(signals)
  for event in (
    Done(5, 7),
    Answer(
      ServerMessage.ABORT, {"number": 5, "worker": 1, "reason": "worker 1 is lost"}
    ),
  ):
    protocol.handle(event, 0.0)
  *_, done, failed, ready = signals
  assert [signal.kind for signal in (done, failed, ready)] == [
    WorkerMessage.DONE,
    WorkerMessage.FAILED,
    WorkerMessage.READY,
  ]
  assert ready.position == RoundPosition()


@pytest.mark.parametrize("has_result", [False, True])
def test_a_round_without_a_server_is_dropped_unless_it_may_count(has_result):
  protocol, exchange = protocol_in_a_round([])
  if has_result:
    protocol.handle(Done(5, 7), 0.0)
  for second in range(int(LIMIT) + 2):
    assert not exchange.is_dropped
    protocol.tick(float(second))
  assert exchange.is_dropped == (not has_result)


class Complaining(Pieces):
  """An exchange that takes no anchor."""

  def adopt(self, *_):
    raise ValueError("of another model")


@pytest.mark.parametrize("donor", [None, "tcp://b:1"])
def test_a_worker_that_gets_no_anchor_says_so_rarely(donor, caplog):
  """At once, then after 10, 20 and 40 s, however often it asks; at once for another reason. Its server says it once."""
  quiet = lambda *_: None
  place = Membership(0, "tcp://a:1", TIMEOUT, 0.0, quiet, quiet, quiet, TIMEOUT)
  protocol = RoundProtocol(place, Complaining(), 4, quiet)
  server = RoundServer(
    js.partial.Quorum(2, quorum=1, grace=0.0),
    Members(RoundMember, lambda *_: True, 1000.0, 0.0),
  )
  server.receive(
    b"c", [Signal(WorkerMessage.HELLO, 0, address="tcp://a:1").pack()], 0.0
  )
  server._quorum.position = RoundPosition(5, 9)
  options = {
    "grace": GRACE,
    "sizes": [1, 2],
    "round": 5,
    "base": 9,
    "digest": 0,
    "run": 7,
  }

  def ask(now):
    protocol.tick(now)
    protocol.handle(
      Answer(
        ServerMessage.WELCOME, {"limit": 1000.0, "donor": donor, "number": 0, **options}
      ),
      now,
    )
    if donor:
      protocol.handle(Piece(PieceKind.MODEL, 5, 1, np.zeros(4, np.float32)), now)
    else:
      protocol.handle(RoundRequest(WorkerMessage.READY, 1), now)
      protocol.handle(Answer(ServerMessage.BEHIND, {"donor": None, **options}), now)
    server.members.now = now
    server._tell_behind([0])

  for second in range(75):
    ask(float(second))
  said = lambda: [name.rpartition(".")[2] for name, *_ in caplog.record_tuples]
  assert sorted(said()) == ["membership"] * 4 + ["server"]
  protocol.handle(RoundRequest(WorkerMessage.READY, 1), 75.0)
  protocol.membership.state, protocol.membership.waits = "joined", True
  protocol.handle(
    Answer(ServerMessage.BEHIND, {"donor": None, **options, "round": 6}), 75.0
  )
  assert sorted(said()) == ["membership"] * 5 + ["server"]


class Taking(Pieces):
  """An exchange that takes any anchor."""

  lineage = (3, 8)

  def adopt(self, *_):
    return RoundPosition(9, 5)


@pytest.mark.parametrize("event", ["refused", "unreachable", "none", "late", "taken"])
def test_links_of_one_donor_then_slices_of_several_then_the_anchor_of_one(event):
  """The next where those before are refused, or a donor is lost; links again once an anchor was taken.

  Slices of donors that have been through another round since are empty.
  """
  sent = []
  quiet = lambda *_: None
  send = lambda address, piece: sent.append((address, *piece.values.view(np.int64)))
  place = Membership(0, "tcp://a:1", TIMEOUT, 0.0, quiet, send, quiet, TIMEOUT)
  exchange = Complaining() if event in ("refused", "late") else Taking()
  exchange.lineage = Taking.lineage
  protocol = RoundProtocol(place, exchange, 4, quiet)
  options = {"grace": GRACE, "sizes": [1, 3], "round": 9, "base": 5, "digest": 0}
  donors = "tcp://b:1 tcp://c:1"
  welcome = {"limit": LIMIT, "donor": donors, "number": 0, "run": 7, **options}
  model = Piece(PieceKind.MODEL, 9, 1, np.zeros(4, np.float32))
  none = model._replace(values=np.zeros(PREFIX, np.float32))
  links = [("tcp://b:1", 0, 8, 0, 1)]
  slices = [("tcp://b:1", -1, 8, 0, 2), ("tcp://c:1", -1, 8, 1, 2)]
  whole = [("tcp://b:1", -1, 8, 0, 1)]
  last = {"refused": model, "none": none, "late": none, "taken": model}
  fail = last.get(event, Unreachable("tcp://b:1"))
  protocol.handle(Answer(ServerMessage.WELCOME, welcome), 0.0)
  assert sent == links
  protocol.handle(fail, 0.0)
  if event == "taken":
    assert place.position == (9, 5, 0)
    return
  if event not in ("none", "late"):
    protocol.handle(Answer(ServerMessage.WELCOME, welcome), 0.0)
  assert sent == links + slices
  lost = Unreachable("tcp://c:1")
  protocol.handle({"refused": model, "late": none}.get(event, lost), 0.0)
  protocol.handle(Answer(ServerMessage.WELCOME, welcome), 0.0)
  assert sent == links + slices + whole
  protocol.exchange = Taking()
  protocol.handle(model, 0.0)
  protocol.handle(RoundRequest(WorkerMessage.READY, 1), 0.0)
  protocol.handle(Answer(ServerMessage.BEHIND, welcome | {"round": 10}), 0.0)
  assert sent[4:] == [("tcp://b:1", 9, 8, 0, 1)]


def test_the_server_names_several_donors_the_one_of_fewest_others_first():
  """Those that have the last anchor, but for those that the worker does not reach: also the first time."""
  server = RoundServer(
    js.partial.Quorum(10, quorum=5), Members(RoundMember, lambda *_: True, LIMIT, 0.0)
  )
  hello = lambda worker: Signal(
    WorkerMessage.HELLO, worker, address=f"tcp://h:{worker + 1}"
  )
  for worker in range(9):
    server.receive(b"%d" % worker, [hello(worker).pack()], 0.0)
  donors = lambda worker: [
    int(address.rpartition(":")[2]) - 1
    for address in server._find_donor(worker).split()
  ]
  newest = RoundPosition(5, 9)
  server._quorum.position = newest
  for worker in range(6):
    server.members.known[worker].position = newest
  assert donors(8) == [0, 1, 2, 3]
  server.members.known[8].donor = None
  # One has fetched a later anchor than that of the worker, and lacks links to it.
  server.members.known[0].fetches_since = 0.0
  server.members.known[0].position = RoundPosition(3, 4)
  beat = Signal(WorkerMessage.BEAT, 0, position=newest)
  server.receive(b"0", [beat.pack()], 0.0)
  server.members.known[8].position = RoundPosition(4, 7)
  assert donors(8) == [1, 2, 3, 4]
  # A busy donor comes behind one that may lack links.
  for worker in range(2, 6):
    server.members.known[worker].position = RoundPosition(4, 7)
  fetching = server.members.known[7]
  fetching.fetches_since, fetching.donor = 0.0, 1
  server.members.known[8].donor = None
  assert donors(8) == [0]
  fetching.fetches_since = fetching.donor = None
  for worker in range(2, 6):
    server.members.known[worker].position = newest
  server.members.known[8].position = RoundPosition()
  server.members.known[0].links_since = 0
  server.members.known[8].donor = 0
  server.members.known[8].fetches_since = 0.0
  group = WorkerGroup((1, 2, 7), (), 0, number=4)
  server._quorum.pairs.separate(group, 7, 2)
  assert len(donors(7)) == 1  # while another one fetches
  server.members.known[8].fetches_since = server.members.known[7].donor = None
  for worker in range(3, 6):
    server.members.known[worker].position = RoundPosition(4, 8)
  assert donors(7) == [0, 1]
  server.members.known[0].position = RoundPosition(4, 8)
  asked = set()
  for _ in range(6):  # in vain: also one that it has missed messages of
    server.members.now += LIMIT
    asked.add(donors(7)[0])
  assert asked == {1, 2}
  alike = Alike(run=server._run)
  comes = Signal(WorkerMessage.HELLO, 9, address="tcp://h:10", alike=alike)
  server.receive(b"9", [comes._replace(position=newest).pack()], server.members.now)
  assert server.members.known[9].links_since == newest.round


def test_a_server_remembers_only_workers_that_it_knows_and_that_have_asked_of_late():
  """Whether a last round counts is asked with any number and by any worker that has joined before."""
  server = RoundServer(
    js.partial.Quorum(3, quorum=2), Members(RoundMember, lambda *_: True, LIMIT, 0.0)
  )
  position = RoundPosition(4, 8, last=9)
  for now, worker in enumerate([*range(3, 40), 0, 1, 2, 1]):
    frame = Signal(
      WorkerMessage.HELLO, worker, address="tcp://a:1", position=position
    ).pack()
    server.receive(b"", [frame], now * LIMIT * 0.9)
  assert server._undecided.keys() == {1, 2}


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_what_members_send_early_is_kept_for_the_round_of_another_server_with_a_smaller_number(
  rejected, committed
):
  """They send as soon as they hear of the round; a worker without it would wait for its timeout."""
  exchange, replies, switched, entries, members = Pieces(), [], [], 10**5, [0, 1, 2, 3]
  quiet = lambda *_: None
  place = Membership(0, "tcp://a", TIMEOUT, 0.0, quiet, quiet, replies.append, TIMEOUT)
  protocol = RoundProtocol(place, exchange, entries, lambda: switched.append(True))

  def answer(kind, **content):
    protocol.handle(Answer(kind, content), protocol.membership.now)

  def join(number):
    options = {
      "grace": GRACE,
      "sizes": [3, 4],
      "round": 0,
      "base": number,
      "digest": 0,
      "run": 7,
    }
    answer(ServerMessage.WELCOME, limit=LIMIT, donor=None, number=number, **options)

  def begin(number):
    protocol.handle(
      RoundRequest(WorkerMessage.READY, weight=1), protocol.membership.now
    )
    for member in members[1:]:  # an index and a value of each entry
      protocol.handle(
        Piece(
          PieceKind.MESSAGE, number, member, np.ones(2 * entries, np.float32), tag=1
        ),
        protocol.membership.now,
      )
    facts = {
      "members": tuple(members),
      "weights": (0.25,) * 4,
      "iteration": 0,
      "initial": 0.0,
      "number": number,
      "links": [],
      "leaving": [],
    }
    answer(
      ServerMessage.GROUP,
      **facts,
      addresses={member: f"tcp://{member}" for member in members},
    )
    assert [(piece.number, piece.sender) for piece in exchange.received] == [
      (number, member) for member in members[1:]
    ]

  join(0)
  begin(2000)
  protocol.handle(Done(2000, 7), protocol.membership.now)
  if committed:
    answer(
      ServerMessage.COMMIT, number=2000, digest=7, round=1, base=2000, run=7, donor=None
    )
  if rejected:
    answer(ServerMessage.REJECTED, reason="absent: worker 0 has to join")
  else:
    for part in (0.4, 0.8, 1.2):
      protocol.tick(LIMIT * part)
  assert rejected != bool(switched)
  join(2000)
  assert protocol.membership.position == (1, 2000, 0)
  assert len(replies) == 2
  begin(1000)
