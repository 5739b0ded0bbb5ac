"""The protocol of one worker: every transition, lost peers, duplicate, stale and early messages, and any order."""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal
from jaxsparse.partial.worker_protocol import Model, Request, Unreachable, WorkerProtocol

ME, LIMIT, TIMEOUT, RECONNECT = 1, 5.0, 20.0, 7.0
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
TICK = None

# What the protocol does; models and pieces as lists.
Send = collections.namedtuple("Send", "address piece")
Reply = collections.namedtuple("Reply", "answer")
ControllerSilent = collections.namedtuple("ControllerSilent", "awaited seconds")


def model(value, iteration):
  return Model(np.full(4, value, np.float32), iteration)


def signal(says, value=0):
  return Signal(says, ME, value, ADDRESSES[ME] if says == Says.HELLO else "")


def reply(value, iteration):
  return Reply(([float(value)] * 4, iteration))


FETCH = Send(ADDRESSES[0], Piece(Kind.FETCH, 0, ME, []))
FETCHED = Piece(Kind.MODEL, 9, 0, np.full(4, 4, np.float32))
AGAIN = [signal(Says.FAILED, 5), signal(Says.READY, 3)]
LOST = ControllerSilent("sign of life", LIMIT + RECONNECT)


class Subject:
  """A `WorkerProtocol`, and a clock; while `broken`, connections to other workers break when something is sent."""

  def __init__(self):
    self.now, self.actions, self.broken = 100.0, [], False
    outlets = {"tell": lambda signal: self.actions.append(signal), "send": self.send, "reply": self.reply}
    start = np.zeros(4, np.float32)
    self.protocol = WorkerProtocol(ME, start, ADDRESSES[ME], TIMEOUT, RECONNECT, self.now, **outlets)

  def send(self, address, piece):
    self.actions.append(Send(address, piece._replace(values=piece.values.tolist())))
    if self.broken:
      self.protocol.handle(Unreachable(address, refused=False), self.now)

  def reply(self, answer):
    found = (answer.vector.tolist(), answer.iteration) if isinstance(answer, Model) else (type(answer), str(answer))
    self.actions.append(Reply(found))

  def __call__(self, event, *content, **fields):
    """What the protocol does."""
    if isinstance(event, Answer):
      event = ServerMessage(event, fields)
    elif isinstance(event, Says):
      event = Request(event, *content)
    self.actions = []
    ended = self.protocol.state == "ended"
    if event is TICK:
      self.protocol.tick(self.now)
    else:
      self.protocol.handle(event, self.now)
    if self.protocol.lost[0] and not ended:
      self.actions.append(ControllerSilent(*self.protocol.lost))
    return self.actions

  def wait(self, seconds, step=0.1):
    """Ticks; the actions but heartbeats."""
    actions = []
    for _ in range(round(seconds / step)):
      self.now += step
      actions += [action for action in self(TICK) if action != signal(Says.BEAT)]
    return actions

  def alive(self, seconds):
    """Ticks while the server sends heartbeats."""
    return [action for _ in range(round(seconds)) for action in self(Answer.BEAT) + self.wait(1)]

  def group(self, number, members=(0, 1), weights=(0.5, 0.5), iteration=7):
    addresses = [ADDRESSES[member] for member in members]
    content = {"members": list(members), "weights": list(weights), "iteration": iteration, "initial": 0.0}
    return self(Answer.GROUP, **content, number=number, addresses=addresses)

  def piece(self, kind, number, sender, *entries):
    return self(Piece(kind, number, sender, np.array(entries, np.float32)))

  def part(self, number, sender, *entries):
    return self.piece(Kind.PART, number, sender, *entries)

  def mean(self, number, sender, *entries):
    return self.piece(Kind.MEAN, number, sender, *entries)


def kinds(actions):
  return [action.piece.kind for action in actions]


@pytest.fixture
def new():
  return Subject()


@pytest.fixture
def ready(new):
  """Joined, and READY with a model of ones at iteration 3."""
  assert new(Answer.WELCOME, limit=LIMIT) == [reply(0, 0)]
  assert new(Says.READY, model(1, 3)) == [signal(Says.READY, 3)]
  return new


@pytest.fixture
def averaging(ready):
  """In group 5, with worker 0; nothing has arrived."""
  assert ready.group(5) == [Send(ADDRESSES[0], Piece(Kind.PART, 5, ME, [1, 1]))]
  return ready


