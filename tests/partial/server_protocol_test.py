"""The server's protocol without sockets, in virtual time: what is accepted and rejected, and who is dropped."""

import contextlib
import functools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.partial.groups.server import GroupMember, GroupServer
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.membership import Members, Membership
from jaxsparse.partial.net.messages import (
  Rejected,
  ServerMessage,
  Signal,
  WorkerGroup,
  WorkerMessage,
)

ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9, 10)]
LIMIT, START = 5.0, 60.0
FIRST = 700  # servers at one address number their groups differently


def hello(worker, kind=WorkerMessage.HELLO, params=0.0):
  return Signal(kind, worker, 0, ADDRESSES[worker], alike=Alike.of(params))


def welcome(donor=None):
  return [
    (
      ServerMessage.WELCOME,
      {"limit": LIMIT, "donor": None if donor is None else ADDRESSES[donor]},
    )
  ]


class Wire:
  """A `GroupServer`, connections to it, and what it has sent by each; of a worker it is the worker's number."""

  def __init__(self, workers=4, size=2, joined=None):
    self.controller, self.now = js.partial.Controller(workers, size), 0.0
    self.sent, self.gone = {}, set()
    expected = dict.fromkeys(self.controller.alive, START)
    self.protocol = GroupServer(
      self.controller,
      Members(GroupMember, self.send, LIMIT, 0.0, expected),
      first=FIRST,
    )
    for worker in range(workers) if joined is None else joined:
      assert self.say(hello(worker)) == welcome()

  def send(self, connection, frame):
    if connection in self.gone:
      return False
    self.sent.setdefault(connection, []).append(messages.parse_answer(frame))
    return True

  def say(self, *frames, by=None):
    """What comes by a connection after a signal, and has come by it before; heartbeats are left out."""
    by = frames[0].worker if by is None else by
    self.protocol.receive(
      by, [f.pack() if isinstance(f, Signal) else f for f in frames], self.now
    )
    return self.heard(by)

  def heard(self, connection):
    return [
      answer
      for answer in self.sent.pop(connection, [])
      if answer[0] != ServerMessage.BEAT
    ]

  def wait(self, seconds, *beating):
    """Time passes; workers send a heartbeat each 0.1 s."""
    for _ in range(round(10 * seconds)):
      self.now += 0.1
      for worker in beating:
        self.say(Signal(WorkerMessage.BEAT, worker))
      self.protocol.tick(self.now)


@pytest.fixture
def wire():
  return Wire()


@pytest.fixture
def grouped(wire):
  """Workers 0 and 1 average."""
  assert wire.say(Signal(WorkerMessage.READY, 0, 1)) == []
  (answer,) = wire.say(Signal(WorkerMessage.READY, 1, 1))
  assert wire.heard(0) == [answer]
  return wire


def reasons(answers):
  assert [kind for kind, _ in answers] == [ServerMessage.REJECTED] * len(answers)
  return [content["reason"] for _, content in answers]


def test_addresses_are_told_once_to_each_connection_that_takes_them(wire):
  """Again to one that has not taken the message, and to a worker that has joined again, whose address is told anew."""
  told = lambda worker: [
    content["addresses"]
    for kind, content in wire.heard(worker)
    if kind == ServerMessage.GROUP
  ]

  def group(*workers, iteration):
    for worker in workers:
      wire.protocol.receive(
        worker, [Signal(WorkerMessage.READY, worker, iteration).pack()], wire.now
      )
    return [told(worker) for worker in workers]

  everybody = dict(enumerate(ADDRESSES))
  assert group(0, 1, iteration=1) == [[everybody]] * 2
  wire.gone = {2}
  assert group(1, 2, iteration=2) == [[{}], []]
  wire.gone = set()
  assert group(2, 3, iteration=3) == [[everybody]] * 2
  wire.say(hello(0))
  assert group(0, 3, iteration=4) == [[everybody], [{0: ADDRESSES[0]}]]


