"""The events that `WorkerProtocol` takes, and the actions that it returns.

Events are Tick, Request, ServerMessage, PieceReceived, ModelReceived and Unreachable; actions are Signal (a message to
the server), SendPiece, FetchModel, Reply and ControllerSilent.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxsparse.partial.exchange import Kind
from jaxsparse.partial.messages import Answer, Says, Signal


class Model(NamedTuple):
  """A flat model and the number of iterations that it has been trained for.

  Example:
    >>> Model(np.zeros(2, np.float32), 3).iteration
    3
  """

  vector: np.ndarray
  iteration: int


class Tick(NamedTuple):
  """Time has passed; the runtime sends one at least every `WorkerProtocol.interval` seconds.

  Example:
    >>> Tick()
    Tick()
  """


class Request(NamedTuple):
  """The training loop asks for something; every request but BYE is answered by one `Reply`.

  Attributes:
    says: READY, average `model` with a group; SYNCHRONIZE, average it with all workers; NOT_FINITE, get the model of
      another worker; BYE, leave.
    model: for READY and SYNCHRONIZE.

  Example:
    >>> Request(Says.BYE).model is None
    True
  """

  says: Says
  model: Model | None = None


class ServerMessage(NamedTuple):
  """A message of the server.

  Example:
    >>> ServerMessage(Answer.ABORT, {"number": 3, "worker": 1}).kind.name
    'ABORT'
  """

  kind: Answer
  content: dict[str, Any]


class PieceReceived(NamedTuple):
  """A piece of an average from another worker, for group `number`; see `jaxsparse.partial.exchange`.

  Example:
    >>> PieceReceived(3, "part", sender=1, values=np.zeros(2, np.float32)).kind
    'part'
  """

  number: int
  kind: Kind
  sender: int
  values: np.ndarray


class ModelReceived(NamedTuple):
  """The answer of a donor to `FetchModel`.

  Example:
    >>> ModelReceived(Model(np.zeros(2, np.float32), 3)).model.iteration
    3
  """

  model: Model


class Unreachable(NamedTuple):
  """The connection to another worker is closed.

  Attributes:
    address: of the other worker.
    refused: True if the connection could not be made, so that nothing has been delivered; False if it broke, and
      earlier messages may have been delivered.

  Example:
    >>> Unreachable("tcp://127.0.0.1:9", refused=True).refused
    True
  """

  address: str
  refused: bool


class SendPiece(NamedTuple):
  """Send a piece of the average of group `number` to another worker.

  Example:
    >>> SendPiece("tcp://127.0.0.1:9", 3, "part", np.zeros(2, np.float32)).number
    3
  """

  address: str
  number: int
  kind: Kind
  values: np.ndarray


class FetchModel(NamedTuple):
  """Ask a donor, another worker, for its model.

  Example:
    >>> FetchModel("tcp://127.0.0.1:9").address
    'tcp://127.0.0.1:9'
  """

  address: str


class Reply(NamedTuple):
  """Answer the training loop; an exception is raised there.

  Example:
    >>> Reply(Model(np.zeros(2, np.float32), 3)).answer.iteration
    3
  """

  answer: Model | Exception


class ControllerSilent(NamedTuple):
  """The controller is lost: the awaited message has not arrived for so many seconds. The worker has ended.

  Example:
    >>> ControllerSilent("WELCOME", 5.0).awaited
    'WELCOME'
  """

  awaited: str
  seconds: float


Event = Tick | Request | ServerMessage | PieceReceived | ModelReceived | Unreachable
Action = Signal | SendPiece | FetchModel | Reply | ControllerSilent
