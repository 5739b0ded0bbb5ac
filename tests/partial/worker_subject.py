"""What the tests of `WorkerProtocol` share: a protocol with a clock of its own, and actions that compare."""

from typing import Any, NamedTuple

import numpy as np

from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal
from jaxsparse.partial.worker_protocol import Model, Request, Unreachable, WorkerProtocol

ME, LIMIT, TIMEOUT, RECONNECT = 1, 5.0, 20.0, 7.0
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]


def fetched(value, iteration):
  return Piece(Kind.MODEL, iteration, 0, np.full(4, value, np.float32))


def model(value, iteration):
  return Model(np.full(4, value, np.float32), iteration)


def signal(says, value=0):
  return Signal(says, ME, value, ADDRESSES[ME] if says == Says.HELLO else "")


TICK = None
FETCHED = fetched(4, 9)


def values(*entries):
  return np.array(entries, np.float32)


class Send(NamedTuple):
  """What the protocol does: it sends a piece to another worker, with the values as a list."""

  address: str
  piece: Piece


class Reply(NamedTuple):
  """It answers the training loop, with a model as a list, or an exception."""

  answer: Any


class ControllerSilent(NamedTuple):
  """It gives the controller up."""

  awaited: str
  seconds: float


class Subject:
  """A `WorkerProtocol`, and a clock that runs only when it is told to.

  While `broken`, every connection to another worker breaks when something is sent.
  """

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
    self.actions.append(Reply((answer.vector.tolist(), answer.iteration) if isinstance(answer, Model) else answer))

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
    actions = []
    for _ in range(round(seconds)):
      actions += self(Answer.BEAT) + self.wait(1)
    return actions

  def group(self, number, members=(0, 1), weights=(0.5, 0.5), iteration=7):
    addresses = [ADDRESSES[member] for member in members]
    content = {"members": list(members), "weights": list(weights), "iteration": iteration, "initial": 0.0}
    return self(Answer.GROUP, **content, number=number, addresses=addresses)

  def part(self, number, sender, *entries):
    return self(Piece(Kind.PART, number, sender, values(*entries)))

  def mean(self, number, sender, *entries):
    return self(Piece(Kind.MEAN, number, sender, values(*entries)))


FETCH = Send(ADDRESSES[0], Piece(Kind.FETCH, 0, ME, []))


def reply(value, iteration):
  return Reply(([float(value)] * 4, iteration))


def error(actions):
  ((answer,),) = actions
  return answer
