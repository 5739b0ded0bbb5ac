"""The thread of a worker that talks: to the server, to the members of its group, and to who needs a model.

It is in one of three states:

    hello    says HELLO until the server says WELCOME, again if the server took it for dead
    fetch    waits for the model of the donor that came with the WELCOME
    here     takes what `reduce` asks for: READY -> GROUP -> pieces -> the average; after ABORT, or when no piece comes
             for too long, FAILED and READY once more

A worker whose own model is not finite says NOT_FINITE instead of READY, until the server names a donor: -> fetch.

Which worker is dead is the server's word. That a connection between workers has broken says less: who has left in good
order closes it while its last pieces are still on their way.
"""

import contextlib
import os
import pathlib
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import zmq

from jaxsparse.partial import messages, saving
from jaxsparse.partial.controller import Group
from jaxsparse.partial.early import Early
from jaxsparse.partial.exchange import Average, Kind, Piece
from jaxsparse.partial.messages import Answer, Keys, Says, Signal
from jaxsparse.partial.peers import Inbox, Peers

GRACE = 5.0  # seconds that a worker gets to come to `reduce` after the controller's death

_HEADER = struct.Struct("!BqH")  # kind, number of the group or iteration, worker
_FETCH, _MODEL, _PART, _MEAN = range(1, 5)
_KINDS: dict[int, Kind] = {_PART: "part", _MEAN: "mean"}
_LAST_WORDS = 5000  # milliseconds that a worker who leaves waits for BYE to be sent: the server may be dead
_RETRY = 0.2  # seconds between two HELLOs
_BEATS = 5  # signs of life in the time after which we would count as dead


class ControllerLost(RuntimeError):
  """The controller gave no sign of life, or never answered; the message says where the parameters are.

  Example:
    >>> raise ControllerLost("no sign of life from the controller for 5 s")
    Traceback (most recent call last):
    ...
    jaxsparse.partial.talk.ControllerLost: no sign of life from the controller for 5 s
  """


class Model(NamedTuple):
  """A model, flat, and how many iterations it has seen.

  Example:
    >>> Model(np.zeros(2, np.float32), 3).iteration
    3
  """

  vector: np.ndarray
  iteration: int


