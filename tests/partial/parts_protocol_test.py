"""Workers of several processes in virtual time: the laws of rounds hold in each part, and for all parts alike.

- the training loops of all parts go on from the same round at the same step;
- a round is skipped in all parts of its members or in none;
- a worker that loses a part ends as a whole;
- a reader is told that each part has a part of the anchor, and reads none.
"""

import collections
import types
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsparse.partial.net import messages
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.membership import Member, Members, Membership
from jaxsparse.partial.net.messages import (
  Answer,
  Next,
  Piece,
  PieceKind,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds import processes
from jaxsparse.partial.rounds.parts import (
  Decision,
  LeadProtocol,
  PartLost,
  PartProtocol,
  _digest_of,
)
from jaxsparse.partial.rounds.protocol import RoundRequest
from jaxsparse.partial.rounds.run import Done
from tests.partial import protocols_test, rounds_protocol_test
from tests.partial.protocols_test import LATENCY, LIMIT, TIMEOUT
from tests.partial.rounds_protocol_test import DISTURBED, Reader


class Part(rounds_protocol_test.Process):
  """A process of a worker, of which the lead comes last."""

  delivers = False

  def __init__(self, network, number, part):
    self.part = part
    self.lead = None
    super().__init__(network, number)

  def make_protocol(self, place, *facts):
    place.part = self.part
    *most, _, _ = facts
    return PartProtocol(place, *most, self.miss_lead)

  def miss_lead(self):
    raise PartLost

  def tell(self, signal):
    self.network.post(
      (self, self.lead), self.lead, self.lead.hear_part, self.serial, [signal.pack()]
    )

  def handle(self, event):
    self.run_or_end(super().handle, event)

  def tick(self):
    self.run_or_end(super().tick)

  def run_or_end(self, method, *content):
    try:
      method(*content)
    except PartLost:
      self.dead = True

  def skips(self, number):
    """In one part of some rounds; all members find that alike."""
    return hash((number, self.part)) % 6 == 0

  def skip(self):
    self.run.skipped = True
    return self.run.hash()

  def commit(self):
    skipped = self.run.skipped
    assert self.network.skipped.setdefault(self.run.group.number, skipped) == skipped
    return super().commit()

  def take(self, answer):
    if answer != Next.LATER:
      super().take(answer)


class Lead(Part):
  """Part 0 of a worker."""

  def __init__(self, network, number, others):
    self.others = others
    super().__init__(network, number, 0)
    for other in others:
      other.lead = self

  def make_protocol(self, *facts):
    members = Members(Member, self.send_part, LIMIT, self.network.now)
    addresses = [process.address for process in (self, *self.others)]
    return LeadProtocol(*facts, others=members, addresses=addresses)

  def tell(self, signal):
    rounds_protocol_test.Process.tell(self, signal)

  def send_part(self, serial, frame):
    part = self.network.processes[serial]
    if part.lives:
      self.network.post((self, part), part, part.handle, messages.parse_answer(frame))
    return part.lives

  def hear_part(self, serial, frames):
    if self.lives:
      self.run_or_end(self.protocol.hear_part, serial, frames, self.network.now)

  def take(self, answer):
    if isinstance(answer, Exception):
      super().take(answer)
    else:
      self.network.at(
        self.network.now + LATENCY * self.network.random.random(),
        self,
        self.decide,
        answer,
      )

  def decide(self, answer):
    """The training loop is at a step where it goes on from a round, and so do those of all parts that live."""
    if self.lives:
      assert {other.anchor for other in self.others if other.lives} <= {self.anchor}
      self.handle(Decision(answer))
      super().take(answer)

  def tick(self):
    if self.network.random.random() < 0.1:
      self.handle(Decision(Next.LATER))
    super().tick()


class Network(rounds_protocol_test.Network):
  """Workers of so many parts each."""

  def __init__(self, parts, *options):
    self.parts, self.skipped = parts, {}
    super().__init__(*options)

  def kind(self, _, number):
    for part in range(1, self.parts):
      self.processes.append(Part(self, number, part))
    return Lead(self, number, self.processes[-self.parts + 1 :])

  def post(self, channel, *content, **sizes):
    """Links inside a worker are not cut."""
    sender, receiver = channel
    if (
      isinstance(sender, Part)
      and isinstance(receiver, Part)
      and sender.number == receiver.number
    ):
      protocols_test.Network.post(self, channel, *content)
    else:
      super().post(channel, *content, **sizes)

  def disturb(self, kind):
    """All parts of a worker leave or are suspended, or one dies or diverges; one worker always runs."""
    parts = collections.defaultdict(list)
    for process in self.living():
      if (
        not process.suspended
        and not process.leaves
        and process.protocol.membership.state == "joined"
      ):
        parts[process.number].append(process)
    running = [
      processes for processes in parts.values() if len(processes) == self.parts
    ]
    if kind in ("suspended", "leaves", "dead", "diverges"):
      if len(running) > 1:
        chosen = self.random.choice(running)
        for process in (
          chosen if kind in ("suspended", "leaves") else [self.random.choice(chosen)]
        ):
          setattr(process, kind, True)
    else:
      super().disturb(kind)


class Alone:
  """The lead of three parts, by hand."""

  skipped = False
  lineage = ()

  def __init__(self, donor=None, round=0, base=0, digest=0):
    self.anchor_digest = 7
    self.to_server, self.to_parts, self.replies = [], [], []
    quiet = lambda *_: None
    place = Membership(
      0,
      "tcp://a:1",
      TIMEOUT,
      0.0,
      self.to_server.append,
      quiet,
      self.replies.append,
      TIMEOUT,
    )
    tell = lambda part, frame: self.to_parts.append(
      (part, messages.parse_answer(frame))
    )
    members = Members(Member, tell, LIMIT, 0.0)
    addresses = ["tcp://a:1", "tcp://a:2", "tcp://a:3"]
    self.lead = LeadProtocol(place, self, 4, quiet, others=members, addresses=addresses)
    self.lead.tick(0.0)
    for part in (1, 2):
      self.hear(
        part,
        WorkerMessage.HELLO,
        address=addresses[part],
        alike=Alike(start=(f"of part {part}",)),
      )
    (self.hello,) = self.to_server
    last = {"round": round, "base": base, "digest": digest, "run": 7}
    self.options = {
      "limit": LIMIT,
      "grace": 1.0,
      "sizes": [1, 2],
      "donor": donor,
      "number": 0,
      **last,
    }
    self.welcome()

  def welcome(self):
    self.answer(ServerMessage.WELCOME, **self.options)

  def adopt(self, piece, base, digest):
    return RoundPosition(piece.number, base)

  def digest(self):
    return self.anchor_digest

  def hear(self, part, kind, value=0, now=0.0, **facts):
    self.lead.hear_part(part, [Signal(kind, part, value, **facts).pack()], now)

  def answer(self, kind, **content):
    self.lead.handle(Answer(kind, content), 0.0)

  def told(self, kind):
    return [signal for signal in self.to_server if signal.kind == kind]

  def begin(self, group):
    self.group = group
    return self


def digest_of(*digests):
  signals = [Signal(WorkerMessage.DONE, 0, digest=digest) for digest in digests]
  return _digest_of(dict(enumerate(signals)))


def test_training_begins_when_a_donor_has_given_all_parts_the_anchor_of_one_round():
  alone = Alone(donor="tcp://b:1,tcp://b:2,tcp://b:3")
  lead = alone.lead
  assert alone.hello.address == "tcp://a:1,tcp://a:2,tcp://a:3"
  assert (alone.hello.worker, alone.hello.alike.start) == (
    0,
    ("of part 1", "of part 2"),
  )
  welcomes = [
    (part, content["donor"])
    for part, (kind, content) in alone.to_parts
    if kind == ServerMessage.WELCOME
  ]
  assert welcomes == [(part, "tcp://b:1,tcp://b:2,tcp://b:3") for part in (1, 2)]
  assert lead.membership.donors == ["tcp://b:1"]
  newest = RoundPosition(4, 9)
  for rounds in ((newest, newest._replace(round=3)), (newest, newest)):
    assert alone.replies == []
    alone.to_parts.clear()
    lead.membership.position = newest
    lead.membership.reply(newest)
    for part, position in enumerate(rounds, start=1):
      alone.hear(part, WorkerMessage.ANSWERED, position=position)
    again = [
      part for part, (_, content) in alone.to_parts if content.get("next") == Next.AGAIN
    ]
    assert again == ([] if rounds == (newest, newest) else [1, 2])
    assert lead.membership.state == ("joining" if again else "joined")
  assert alone.replies == [newest]


def test_a_lead_hears_no_process_that_is_not_one_of_its_parts():
  alone = Alone()
  alone.to_parts.clear()
  for stranger, address in ((7, "tcp://a:8"), (0, "tcp://a:1"), (3, "tcp://a:3")):
    alone.hear(stranger, WorkerMessage.HELLO, address=address)
    alone.hear(stranger, WorkerMessage.BYE)
  alone.lead.hear_part(7, [Signal(WorkerMessage.BYE, 1).pack()], 0.0)
  assert {kind for _, (kind, _) in alone.to_parts} == {ServerMessage.REJECTED}
  assert {connection for connection, _ in alone.to_parts} == {0, 3, 7}
  assert alone.lead.others.known.keys() == {1, 2}
  assert not alone.told(WorkerMessage.BYE)


def test_a_part_reaches_the_same_part_of_other_workers():
  """Also once one has joined again elsewhere, and none where a worker has fewer parts, or has left."""
  quiet = lambda *_: None
  place = Membership(0, "tcp://a:2", TIMEOUT, 0.0, quiet, quiet, quiet, TIMEOUT, part=1)
  place.learn({1: "tcp://b:1,tcp://b:2", 2: "tcp://c:1,tcp://c:2", 3: "tcp://d:1"})
  assert place.addresses == {1: "tcp://b:2", 2: "tcp://c:2"}
  place.learn({1: "tcp://b:3,tcp://b:4", 2: None})
  assert place.addresses == {1: "tcp://b:4"}
  place.donor = "tcp://b:1,tcp://b:2 tcp://d:1 tcp://c:1,tcp://c:2"
  place.in_vain = 1
  assert place.donors == ["tcp://b:2", "tcp://c:2"]


def test_a_worker_that_joins_again_says_for_how_long_its_parts_have_waited_for_an_anchor():
  alone = Alone(donor="tcp://b:1,tcp://b:2,tcp://b:3")
  assert alone.hello.value == 0
  alone.lead.membership.miss_donor("tcp://b:1")
  alone.lead.tick(7.0)
  for part in (1, 2):
    alone.hear(
      part,
      WorkerMessage.HELLO,
      1,
      now=7.0,
      address=f"tcp://a:{part + 1}",
      alike=Alike(start=("of a part",)),
    )
  assert [hello.value for hello in alone.told(WorkerMessage.HELLO)] == [0, 7]


def test_parts_that_have_fetched_another_anchor_than_that_of_the_last_round_fetch_again(
  caplog,
):
  """Each knows the digest of its own part; the server knows that of all."""
  right = digest_of(20, 21, 22)
  alone = Alone(donor="tcp://b:1,tcp://b:2,tcp://b:3", round=4, base=9, digest=right)
  lead, newest = alone.lead, RoundPosition(4, 9)
  for digests in ((20, 21, 5), (20, 21, 22)):
    alone.anchor_digest = digests[0]
    lead.handle(Piece(PieceKind.MODEL, 4, 1), 0.0)
    for part in (1, 2):
      alone.hear(part, WorkerMessage.ANSWERED, position=newest, digest=digests[part])
    if digests[2] == 5:
      assert alone.replies == []
      assert (
        "worker 0 refuses an anchor for all its parts: its digest is" in caplog.text
      )
      assert lead.membership.state == "joining"
      lead.tick(1.0)
      for part in (1, 2):
        facts = {
          "address": f"tcp://a:{part + 1}",
          "alike": Alike(start=(f"of part {part}",)),
          "position": newest,
        }
        alone.hear(part, WorkerMessage.HELLO, 1, **facts)
      assert alone.told(WorkerMessage.HELLO)[-1].position == RoundPosition(0, -1)
      alone.welcome()
  assert alone.replies == [newest]
  assert alone.told(WorkerMessage.HELLO)[-1].position == RoundPosition(0, -1)


def test_a_result_that_was_told_before_a_part_has_skipped_is_not_counted():
  """Or the digest of the worker would be that of no other one."""
  alone = Alone()
  lead = alone.lead
  lead.handle(RoundRequest(WorkerMessage.READY, 1), 0.0)
  for part in (1, 2):
    assert not alone.told(WorkerMessage.READY)
    alone.hear(part, WorkerMessage.READY, 1)
  group = {
    "members": (0,),
    "weights": (1.0,),
    "iteration": 0,
    "initial": 0.0,
    "number": 5,
    "links": [],
    "leaving": [],
  }
  alone.answer(
    ServerMessage.GROUP, **group, addresses={0: "tcp://a:1,tcp://a:2,tcp://a:3"}
  )
  alone.hear(1, WorkerMessage.DONE, 5, digest=8)
  alone.skipped = True
  lead.handle(Done(5, 7), 0.0)
  alone.hear(2, WorkerMessage.DONE, 5, digest=9)
  skips = {"next": Next.SKIP, "number": 5, "reason": ""}
  told = [part for part, (_, content) in alone.to_parts if content == skips]
  assert told == [1, 2]
  alone.hear(2, WorkerMessage.SKIPPED, 5, digest=3)
  assert not alone.told(WorkerMessage.DONE)
  alone.hear(1, WorkerMessage.SKIPPED, 5, digest=2)
  (done,) = alone.told(WorkerMessage.DONE)
  assert done.digest == digest_of(7, 2, 3)


@settings(max_examples=settings().max_examples)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 3), DISTURBED)
def test_the_parts_of_a_worker_go_from_round_to_round_together_and_nothing_is_lost(
  seed, workers, parts, disturbed
):
  """As in `rounds_protocol_test`: a random schedule with disturbances, then a quiet one for `ROUNDS` rounds more."""
  random, (servers, disturbances) = Random(seed), disturbed
  network = Network(parts, random, workers, workers // 2 + 1, servers)
  for kind in disturbances:
    network.at(random.random() * 30, None, network.disturb, kind)
  reader = Reader(network)
  rounds_protocol_test.run_until_goal(network, seconds=200)
  assert reader.anchor.rounds == ()
  assert set(reader.refusals) == {
    "Follower: workers of several processes have a part each"
  }
  for process in network.processes:
    assert process.dead or not process.failed
    if not process.dead:
      process.check()
  for number in range(workers):
    assert len(
      [process for process in network.living() if process.number == number]
    ) in (0, parts)


@pytest.mark.parametrize(("part", "kind"), [(0, LeadProtocol), (1, PartProtocol)])
def test_the_protocol_of_each_part_has_its_membership_and_exchange(
  part, kind, monkeypatch
):
  addresses = ["tcp://a:1", "tcp://a:2"]
  monkeypatch.setattr(processes, "_meet", lambda _: addresses)
  quiet = lambda *_: None
  membership = Membership(
    0, addresses[part], TIMEOUT, 0.0, quiet, quiet, quiet, TIMEOUT
  )
  endpoint, exchange = mock.Mock(address=addresses[part]), mock.Mock()
  place = types.SimpleNamespace(parts=2, part=part)
  protocol = processes.make_protocol(place, endpoint, membership, exchange, 4, 1)
  assert type(protocol) is kind
  assert (protocol.membership, protocol.exchange) == (membership, exchange)
