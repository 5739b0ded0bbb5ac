"""The protocol of a worker of rounds: that of partial reduce, whose averages are rounds that count for all or nobody.

    Request(READY, weight) ──> READY ──> GROUP: the exchange runs ──> Done(digest) ──> DONE ──> COMMIT: adopt, reply
                                  └────> BEHIND: fetch the anchor of a donor, then READY again
    ABORT, a member that cannot be reached, or no message for `timeout` seconds
                  └────> drop what the exchange has computed, FAILED with the missing member, READY again
    Request(BYE) ──> BYE ──> Piece(RESIDUAL) to a worker of an earlier round ──> Piece(TAKEN): the end

Between DONE and COMMIT a worker does not know whether the round counts. If the server is gone then, it says so to the
next one when it joins, which knows from the others, or decides.

A server that is silent is no reason to end: training goes on, and the worker tries the next address, over and over. It
also tries the next address when its server has too few workers for a round, since the others may be at another server.
It waits longest at the first address, so that workers meet there.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxsparse.partial.controller import Group
from jaxsparse.partial.messages import Answer, Kind, Piece, Says, ServerMessage, Stand
from jaxsparse.partial.worker_protocol import _MEMBERS, _RETRY, Event, Request, Unreachable, WorkerProtocol

_LOG = logging.getLogger(__name__)
_MOST_DOUBLINGS = 10
_GOLDEN = 0.618  # the fractional parts of its multiples are well spread: each worker waits for another time


class Done(NamedTuple):
  """Event: the exchange of round `number` has ended; `digest` is that of its result, None without one."""

  number: int
  digest: int | None


class Send(NamedTuple):
  """Event: the exchange of a round sends a piece to a member."""

  member: int
  piece: Piece


class Exchange(Protocol):
  """What runs the exchanges of a worker, one at a time, and has its anchor."""

  def begin(self, group: Group) -> Any:
    """Starts the exchange of a group; the result has the methods of `Average`."""

  def commit(self) -> Stand:
    """The result of the exchange that is done counts; where the worker stands now."""

  def go_back(self) -> Stand:
    """The result that has counted last differs from that of most members: the anchor is again that before."""

  def drop(self) -> None:
    """The exchange that was begun last counts for nobody."""

  def counts(self, model: Piece, stand: Stand) -> bool | None:
    """Whether round `last` of this worker's stand counts for a donor, from its anchor; None if that does not say."""

  def adopt(self, model: Piece, base: int, digest: int) -> Stand | None:
    """Takes the anchor of a donor; None if it is older, or that of round `base` and has another digest, if not 0."""

  def hand_over(self) -> np.ndarray:
    """f32[m], the residual of this worker, which leaves."""