@pytest.fixture
def computing(averaging):
  """Between two requests, with a model of twos at iteration 7."""
  averaging.part(5, 0, 3, 3)
  assert averaging.mean(5, 0, 2, 2) == [reply(2, 7)]
  return averaging


def test_welcome_gives_the_initial_model_or_that_of_a_donor(new):
  assert new(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0]) == [FETCH]
  assert new(Answer.WELCOME, limit=LIMIT) == []  # the answer to a repeated HELLO
  assert new(FETCHED) == [reply(4, 9)]
  assert new(FETCHED._replace(number=10)) == []
  assert new(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0]) == []
  assert new.protocol.model.iteration == 9


def test_a_group_averages(averaging):
  assert averaging.part(5, 0, 3, 5) == [Send(ADDRESSES[0], Piece(Kind.MEAN, 5, ME, [2, 3]))]
  assert averaging.mean(5, 0, 6, 7) == [Reply(([6, 7, 2, 3], 7))]
  assert averaging(Says.BYE) == [signal(Says.BYE, 5)]


@pytest.mark.parametrize("kind", [Kind.PART, Kind.MEAN])
def test_a_duplicate_or_foreign_piece_changes_nothing(averaging, kind):
  assert averaging.piece(kind, 5, ME, 9, 9) == []
  averaging.part(5, 0, 3, 5)
  for sender, entries in ((0, (9, 9)), (2, (9, 9)), (ME, (9, 9)), (0, (9,)), (0, ())):
    if (kind, sender, len(entries)) != (Kind.MEAN, 0, 2):  # the one that is awaited
      assert averaging.piece(kind, 5, sender, *entries) == []
  for number in (4, 6):
    assert averaging.piece(kind, number, 0, 9, 9) == []
  assert averaging.mean(5, 0, 6, 7) == [Reply(([6, 7, 2, 3], 7))]


def test_a_part_is_kept_only_for_the_group_that_is_awaited(computing):
  """Where a request is open, for the next group of this server; no mean can be early."""
  computing.part(6, 0, 3, 5)  # no request is open
  computing(Says.READY, model(1, 8))
  computing.part(7, 0, 3, 5)  # of another group than the next
  assert kinds(computing.group(6)) == [Kind.PART]
  assert computing.protocol._early.take(7) == []
  computing.part(6, 0, 3, 3)
  assert computing.mean(6, 0, 2, 2) == [reply(2, 7)]
  computing(Says.READY, model(1, 9))
  computing.part(7, 0, 3, 5)
  computing.part(6, 0, 9, 9)  # of a group that is settled: does not replace that of the next
  assert kinds(computing.group(7)) == [Kind.PART, Kind.MEAN]
  computing.mean(7, 0, 2, 2)
  computing(Says.READY, model(1, 10))
  computing.mean(8, 0, 9, 9)
  computing.part(8, 0, 3, 5)
  computing(Answer.REJECTED, reason="absent: worker 1 has not joined")
  assert computing(Answer.WELCOME, limit=LIMIT) == [signal(Says.READY, 10)]
  assert kinds(computing.group(8)) == [Kind.PART]  # without what came before the server was joined again


def test_an_abort_counts_only_while_the_member_is_needed(averaging):
  assert averaging(Answer.ABORT, number=4, worker=0) == []
  assert averaging(Answer.ABORT, number=5, worker=2) == []
  assert averaging(Answer.ABORT, number=5, worker=0) == AGAIN
  assert averaging(Answer.ABORT, number=5, worker=0) == []
  assert averaging.part(5, 0, 3, 5) == averaging.mean(5, 0, 6, 7) == []  # late
  assert averaging.group(6) == [Send(ADDRESSES[0], Piece(Kind.PART, 6, ME, [1, 1]))]  # with the model as it was


def test_an_abort_after_the_last_piece_of_a_member_does_not_count(ready):
  ready.group(5, members=(0, 1, 2), weights=(0.25, 0.25, 0.5))
  ready.part(5, 0, 3)
  ready.mean(5, 0, 6)
  assert ready(Answer.ABORT, number=5, worker=0) == []
  assert ready(Answer.ABORT, number=5, worker=2) == AGAIN


