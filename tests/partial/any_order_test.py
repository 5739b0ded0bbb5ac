"""The protocol of one worker against any messages in any order."""

import hypothesis
import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st

from jaxsparse.partial.messages import Answer, Kind, Piece, Says, Signal
from jaxsparse.partial.worker_protocol import Unreachable
from tests.partial.worker_subject import (
  ADDRESSES,
  FETCHED,
  LIMIT,
  ME,
  RECONNECT,
  TICK,
  TIMEOUT,
  ControllerSilent,
  Reply,
  Send,
  Subject,
  model,
)

MEMBERS = st.sets(st.sampled_from([0, 2]), max_size=2).map(lambda others: tuple(sorted({ME, *others})))
REASONS = ["absent: ", "duplicate: ", "nobody: ", "stale: ", "unlike: "]


class AnyOrder(stateful.RuleBasedStateMachine):
  """Any message at any time: what is sent stays well-formed, and a request is answered at most once."""

  @stateful.initialize()
  def begin(self):
    self.subject, self.open, self.number, self.group = Subject(), True, 0, None

  def send(self, event, *content, **fields):
    ended = self.subject.protocol.state == "ended"
    actions = self.subject(event, *content, **fields)
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
        members, number = self.group
        assert action.piece.number == number
        assert action.address in [ADDRESSES[member] for member in members if member != ME]

  @stateful.rule(limit=st.sampled_from([1.0, 5.0]), donor=st.sampled_from([None, ADDRESSES[0], ADDRESSES[2]]))
  def welcome(self, limit, donor):
    self.send(Answer.WELCOME, limit=limit, **({"donor": donor} if donor else {}))

  @stateful.rule(says=st.sampled_from([Says.READY, Says.SYNCHRONIZE, Says.NOT_FINITE]))
  def request(self, says):
    if not self.open and self.subject.protocol.state != "ended":  # the training loop waits for each reply
      self.open = True
      self.send(says, *([] if says == Says.NOT_FINITE else [model(1, 3)]))

  @stateful.rule(members=MEMBERS)
  def is_in_a_group(self, members):
    self.number += 1
    self.group = (members, self.number)
    addresses = [ADDRESSES[member] for member in members]
    weights = [1 / len(members)] * len(members)
    content = {"members": members, "weights": weights, "iteration": 7, "initial": 0.0, "number": self.number}
    self.send(Answer.GROUP, **content, addresses=addresses)

  @stateful.rule(
    past=st.integers(-1, 1),
    kind=st.sampled_from([Kind.PART, Kind.MEAN]),
    sender=st.integers(0, 2),
    size=st.integers(0, 4),
  )
  def piece(self, past, kind, sender, size):
    self.send(Piece(kind, self.number - past, sender, np.ones(size, np.float32)))

  @stateful.rule(past=st.integers(-1, 1), worker=st.integers(0, 2))
  def abort(self, past, worker):
    self.send(Answer.ABORT, number=self.number - past, worker=worker)

  @stateful.rule(kind=st.sampled_from([Answer.BEAT, Answer.PROBE]))
  def heartbeat(self, kind):
    self.send(kind)

  @stateful.rule(reason=st.sampled_from(REASONS))
  def rejected(self, reason):
    self.send(Answer.REJECTED, reason=reason)

  @stateful.rule()
  def fetched(self):
    self.send(FETCHED)

  @stateful.rule(address=st.sampled_from(ADDRESSES), refused=st.booleans())
  def unreachable(self, address, refused):
    self.send(Unreachable(address, refused))

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
