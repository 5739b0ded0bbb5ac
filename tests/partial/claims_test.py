"""What members claim: numbers of rounds, weights, times. The server believes what can be, and names who says more."""

import logging
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.partial.groups.protocol import GroupProtocol
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.log import Warnings
from jaxsparse.partial.net.membership import Membership
from jaxsparse.partial.net.messages import (
  Answer,
  Piece,
  PieceKind,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds.lineage import Lineage
from jaxsparse.partial.rounds.protocol import RoundProtocol
from tests.partial.server_protocol_test import Wire, hello
from tests.partial.status_test import Hub

ALIKE = Alike.of(jnp.zeros(2))


START = RoundPosition()


class Server(Hub):
  """A server of rounds; `round` makes the next round of some workers count."""

  def __init__(self, workers=3, quorum=2):
    super().__init__(workers, quorum)
    self.now = 0.0

  def hello(
    self, worker, position=START, value=0, lineage=None, run=None, **connection
  ):
    if lineage is None:  # anybody can chain more rounds to those that the server has
      lineage = self.server._quorum.lineage
      for number in range(min(position.round - lineage.round, 300)):
        lineage = lineage.after(number)
    alike = ALIKE._replace(run=run or self.server._run, lineage=lineage.ids)
    facts = {"position": position, "alike": alike, "address": f"tcp://h:{worker + 1}"}
    self.say(WorkerMessage.HELLO, worker, value, **facts, **connection)
    return self.answers[connection.get("connection", b"%d" % worker)]

  def say(self, kind, worker, value=0, **facts):
    self.tell(kind, worker, value, now=self.now, **facts)

  def wait(self, seconds, *beating):
    for _ in range(round(2 * seconds)):
      self.now += 0.5
      for worker in beating:
        self.say(WorkerMessage.BEAT, worker)
      self.server.tick(self.now)

  def round(self, *members):
    """Workers are ready, and all have the result."""
    for worker in members:
      self.say(WorkerMessage.READY, worker, 1, position=self.position)
    self.wait(2, *members)
    group = self.server._quorum.under_way
    assert group.members == members
    for worker in members:
      self.say(WorkerMessage.DONE, worker, group.number, digest=7)
    return self.position

  @property
  def position(self):
    return self.server._quorum.position


def joined(workers=3, quorum=2, present=(0, 1)):
  server = Server(workers, quorum)
  for worker in present:
    assert server.hello(worker).kind == ServerMessage.WELCOME
  server.wait(6, *present)
  server.round(*present)
  server.round(*present)
  return server


@pytest.mark.parametrize("ahead", [1, 200, 2**62])
@pytest.mark.parametrize(("workers", "quorum"), [(3, 2), (5, 2), (4, 1)])
def test_a_round_that_cannot_have_counted_is_refused_by_name_and_rounds_go_on(
  workers, quorum, ahead
):
  server = joined(workers, quorum)
  newest = server.position
  answer = server.hello(2, RoundPosition(2 + ahead, 5))
  assert answer.kind == ServerMessage.REJECTED
  assert "worker 2" in answer.content["reason"]
  assert str(2 + ahead) in answer.content["reason"]
  assert server.position == newest
  server.round(0, 1)
  assert server.position.round == 3
  assert server.hello(2).kind == ServerMessage.WELCOME


@pytest.mark.parametrize("ahead", [0, 1, 1000, 2**40 - 9])
def test_a_worker_of_another_branch_is_behind_however_many_rounds_it_has(ahead):
  """It is told, with a donor, and not refused until the others are as far."""
  server = joined()
  newest = server.position
  lineage = Lineage()
  for number in range(300):
    lineage = lineage.after(number)
  answer = server.hello(2, RoundPosition(newest.round + ahead, 5), lineage=lineage)
  assert answer.kind == ServerMessage.WELCOME
  assert answer.content["donor"].split()[0] in ("tcp://h:1", "tcp://h:2")
  assert server.position == newest
  server.round(0, 1)


@pytest.mark.parametrize("at", [0, 1, 30])
@pytest.mark.parametrize("is_other_run", [False, True])
def test_a_new_server_goes_on_without_a_worker_that_gives_its_later_anchor_to_nobody(
  at, is_other_run
):
  """It says first that it has been through many rounds, over and over; the others ask it for the anchor in vain."""
  before = joined(present=(0, 1))
  while before.position.round < at:
    before.round(0, 1)
  own = before.position if at else START
  lineage = before.server._quorum.lineage if at else Lineage()
  run = before.server._run
  server = Server()
  of_run = run + is_other_run
  claim = RoundPosition(2**40 - 1, 5)
  answers = dict[int, ServerMessage]()
  for _ in range(45):
    server.hello(2, claim, lineage=Lineage(claim.round, (7,) * 256), run=of_run)
    for worker in (0, 1):
      if server.position == own and answers.get(worker) == ServerMessage.WELCOME:
        continue
      answer = server.hello(worker, own, lineage=lineage, run=run)
      answers[worker] = answer.kind
      if answer.kind == ServerMessage.REJECTED:
        assert answer.content["reason"].startswith("duplicate")
    server.wait(1, 0, 1, 2)
  assert server.position == own
  server.round(0, 1)
  server.hello(2, claim, lineage=Lineage(claim.round, (7,) * 256), run=of_run)
  assert server.position.round == own.round + 1


def test_a_member_that_claims_a_later_round_holds_up_nobody_and_is_no_donor():
  server = joined(present=(0, 1, 2))
  later = RoundPosition(9, 5)
  server.say(WorkerMessage.READY, 2, 1, position=later)
  server.wait(1, 0, 1)
  server.say(WorkerMessage.BEAT, 2, position=later)
  server.round(0, 1)
  assert server.position.round == 3
  assert server.server.members.known[2].position.round < 3


@pytest.mark.parametrize("left", [False, True])
def test_rounds_that_others_may_have_held_at_a_second_server_are_believed(left):
  """Two of three workers have left this server: they are a quorum elsewhere. While both stay they are not."""
  server = joined(present=(0, 1, 2))
  if left:
    server.wait(7, 0)
  claim = RoundPosition(7, 5)
  answer = server.hello(1, claim)
  assert (answer.kind == ServerMessage.WELCOME) == left
  assert (server.position == claim) == left


@pytest.mark.parametrize("value", [-1, 2**47 + 1, 2**62])
def test_a_weight_that_no_worker_has_is_refused(value):
  server = joined()
  server.say(WorkerMessage.READY, 0, value, position=server.position)
  assert server.answers[b"0"].kind == ServerMessage.REJECTED
  server.round(0, 1)


def test_a_fetch_has_not_begun_before_the_server_did():
  server = joined()
  server.hello(2, value=2**40)
  assert server.server.members.known[2].fetches_since >= 0.0


def test_an_iteration_far_ahead_of_all_others_is_refused():
  controller = js.partial.Controller(3, 2)
  controller.ready(0, 7)
  with pytest.raises(ValueError, match="iteration 4611686018427387904 of worker 1"):
    controller.ready(1, 2**62)
  assert controller.ready(1, 10**6)


def test_a_rejected_worker_without_a_finite_model_is_dropped_in_time():
  """NOT_FINITE of the last worker is rejected, since nobody has a model, and its connection ends."""
  wire = Wire(workers=3)
  wire.say(Signal(WorkerMessage.BYE, 1))
  for worker in (0, 2, 1):
    (*_, answer) = wire.say(hello(worker, WorkerMessage.NOT_FINITE)) or [None]
  assert answer.content == {"reason": "nobody: no worker has a finite model"}
  wire.gone.add(1)
  wire.wait(12, 0, 2)
  assert wire.controller.alive == (0, 2)


@pytest.mark.parametrize(
  "piece",
  [
    Piece(PieceKind.MODEL, 7, 0, np.full(4, np.nan, np.float32)),
    Piece(PieceKind.MODEL, -7, 0, np.ones(4, np.float32)),
    Piece(PieceKind.MODEL, 2**62 + 1, 0, np.ones(4, np.float32)),
  ],
)
def test_a_model_of_a_donor_that_is_not_finite_or_of_no_iteration_is_not_taken(piece):
  replies = []
  quiet = lambda *_: None
  place = Membership(1, "tcp://a:1", 9.0, 0.0, quiet, quiet, replies.append, 9.0)
  protocol = GroupProtocol(place, np.zeros(4, np.float32))
  welcome = {"limit": 5.0, "donor": "tcp://b:1"}
  protocol.handle(Answer(ServerMessage.WELCOME, welcome), 0.0)
  protocol.handle(piece, 0.1)
  assert replies == []
  protocol.handle(Piece(PieceKind.MODEL, 7, 0, np.ones(4, np.float32)), 0.2)
  assert replies[0].iteration == 7


# What is said of it.


def test_what_lasts_is_said_rarely_with_how_often_and_anew_after_a_while(caplog):
  log = Warnings(logging.getLogger("jaxsparse"))
  for tenth in range(1000):
    log.say("a", f"number {tenth}", tenth / 10)
  assert [line.partition(" (")[0] for *_, line in caplog.record_tuples] == [
    f"number {tenth}" for tenth in (0, 100, 300, 700)
  ]
  assert caplog.messages[1].endswith("(99 more like this in 10 s)")
  log.say("a", "much later", 1000.0)
  log.say("b", "another", 1000.0)
  assert len(caplog.messages) == 6


def test_lines_of_a_server_are_true_and_few(caplog):
  """A worker is behind in each of 40 rounds; another one has the anchor of a round 5 that does not count."""
  server = joined(workers=4, present=(0, 1, 2))
  for _ in range(40):
    server.round(0, 1)
    server.say(WorkerMessage.READY, 2, 1, position=RoundPosition(1, 1))
    server.wait(0.5, 0, 1, 2)
  assert len(caplog.messages) < 20
  assert " 0 s" not in caplog.text
  position = server.position
  server.hello(3, RoundPosition(position.round, position.base + 5))
  server.say(
    WorkerMessage.READY, 3, 1, position=RoundPosition(position.round, position.base + 5)
  )
  server.wait(2, 0, 1, 2, 3)
  for words in map(str.split, caplog.messages):
    numbers = [
      words[index + 1] for index, word in enumerate(words[:-1]) if word == "round"
    ]
    assert "not" not in words or len(set(numbers)) == len(numbers)


# Mutants that had survived.


def test_a_worker_whose_result_differs_fetches_that_of_another_one():
  server = Server(3, 3)
  for worker in range(3):
    server.hello(worker)
  server.wait(6, 0, 1, 2)
  for worker in range(3):
    server.say(WorkerMessage.READY, worker, 1)
  number = server.server._quorum.under_way.number
  for worker, digest in ((0, 8), (1, 7), (2, 7)):
    server.say(WorkerMessage.DONE, worker, number, digest=digest)
  assert server.answers[b"0"].content["donor"].split()[0] in ("tcp://h:2", "tcp://h:3")


def test_a_worker_that_was_suspended_waits_for_what_it_has_not_read():
  quiet = lambda *_: None
  place = Membership(0, "tcp://h:1", 10.0, 0.0, quiet, quiet, quiet, 5.0)
  place.await_peer()
  place.tick(1.0)
  place.tick(101.0)
  assert place.peer_until == place.server_until == 106.0


def test_a_worker_without_a_quorum_waits_longest_at_the_first_server():
  """So workers meet there."""
  visits = [0.0]
  now = 0.0
  quiet = lambda *_: None
  place = Membership(0, "tcp://h:1", 10.0, 0.0, quiet, quiet, quiet, 5.0)
  exchange = types.SimpleNamespace(lineage=())
  switch = lambda: visits.append(now)
  protocol = RoundProtocol(place, exchange, 4, switch=switch, servers=2)
  sizes = {"limit": 5.0, "grace": 1.0, "sizes": [2, 3], "donor": None, "number": 0}
  last = {"round": 0, "base": 0, "digest": 0, "run": 1}
  while len(visits) < 6:
    now += 0.1
    if place.state == "joining":
      protocol.handle(Answer(ServerMessage.WELCOME, sizes | last), now)
    protocol.handle(Answer(ServerMessage.BEAT, {"alive": 1}), now)
    protocol.tick(now)
    place.state = "joined" if place.state == "fetching" else place.state
  first, second = np.diff(visits)[0::2], np.diff(visits)[1::2]
  assert first.min() > 1.5 * second.max()


def test_a_worker_whose_donor_never_answers_looks_for_others_at_the_next_server():
  """A server with too few workers for a round names a donor each time that it is asked."""
  now = 0.0
  switched = []
  quiet = lambda *_: None
  place = Membership(0, "tcp://h:1", 40.0, 0.0, quiet, quiet, quiet, 5.0)
  switch = lambda: switched.append(now)
  exchange = types.SimpleNamespace(lineage=())
  protocol = RoundProtocol(place, exchange, 4, switch=switch, servers=2)
  sizes = {"limit": 5.0, "grace": 1.0, "sizes": [3, 4], "number": 0}
  last = {"round": 9, "base": 5, "digest": 0, "run": 1, "donor": "tcp://h:2"}
  while not switched:
    now += 0.1
    if place.state == "joining":
      protocol.handle(Answer(ServerMessage.WELCOME, sizes | last), now)
    protocol.handle(Answer(ServerMessage.BEAT, {"alive": 2}), now)
    protocol.tick(now)
    assert now < 40