def test_an_average_without_progress_is_given_up(averaging):
  assert averaging.alive(TIMEOUT - 1) == []
  averaging.part(5, 0, 3, 5)  # progress
  assert averaging.alive(TIMEOUT - 1) == []
  assert averaging.alive(2) == AGAIN


def test_a_connection_that_is_refused_ends_the_average_and_a_broken_one_does_not(averaging):
  assert averaging(Unreachable(ADDRESSES[0], refused=False)) == []
  assert averaging(Unreachable(ADDRESSES[2], refused=True)) == []
  assert averaging(Unreachable(ADDRESSES[0], refused=True)) == AGAIN


LEAVES = Reply((RuntimeError, f"worker 1: no model from {ADDRESSES[0]} for 20 s"))
NO_MODEL = Reply((FloatingPointError, "no model from another worker for 20 s"))


@pytest.mark.parametrize(
  ("fixture", "event", "donor", "then"),
  [
    ("new", TICK, True, [signal(Says.BYE), LEAVES]),  # it has no model of its own
    ("ready", ServerMessage(Answer.REJECTED, {"reason": "absent: "}), True, [signal(Says.READY, 3)]),
    ("computing", Says.NOT_FINITE, True, [NO_MODEL]),
    ("computing", Says.NOT_FINITE, False, [NO_MODEL]),
  ],
)
def test_a_donor_that_does_not_answer_is_awaited_until_the_timeout(request, fixture, event, donor, then):
  worker = request.getfixturevalue(fixture)
  worker(event)
  if donor:
    assert worker(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0]) == [FETCH]
  assert [action for action in worker.alive(TIMEOUT + 1) if action != signal(Says.NOT_FINITE)] == then
  if fixture == "computing":
    assert worker(Says.READY, model(1, 8)) == [signal(Says.READY, 8)]


def test_a_worker_that_is_dropped_while_it_computes_gets_the_donors_model_at_its_next_request_once(computing):
  computing(Answer.REJECTED, reason="absent: ")
  computing(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0])
  assert computing(FETCHED) == []
  assert computing(Says.READY, model(5, 8)) == [reply(4, 9)]
  assert computing(Says.READY, model(5, 10)) == [signal(Says.READY, 10)]


def test_a_worker_that_synchronizes_takes_part_with_its_own_model(computing):
  computing(Answer.REJECTED, reason="absent: ")
  computing(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0])
  assert computing(Says.SYNCHRONIZE, model(5, 8)) == []
  assert computing(FETCHED) == [signal(Says.SYNCHRONIZE, 8)]
  computing(Answer.REJECTED, reason="absent: ")
  assert computing(Answer.WELCOME, limit=LIMIT, donor=ADDRESSES[0]) == [signal(Says.SYNCHRONIZE, 8)]


def test_a_rejected_request_is_answered_with_the_reason_and_the_worker_goes_on(ready):
  rejected = Reply((ValueError, "worker 1: stale: iteration 3"))
  assert ready(Answer.REJECTED, reason="stale: iteration 3") == [rejected]
  assert ready(Answer.REJECTED, reason="stale: again") == []  # no request is open
  assert ready(Says.READY, model(1, 4)) == [signal(Says.READY, 4)]


def test_heartbeats_are_sent_while_the_training_loop_computes(computing):
  beats = 0
  for _ in range(100):
    computing(Answer.BEAT)
    computing.now += 0.1
    beats += computing(TICK) == [signal(Says.BEAT)]
  assert 9 <= beats <= 11  # five in each limit
  assert computing(Answer.PROBE) == [signal(Says.BEAT)]


@pytest.mark.parametrize("open_request", [True, False])
def test_a_controller_that_stays_silent_is_lost(averaging, open_request):
  """Whether the training loop waits for an answer or computes."""
  if not open_request:
    averaging.part(5, 0, 3, 3)
    averaging.mean(5, 0, 2, 2)
  assert averaging.wait(LIMIT) == []
  averaging(Answer.BEAT)
  assert averaging.wait(LIMIT + RECONNECT - 0.1) == []
  assert averaging.wait(0.3) == [LOST]
  assert averaging.part(5, 0, 3, 5) == averaging.wait(60) == []