def test_workers_forget_the_addresses_of_those_that_have_left(wire):
  """Each is told once; one that has joined again has an address again."""
  place = Membership(1, ADDRESSES[1], 1.0, 0.0, print, print, print, limit=LIMIT)

  def group(*workers, iteration):
    for worker in workers:
      wire.protocol.receive(
        worker, [Signal(WorkerMessage.READY, worker, iteration).pack()], wire.now
      )
    addresses = wire.heard(1)[-1].content["addresses"]
    place.learn(addresses)
    return addresses, place.addresses.keys()

  assert group(0, 1, iteration=1)[1] == {0, 1, 2, 3}
  wire.say(Signal(WorkerMessage.BYE, 3))
  assert group(0, 1, iteration=2) == ({3: None}, {0, 1, 2})
  assert group(1, 2, iteration=3) == ({}, {0, 1, 2})
  wire.say(hello(3))
  assert group(0, 1, iteration=4) == ({3: ADDRESSES[3]}, {0, 1, 2, 3})


def test_a_message_to_a_group_of_many_is_short():
  """Of 9,999 workers with equal weights, once they know each other's addresses."""
  members = tuple(worker for worker in range(10_000) if worker != 5000)
  group = WorkerGroup(members, (1 / 9999,) * 9999, 7, number=2**61)
  frame = messages.pack_answer(ServerMessage.GROUP, **group._asdict(), addresses={})
  assert WorkerGroup.parse(messages.parse_answer(frame).content) == group
  assert len(frame) < 200


def test_groups_go_to_their_members_and_nobody_else(wire):
  assert wire.say(Signal(WorkerMessage.READY, 3, 5)) == []
  (answer,) = wire.say(Signal(WorkerMessage.READY, 1, 7))
  expected = {
    "members": (1, 3),
    "weights": (0.5, 0.5),
    "iteration": 7,
    "initial": 0.0,
    "number": FIRST + 1,
  }
  assert answer == (
    ServerMessage.GROUP,
    {
      **expected,
      "links": [],
      "leaving": [],
      "addresses": dict(enumerate(ADDRESSES[:4])),
    },
  )
  assert wire.heard(3) == [answer]
  assert wire.heard(0) == wire.heard(2) == []
  assert wire.protocol.members.rejected == 0
  assert len(Signal(WorkerMessage.READY, 3, 5).pack()) == 55


MALFORMED = [
  (b"\x02\x00",),
  (Signal(WorkerMessage.READY, 1, 3).pack(), b""),
  (struct.pack("!BHq", 9, 0, 0),),
  (Signal(WorkerMessage.READY, 1, 3).pack() + b"x",),
  (Signal(WorkerMessage.HELLO, 0).pack() + b"\xff",),
  (hello(0).pack() + b"]",),
  (hello(0)._replace(alike=Alike((1,), ())),),
  (hello(0)._replace(alike=Alike("no lists", "but strings")),),
  *(
    (Signal(WorkerMessage.HELLO, 0, 0, f"tcp://{end}"),)
    for end in ("", "127.0.0.1:*", "127.0.0.1:0", "h:65536", "a b:1")
  ),
  (Signal(WorkerMessage.NOT_FINITE, 0, 0, "ipc://x"),),
]


@pytest.mark.parametrize(
  ("frames", "reason"),
  [
    *((frames, "malformed: [") for frames in MALFORMED),
    ((hello(0)._replace(worker=4),), "unknown: worker 4, there are 0 … 3"),
    (
      (hello(0, params={"b": 0.0}),),
      "unlike: worker 0 has params['b'] of float32[], the others have params of",
    ),
    ((hello(1),), "duplicate: worker 1 is ready already, with iteration 4"),
    (
      (hello(2),),
      "duplicate: worker 2 has joined; if it died, it is dropped after 5 s",
    ),
    ((Signal(WorkerMessage.READY, 1, -1),), "malformed: value=-1 of worker 1, choose"),
    (
      (Signal(WorkerMessage.READY, 1, 4),),
      "duplicate: worker 1 is ready already, with iteration 4",
    ),
    (
      (Signal(WorkerMessage.READY, 0, 4),),
      "absent: worker 0 has not joined by this connection, it has to send HELLO",
    ),
    (
      (Signal(WorkerMessage.READY, 2, 4),),
      "absent: worker 2 has not joined by this connection",
    ),
    (
      (Signal(WorkerMessage.FAILED, 1, FIRST + 1),),
      "stale: worker 1 is not in group 1",
    ),
  ],
)
def test_what_is_rejected_changes_nothing(frames, reason):
  wire = Wire(joined=(1, 2))
  wire.say(Signal(WorkerMessage.READY, 1, 4))
  (found,) = reasons(wire.say(*frames, by=1))
  assert found.startswith(reason)
  assert wire.protocol.members.rejected == 1
  assert wire.say(Signal(WorkerMessage.READY, 2, 6))[0][1]["members"] == (1, 2)


