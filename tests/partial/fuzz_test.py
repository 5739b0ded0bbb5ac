"""Any bytes to any party, by the connection of a member: nothing but a refusal, and a good peer is served afterwards.

Parties: the servers of both products, workers of both that have joined or fetch, links,
the lead and another part of a worker. Messages: valid ones, truncated, with a flipped
byte, or with a field replaced by one of another type, size or depth; and random bytes.
"""

import json
import struct

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.partial.groups.protocol import GroupProtocol, GroupRequest, Model
from jaxsparse.partial.groups.server import GroupMember, GroupServer
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.endpoint import Endpoint
from jaxsparse.partial.net.membership import Member, Members, Membership
from jaxsparse.partial.net.messages import (
  Piece,
  PieceKind,
  Rejected,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.net.transfers import Assembly, Transfers
from jaxsparse.partial.rounds.exchanger import Exchanger
from jaxsparse.partial.rounds.outer_step import OuterStep
from jaxsparse.partial.rounds.parts import LeadProtocol, PartLost, PartProtocol
from jaxsparse.partial.rounds.protocol import RoundProtocol, RoundRequest
from jaxsparse.partial.rounds.run import Run
from jaxsparse.partial.rounds.server import RoundMember, RoundServer

LIMIT, TIMEOUT = 5.0, 20.0
START = np.zeros(4, np.float32)
ALIKE = Alike.of(START)
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
SERVER, PEER, DONOR = "server", "peer", "donor"  # where a message comes from
OUTER = OuterStep(
  lambda comm: optax.chain(js.make_transform("topka", comm, k=1), optax.sgd(1.0))
)

# What messages are made of.

DEEP = ["[" * 100_000, '{"a":' * 50_000, "[" * 9 + "]" * 9, '["' + "\\" * 99_999]
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(
  [0, 1, 2, 7, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
)
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | NUMBERS
  | st.floats()
  | st.text(max_size=5)
  | st.sampled_from([10**30, -(10**400), "tcp://h:1", "absent: x", "5", "again"]),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
  ),
  max_leaves=6,
)
TEXTS = (
  st.sampled_from([*DEEP, f"{ADDRESSES[1]}\n{ALIKE}", ADDRESSES[1] + "\n" + DEEP[0]])
  | st.text(max_size=20)
  | VALUES.map(lambda value: f"{ADDRESSES[1]}\n{json.dumps([value, [], value, []])}")
)


@st.composite
def broken(draw, frames):
  """A message as it is, or truncated, longer, with a flipped byte, or with other frames."""
  content = [bytes(frame) for frame in draw(frames)]
  how = draw(st.sampled_from(["as it is"] * 4 + ["cut", "flip", "longer", "frames"]))
  first = content[0] if content else b""
  at = draw(st.integers(0, max(0, len(first) - 1)))
  if how == "cut":
    content[:1] = [first[:at]]
  elif how == "flip" and first:
    content[:1] = [first[:at] + bytes([first[at] ^ 255]) + first[at + 1 :]]
  elif how == "longer":
    content[:1] = [first + draw(st.binary(min_size=1, max_size=9))]
  elif how == "frames":
    content += draw(st.lists(st.binary(max_size=8), max_size=2))
  return content or [b""]


@st.composite
def signals(draw):
  kind = draw(st.sampled_from([*WorkerMessage]) | st.integers(0, 255))
  *numbers, delivers = draw(st.lists(NUMBERS, min_size=6, max_size=6))
  worker = draw(st.sampled_from([0, 1, 2, 3, 65535]))
  missing = draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 2))
  fixed = struct.pack("!BHqqqqqiq", kind, worker, *numbers, missing, delivers)
  has_text = kind in (WorkerMessage.HELLO, WorkerMessage.NOT_FINITE)
  return [fixed + (draw(TEXTS).encode() if has_text or draw(st.booleans()) else b"")]


ROUND = {"round": 3, "base": 5, "digest": 9, "run": 1}
CONTENT = {
  "limit": LIMIT,
  "grace": 1.0,
  "sizes": [1, 3],
  "donor": ADDRESSES[1],
  "number": 6,
  "members": [[0, 2]],
  "weights": [[0.5, 2]],
  "iteration": 3,
  "initial": 0.0,
  "links": [1],
  "leaving": [],
  "addresses": {"0": ADDRESSES[0], "1": ADDRESSES[1]},
  "alive": 2,
  "worker": 1,
  "reason": "duplicate: x",
  "next": "later",
  **ROUND,
}


@st.composite
def answers(draw):
  kind = draw(st.sampled_from([*ServerMessage]) | st.integers(0, 255))
  content = dict(CONTENT)
  for name in draw(st.lists(st.sampled_from([*content]), max_size=3)):
    content[name] = draw(VALUES)
  for name in draw(st.lists(st.sampled_from([*content]), max_size=1)):
    content.pop(name)
  text = draw(st.just(json.dumps(content)) | st.sampled_from(DEEP) | st.text())
  return [bytes([kind]) + text.encode()]


def model_of(numbers):
  header = np.array(numbers, np.int64).tobytes()
  content = len(header).to_bytes(4) + header + START.tobytes()
  return content + bytes(-len(content) % 4)


