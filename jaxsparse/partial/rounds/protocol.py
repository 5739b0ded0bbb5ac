"""The protocol of a worker of rounds: a pure state machine, without sockets and clocks.

    RoundRequest(READY, …) ──> READY ──> GROUP: the exchange runs ──> Done(digest) ──> DONE ──> COMMIT: adopt, reply
                                └────> BEHIND: fetch the anchor of a donor, then READY again
    ABORT, a member that cannot be reached, or no message for `timeout` seconds
                  └────> drop what the exchange has computed, FAILED with the missing member, READY again
    RoundRequest(LEAVING, …) ──> …: a round in which its residual passes to another member, and then BYE

Between DONE and COMMIT a worker does not know whether the round counts. If the server
is gone then, it says so to the next one when it joins, which knows from the others, or
decides.

A server that is silent is no reason to end: training goes on, and the worker tries the
next address, over and over. It also tries the next address when its server has too few
workers for a round, since the others may be at another server. It waits longest at the
first address, so that workers meet there.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxsparse.partial.net.membership import (
  RETRY,
  EarlyPieces,
  Unreachable,
  WorkerProtocol,
)
from jaxsparse.partial.net.messages import (
  Content,
  Piece,
  Rejected,
  RoundPosition,
  ServerMessage,
  WorkerMessage,
)
from jaxsparse.partial.net.transfers import PREFIX
from jaxsparse.partial.rounds.anchor import Forked
from jaxsparse.partial.rounds.exchanger import Exchanger
from jaxsparse.partial.rounds.run import Done, Outgoing, Run

# The fractional parts of its multiples are well spread, so that each worker waits for
# another time.
_GOLDEN = 0.618
# bytes a second: an uplink of 5 Mbit/s, on which the messages to all members may take
# longer than the timeout
_SLOWEST = 625e3


class RoundRequest(NamedTuple):
  """Event: the training loop asks for a place (HELLO), a round (READY, LINK), None (NOT_FINITE) or the end (BYE)."""

  kind: WorkerMessage
  weight: int = 0  # mean weight of a step, with 16 fractional bits
  delivers: int = 0  # weight of the steps that are wholly delivered by the round


@dataclasses.dataclass(eq=False)
class RoundProtocol(WorkerProtocol[Run]):
  """The protocol of one worker; answers to the training loop are the positions reached.

  Attributes:
    membership: the worker's place at its server: its `state` (joining, fetching,
      joined or ended); its `donor`, from which it fetches the anchor; whether a request
      of the training loop `waits`; and the `position` of the anchor, with `last`, the
      number of a group whose result it has without knowing whether it counts; 0: none.
    exchange: the `Exchanger`, which has the anchor.
    servers: how many addresses of servers there are.
    grace: how long training may wait for a round.
    sizes: of the smallest and the largest group.
    _request: the last request of the training loop; HELLO once its round has counted,
      when it waits for the anchor alone.
    _run: the exchange that runs, or has a result not known to count; or None.
    _settled: number of the last group with which this worker has nothing more to do.
    _last: position of the last round of all workers, as the server says, and `_digest`
      of the anchor after it; 0: the server does not know.
    _own_round: number of the last round of this worker that counted.
    _early: messages of a group that the server has not named yet.
    _members: the members of the last group by their addresses.
    _leaves: whether the training loop has asked for the end.
    _visits: how often the worker has gone to another server, and `_quorum_until` when
      it goes to the next one if this one has too few workers.
  """

  exchange: Exchanger  # runs the exchanges
  entries: int  # entries of the model
  switch: Callable[[], None]  # connects to the next server
  servers: int = 1  # how many there are
  # seconds for which workers wait for each other, as the server says
  grace: float = 0.0
  sizes: tuple[int, int] = (1, 1)  # the smallest and the largest group
  # what it has trained for since it last delivered, for the server to count if it is
  # lost
  undelivered: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    self._request = RoundRequest(WorkerMessage.HELLO)  # the last one
    self._visits = 0  # how often it has gone to another server
    # until when this server may have too few workers, before it goes to the next one
    self._quorum_until = self.membership.server_until
    self._leaves = False  # whether the training loop has asked for the end
    self._members = dict[str, int]()  # members of the last group, by their addresses
    # number of the last round with this worker's movement, which earlier anchors lack
    self._own_round = 0
    self._last = RoundPosition()  # the last round of all, as the server says
    self._digest = 0  # digest of the result of that round

  def _handle(self, event: object) -> None:
    """Does what an event of the training loop, the exchange or the network asks for; raises an error of an exchange."""
    membership = self.membership
    match event:
      case Exception():
        raise event
      case RoundRequest(WorkerMessage.BYE):
        self._leave()
      # The answer None: the training loop goes on from the anchor that it has.
      case RoundRequest(WorkerMessage.NOT_FINITE):
        membership.answer(None)
      case RoundRequest():
        self._request = event
        if membership.open_request():
          self._begin_request()
      case Unreachable(address) if self._run and address in self._members:
        self._miss_member(self._run, self._members[address])
      case Done(group_number, digest) if run := self._run_of(group_number):
        self._take_result(run, digest)
      case Outgoing(member, piece) if run := self._run_of(piece.number):
        # Another member sends as many bytes to each member: the timeout allows for a
        # slow uplink.
        nbytes = piece.values.nbytes * len(run.group.members)
        membership.timeout = max(membership.timeout, nbytes / _SLOWEST)
        membership.await_peer()
        membership.send(membership.addresses[member], piece)
      # answers of the server, pieces, and any other `Unreachable`
      case _:
        super()._handle(event)

  def tick(self, now: float) -> None:
    """Repeats signals and gives up what is late, as every worker; also leaves a server with too few workers."""
    super().tick(now)
    state = self.membership.state
    is_idle = state == "joining" or (state == "joined" and not self._run)
    if self.servers > 1 and is_idle and now > self._quorum_until:
      self._miss_server()

  def _repeat_signal(self) -> None:
    """Sends HELLO, or a heartbeat, when it is time."""
    membership = self.membership
    # HELLO carries the ids of the anchor as it is now: the server compares branches.
    membership.alike = membership.alike._replace(lineage=self.exchange.lineage)
    membership.repeat_signal(undelivered=self.undelivered)

  def _give_up(self) -> None:
    """Neither WELCOME nor a message of another worker has come in time: ends, drops the round, or asks again."""
    membership = self.membership
    # Whether the first request is open: HELLO is also the request after a round of this
    # worker. If WELCOME does not come, the worker ends.
    is_new = (
      membership.waits
      and self._request.kind == WorkerMessage.HELLO
      and not self._own_round
    )
    # The time to leave in good order is over.
    if self._leaves:
      membership.state = "ended"
    # `last` is 0: the exchange has no result, so the round has not counted, and this
    # worker may drop it.
    elif self._run and not membership.position.last:
      missing = self._run.missing  # the member whose message it waits for, or −1
      whose = "" if missing < 0 else f" of worker {missing}"
      reason = f"no message{whose} for {membership.timeout:g} s"
      self._fail(self._run, reason, missing)
    elif membership.state == "joining" and is_new:
      membership.lose("WELCOME", membership.timeout)
    else:  # HELLO: the server, or a donor, also tells whether an undecided round counts.
      membership.await_peer()
      membership.join_again(0)

  def _miss_member(self, run: Run, member: int) -> None:
    """Fails the round of a member that cannot be reached, and so misses messages of this worker."""
    membership = self.membership
    if not membership.position.last:
      address = membership.addresses[member]
      self._fail(run, f"worker {member} cannot be reached at {address}", member)
    # This worker has a result: the server drops the round, unless all members are done.
    elif membership.state == "joined":
      membership.tell(WorkerMessage.FAILED, run.group.number, missing=member)

  def _miss_server(self) -> None:
    """Goes to the next server: this one has been silent for too long, or has too few workers."""
    # The next server may be silent for `limit` seconds, too.
    self.membership.server_until = self.membership.now + self.membership.limit
    self._visits += 1
    self.switch()
    self._await_quorum()
    self._lose_place()
    self.membership.join_again(0)

  def _await_quorum(self) -> None:
    """Sets until when it stays at a server without a quorum: workers leave at different times, to meet at one."""
    # from 2 to 3, by the worker's number
    limits = 2 + self.membership.worker * _GOLDEN % 1
    # twice as long at the first address, where workers meet
    limits *= 1 if self._visits % self.servers else 2
    self._quorum_until = self.membership.now + self.membership.limit * limits

  def _lose_place(self) -> None:
    """Drops the running exchange, as the server goes on without this worker; not after DONE: it may still count."""
    if self._run and not self.membership.position.last:
      self._drop(
        self._run,
        "the server does not count on this worker any more, or cannot be reached",
      )

  # Requests of the training loop.

  def _begin_request(self) -> None:
    """Asks the donor, if there is one, or the server for what the open request needs; answers if nothing is needed."""
    membership = self.membership
    # HELLO is also the request after a round that has counted: the training loop then
    # waits for an anchor with this round.
    has_anchor = (
      self._request.kind != WorkerMessage.HELLO
      or membership.position.round >= self._own_round
    )
    if not membership.donor and (self._run or (not self._leaves and not has_anchor)):
      # It is open whether the round of a result counts, or the anchor lacks this
      # worker's last round. WELCOME tells, or names a donor, whose anchor tells.
      membership.join_again(RETRY)
    elif self._leaves and not self._run:
      self._say_goodbye()
    elif membership.donor:
      membership.await_peer()
      # Links lead on from the anchor's last round: its id, 0 before the first round.
      *_, id_ = 0, *self.exchange.lineage
      membership.fetch(self._last.round, id_)
    elif self._request.kind == WorkerMessage.HELLO:
      membership.reply(membership.position)
    # a request for a round
    else:
      membership.state = "joined"
      kind, weight, delivers = self._request
      membership.tell(kind, weight, delivers=delivers)

  def _leave(self) -> None:
    """Leaves, as the training loop asks: at once, or once an undecided round is decided, within `timeout` seconds."""
    self._leaves = True
    self.membership.await_peer()
    # With a result it stays until it knows whether the round counts.
    if not (self._run and self.membership.position.last):
      self._say_goodbye()

  def _say_goodbye(self) -> None:
    """Ends this worker; an exchange under way is dropped."""
    if self._run:
      self._drop(self._run, "this worker leaves")
    self.membership.tell(WorkerMessage.BYE, self._settled)
    self.membership.state = "ended"

  # Answers of the server.

  def _take_answer(self, kind: ServerMessage, content: Content) -> None:
    """Does what an answer of the server asks for; one that comes too late does nothing."""
    membership = self.membership
    # WELCOME again, while a donor does not answer, is no sign of a quorum: others with
    # the anchor may be at another server.
    is_first = kind == ServerMessage.WELCOME and membership.fetches_since is None
    self.grace = content.get("grace", self.grace)
    # The fields of the last round come together, in several kinds of answers.
    if "base" in content:
      self._last = RoundPosition(content["round"], content["base"])
      self._digest = content["digest"]
      membership.alike = membership.alike._replace(run=content["run"])
    match kind:
      case ServerMessage.WELCOME if membership.state == "joining":
        self._take_welcome(content)
      case ServerMessage.GROUP if self._awaits_group:
        self._start_round(content)
      case ServerMessage.ABORT if run := self._run_of(content["number"]):
        self._fail(run, content.get("reason", "the server says so"))
      case ServerMessage.REJECTED:
        if membership.take_rejection(
          content["reason"], awaits_group=self._awaits_group
        ):
          # The server does not know this worker: it has dropped it, or is another one
          # with other groups, of which `_settled` names none.
          self._lose_place()
          self._settled = 0
      case ServerMessage.COMMIT if (
        run := self._run_of(content["number"])
      ) and membership.position.last:
        self._commit(run, content)
        # Answers the training loop, asks a donor for the anchor, or says BYE.
        if membership.state == "joined":
          self._begin_request()
      case ServerMessage.BEHIND if self._awaits_group:
        donor = membership.donor = content["donor"]
        membership.warn(
          f"is behind: {membership.position.compare(self._last)}, "
          f"{f'which it fetches from {donor}' if donor else 'which no worker that is there has'}"
        )
        # Without a donor now, a later WELCOME may name one.
        self._begin_request() if donor else membership.join_again(RETRY)
    # Signs of enough workers at this server: it is not left for the next one yet.
    if is_first or content.get("alive", 0) >= self.sizes[0]:
      self._await_quorum()

  def _take_welcome(self, content: Content) -> None:
    """Joins; commits the round of a result, if the server says that it counts, and drops it if it cannot count.

    Where the server knows neither, the anchor of a donor tells.
    """
    position = self.membership.position
    if not content.keys() >= {"grace", "sizes", "base", "number"}:
      raise Rejected("malformed: WELCOME of a server of partial reduce, not of rounds")
    self.sizes = tuple(content["sizes"])
    # 4-byte words that all members may send ahead: an index and a value of each entry.
    self._early = EarlyPieces(2 * self.sizes[1] * self.entries)
    # The server names the round if it counted while this worker was away.
    if self._run and content["number"] == position.last:
      self._commit(self._run, content)
    # The newest anchor is still the one before the round.
    elif self._run and content["base"] == position.base:
      self._drop(self._run, "the server has not heard that all members have the result")
    # Times `limit`: the longest silence of the server before it is taken for lost.
    most = content.get("most", 1.0)
    self.membership.enter(content["limit"], content["donor"], most)
    if self.membership.waits:
      self._begin_request()

  def _take_model(self, piece: Piece) -> None:
    """Takes the anchor or the links that a donor has sent; refuses what proves wrong, and asks again."""
    membership = self.membership
    # A prefix alone: the donor has no links. Asks for slices of the anchor instead.
    if not membership.in_vain and piece.values.size == PREFIX:
      membership.in_vain = 1
      self._begin_request()
      return
    try:
      if self._run:
        # Between DONE and COMMIT the lineage of a donor tells whether the round has
        # counted.
        counts = self.exchange.was_committed(piece, membership.position)
        if counts is None:
          raise ValueError("it may not have heard whether the last round counts")
        if counts:
          self._settle(self._run, counts=True)
        else:
          self._drop(self._run, "another worker has an anchor without it")
      membership.position = self._adopt(piece)
    except Forked:
      self._say_goodbye()
      raise
    except ValueError as error:
      membership.warn(f"refuses the anchor of worker {piece.sender}: {error}")
      membership.in_vain += 1
      membership.join_again(RETRY)
      return
    # The anchor has fewer rounds where those of this worker do not count for the
    # others.
    self._own_round = min(self._own_round, membership.position.round)
    membership.donor = membership.fetches_since = None
    membership.in_vain = 0
    membership.state = "joined"
    membership.await_peer()
    self._begin_request()

  def _adopt(self, piece: Piece) -> RoundPosition:
    """Takes the anchor of a donor, unless it is of the last round and has another digest; returns the new position."""
    return self.exchange.adopt(piece, self._last.base, self._digest)

  # The exchange of a round.

  def _start_round(self, content: Content) -> None:
    """Begins the exchange of the group in a GROUP answer."""
    group = self.membership.parse_group(content)
    self._members = {
      self.membership.addresses[member]: member for member in group.members
    }
    self._run = self.exchange.begin(group)
    # Members that heard of the group earlier have sent already.
    for piece in self._early.take(group.number):
      self._run.receive(piece)
    self.membership.await_peer()

  def _take_piece(self, piece: Piece) -> None:
    """Gives a member's message to its exchange, keeps it until the server names the group, or drops it."""
    if run := self._run_of(piece.number):
      run.receive(piece)
      self.membership.await_peer()
    elif piece.number != self._settled and self._awaits_group:
      self._early.keep(piece)

  def _take_result(self, run: Run, digest: int | None) -> None:
    """Tells the server that the exchange has ended; drops it if it has no result.

    Args:
      run: the exchange.
      digest: of its result; None if it has failed.
    """
    membership = self.membership
    group_number = run.group.number
    # Joins again after a pause, and then asks for another round: members with different
    # outer chains would fail again at once.
    if digest is None:
      self._drop(run, "the exchange of this worker has failed")
      membership.tell(WorkerMessage.FAILED, group_number)
      membership.join_again(RETRY)
    else:
      # From now on the round may count: `last` stays until this worker knows whether it
      # does.
      membership.position = membership.position._replace(last=group_number)
      # While it joins, HELLO tells the server of `last`.
      if membership.state == "joined":
        membership.tell(WorkerMessage.DONE, group_number, digest=digest)

  def _commit(self, run: Run, content: Content) -> None:
    """Adopts the result of a round that counts; undoes it, and notes a donor, if most members have another result."""
    self._settle(run, counts=True)
    # 0: this server knows of the round from workers, but not the digest of its result.
    if content["digest"] not in (0, run.digest):
      self.membership.position = self.exchange.go_back()
      self.membership.donor = content["donor"]

  def _drop(self, run: Run, reason: str) -> None:
    """Drops the exchange, whose round counts for nobody, and logs the reason."""
    what = f"worker {self.membership.worker}: {run.group.round} counts for nobody"
    self._log.say(reason, f"{what}: {reason}", self.membership.now)
    self._settle(run, counts=False)

  def _settle(self, run: Run, counts: bool) -> None:
    """Ends the exchange: its result becomes the anchor if the round counts, else it is dropped.

    In both cases `position.last` is 0 afterwards: nothing is undecided any more.
    """
    membership = self.membership
    self._settled = run.group.number
    self._run = None
    if counts:
      membership.position = self.exchange.commit()
      self._own_round = membership.position.round
      # the training loop waits for the anchor alone from now on
      self._request = RoundRequest(WorkerMessage.HELLO)
    else:
      self.exchange.drop()
      membership.position = membership.position._replace(last=0)

  def _fail(self, run: Run, reason: str, missing: int = -1) -> None:
    """Drops the exchange, tells the server that its round has failed, and asks for another one.

    Args:
      run: the exchange.
      reason: for the log.
      missing: member whose message has not come, or that cannot be reached; −1: none.
    """
    self._drop(run, reason)
    if self.membership.state == "joined":
      self.membership.tell(WorkerMessage.FAILED, self._settled, missing=missing)
      self._begin_request()