@given(st.lists(st.binary(max_size=20), max_size=3))
def test_any_bytes_are_parsed_or_rejected(frames):
  with contextlib.suppress(Rejected):
    assert [messages.parse_signal(frames).pack()] == frames


def test_a_silent_worker_is_dropped_after_the_limit_and_its_group_is_told(grouped):
  grouped.wait(LIMIT - 0.1, 0, 2, 3)
  assert 1 in grouped.controller.alive
  grouped.wait(0.3)
  assert grouped.controller.alive == (0, 2, 3)
  assert grouped.heard(0) == [(ServerMessage.ABORT, {"number": FIRST + 1, "worker": 1})]
  assert grouped.heard(2) == grouped.heard(3) == []
  assert reasons(grouped.say(Signal(WorkerMessage.READY, 1, 2)))[0].startswith(
    "absent: worker 1"
  )
  assert grouped.say(hello(1)) == welcome(donor=0)  # it returns, and is named a donor


def test_heartbeats_are_sent_to_all(wire):
  wire.sent.clear()
  wire.wait(0.3)
  assert wire.sent == {worker: [(ServerMessage.BEAT, {})] for worker in range(4)}


@pytest.mark.parametrize(
  ("joined", "pause", "patience"), [((), 0, START), (range(4), 10 * LIMIT, LIMIT)]
)
def test_workers_that_never_come_are_dropped_and_those_that_are_silent_after_a_pause(
  joined, pause, patience
):
  """A server that was suspended drops nobody before that."""
  wire = Wire(joined=joined)
  wire.now += pause
  wire.protocol.tick(wire.now)
  wire.wait(patience - 0.1)
  assert wire.controller.alive == (0, 1, 2, 3)
  wire.wait(0.3)
  assert wire.controller.alive == ()


@pytest.mark.parametrize("settled", [True, False])
def test_leaving_aborts_the_group_exactly_if_pieces_are_owed(grouped, settled):
  """The pieces of a worker that has sent BYE may still be in transit to slower members of its last group."""
  grouped.say(Signal(WorkerMessage.BYE, 0, FIRST + settled))
  assert grouped.heard(1) == (
    [] if settled else [(ServerMessage.ABORT, {"number": FIRST + 1, "worker": 0})]
  )
  grouped.say(Signal(WorkerMessage.READY, 1, 2))
  assert grouped.say(Signal(WorkerMessage.READY, 3, 2))[0][1]["members"] == (1, 3)


def test_an_absent_worker_holds_the_others_up_for_as_long_as_their_step_took():
  """Worker 2 computes for long, and its thread sends heartbeats; 0 and 1 are ready 0.3 s after each average."""
  wire, longest, iteration = Wire(workers=3), 0.0, 0
  while wire.now < 60:
    iteration += 1
    wire.wait(0.3, 0, 1, 2)
    for worker in (0, 1):
      wire.say(Signal(WorkerMessage.READY, worker, iteration))
    began = wire.now
    while wire.controller.waiting:
      wire.wait(0.1, 0, 1, 2)
      assert wire.now - began < 1
    longest = max(longest, wire.now - began)
  assert 0.25 < longest < 0.45
  assert iteration > 0.95 * 60 / 0.3
  wire.say(Signal(WorkerMessage.READY, 2, 1))
  wire.wait(0.3, 0, 1, 2)
  wire.heard(2)
  (answer,) = wire.say(Signal(WorkerMessage.READY, 0, iteration + 1))
  assert answer[1]["members"] == (0, 2)