class Talk(threading.Thread):
  """The thread; `ask` it from another one, and wait for `answers`. The arguments are those of `js.partial.Worker`.

  Example:
    >>> issubclass(Talk, threading.Thread)
    True
  """

  def __init__(
    self,
    server: str,
    number: int,
    initial: np.ndarray,
    bind: str,
    keys: Keys | None,
    timeout: float,
    grace: float,
    save: pathlib.Path | None,
    leaves: Callable[[np.ndarray], dict[str, np.ndarray]],
  ):
    super().__init__(daemon=True, name=f"partial reduce, worker {number}")
    self.answers: queue.SimpleQueue[Model | Exception] = queue.SimpleQueue()
    self._asked: queue.SimpleQueue[tuple[Says, Model | None]] = queue.SimpleQueue()
    self._signal = Says.READY  # what we said, or would say, to be put in a group
    self._number, self._initial, self._keys = number, initial, keys
    self._grace, self._save, self._leaves = grace, save, leaves
    self._model = Model(initial, 0)  # the newest one: for who joins, and for the file
    self._waits = True  # somebody waits for an answer: to begin with, for the model to start from
    self._average: Average | None = None
    self._past = 0  # groups up to this number are over: we owe them nothing, and want nothing of them
    self._early = Early(number, initial.size)
    self._members: dict[int, str] = {}  # of the current group, with addresses
    self._donor, self._patience = "", 0.0  # who sends us a model, and until when we wait for another message of a peer
    self._fetched_model: Model | None = None  # that came while our own worker computed
    self._address, self._timeout, self._limit = server, timeout, timeout
    self._state = "hello"
    self._next, self._ticked = 0.0, time.monotonic()
    self._deadline = self._patience = self._ticked + timeout
    self._context, self._out = zmq.Context(), zmq.Context()  # of what flows in, and of what has to flow out
    self._guard = messages.Guard(self._context, keys)
    self._server = messages.secure(self._context.socket(zmq.DEALER), keys, serves=False)
    self._server.connect(server)
    self._data = messages.secure(self._context.socket(zmq.ROUTER), keys, serves=True)
    self._data.maxmsgsize = initial.nbytes + messages.LONGEST
    self._data.bind(bind)
    self._linger = round(1000 * timeout)  # milliseconds that a worker who leaves waits for its last pieces to be sent
    self._door, self._bell = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
    self._door.bind("inproc://bell")
    self._bell.connect("inproc://bell")
    self._inbox = Inbox()
    for socket, handler in ((self._server, self._hear), (self._data, self._take), (self._door, self._open)):
      self._inbox.listen(socket, handler)
    self._peers = Peers(self._out, keys, self._data.maxmsgsize, self._inbox, self._fetched, self._unreached)

  def ask(self, signal: Says, model: Model | None = None) -> None:
    """Asks for the average of a model with those of a group (READY) or of all (SYNCHRONIZE), or to leave (BYE).

    NOT_FINITE asks for the model of another worker; a FloatingPointError answers it if there is none.
    """
    if not self.is_alive():
      self.answers.put(RuntimeError("this worker has left, or was ended"))
    self._asked.put((signal, model))
    with contextlib.suppress(zmq.ZMQError):  # it has ended; what it said last is in `answers`
      self._bell.send(b"", zmq.NOBLOCK)

  def run(self) -> None:
    """Talks until it is asked to leave or the controller is lost."""
    try:
      while self._state != "ended":
        self._inbox.wait(min(_RETRY, self._limit / _BEATS), lambda: self._state != "ended")
        self._tick()
    except Exception as error:  # whoever waits must not wait for ever
      self.answers.put(error)
    finally:
      self._out.destroy(self._linger)  # waits until what others may still need is on its way
      self._guard.stop()
      self._context.destroy(min(self._linger, _LAST_WORDS))

  def _tick(self) -> None:
    """What is done when its time has come."""
    now = time.monotonic()
    if now - self._ticked > self._limit / 2:  # held up ourselves: the controller may have been there all the time
      self._deadline = max(self._deadline, now + self._limit)
    self._ticked = now
    if now > self._deadline and self._state != "ended":
      self._lose()
    elif now > self._patience and (self._state == "fetch" or self._seeks):
      self._go_on_alone()
    elif self._average and now > self._patience:
      self._give_up()
    elif now > self._next and self._state == "hello":
      self._say(Says.HELLO, self._initial.size, messages.endpoint(self._data))
      self._next = now + _RETRY
    elif now > self._next and self._seeks:
      self._say(Says.NOT_FINITE)
      self._next = now + _RETRY
    elif now > self._next and self._state != "ended":
      self._say(Says.BEAT)
      self._next = now + self._limit / _BEATS

  def _lose(self) -> None:
    """The controller has not been heard of: saves the model, tells who waits, or ends the process if nobody comes."""
    waited = self._timeout if self._state == "hello" else self._limit
    said = f"no {'WELCOME' if self._state == 'hello' else 'sign of life'} from the controller at {self._address} "
    said += f"for {waited:g} s; "
    said += self._saved()
    self._state, self._linger = "ended", 0
    self.answers.put(ControllerLost(said))
    end = time.monotonic() + self._grace
    while not self.answers.empty() and self._asked.empty():  # asked to leave: nobody will take the answer
      if time.monotonic() > end:
        print(f"error: worker {self._number}: {said}", file=sys.stderr, flush=True)
        os._exit(1)
      time.sleep(0.05)

  def _saved(self) -> str:
    """Saves the model; says where, or why not."""
    if not self._model.iteration:
      return "nothing is saved, for nothing has been trained"
    if self._save is None:
      return "nothing is saved, for want of a file"
    content: dict[str, Any] = {**self._leaves(self._model.vector), "iteration": np.asarray(self._model.iteration)}
    try:
      saving.write(self._save, content)
    except OSError as error:
      return f"the parameters could not be saved: {error}"
    return f"the parameters of iteration {self._model.iteration} are in {self._save}"

  # What the server says.

  def _hear(self, frames: list[bytes]) -> None:
    kind, content = messages.parse_answer(frames[0])
    if self._state != "hello":
      self._deadline = time.monotonic() + self._limit
    if kind == Answer.WELCOME:
      self._welcomed(content)
    elif kind == Answer.GROUP and self._state == "here":
      self._begin(content)
    elif kind == Answer.ABORT and self._average and self._average.group.number == content["number"]:
      self._lost(content["worker"])
    elif kind == Answer.REJECTED:
      self._refused(content["reason"])
    elif kind == Answer.PROBE and self._state != "hello":
      self._say(Says.BEAT)

  def _welcomed(self, content: dict[str, Any]) -> None:
    if self._state != "hello" and not self._seeks:  # to a HELLO that we have repeated
      return
    self._limit = content["limit"]
    self._early.clear()
    self._deadline = time.monotonic() + self._limit
    donor = content.get("donor")
    if donor and not (self._waits and self._signal == Says.SYNCHRONIZE):  # which goes on with its own model
      self._state, self._donor = "fetch", donor
      self._peers.send(donor, [_HEADER.pack(_FETCH, 0, self._number)])
    else:
      self._state = "here"
      self._go_on()

  def _say_hello(self) -> None:
    """To be told another donor."""
    self._state, self._next, self._deadline = "hello", time.monotonic() + _RETRY, self._patience

  def _go_on_alone(self) -> None:
    """No donor has sent its model: goes on with one's own, or ends where there is none but the one to begin with."""
    if self._waits and self._signal == Says.NOT_FINITE:
      self._fail_to_fetch(f"no model from another worker for {self._timeout:g} s")
    elif self._model.iteration:
      self._state = "here"
      self._go_on()
    else:
      self._say(Says.BYE, self._past)
      self._state = "ended"
      self.answers.put(RuntimeError(f"worker {self._number}: no model from {self._donor} for {self._timeout:g} s"))

  def _go_on(self) -> None:
    """Here, and nobody has a model that is further: goes on from one's own."""
    if self._model.iteration or self._seeks:
      if self._waits:
        self._say_signal()
    else:
      self._answer(self._model)

  @property
  def _seeks(self) -> bool:
    """Whether our own model is not finite, and no donor of another one is known yet."""
    return self._state == "here" and self._waits and self._signal == Says.NOT_FINITE

  def _fail_to_fetch(self, reason: str) -> None:
    self._state, self._waits = "here", False
    self.answers.put(FloatingPointError(reason))

  def _refused(self, reason: str) -> None:
    kind = reason.partition(":")[0]
    if kind == "duplicate":
      return  # the server does not know yet whether the worker that has our number is dead
    if kind == "nobody":
      if self._seeks:
        self._fail_to_fetch(reason)
      return
    if kind == "absent":  # we were taken for dead, all in a group with us were told; or it is another server
      self._past = 0
      if self._state != "hello":
        self._average, self._patience = None, time.monotonic() + self._timeout
        self._say_hello()
      return
    if self._waits or self._state == "hello":  # the next caller of `reduce` gets the error
      self._waits = False
      self.answers.put(ValueError(f"worker {self._number}: {reason}"))
    if self._state == "hello":
      self._state = "ended"

  def _begin(self, content: dict[str, Any]) -> None:
    addresses = content.pop("addresses")
    group = Group(**{**content, "members": tuple(content["members"]), "weights": tuple(content["weights"])})
    self._members = dict(zip(group.members, addresses, strict=True))
    self._average = Average(group, self._number, self._model.vector, self._initial)
    self._patience = time.monotonic() + self._timeout
    self._send(self._average.begin())
    for sender, values in self._early.take(group.number):
      self._piece(self._average, "part", sender, values)
    self._finish()

  def _lost(self, member: int) -> None:
    """No more will come from a member."""
    if self._average and self._average.needs(member):
      self._give_up()

  def _give_up(self) -> None:
    """Forgets the average, keeps the model, and asks for another group."""
    assert self._average
    self._past, self._average = self._average.group.number, None
    self._say(Says.FAILED, self._past)
    self._say_signal()

  # What other workers say.

  def _take(self, frames: list[bytes]) -> None:
    connection, header, *values = frames
    if len(header) != _HEADER.size:
      return
    kind, number, sender = _HEADER.unpack(header)
    if kind == _FETCH:
      own = _HEADER.pack(_MODEL, self._model.iteration, self._number)
      self._data.send_multipart([connection, own, self._model.vector.data], copy=False)
    elif kind in _KINDS and len(values) == 1 and len(values[0]) % 4 == 0:
      piece = (_KINDS[kind], sender, np.frombuffer(values[0], np.float32))
      if self._average and self._average.group.number == number:
        self._patience = time.monotonic() + self._timeout
        self._piece(self._average, *piece)
        self._finish()
      elif number > self._past and kind == _PART and self._awaits_group:
        self._early.keep(number, sender, piece[-1])

  @property
  def _awaits_group(self) -> bool:
    """Whether the server may have put us in a group, and its word is still on its way."""
    return self._waits and self._state == "here" and self._average is None and not self._seeks

  def _piece(self, average: Average, kind: Kind, sender: int, values: np.ndarray) -> None:
    with contextlib.suppress(ValueError):  # what does not belong to the average changes nothing
      self._send(average.receive(sender, kind, values))

  def _send(self, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
      assert self._average  # who sends does not give up: that is for others to tell
      header = _HEADER.pack(_PART if piece.kind == "part" else _MEAN, self._average.group.number, self._number)
      self._peers.send(self._members[piece.to], [header, piece.values.data])

  def _finish(self) -> None:
    if self._average and self._average.done:
      self._past = self._average.group.number
      average, self._average = self._average, None
      self._answer(Model(average.result, average.group.iteration))

  def _fetched(self, frames: list[bytes]) -> None:
    if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) != self._initial.nbytes:
      return
    kind, iteration, _ = _HEADER.unpack(frames[0])
    if self._state != "fetch" or kind != _MODEL:
      return
    self._state = "here"
    if self._waits and self._signal == Says.SYNCHRONIZE:  # asked for meanwhile, of its own model
      self._go_on()
      return
    model = Model(np.frombuffer(frames[1], np.float32), iteration)
    self._fetched_model = None if self._waits else model
    self._answer(model)

  def _unreached(self, address: str, never: bool) -> None:
    """The connection to a worker is closed; one that was never made has carried nothing of ours to a member."""
    if self._state == "fetch" and address == self._donor:
      self._say_hello()
    if self._average and never and address in self._members.values():
      self._give_up()

  # What our own worker asks.

  def _open(self, _: list[bytes]) -> None:
    signal, model = self._asked.get()
    if signal == Says.BYE:
      self._say(Says.BYE, self._past)
      self._state = "ended"
    elif self._fetched_model and signal != Says.SYNCHRONIZE:  # who was taken for dead goes on with another one's model
      self.answers.put(self._fetched_model)
      self._fetched_model = None
    else:
      self._model, self._waits, self._signal, self._fetched_model = model or self._model, True, signal, None
      if self._seeks:
        self._patience = time.monotonic() + self._timeout
      if self._state == "here":
        self._say_signal()

  def _answer(self, model: Model) -> None:
    self._model = model
    if self._waits:
      self._waits = False
      self.answers.put(model)

  def _say_signal(self) -> None:
    self._say(self._signal, 0 if self._signal == Says.NOT_FINITE else self._model.iteration)

  def _say(self, says: Says, value: int = 0, address: str = "") -> None:
    with contextlib.suppress(zmq.Again):  # no connection, for want of the keys for example: the deadline will tell
      self._server.send(Signal(says, self._number, value, address).packed(), zmq.NOBLOCK)