class RoundProtocol(WorkerProtocol):
  """The protocol of one worker.

  Args:
    number, address, timeout, now, tell, send, reply: as of `WorkerProtocol`.
    entries: of the model.
    exchange: runs the exchanges.
    switch: connects to the next server.
    servers: how many there are. At the start each is tried for its part of `timeout`.

  Attributes:
    grace: seconds for which workers wait for each other, as the server says.
    sizes: the smallest and the largest group.
    undelivered: what it has trained for since it last delivered, for the server to count if it is lost.
  """

  def __init__(
    self,
    number: int,
    entries: int,
    address: str,
    timeout: float,
    now: float,
    *outlets: Any,
    exchange: Exchange,
    switch: Callable[[], None],
    servers: int = 1,
  ):
    nothing = np.broadcast_to(np.float32(0), entries)  # the exchange has the model
    super().__init__(number, nothing, address, timeout, 0.0, now, *outlets)
    self._exchange, self._switch = exchange, switch
    self._limit, self._servers, self._visits = timeout / servers, servers, 0
    self._deadline = self._quorum_until = now + self._limit
    self.grace, self.sizes, self.undelivered, self._weight = 0.0, (1, 1), 0, 0
    self._doublings = 0  # of the time that the transfer of an anchor may take
    self._leaves, self._heir, self._heirs = False, "", list[str]()  # addresses of who may take over the residual
    self._known: dict[int, str] = {}  # addresses of the members of all rounds so far, those of the last one at the end
    self._after = 0  # the number of rounds after the last one of this worker
    self._last = 0, 0  # the number of the last round, and the digest of its result, as the server says

  def handle(self, event: Event | Done | Send | Exception, now: float) -> None:
    """Does what an event asks for; raises one that is an error of an exchange."""
    match event:
      case Piece(Kind.TAKEN, 1) if self.state == "leaving":
        self.state = "ended"
      case Piece(Kind.TAKEN) | Unreachable(self._heir) if self.state == "leaving":
        self._hand_over()
      case _ if self.state == "leaving":
        pass
      case Request(Says.READY, weight=weight):
        self._weight = weight
        super().handle(event, now)
      case Exception():
        raise event
      case Unreachable(address) if self._average and address in self._members.values():
        self._now = now
        self._miss_member(next(member for member, other in self._members.items() if other == address))
      case Done(number, digest):
        self._now = now
        if self._runs(number):
          self._take_result(number, digest)
      case Send(member, piece):
        if self._runs(piece.number):
          self._patience = now + self._timeout
          self._send(self._members[member], piece)
      case _:
        super().handle(event, now)

  def tick(self, now: float) -> None:
    """Time has passed; one that leaves waits for `timeout` seconds at most."""
    if self.state != "leaving":
      super().tick(now)
      is_idle = self.state == "joining" or (self.state == "joined" and not self._average)
      if self._servers > 1 and is_idle and now > self._quorum_until:
        self._miss_server()
    elif now > self._patience:
      self.state = "ended"

  def _miss_member(self, member: int) -> None:
    """A member cannot be reached: it misses messages of this worker, which may have the result already."""
    if not self.stand.last:
      self._fail(self._average, f"worker {member} cannot be reached at {self._members[member]}", member)
    elif self.state == "joined":
      self._tell(Says.FAILED, self._average.group.number, stand=Stand(last=1 + member))

  def _take_result(self, number: int, digest: int | None) -> None:
    if digest is None:  # with a pause: members with other outer chains would fail again at once
      self._drop("the exchange of this worker has failed")
      self._tell(Says.FAILED, number)
      self._join_again(_RETRY)
    else:
      self.stand = self.stand._replace(last=number)
      if self.state == "joined":
        self._tell(Says.DONE, number, stand=Stand(last=digest))

  def _runs(self, number: int) -> bool:
    """Whether this is the round whose exchange runs or has a result."""
    return self._average is not None and self._average.group.number == number

  def _may_come(self, number: int) -> bool:
    return number != self._settled  # each server has random numbers

  def _signal_request(self) -> None:
    self._tell(self._request, self._weight)

  def _begin_average(self, group: Group) -> Any:
    earlier = {member: address for member, address in self._known.items() if member not in self._members}
    self._known = earlier | self._members
    return self._exchange.begin(group)

  def _take_server_message(self, message: ServerMessage) -> None:
    kind, content = message
    if kind == Answer.WELCOME and self.state == "joining":
      self.grace, self.sizes = content["grace"], tuple(content["sizes"])
      self._most_early = 2 * self.sizes[1] * self._initial.size + _MEMBERS  # an index and a value of each entry
      if self._average and content["number"] == self.stand.last:
        self._commit(content)
      elif self._average and content["base"] == self.stand.base:
        self._drop("the server has not heard that all members have the result")
    if "base" in content:
      self._last, self._last_round = (content["base"], content["digest"]), content["round"]
      self.alike = self.alike._replace(run=content["run"])
    super()._take_server_message(message)
    if kind == Answer.WELCOME or content.get("alive", 0) >= self.sizes[0]:
      self._await_quorum()
    if kind == Answer.COMMIT and self._runs(content["number"]) and self.stand.last == content["number"]:
      self._commit(content)
      if self.state == "joined":
        self._begin_request()
    elif kind == Answer.BEHIND and self._awaits_group:
      self._donor = content["donor"]
      behind = f"is behind, with the anchor of round {self.stand.round} in place of {content['round']}"
      _LOG.warning(f"worker {self._number} {behind}, and fetches it from {self._donor}")
      if self._donor:
        self._begin_request()
      else:
        self._join_again(_RETRY)

  def _await_quorum(self) -> None:
    """From now on; workers differ in how long, or they could miss each other again and again."""
    at_first = self._visits % self._servers == 0
    self._quorum_until = self._now + self._limit * (2 + self._number * _GOLDEN % 1) * (2 if at_first else 1)

  def _commit(self, content: dict[str, Any]) -> None:
    """The round counts; if its result is not that of most members, this worker fetches theirs."""
    differs = content["digest"] not in (0, self._average.digest)
    self._settle(counts=True)
    if differs:
      self.stand, self._donor = self._exchange.go_back(), content["donor"]

  def _leave(self) -> None:
    self._leaves, self._patience = True, self._now + self._timeout
    if not (self._average and self.stand.last):  # else it will soon know whether the round counts
      self._hand_over()

  def _hand_over(self) -> None:
    """Says goodbye, and gives the residual to the first worker that takes it, of the last round if one is there."""
    if self.state != "leaving":
      if self._average:
        self._drop("this worker leaves")
      self._tell(Says.BYE, self._settled)
      self.state, self._residual = "leaving", self._exchange.hand_over()
      others = [address for member, address in self._known.items() if member != self._number]
      self._heirs = others if self._residual.any() else []
    if self._heirs:
      self._heir = self._heirs.pop()
      self._send(self._heir, Piece(Kind.RESIDUAL, 0, self._number, self._residual))
    else:
      self.state = "ended"

  def _begin_request(self) -> None:
    if self._average and not self._donor:  # who has the anchor of the last round will know whether this one counts
      self._join_again(_RETRY)
    elif self._leaves and not self._average:
      self._hand_over()
    elif self._request == Says.HELLO and not self._donor and self.stand.round < self._after:
      self._join_again(_RETRY)  # for the anchor of its last round
    else:
      super()._begin_request()
      if self.state == "fetching":  # one that does not end in time is begun again with twice as long
        self._patience = self._now + self._timeout * 2**self._doublings
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)

  def _drop(self, reason: str) -> None:
    """The round of the exchange counts for nobody."""
    group = self._average.group
    _LOG.warning(f"worker {self._number}: round {group.iteration + 1} of {group.names} counts for nobody: {reason}")
    self._settle(counts=False)

  def _settle(self, counts: bool) -> None:
    """The exchange has a result that counts, or is dropped."""
    number, self._average = self._average.group.number, None
    self._settled = number
    if counts:
      self.stand = self._exchange.commit()
      self._after = self.stand.round
      self._request = Says.HELLO  # of what the training loop waits for only the anchor is left
    else:
      self._exchange.drop()
      self.stand = self.stand._replace(last=0)

  def _fail(self, average: Any, reason: str, missing: int | None = None) -> None:
    self._drop(reason)
    if self.state == "joined":
      self._tell(Says.FAILED, average.group.number, stand=Stand(last=0 if missing is None else 1 + missing))
      self._begin_request()

  def _take_model(self, piece: Piece) -> None:
    if self._average and (counts := self._exchange.counts(piece, self.stand)) is not None:
      if counts:
        self._settle(counts=True)
      else:
        self._drop("another worker has an anchor without it")
    if not self._average and (stand := self._exchange.adopt(piece, *self._last)):
      self.stand, self._donor, self.state = stand, None, "joined"
      self._doublings -= 1
      self._patience = self._now + self._timeout
      self._begin_request()
    else:  # the donor may not have heard that the round counts
      self._join_again(_RETRY)

  def _lose_place(self) -> None:
    """Keeps a result that may count."""
    if self._average and not self.stand.last:
      self._drop("the server does not count on this worker any more, or cannot be reached")

  def _miss_server(self) -> None:
    self._deadline, self._visits = self._now + self._limit, self._visits + 1
    self._switch()
    self._await_quorum()
    self._lose_place()
    self._join_again(0)

  def _give_up(self) -> None:
    if self._leaves:
      self.state = "ended"
    elif self._average and not self.stand.last:
      missing = self._average.missing
      silence = "no message" if missing is None else f"no message of worker {missing}"
      self._fail(self._average, f"{silence} for {self._timeout:g} s", missing)
    elif self.state == "joining" and not self.stand.round and self._waits_for(Says.HELLO):
      super()._give_up()
    else:  # a server knows, or a donor, also whether the last round counts
      self._patience = self._now + self._timeout
      self._join_again(0)

  def _tell(self, says: Says, value: int = 0, address: str = "", stand: Stand | None = None) -> None:
    super()._tell(says, self.undelivered if says == Says.BEAT else value, address, stand or self.stand)