def test_heartbeats_go_on_while_the_controller_is_away_and_another_one_is_joined(computing):
  """A controller that was restarted at the same address rejects a heartbeat of a worker that it does not know."""
  computing.now += LIMIT
  assert computing(Says.READY, model(1, 8)) == [signal(Says.READY, 8)]
  assert computing(TICK) == [signal(Says.BEAT)]
  assert computing.wait(RECONNECT - 0.5) == []
  computing(Answer.REJECTED, reason="absent: worker 1 has not joined, it has to send HELLO")
  assert computing.wait(0.3) == [signal(Says.HELLO, 4)]
  assert computing(Answer.WELCOME, limit=LIMIT) == [signal(Says.READY, 8)]
  assert kinds(computing.group(1)) == [Kind.PART]


AROUND, WORKERS = st.integers(-1, 1), st.integers(0, 2)
REASONS = ("absent: ", "duplicate: ", "nobody: ", "stale: ", "unlike: ")
EVENTS = [
  *(ServerMessage(Answer.WELCOME, {"limit": limit}) for limit in (1.0, 5.0)),
  *(ServerMessage(Answer.WELCOME, {"limit": 5.0, "donor": donor}) for donor in (ADDRESSES[0], ADDRESSES[2])),
  *(ServerMessage(Answer.REJECTED, {"reason": reason}) for reason in REASONS),
  *(ServerMessage(kind, {}) for kind in (Answer.BEAT, Answer.PROBE)),
  *(Unreachable(address, refused) for address in ADDRESSES for refused in (True, False)),
  FETCHED,
]


class AnyOrder(stateful.RuleBasedStateMachine):
  """Any message at any time: what is sent stays well-formed, and a request is answered at most once."""

  @stateful.initialize()
  def begin(self):
    self.subject, self.open, self.number = Subject(), True, 0

  def send(self, event, *content, **fields):
    self.check(lambda: self.subject(event, *content, **fields))

  def check(self, does):
    ended = self.subject.protocol.state == "ended"
    actions = does()
    assert not (ended and actions)
    for action in actions:
      assert self.subject.protocol.state == "ended" or not isinstance(action, ControllerSilent)
      if isinstance(action, Reply):
        assert self.open or self.subject.protocol.state == "ended"  # an error that the next request raises
        self.open = False
      elif isinstance(action, Signal):
        assert Signal(*action).pack()
        assert (action.worker, action.says == Says.HELLO) == (ME, bool(action.address))
        assert action.value <= self.number or action.says not in (Says.FAILED, Says.BYE)
      elif isinstance(action, Send) and action.piece.kind != Kind.FETCH:
        assert action.piece.number == self.number
        assert action.address in [ADDRESSES[member] for member in self.members if member != ME]

  @stateful.rule(event=st.sampled_from(EVENTS))
  def happens(self, event):
    self.send(event)

  @stateful.rule(says=st.sampled_from([Says.READY, Says.SYNCHRONIZE, Says.NOT_FINITE]))
  def request(self, says):
    if not self.open and self.subject.protocol.state != "ended":  # the training loop waits for each reply
      self.open = True
      self.send(says, *([] if says == Says.NOT_FINITE else [model(1, 3)]))

  @stateful.rule(members=st.sampled_from([(ME,), (0, ME), (ME, 2), (0, ME, 2)]))
  def is_in_a_group(self, members):
    self.number += 1
    self.members = members
    self.check(lambda: self.subject.group(self.number, members, [1 / len(members)] * len(members)))

  @stateful.rule(past=AROUND, kind=st.sampled_from([Kind.PART, Kind.MEAN]), sender=WORKERS, size=st.integers(0, 4))
  def piece(self, past, kind, sender, size):
    self.send(Piece(kind, self.number - past, sender, np.ones(size, np.float32)))

  @stateful.rule(past=AROUND, worker=WORKERS)
  def abort(self, past, worker):
    self.send(Answer.ABORT, number=self.number - past, worker=worker)

  @stateful.rule(broken=st.booleans())
  def connections(self, broken):
    self.subject.broken = broken

  @stateful.rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 6.0, 30.0]))
  def time(self, seconds):
    self.subject.now += seconds
    self.send(TICK)

  def teardown(self):
    """Silence of all others ends the worker, and with it an open request, whatever was before."""
    if hasattr(self, "subject"):
      self.subject.wait(2 * TIMEOUT + LIMIT + RECONNECT, step=0.2)
      assert self.subject.protocol.state == "ended"


AnyOrder.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
