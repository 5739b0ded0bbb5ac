"""The protocol of one worker: every transition, lost peers, duplicate, stale and early messages, and any order."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal
from jaxsparse.partial.worker_protocol import Model, Request, Unreachable, WorkerProtocol

ME, LIMIT, TIMEOUT, RECONNECT = 1, 5.0, 20.0, 7.0
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
TICK = None

# What the protocol does; models and pieces as lists.
Send = collections.namedtuple("Send", "address piece")
Reply = collections.namedtuple("Reply", "answer")


def model(value, iteration):
  return Model(np.full(4, value, np.float32), iteration)


def signal(says, value=0):
  return Signal(says, ME, value, ADDRESSES[ME] if says in (Says.HELLO, Says.NOT_FINITE) else "")


def welcome(donor=None, limit=LIMIT):
  return ServerMessage(Answer.WELCOME, {"limit": limit, "donor": donor})


def group(number, members, weights):
  content = {"members": list(members), "weights": list(weights), "iteration": 7, "initial": 0.0, "number": number}
  return ServerMessage(Answer.GROUP, content | {"addresses": [ADDRESSES[member] for member in members]})


def reply(value, iteration):
  return Reply(([float(value)] * 4, iteration))


FETCH = Send(ADDRESSES[0], Piece(Kind.FETCH, 0, ME, []))
FETCHED = Piece(Kind.MODEL, 9, 0, np.full(4, 4, np.float32))
AGAIN = [signal(Says.FAILED, 5), signal(Says.READY, 3)]
ABSENT = ServerMessage(Answer.REJECTED, {"reason": "absent: worker 1 has not joined"})


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
      self.protocol.handle(Unreachable(address), self.now)

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
    if event is TICK:
      self.protocol.tick(self.now)
    else:
      self.protocol.handle(event, self.now)
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

  def group(self, number, members=(0, 1), weights=(0.5, 0.5)):
    return self(group(number, members, weights))

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
  assert new(welcome()) == [reply(0, 0)]
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
  assert new(TICK) == [signal(Says.HELLO, 4)]
  assert new(welcome(ADDRESSES[0])) == [FETCH]
  assert new(welcome()) == []  # the answer to a repeated HELLO
  assert new(FETCHED) == [reply(4, 9)]
  assert new(FETCHED._replace(number=10)) == new(welcome(ADDRESSES[0])) == []
  assert new.protocol.model.iteration == 9


def test_another_donor_is_asked_for_if_one_cannot_be_reached(new):
  new.broken = True
  assert new(welcome(ADDRESSES[0])) == [FETCH]
  assert new.wait(0.3) == [signal(Says.HELLO, 4)]
  assert new(welcome(ADDRESSES[2])) == [FETCH._replace(address=ADDRESSES[2])]


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
  assert computing.protocol._early == {}
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
  computing(ABSENT)
  assert computing(welcome()) == [signal(Says.READY, 10)]
  assert kinds(computing.group(8)) == [Kind.PART]  # without what came before the server was joined again


def test_forged_parts_do_not_fill_the_memory(ready):
  """Those that are early have no more entries together than any group sends, and take the place of none of its."""
  for sender in (5, 6, 6, 7):
    ready.part(5, sender, *[0.0] * 30000)
  ready.part(5, 0, 3, 5)
  assert ready.protocol._early.keys() == {0, 5, 6}
  assert kinds(ready.group(5)) == [Kind.PART, Kind.MEAN]


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


LEAVES = Reply((RuntimeError, f"worker 1: no model from {ADDRESSES[0]} for 20 s"))
NO_MODEL = Reply((FloatingPointError, "no model from another worker for 20 s"))


@pytest.mark.parametrize(
  ("fixture", "event", "donor", "then"),
  [
    ("new", TICK, True, [LEAVES, signal(Says.BYE)]),  # it has no model of its own
    ("ready", ABSENT, True, [signal(Says.READY, 3)]),
    ("computing", Says.NOT_FINITE, True, [NO_MODEL]),
    ("computing", Says.NOT_FINITE, False, [NO_MODEL]),
  ],
)
def test_a_donor_that_does_not_answer_is_awaited_until_the_timeout(request, fixture, event, donor, then):
  worker = request.getfixturevalue(fixture)
  worker(event)
  assert worker(welcome(ADDRESSES[0] if donor else None)) == [FETCH] * donor
  assert [action for action in worker.alive(TIMEOUT + 1) if action != signal(Says.NOT_FINITE, 4)] == then
  if fixture == "computing":
    assert worker(Says.READY, model(1, 8)) == [signal(Says.READY, 8)]


def test_a_worker_without_a_finite_model_joins_again_until_there_is_a_donor(computing):
  computing(Says.NOT_FINITE)
  assert computing.wait(0.5) == [signal(Says.NOT_FINITE, 4)] * 2
  assert computing(welcome()) == []  # the answer to an earlier HELLO
  assert computing(welcome(ADDRESSES[0])) == [FETCH]
  assert computing(FETCHED) == [reply(4, 9)]
  computing(Says.NOT_FINITE)
  refused = Reply((FloatingPointError, "nobody: no worker"))
  assert computing(Answer.REJECTED, reason="nobody: no worker") == [refused]
  assert computing(Answer.REJECTED, reason="nobody: no worker") == []


def test_a_worker_that_is_dropped_while_it_computes_gets_a_donors_model_at_its_next_request_once(computing):
  """But it takes part in the average of all with its own model."""
  for _ in range(2):
    computing(ABSENT)
    assert computing(welcome(ADDRESSES[0])) == []
    assert computing(Says.READY, model(5, 8)) == [FETCH]
    assert computing(FETCHED) == [reply(4, 9)]
    assert computing(Says.READY, model(5, 10)) == [signal(Says.READY, 10)]
    computing.group(6, members=(ME,), weights=(1,))
  computing(ABSENT)
  computing(welcome(ADDRESSES[0]))
  for _ in range(2):
    assert computing(Says.SYNCHRONIZE, model(5, 8)) == [signal(Says.SYNCHRONIZE, 8)]
    computing(ABSENT)
    assert computing(welcome(ADDRESSES[0])) == [signal(Says.SYNCHRONIZE, 8)]


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


@pytest.mark.parametrize("open_request", [True, False])
def test_a_controller_that_stays_silent_is_lost(averaging, open_request):
  """Whether the training loop waits for an answer or computes."""
  if not open_request:
    averaging.part(5, 0, 3, 3)
    averaging.mean(5, 0, 2, 2)
  assert averaging.wait(LIMIT) == []
  averaging(Answer.BEAT)
  assert averaging.wait(LIMIT + RECONNECT - 0.1) == []
  assert not averaging.protocol.lost[0]
  averaging.wait(0.3)
  assert averaging.protocol.lost == ("sign of life", LIMIT + RECONNECT)
  assert averaging.part(5, 0, 3, 5) == averaging.wait(60) == []


def test_heartbeats_go_on_while_the_controller_is_away_and_another_one_is_joined(computing):
  """A controller that was restarted at the same address rejects a heartbeat of a worker that it does not know."""
  computing.now += LIMIT
  assert computing(Says.READY, model(1, 8)) == [signal(Says.READY, 8)]
  assert computing(TICK) == [signal(Says.BEAT)]
  assert computing.wait(RECONNECT - 0.5) == []
  computing(ABSENT)
  assert computing.wait(0.3) == [signal(Says.HELLO, 4)]
  assert computing(welcome()) == [signal(Says.READY, 8)]
  assert kinds(computing.group(1)) == [Kind.PART]


REASONS = ("absent: ", "duplicate: ", "nobody: ", "stale: ", "unlike: ")


@given(st.randoms(use_true_random=False), st.booleans())
def test_any_message_at_any_time(random, broken):
  """What is sent is well-formed, a request has one answer at most, and the silence of all others ends the worker."""
  worker, waiting, number, addresses = Subject(), True, 0, []
  worker.broken = broken
  for _ in range(60):
    near, other = number + random.randint(-1, 1), random.randrange(3)
    members = random.choice([(ME,), (0, ME), (ME, 2), (0, ME, 2)])
    event = random.choice(
      [
        *(welcome(random.choice([None, *ADDRESSES]), limit) for limit in (1.0, LIMIT)),
        ServerMessage(Answer.REJECTED, {"reason": random.choice(REASONS)}),
        ServerMessage(Answer.ABORT, {"number": near, "worker": other}),
        group(number + 1, members, [1 / len(members)] * len(members)),
        *(Request(says, model(1, 3)) for says in (Says.READY, Says.SYNCHRONIZE)),
        *(Request(Says.NOT_FINITE), Unreachable(ADDRESSES[other]), FETCHED),
        *(Piece(kind, near, other, np.ones(random.randrange(5), np.float32)) for kind in (Kind.PART, Kind.MEAN)),
        *(TICK, TICK),
      ]
    )
    ended = worker.protocol.state == "ended"
    if isinstance(event, Request):
      if waiting or ended:  # the training loop waits for each reply
        continue
      waiting = True
    elif isinstance(event, ServerMessage) and event.kind == Answer.GROUP:
      number, addresses = number + 1, event.content["addresses"]
    worker.now += random.choice([0.0, 0.1, 1.0, 6.0])
    for action in worker(event):
      assert not ended
      if isinstance(action, Reply):
        assert waiting or worker.protocol.state == "ended"  # an error that the next request raises
        waiting = False
      elif isinstance(action, Signal):
        assert action == signal(action.says, action.value)
        assert action.value <= number or action.says not in (Says.FAILED, Says.BYE)
      elif action.piece.kind != Kind.FETCH:
        assert action.piece.number == number
        assert action.address in set(addresses) - {ADDRESSES[ME]}
  worker.wait(2 * TIMEOUT + LIMIT + RECONNECT, step=0.2)
  assert worker.protocol.state == "ended"