@st.composite
def contents(draw):
  """Values of a piece: any, or the header of an anchor with anything in it."""
  good = OUTER.pack(OUTER.start(START))
  size = int.from_bytes(good[:4])
  numbers = np.frombuffer(good[4 : 4 + size], np.int64).tolist()
  for index in draw(st.lists(st.integers(0, len(numbers) - 1), max_size=2)):
    numbers[index] = draw(NUMBERS)
  content = draw(
    st.binary(max_size=24)
    | st.just(model_of(numbers))
    | st.just(good)
    | links_of(draw(st.lists(st.integers(0, 3) | NUMBERS, max_size=9)))
    | st.sampled_from([len(text).to_bytes(4) + text.encode() for text in DEEP])
    | st.just(struct.pack("4f", *[float("nan")] * 4))
    | st.just((2**32 - 1).to_bytes(4))
  )
  digest = OUTER.digest(OUTER.start(START))
  words = draw(st.just(len(content) // 4) | NUMBERS)
  prefix = [digest, words, draw(st.integers(0, 1)), draw(st.integers(0, 2))]
  return draw(st.just(np.array(prefix, np.int64).tobytes()) | st.just(b"")) + content


@st.composite
def links_of(draw, numbers):
  """Links of these integers, from the first round on or another one."""
  good = [0, 0, [[5, 1, [0], 2], [6, 1, [], 0]]]
  start = draw(st.just(good[:2]) | st.just(numbers[:2]))
  links = draw(st.just(good[2]) | st.just([[5, 1, numbers, 2]]) | st.just([numbers]))
  text = draw(st.just(json.dumps([*start, links])) | st.sampled_from(DEEP))
  header = text.encode() + b" " * (-len(text.encode()) % 4)
  count = draw(st.just(len(header) // 4) | st.integers(0, 2**32 - 1))
  first = np.array([0, count], np.uint32).tobytes()
  return first + header + draw(st.binary(max_size=12))


@st.composite
def pieces(draw):
  kind = draw(st.sampled_from([*PieceKind]) | st.integers(0, 255))
  number = draw(NUMBERS)
  sender = draw(st.sampled_from([0, 1, 2, 65535]))
  tag = draw(st.sampled_from([0, 0, 1, 5, 2**32 - 1]))
  return [struct.pack("!BqHI", kind, number, sender, tag), draw(contents())]


SIGNALS = broken(signals()) | st.lists(st.binary(max_size=60), max_size=3)
TO_WORKERS = (
  st.tuples(st.just(SERVER), broken(answers()))
  | st.tuples(st.sampled_from([PEER, DONOR]), broken(pieces()))
  | st.tuples(st.just(PEER), SIGNALS)
)

# Who gets them.


class Server:
  """A server with two members; what comes says it is of the first one."""

  messages = SIGNALS

  def __init__(self):
    self.now = 0.0
    self.sent = []
    self.server = self.make()
    for worker in range(2):
      self.tell(Signal(WorkerMessage.HELLO, worker, 0, ADDRESSES[worker], alike=ALIKE))

  def send(self, connection, frame):
    self.sent.append((connection, messages.parse_answer(frame)))
    return True

  def tell(self, signal):
    self.server.receive(b"%d" % signal.worker, [signal.pack()], self.now)

  def hear(self, frames):
    self.now += 0.1
    self.server.receive(b"0", frames, self.now)
    self.tell(Signal(WorkerMessage.BEAT, 1))
    self.server.tick(self.now)

  def check(self):
    """The other member goes on, and a newcomer is welcome."""
    self.now += 60.0
    self.server.tick(self.now)
    self.sent.clear()
    alike = ALIKE._replace(run=getattr(self.server, "_run", 0))
    self.tell(Signal(WorkerMessage.HELLO, 2, 0, ADDRESSES[2], alike=alike))
    assert (b"2", ServerMessage.WELCOME) in [(to, kind) for to, (kind, _) in self.sent]


class ServerOfRounds(Server):
  def make(self):
    members = Members(RoundMember, self.send, LIMIT, 0.0)
    return RoundServer(js.partial.Quorum(3, quorum=1, grace=1.0), members)


class ServerOfGroups(Server):
  def make(self):
    members = Members(GroupMember, self.send, LIMIT, 0.0)
    return GroupServer(js.partial.Controller(3, 2), members)


class Loop(Endpoint):
  """An endpoint without sockets and threads."""

  def __init__(self):
    self.heard = []
    self._transfers = Transfers()
    self._assembly = Assembly(1000)

  def _send_back(self, peer, piece):
    self.heard.append(piece)


class Waiting(Exchanger):
  """Exchanges of a worker that are begun and never end."""

  def begin(self, group):
    self._run = Run(group, self._worker, self.post, room=100)
    return self._run


class Worker:
  """A worker of rounds that has joined, or fetches the anchor of a donor."""

  messages = TO_WORKERS
  is_link = fetches = False

  def __init__(self):
    self.now = 0.0
    self.loop = Loop()
    self.told = []
    quiet = lambda *_: None
    self.place = Membership(
      0, ADDRESSES[0], TIMEOUT, 0.0, self.told.append, quiet, quiet, TIMEOUT
    )
    self.exchanger = Waiting(OUTER, OUTER.start(START), 0, self.is_link)
    self.exchanger.post = quiet
    self.protocol = self.loop._protocol = self.make()
    self.loop._make_model = lambda _: Piece(PieceKind.MODEL, 0, 0, START)
    self.answer(ServerMessage.WELCOME, **self.welcome())
    if not self.fetches:
      self.ask()

  def make(self):
    return RoundProtocol(self.place, self.exchanger, START.size, lambda: None)

  def welcome(self, donor=None):
    donor = ADDRESSES[1] if self.fetches else donor
    names = ("limit", "grace", "sizes", *ROUND)
    return {name: CONTENT[name] for name in names} | {"donor": donor, "number": 0}

  def ask(self):
    self.protocol.handle(RoundRequest(WorkerMessage.READY, 1), self.now)

  def answer(self, kind, **content):
    self.loop._from_server([messages.pack_answer(kind, **content)])

  def hear(self, message):
    origin, frames = message
    self.now += 0.1
    if origin == SERVER:
      self.loop._from_server(frames)
    elif origin == DONOR:
      self.loop._from_peer(ADDRESSES[1], frames)
    else:
      self.loop._from_worker([b"c", *frames])
    self.protocol.tick(self.now)

  def check(self):
    """A worker that asks for the model gets it."""
    if self.place.state != "ended":
      self.loop._from_worker([b"c", *Piece(PieceKind.FETCH, 0, 1).pack()])
      assert b"c" in self.loop._transfers._waiting
      self.answer(ServerMessage.WELCOME, **self.welcome())
      self.protocol.tick(self.now + 1.0)


class Newcomer(Worker):
  fetches = True


class Link(Worker):
  is_link = True


class Part(Worker):
  """The second process of a worker, whose server is the lead."""

  def make(self):
    return PartProtocol(self.place, self.exchanger, START.size, lambda: None)

  def hear(self, message):
    try:
      super().hear(message)
    except PartLost:  # as its lead says
      self.place.state = "ended"


class Lead(Worker):
  """The first process of a worker; members reach it by the address for pieces."""

  def make(self):
    self.others = Members(Member, lambda *_: True, LIMIT, 0.0)
    return LeadProtocol(
      self.place,
      self.exchanger,
      START.size,
      lambda: None,
      others=self.others,
      addresses=ADDRESSES[:2],
    )

  def hear(self, message):
    origin, frames = message
    if origin == PEER and not messages.parse_piece(frames):
      self.protocol.hear_part(b"c", frames, self.now)
    else:
      super().hear(message)


class GroupWorker(Worker):
  """A worker of partial reduce."""

  def make(self):
    return GroupProtocol(self.place, START)

  def ask(self):
    self.protocol.handle(GroupRequest(WorkerMessage.READY, Model(START, 1)), self.now)

  def welcome(self):
    return {"limit": LIMIT, "donor": ADDRESSES[1] if self.fetches else None}


class GroupNewcomer(GroupWorker):
  fetches = True


PARTIES = [
  *(ServerOfRounds, ServerOfGroups, Worker, Newcomer, Link, Part, Lead),
  *(GroupWorker, GroupNewcomer),
]


def fuzz(party, data):
  subject = party()
  for message in data.draw(st.lists(party.messages, min_size=1, max_size=6)):
    subject.hear(message)
  subject.check()


each_party = pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.__name__)


@each_party
@settings(max_examples=15)
@given(st.data())
def test_a_few_messages_of_any_kind_are_refused(party, data):
  fuzz(party, data)


@pytest.mark.long
@each_party
@settings(max_examples=400)
@given(st.data())
def test_messages_of_any_kind_are_refused(party, data):
  fuzz(party, data)


@pytest.mark.parametrize("field", ["limit", "grace", "initial"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_no_float_holds_is_refused(field, sign):
  text = json.dumps(CONTENT | {field: sign * 10**400})
  frame = bytes([ServerMessage.WELCOME]) + text.encode()
  with pytest.raises(Rejected, match=f"is no answer: {field}="):
    messages.parse_answer(frame)


@each_party
@pytest.mark.parametrize("text", DEEP)
def test_deep_json_ends_nobody(party, text):
  subject = party()
  hello = Signal(WorkerMessage.HELLO, 0, address=ADDRESSES[1]).pack().partition(b"\n")
  position = RoundPosition(3, 5)
  signal = [hello[0] + b"\n" + text.encode()]
  if isinstance(subject, Server):
    subject.hear(signal)
    subject.hear([Signal(WorkerMessage.BEAT, 0, position=position).pack()])
  else:
    header = len(text).to_bytes(4) + text.encode()
    values = np.frombuffer(header + bytes(-len(header) % 4), np.float32)
    for kind in PieceKind:
      subject.hear((DONOR, Piece(kind, 0, 1, values).pack()))
    subject.hear((PEER, signal))
    subject.hear((SERVER, [bytes([ServerMessage.WELCOME]) + text.encode()]))
  subject.check()
