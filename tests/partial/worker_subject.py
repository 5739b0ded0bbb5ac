"""What the tests of `WorkerProtocol` share: a protocol with a clock of its own, and actions that compare."""

import numpy as np

from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Signal
from jaxsparse.partial.worker_protocol import Model, Reply, Request, Send, Tick, WorkerProtocol

ME, LIMIT, TIMEOUT, RECONNECT = 1, 5.0, 20.0, 7.0
ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
FETCH = Send(ADDRESSES[0], Piece(Kind.FETCH, 0, ME, []))


def fetched(value, iteration):
  return Piece(Kind.MODEL, iteration, 0, np.full(4, value, np.float32))


def model(value, iteration):
  return Model(np.full(4, value, np.float32), iteration)


def signal(says, value=0):
  return Signal(says, ME, value, ADDRESSES[ME] if says == Says.HELLO else "")


FETCHED = fetched(4, 9)


def values(*entries):
  return np.array(entries, np.float32)


class Subject:
  """A `WorkerProtocol` and a clock that runs only when it is told to."""

  def __init__(self):
    self.now = 100.0
    self.protocol = WorkerProtocol(ME, np.zeros(4, np.float32), ADDRESSES[ME], TIMEOUT, RECONNECT, self.now)

  def __call__(self, event, *content, **fields):
    """The actions; models and pieces as lists, exceptions as they are."""
    if isinstance(event, Answer):
      event = ServerMessage(event, fields)
    elif isinstance(event, Says):
      event = Request(event, *content)
    return [plain(action) for action in self.protocol.handle(event, self.now)]

  def wait(self, seconds, step=0.1):
    """Ticks; the actions but heartbeats."""
    actions = []
    for _ in range(round(seconds / step)):
      self.now += step
      actions += [action for action in self(Tick()) if action != signal(Says.BEAT)]
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


def plain(action):
  if isinstance(action, Reply):
    answer = action.answer
    return Reply((answer.vector.tolist(), answer.iteration) if isinstance(answer, Model) else answer)
  if isinstance(action, Send):
    return action._replace(piece=action.piece._replace(values=action.piece.values.tolist()))
  return action


def reply(value, iteration):
  return Reply(([float(value)] * 4, iteration))


def error(actions):
  ((answer,),) = actions
  return answer
