"""The protocol of a worker of partial reduce: a pure state machine, without sockets and clocks.

Events go in with the time at which they happen:

    GroupRequest(READY, model) ──┐                         ┌──> tell(Signal(READY, …))    the server
    Answer(GROUP)              ──┼──> handle(event, now) ──┼──> send(address, piece)      to another member of the group
    Piece(PART, …)             ──┘                         └──> reply(average)            to the training loop

A server that is silent may come back. Until it has been silent for its own limit and
`reconnect` seconds more, the worker goes on sending heartbeats. A server that was
restarted at the same address rejects them; the worker sends HELLO then, and repeats its
open request.

An average fails if the server sends ABORT, or if no piece arrives for `timeout`
seconds: the worker keeps its model and sends FAILED, then READY again. A worker whose
model is not finite joins again, with NOT_FINITE in place of HELLO, which the server
answers once it can name a donor. A broken connection does not prove that another worker
is dead: one that leaves in good order closes its connections while its last pieces are
still in transit.

A member of a group sends its parts as soon as it hears of the group, which may be
before this worker does. Only parts can be early, since a mean needs the parts of all
members; each member sends one part; and a worker waits for one group at a time. So the
early parts of a group of G members have at most (G − 1) ⌈n/G⌉ < n + G entries.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxsparse.partial.groups.average import Average
from jaxsparse.partial.groups.controller import MAX_ITERATION
from jaxsparse.partial.net.membership import EarlyPieces, WorkerProtocol
from jaxsparse.partial.net.messages import (
  Content,
  Piece,
  PieceKind,
  ServerMessage,
  WorkerMessage,
)


class Model(NamedTuple):
  """A flat model and the number of iterations that it has been trained for."""

  vector: np.ndarray
  iteration: int


class GroupRequest(NamedTuple):
  """Event: the training loop asks for something; every request but BYE has one reply.

  READY averages `model` with a group, SYNCHRONIZE with all workers; NOT_FINITE gets the
  model of another worker. HELLO is open from the beginning: it gets the model to start
  from.
  """

  kind: WorkerMessage
  model: Model | None = None


@dataclasses.dataclass(eq=False)
class GroupProtocol(WorkerProtocol[Average]):
  """The protocol of one worker.

  Attributes:
    initial: f32[n], the model that training starts from.
    model: the newest model of this worker, which is finite.
    membership: the place at the server: its `state`, whether a request is open
      (`waits`), the `donor` whose model is to replace that of this worker, deadlines.
    _request: the kind of the last request of the training loop.
    _run: the `Average` of the group under way; None if there is none.
    _settled: the number of the last group that needs nothing more of this worker.
    _early: pieces of a group of which the server has not told yet.
    _has_no_donor: whether the open request goes on with this worker's own model, since
      the model of the donor did not come in time.

  Example:
    >>> from jaxsparse.partial.net.membership import Membership
    >>> from jaxsparse.partial.net.messages import Answer
    >>> outlets = {"tell_server": print, "send": print, "answer_loop": print}
    >>> place = Membership(3, "tcp://127.0.0.1:9", 5.0, 0.0, **outlets, limit=5.0, reconnect=60.0)
    >>> protocol = GroupProtocol(place, np.zeros(2, np.float32))
    >>> protocol.tick(0.1)
    Signal(kind=<WorkerMessage.HELLO: 1>, worker=3, value=0, address='tcp://127.0.0.1:9', position=...)
    >>> protocol.handle(Answer(ServerMessage.WELCOME, {"limit": 5.0, "donor": None}), 0.2)
    Model(vector=array([0., 0.], dtype=float32), iteration=0)
    >>> protocol.handle(GroupRequest(WorkerMessage.READY, Model(np.ones(2, np.float32), 1)), 0.3)
    Signal(kind=<WorkerMessage.READY: 2>, worker=3, value=1, address='', position=...)
  """

  initial: np.ndarray

  def __post_init__(self) -> None:
    super().__post_init__()
    # what other workers fetch, and what is saved when the server is lost
    self.model = Model(self.initial, 0)
    self._request = WorkerMessage.HELLO
    self._has_no_donor = False

  def _handle(self, event: object) -> None:
    match event:
      case GroupRequest(WorkerMessage.BYE):
        self._leave()
      case GroupRequest():
        self._request = event.kind
        self._has_no_donor = False
        # NOT_FINITE has no model: the last finite one stays, and others can fetch it.
        self.model = event.model or self.model
        # False while this worker joins: `_take_answer` then begins it at WELCOME.
        if self.membership.open_request():
          self._begin_request()
      case _:
        super()._handle(event)

  def _repeat_signal(self) -> None:
    # NOT_FINITE joins too: the server answers it once there is a donor.
    seeks = self._waits_for_a_finite_model
    self.membership.repeat_signal(
      WorkerMessage.NOT_FINITE if seeks else WorkerMessage.HELLO
    )

  def _miss_server(self) -> None:
    """Ends: the server has been silent for its limit and `reconnect` seconds."""
    membership = self.membership
    membership.lose("sign of life", membership.limit + membership.reconnect)

  def _give_up(self) -> None:
    """Fails, ends, or goes on without a donor: for `timeout` seconds no WELCOME or message of another worker came."""
    membership = self.membership
    if self._run:
      self._fail(self._run, f"no message of a member for {membership.timeout:g} s")
    elif self._waits_for_a_finite_model:
      membership.reply(
        FloatingPointError(f"no model from another worker for {membership.timeout:g} s")
      )
    # The server has not answered; where `fetches_since` is set, it has named a donor.
    elif membership.state == "joining" and membership.fetches_since is None:
      membership.lose("WELCOME", membership.timeout)
    # Training cannot start without the model of the donor.
    elif self._request == WorkerMessage.HELLO:
      membership.reply(
        RuntimeError(
          f"worker {membership.worker}: no model from {membership.donor} for {membership.timeout:g} s"
        )
      )
      self._leave()
    else:  # READY or SYNCHRONIZE goes on with the own model, once the worker has joined
      self._has_no_donor = True
      membership.donor = None
      membership.await_peer()
      # else, in state "joining", the request begins at WELCOME
      if membership.state == "fetching":
        self._begin_request()

  def _leave(self) -> None:
    # The server aborts a later group than `_settled`: its members wait for pieces.
    self.membership.tell(WorkerMessage.BYE, self._settled)
    self.membership.state = "ended"

  # Requests of the training loop.

  @property
  def _waits_for_a_finite_model(self) -> bool:
    return self.membership.waits and self._request == WorkerMessage.NOT_FINITE

  def _begin_request(self) -> None:
    """Begins the open request of the training loop, once this worker is a member.

    Fetches the model of a donor, if the server has named one, else asks the server. The
    first workers, for which there is no donor, go on with the model that they have.
    """
    membership = self.membership
    membership.state = "joined"  # after WELCOME or a fetch in vain, or already
    # The average of all is of the models that workers have: nothing is fetched for it.
    if membership.donor and self._request != WorkerMessage.SYNCHRONIZE:
      membership.fetch()
    elif self._request == WorkerMessage.HELLO:
      self._reply(self.model)
    elif self._request == WorkerMessage.NOT_FINITE:
      # Gives up its membership: at the next tick `_repeat_signal` asks for a donor by
      # NOT_FINITE.
      membership.join_again(0)
    else:
      membership.tell(self._request, self.model.iteration)

  def _take_model(self, piece: Piece) -> None:
    """Answers the open request with the model of a donor.

    A model of another size, or with NaN or Inf, is ignored: the request stays open.
    """
    is_model = 0 <= piece.number <= MAX_ITERATION and np.isfinite(piece.values).all()
    if is_model and piece.values.size == self.initial.size:
      self._reply(Model(piece.values, piece.number))
    else:
      self.membership.warn(
        f"ignores a model of worker {piece.sender}: {piece.values.size} entries, iteration {piece.number}"
      )

  def _reply(self, model: Model) -> None:
    self.model = model
    self.membership.reply(model)

  # Answers of the server.

  def _take_answer(self, kind: ServerMessage, content: Content) -> None:
    membership = self.membership
    match kind:
      case ServerMessage.WELCOME if membership.state == "joining":
        goes_on = self._has_no_donor and membership.waits
        donor = None if goes_on else content["donor"]
        membership.enter(content["limit"], donor)
        # Early parts have fewer than n + G entries, as the file's docstring says:
        # `EarlyPieces` has room for a million words more than n.
        self._early = EarlyPieces(self.initial.size)
        if membership.waits:
          self._begin_request()
      case ServerMessage.GROUP if self._awaits_group:
        self._start_average(content)
      # Ignored if the lost worker has sent all its pieces to this one; -1 is no worker.
      case ServerMessage.ABORT if self._run and self._run.needs(
        content["number"], content.get("worker", -1)
      ):
        self._fail(self._run, f"worker {content['worker']} is lost")
      case ServerMessage.REJECTED:
        self._take_rejection(content["reason"])

  def _take_rejection(self, reason: str) -> None:
    # "nobody": no worker has a finite model; the training loop raises the error.
    if reason.startswith("nobody:"):
      if self._waits_for_a_finite_model:
        self.membership.reply(FloatingPointError(reason))
    elif self.membership.take_rejection(reason, awaits_group=self._awaits_group):
      # The server has dropped this worker, or was restarted: the worker joins again,
      # and its groups are over. Groups of a restarted server begin at another number,
      # perhaps a lower one.
      self._run = None
      self._settled = 0

  # The average of a group.

  def _start_average(self, content: Content) -> None:
    group = self.membership.parse_group(content)
    average = self._run = Average(
      group, self.membership.worker, self.model.vector, self.initial
    )
    # `receive` returns generators, which run after `begin`: own parts are sent first.
    early = [average.receive(piece) for piece in self._early.take(group.number)]
    self._progress(average, itertools.chain(average.begin(), *early))

  def _take_piece(self, piece: Piece) -> None:
    if average := self._run_of(piece.number):
      self._progress(average, average.receive(piece))
    # a part of the next group; numbers of groups rise
    elif (
      piece.number > self._settled
      and piece.kind != PieceKind.MEAN
      and self._awaits_group
    ):
      self._early.keep(piece)

  def _progress(self, average: Average, pieces: Iterable[tuple[int, Piece]]) -> None:
    """Sends pieces to their receivers, and answers the request if the average is done."""
    # The timeout begins anew with the group, and with each piece that has come.
    self.membership.await_peer()
    for member, piece in pieces:
      self.membership.send(self.membership.addresses[member], piece)
    if average.done:
      self._settle(average)
      self._reply(Model(average.result, average.group.iteration))

  def _settle(self, average: Average) -> None:
    """Forgets an average: its group needs nothing more of this worker."""
    self._settled = average.group.number
    self._run = None

  def _fail(self, average: Average, reason: str) -> None:
    """Drops an average: this worker keeps its model, and asks for another group or the average of all again."""
    membership = self.membership
    self._log.say(
      reason,
      f"worker {membership.worker}: no average of {average.group.names}: {reason}",
      membership.now,
    )
    self._settle(average)
    # `_settle` has set `_settled` to the number of this group.
    self.membership.tell(WorkerMessage.FAILED, self._settled)
    self._begin_request()
