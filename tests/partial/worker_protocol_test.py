"""The protocol of one worker: lost peers and servers, duplicate, stale, early and forged messages, and any order."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsparse.partial.groups.protocol import GroupProtocol, GroupRequest, Model
from jaxsparse.partial.net.membership import Membership, Unreachable
from jaxsparse.partial.net.messages import (
  Answer,
  Piece,
  PieceKind,
  ServerMessage,
  Signal,
  WorkerMessage,
)

ME, LIMIT, TIMEOUT, RECONNECT = 1, 5.0, 20.0, 7.0
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
TICK = None


def piece(kind, number, sender, *entries):
  return Piece(kind, number, sender, np.array(entries, np.float32))


def message(kind, **content):
  return Answer(kind, content)


def welcome(donor=None, limit=LIMIT):
  return message(
    ServerMessage.WELCOME,
    limit=limit,
    donor=None if donor is None else ADDRESSES[donor],
  )


def group(number, members=(0, 1), weights=(0.5, 0.5)):
  addresses = {member: ADDRESSES[member] for member in members}
  fields = {
    "members": tuple(members),
    "weights": weights,
    "iteration": 7,
    "initial": 0.0,
    "number": number,
    "links": [],
    "leaving": [],
  }
  return message(ServerMessage.GROUP, **fields, addresses=addresses)


def request(kind, value=0, iteration=0):
  return GroupRequest(
    kind, Model(np.full(4, value, np.float32), iteration) if iteration else None
  )


part, mean = (
  functools.partial(piece, PieceKind.PART),
  functools.partial(piece, PieceKind.MEAN),
)
abort, rejected = (
  functools.partial(message, ServerMessage.ABORT),
  functools.partial(message, ServerMessage.REJECTED),
)
ABSENT, BEAT = (
  rejected(reason="absent: worker 1 has not joined"),
  message(ServerMessage.BEAT),
)
FETCHED = piece(PieceKind.MODEL, 9, 0, 4, 4, 4, 4)

# What the protocol does: a signal, a piece with the receiver (sent), a model or an
# error for the training loop (reply).


def signal(kind, value=0):
  return Signal(
    kind,
    ME,
    value,
    ADDRESSES[ME] if kind in (WorkerMessage.HELLO, WorkerMessage.NOT_FINITE) else "",
  )


def sent(to, kind, number, *entries):
  return ADDRESSES[to], kind, number, list(entries)


def reply(value, iteration):
  return [float(value)] * 4, iteration


FETCH, AGAIN = (
  sent(0, PieceKind.FETCH, 0),
  [signal(WorkerMessage.FAILED, 5), signal(WorkerMessage.READY, 3)],
)


class Subject:
  """A `GroupProtocol`, and a clock; while `broken`, connections to other workers break when something is sent."""

  def __init__(self):
    self.now, self.actions, self.broken = 100.0, [], False
    outlets = lambda signal: self.actions.append(signal), self.send, self.reply
    start = np.zeros(4, np.float32)
    place = Membership(
      ME, ADDRESSES[ME], TIMEOUT, self.now, *outlets, limit=TIMEOUT, reconnect=RECONNECT
    )
    self.protocol = GroupProtocol(place, start)

  def send(self, address, piece):
    assert piece.sender == ME
    # those of FETCH are for rounds
    values = [] if piece.kind == PieceKind.FETCH else piece.values.tolist()
    self.actions.append((address, piece.kind, piece.number, values))
    if self.broken:
      self.protocol.handle(Unreachable(address), self.now)

  def reply(self, answer):
    is_model = isinstance(answer, Model)
    self.actions.append(
      (answer.vector.tolist(), answer.iteration)
      if is_model
      else (type(answer), str(answer))
    )

  def __call__(self, *events):
    """What the protocol does."""
    self.actions = []
    for event in events:
      self.protocol.tick(self.now) if event is TICK else self.protocol.handle(
        event, self.now
      )
    return self.actions

  def wait(self, seconds, *events, step=0.1):
    """Ticks, and what happens before each; the actions but heartbeats."""
    actions = []
    for _ in range(round(seconds / step)):
      self.now += step
      actions += [
        action for action in self(*events, TICK) if action != signal(WorkerMessage.BEAT)
      ]
    return actions


@pytest.fixture
def new():
  return Subject()


@pytest.fixture
def ready(new):
  """Joined, and READY with a model of ones at iteration 3."""
  assert new(welcome(), request(WorkerMessage.READY, 1, 3)) == [
    reply(0, 0),
    signal(WorkerMessage.READY, 3),
  ]
  return new


@pytest.fixture
def averaging(ready):
  """In group 5, with worker 0; nothing has arrived."""
  assert ready(group(5)) == [sent(0, PieceKind.PART, 5, 1, 1)]
  return ready


@pytest.fixture
def computing(averaging):
  """Between two requests, with a model of twos at iteration 7."""
  assert averaging(part(5, 0, 3, 3), mean(5, 0, 2, 2))[1:] == [reply(2, 7)]
  return averaging


def test_welcome_gives_the_initial_model_or_that_of_a_donor(new):
  assert new(TICK) == [signal(WorkerMessage.HELLO)]
  assert new(welcome(donor=0)) == [FETCH]
  assert new(welcome()) == []  # the answer to a repeated HELLO
  assert new(FETCHED) == [reply(4, 9)]
  assert new(FETCHED._replace(number=10), welcome(donor=0)) == []
  assert new.protocol.model.iteration == 9


def test_another_donor_is_asked_for_if_one_cannot_be_reached(new):
  new.broken = True
  assert new(welcome(donor=0)) == [FETCH]
  assert new.wait(0.3) == [signal(WorkerMessage.HELLO)]
  assert new(welcome(donor=2)) == [sent(2, PieceKind.FETCH, 0)]


@pytest.mark.parametrize("kind", [PieceKind.PART, PieceKind.MEAN])
def test_a_group_averages_and_a_duplicate_or_foreign_piece_changes_nothing(
  averaging, kind
):
  assert averaging(piece(kind, 5, ME, 9, 9), part(5, 0, 9)) == []
  assert averaging(part(5, 0, 3, 5)) == [sent(0, PieceKind.MEAN, 5, 2, 3)]
  foreign = [(5, 2, 9, 9), (5, ME, 9, 9), (5, 0, 9), (5, 0), (4, 0, 9, 9), (6, 0, 9, 9)]
  assert (
    averaging(part(5, 0, 9, 9), *(piece(kind, *fields) for fields in foreign)) == []
  )
  assert averaging(mean(5, 0, 6, 7)) == [([6, 7, 2, 3], 7)]
  assert averaging(GroupRequest(WorkerMessage.BYE)) == [signal(WorkerMessage.BYE, 5)]


def test_a_part_is_kept_only_for_the_group_that_is_awaited(computing):
  """Where a request is open, for the next group of this server; no mean can be early."""
  computing(part(6, 0, 3, 5))  # no request is open
  # of another group than the next
  computing(request(WorkerMessage.READY, 1, 8), part(7, 0, 3, 5))
  assert computing(group(6)) == [sent(0, PieceKind.PART, 6, 1, 1)]
  assert computing.protocol._early.pieces == {}
  assert computing(part(6, 0, 3, 3), mean(6, 0, 2, 2))[1:] == [reply(2, 7)]
  computing(request(WorkerMessage.READY, 1, 9), part(7, 0, 3, 5))
  # of a group that is settled: does not replace that of the next
  computing(part(6, 0, 9, 9))
  assert computing(group(7)) == [
    sent(0, PieceKind.PART, 7, 1, 1),
    sent(0, PieceKind.MEAN, 7, 2, 3),
  ]
  computing(
    mean(7, 0, 2, 2),
    request(WorkerMessage.READY, 1, 10),
    mean(8, 0, 9, 9),
    part(8, 0, 3, 5),
  )
  assert computing(ABSENT, welcome()) == [signal(WorkerMessage.READY, 10)]
  # without what came before the server was joined again
  assert computing(group(8)) == [sent(0, PieceKind.PART, 8, 1, 1)]


def test_forged_parts_do_not_fill_the_memory(ready):
  """Those that are early have no more entries together than any group sends, and take the place of none of its."""
  forged = [
    part(number, sender, *[0.0] * 400_000)
    for number, sender in ((5, 5), (4, 6), (5, 6), (5, 7))
  ]
  ready(*forged, part(5, 0, 3, 5))
  assert {
    sender: early.number for (sender, _), early in ready.protocol._early.pieces.items()
  } == {0: 5, 5: 5, 6: 5}
  assert ready(group(5)) == [
    sent(0, PieceKind.PART, 5, 1, 1),
    sent(0, PieceKind.MEAN, 5, 2, 3),
  ]


def test_an_abort_counts_only_while_the_member_is_needed(averaging):
  assert averaging(abort(number=4, worker=0), abort(number=5, worker=2)) == []
  assert averaging(abort(number=5, worker=0)) == AGAIN
  # late
  assert averaging(abort(number=5, worker=0), part(5, 0, 3, 5), mean(5, 0, 6, 7)) == []
  averaging(group(5, members=(0, 1, 2), weights=(0.25, 0.25, 0.5)))
  averaging(part(5, 0, 3), mean(5, 0, 6), part(5, 2, 3))
  assert averaging(abort(number=5, worker=0)) == []  # it has sent its last piece
  assert averaging(abort(number=5, worker=2)) == AGAIN  # its mean is missing
  # with the model as it was
  assert averaging(group(6)) == [sent(0, PieceKind.PART, 6, 1, 1)]


def test_an_average_without_progress_is_given_up(averaging):
  assert averaging.wait(TIMEOUT - 1, BEAT) == []
  averaging(part(5, 0, 3, 5))  # progress
  assert averaging.wait(TIMEOUT - 1, BEAT) == []
  assert averaging.wait(2, BEAT) == AGAIN


NO_MODEL = [(FloatingPointError, "no model from another worker for 20 s")]


@pytest.mark.parametrize(
  ("fixture", "event", "donor", "then"),
  [
    (
      "new",
      TICK,
      0,
      [
        (RuntimeError, f"worker 1: no model from {ADDRESSES[0]} for 20 s"),
        signal(WorkerMessage.BYE),
      ],
    ),
    ("ready", ABSENT, 0, [signal(WorkerMessage.READY, 3)]),
    ("computing", GroupRequest(WorkerMessage.NOT_FINITE), 0, NO_MODEL),
    ("computing", GroupRequest(WorkerMessage.NOT_FINITE), None, NO_MODEL),
  ],
)
def test_a_donor_that_does_not_answer_is_awaited_until_the_timeout(
  request, fixture, event, donor, then
):
  worker = request.getfixturevalue(fixture)
  worker(event)
  assert worker(welcome(donor)) == ([] if donor is None else [FETCH])
  asks = WorkerMessage.HELLO, WorkerMessage.NOT_FINITE
  assert [
    action
    for action in worker.wait(TIMEOUT + 1, BEAT, welcome(donor))
    if action != FETCH and getattr(action, "kind", None) not in asks
  ] == then
  if fixture == "computing":
    assert worker(GroupRequest(WorkerMessage.READY, worker.protocol.model)) == [
      signal(WorkerMessage.READY, 7)
    ]


def test_a_worker_without_a_finite_model_joins_again_until_there_is_a_donor(computing):
  computing(GroupRequest(WorkerMessage.NOT_FINITE))
  assert computing.wait(0.5) == [signal(WorkerMessage.NOT_FINITE)] * 2
  assert computing(welcome()) == []  # the answer to an earlier HELLO
  assert computing(welcome(donor=0), FETCHED) == [FETCH, reply(4, 9)]
  computing(GroupRequest(WorkerMessage.NOT_FINITE))
  nobody = rejected(reason="nobody: no worker")
  assert computing(nobody, nobody) == [(FloatingPointError, "nobody: no worker")]


def test_a_donor_is_asked_again_after_a_request_that_went_on_without_one_was_rejected(
  ready,
):
  ready(ABSENT)
  ready.wait(TIMEOUT + 1, BEAT, welcome(donor=0))
  stale = rejected(reason="stale: iteration 3")
  assert ready(stale) == [(ValueError, "worker 1: stale: iteration 3")]
  ready(ABSENT, welcome(donor=0))
  assert ready(request(WorkerMessage.READY, 5, 8)) == [FETCH]


def test_a_worker_that_is_dropped_while_it_computes_gets_a_donors_model_at_its_next_request_once(
  computing,
):
  """But it takes part in the average of all with its own model."""
  for _ in range(2):
    assert computing(ABSENT, welcome(donor=0)) == []
    assert computing(request(WorkerMessage.READY, 5, 8), FETCHED) == [
      FETCH,
      reply(4, 9),
    ]
    assert computing(request(WorkerMessage.READY, 5, 10)) == [
      signal(WorkerMessage.READY, 10)
    ]
    computing(group(6, members=(ME,), weights=(1,)))
  computing(ABSENT, welcome(donor=0))
  assert computing(request(WorkerMessage.SYNCHRONIZE, 5, 8)) == [
    signal(WorkerMessage.SYNCHRONIZE, 8)
  ]
  assert computing(ABSENT, welcome(donor=0)) == [signal(WorkerMessage.SYNCHRONIZE, 8)]


def test_a_rejected_request_is_answered_with_the_reason_and_the_worker_goes_on(ready):
  stale = rejected(reason="stale: iteration 3")
  # then no request is open
  assert ready(stale, stale) == [(ValueError, "worker 1: stale: iteration 3")]
  assert ready(request(WorkerMessage.READY, 1, 4)) == [signal(WorkerMessage.READY, 4)]


@pytest.mark.parametrize("limit", [LIMIT, 100.0])
def test_five_heartbeats_are_sent_in_each_limit_and_one_in_each_second(new, limit):
  new(welcome(limit=limit))
  beats = 0
  for _ in range(100):
    new.now += 0.1
    beats += new(BEAT, TICK) == [signal(WorkerMessage.BEAT)]
  assert 9 <= beats <= 11


@pytest.mark.parametrize("fixture", ["averaging", "computing"])
def test_a_controller_that_stays_silent_is_lost(request, fixture):
  worker = request.getfixturevalue(fixture)
  assert (
    worker.wait(LIMIT) == worker(BEAT) == worker.wait(LIMIT + RECONNECT - 0.1) == []
  )
  assert worker.protocol.membership.lost == ("", 0)
  assert worker.wait(0.3) == []
  assert worker.protocol.membership.lost == ("sign of life", LIMIT + RECONNECT)
  assert worker(part(5, 0, 3, 5)) == worker.wait(60) == []


def test_heartbeats_go_on_while_the_controller_is_away_and_another_one_is_joined(
  computing,
):
  """A controller that was restarted at the same address rejects a heartbeat of a worker that it does not know."""
  computing.now += 60  # its process was suspended, messages may be unread
  assert computing(request(WorkerMessage.READY, 1, 8), TICK) == [
    signal(WorkerMessage.READY, 8),
    signal(WorkerMessage.BEAT),
  ]
  assert computing.wait(LIMIT - 0.5) == computing(ABSENT) == []
  assert computing.wait(0.3) == [signal(WorkerMessage.HELLO)]
  pieces = [sent(0, PieceKind.PART, 1, 1, 1), sent(0, PieceKind.MEAN, 1, 2, 2)]
  assert computing(welcome(), part(1, 0, 3, 3), group(1)) == [
    signal(WorkerMessage.READY, 8),
    *pieces,
  ]


@given(st.randoms(use_true_random=False))
def test_any_message_at_any_time(random):
  """What is sent is well-formed, a request has one answer at most, and the silence of all others ends the worker."""
  worker, waiting, ready, number, others = Subject(), True, False, 0, []
  for _ in range(60):
    near, other, members = (
      number + random.randint(-1, 1),
      random.randrange(3),
      random.choice([[1], [0, 1], [0, 1, 2]]),
    )
    event = random.choice(
      [
        *(welcome(donor, limit) for donor in (None, 0, 1) for limit in (1.0, LIMIT)),
        *(
          rejected(reason=f"{kind}: ")
          for kind in ("absent", "duplicate", "nobody", "stale", "unlike")
        ),
        *(
          GroupRequest(WorkerMessage.NOT_FINITE),
          request(WorkerMessage.READY, 1, 3),
          request(WorkerMessage.SYNCHRONIZE, 1, 3),
        ),
        *[
          group(number + 1, members, [1 / len(members)] * len(members)),
          Unreachable(ADDRESSES[other]),
        ]
        * 3,
        *[make(near, other, *[1.0] * random.randrange(5)) for make in (part, mean)] * 2,
        *(abort(number=near, worker=other), FETCHED, TICK, TICK, TICK),
      ]
    )
    ended = worker.protocol.membership.state == "ended"
    if isinstance(event, GroupRequest):
      if waiting or ended:  # the training loop waits for each reply
        continue
      waiting = True
    elif isinstance(event, Answer) and event.kind == ServerMessage.GROUP:
      if not ready:  # the server forms groups of workers that are
        continue
      ready, number, others = (
        False,
        number + 1,
        [ADDRESSES[member] for member in members if member != ME],
      )
    worker.now += random.choice([0.0, 0.1, 1.0, 6.0])
    for action in worker(event):
      assert not ended
      if isinstance(action, Signal):
        assert action == signal(action.kind, action.value)
        assert action.value <= number or action.kind not in (
          WorkerMessage.FAILED,
          WorkerMessage.BYE,
        )
        ready |= action.kind in (WorkerMessage.READY, WorkerMessage.SYNCHRONIZE)
      elif isinstance(action[0], str):
        assert action[1] == PieceKind.FETCH or (
          action[2] == number and action[0] in others
        )
      else:
        # an error that the next request raises
        assert waiting or worker.protocol.membership.state == "ended"
        waiting = False
  worker.wait(2 * TIMEOUT + LIMIT + RECONNECT, step=0.2)
  assert worker.protocol.membership.state == "ended"