def test_a_failed_average_aborts_the_group_and_the_worker_may_be_ready_again(grouped):
  assert grouped.say(Signal(WorkerMessage.FAILED, 0, FIRST + 1)) == []
  assert grouped.heard(1) == [(ServerMessage.ABORT, {"number": FIRST + 1, "worker": 0})]
  assert grouped.say(Signal(WorkerMessage.READY, 0, 1)) == []
  assert reasons(grouped.say(Signal(WorkerMessage.FAILED, 1, FIRST)))[0].startswith(
    "stale: worker 1 is not in group 0"
  )
  assert grouped.say(Signal(WorkerMessage.FAILED, 1, FIRST + 1)) == []
  assert grouped.say(Signal(WorkerMessage.READY, 1, 1))[0][1]["number"] == FIRST + 2


def test_a_repeated_hello_names_the_next_donor_the_most_trained_first():
  wire = Wire(joined=(0, 1))
  wire.say(Signal(WorkerMessage.READY, 0, 7))
  wire.say(Signal(WorkerMessage.SYNCHRONIZE, 1, 8))
  assert [wire.say(hello(2)) for _ in range(3)] == [
    welcome(donor) for donor in (1, 0, 1)
  ]


def test_a_worker_without_a_finite_model_is_no_donor_until_it_is_ready_again():
  """It is welcome once there is a donor, of which it has a finite model then; and rejected if all others ask too."""
  wire, asks = Wire(workers=3), functools.partial(hello, kind=WorkerMessage.NOT_FINITE)
  assert wire.say(asks(0)) == wire.say(asks(1)) == []  # worker 2 has not been ready yet
  assert reasons(wire.say(asks(2))) == ["nobody: no worker has a finite model"]
  wire.say(Signal(WorkerMessage.READY, 2, 7))
  assert wire.say(asks(0)) == welcome(donor=2)
  wire.say(Signal(WorkerMessage.BYE, 2))
  assert wire.say(asks(1)) == []
  assert wire.say(Signal(WorkerMessage.READY, 0, 8)) == []
  assert wire.say(asks(1)) == welcome(donor=0)
  assert wire.say(Signal(WorkerMessage.READY, 1, 8))[0][1]["members"] == (0, 1)
  assert wire.say(asks(0))[-1:] == welcome(donor=1)
  assert wire.say(asks(1)) == []


@pytest.mark.parametrize("end", ["disconnected", "silent"])
def test_the_number_of_a_dead_worker_is_free_again(wire, end):
  """Its successor retries until the server drops the dead one; earlier rivals are rejected for good."""
  for reason in ("duplicate: worker 0", "taken: a living worker has the number 0"):
    for rival in ("rival", "other"):
      assert reasons(wire.say(hello(0), by=rival))[0].startswith(reason)
    wire.wait(0.1, 0)
  if end == "disconnected":
    wire.say(hello(0), by="successor")  # before the worker has died
    wire.wait(0.1, 0)
    wire.gone.add(0)
  died = wire.now
  while (answers := wire.say(hello(0), by="successor")) != welcome():
    assert reasons(answers)[0].startswith("duplicate: worker 0")
    wire.wait(0.2, 1, 2, 3)
  assert wire.now - died < (LIMIT / 2 if end == "disconnected" else LIMIT + 0.5)


@pytest.mark.parametrize("lineage", [(-1,), (1 << 62,), ("1",), (True, None)])
def test_a_lineage_of_anything_but_ids_is_malformed(lineage):
  signal = messages.Signal(messages.WorkerMessage.HELLO, 0, address="tcp://a:1")
  frame = signal._replace(alike=signal.alike._replace(lineage=lineage)).pack()
  with pytest.raises(messages.Rejected, match="malformed"):
    messages.parse_signal([frame])
