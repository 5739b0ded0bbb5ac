"""Who is there: `Membership` is a worker's place at its server, `Members` are the workers at a server.

State machines without sockets and clocks, which the protocols of both products have as
a part. All times are seconds.

The server alone decides that a worker is dead: its connection is gone, or its thread
has sent no heartbeat for `limit` seconds, whatever its training loop does. A message
that is malformed, or a signal that is unknown, duplicate or stale, is answered by
REJECTED with the reason, and changes nothing.

A HELLO with the number of a worker that has joined comes from its successor, restarted
after a crash that the server has not noticed yet, or from a second worker that was
given the same number by mistake. It is rejected as "duplicate", which may be retried;
as "taken" once the worker that has joined was heard after it.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from jaxsparse.partial.net import messages, transfers
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.log import Warnings
from jaxsparse.partial.net.messages import (
  Answer,
  Content,
  Piece,
  PieceKind,
  Rejected,
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerGroup,
  WorkerMessage,
)

_LOG = logging.getLogger(__name__)
RETRY = 0.2  # seconds between two HELLO, or two NOT_FINITE
_BEATS = 5  # heartbeats in the time after which the server drops a silent worker
# seconds between two heartbeats at most: the next one proves that a second worker has
# the same number
_PULSE = 1.0
_RIVALRY = 4  # times `limit`, for which a rival of a living worker is remembered
_SILENCES = 3  # times the longest recent silence: after so long a sender is lost
# factor of the longest recent silence at each message: half in a minute of heartbeats
_DECAY = 0.99
_PROBES = 10  # heartbeats of the server to each worker in `limit` seconds
# words of early pieces beside their entries: some thousands without entries
_EARLY_WORDS = 1 << 20
_START = RoundPosition()
_UNKNOWN = Alike()


class Unreachable(NamedTuple):
  """Event: the connection to another worker is closed, or cannot be made."""

  address: str


class Relay(Protocol):
  """What signals and answers of a worker pass through, where it is one of several processes."""

  def relay_signal(self, signal: Signal) -> None:
    """A signal to the server."""

  def relay_answer(self, answer: Any) -> None:
    """An answer to the training loop."""


def limit_after(silence: float, limit: float, most: float) -> float:
  """Seconds of silence after which a worker or a server is lost: at least `limit`, more if it was silent before.

  Args:
    silence: seconds of its longest recent silence.
    limit: seconds.
    most: times `limit`, the upper bound of the result.
  """
  return min(max(_SILENCES * silence, limit), most * limit)


@dataclasses.dataclass(eq=False)
class Membership:
  """The place of one worker at its server, which is in one of several states.

  joining     sends HELLO until the server answers WELCOME; again if the server has dropped this worker
  fetching    waits for the model of the donor, another worker, that the server has named
  joined      serves requests of the training loop
  ended       the worker has left, was rejected, or has lost the server; nothing happens any more
  """

  worker: int  # the number of this worker
  address: str  # where other workers reach this one
  timeout: float  # how long to wait for WELCOME, and for each message of another worker
  now: float  # time of the last event or tick, in seconds
  tell_server: Callable[[Signal], None]
  # to the worker at an address; may handle `Unreachable` before it returns
  send: Callable[[str, Piece], None]
  answer_loop: Callable[[Any], None]  # the training loop raises exceptions
  limit: float  # how long the server may be silent; it states its own limit in WELCOME
  # closes the connection to an address; may handle `Unreachable` before it returns
  disconnect: Callable[[str], None] = lambda _: None
  # times `limit`: after so long at most a server is lost that was often silent before
  most: float = 1.0
  # longest recent seconds between two messages of the server, which decay
  silence: float = 0.0
  # how long to wait for a server that has been silent for its limit
  reconnect: float = 0.0
  state: Literal["joining", "fetching", "joined", "ended"] = "joining"
  position: RoundPosition = _START  # in rounds
  alike: Alike = _UNKNOWN  # what all workers need alike
  # the address of the worker whose model has to replace the model of this one; in
  # rounds addresses of several donors, with spaces. None if the own model stays.
  donor: str | None = None
  # how often donors have been asked in vain: one for links, then all for slices of their
  # anchor, then one for its anchor
  in_vain: int = 0
  # when it began to ask for a model that has not come
  fetches_since: float | None = None
  # whether a request of the training loop is open; the first one asks for the model to
  # start from
  waits: bool = True
  # addresses of the workers of whom the server has told it
  addresses: dict[int, str] = dataclasses.field(default_factory=dict)
  part: int = 0  # the number of this process among those of the worker
  # once the server is lost, which message has not come for how many seconds
  lost: tuple[str, float] = "", 0.0
  relay: Relay | None = None

  def __post_init__(self) -> None:
    now = self.now
    self._heard = now  # when the last message of the server came
    # time until which it waits for the next message of the server
    self.server_until = now + self.limit
    # time until which it waits for WELCOME, or for the next message of another worker
    self.peer_until = now + self.timeout
    # time until which it waits for the next byte of the donor
    self.stalled_until = now
    self._last_tick = now
    self._log = Warnings(_LOG)
    self._next_signal = now  # when HELLO, NOT_FINITE or BEAT is sent

  @property
  def interval(self) -> float:
    """Seconds between two ticks, at most."""
    return min(RETRY, self.limit / _BEATS)

  @property
  def fetching(self) -> int:
    """Seconds for which it has asked for a model that has not come; 0 if it does not ask."""
    return 0 if self.fetches_since is None else round(self.now - self.fetches_since)

  def tick(self, now: float) -> None:
    """Notes the time; asks donors again of whom no byte has come for too long."""
    self.now = now
    # This process was suspended: unread messages of others may wait, so nobody is taken
    # for silent.
    if now - self._last_tick > self.limit / 2:
      self._heard = now
      self.server_until = max(self.server_until, now + self.limit)
      self.peer_until = max(self.peer_until, now + self.limit)
      self.stalled_until = max(self.stalled_until, now + self.limit)
    self._last_tick = now
    if self.state == "fetching" and now > self.stalled_until:
      self.warn(f"has no byte of the model of {self.donor} for a while, and asks again")
      for donor in self.donors:
        self.disconnect(donor)
        # no effect where `disconnect` has handled `Unreachable` already
        self.miss_donor(donor)

  def tell(self, kind: WorkerMessage, value: int = 0, **facts: Any) -> None:
    """Sends a signal to the server; `facts` are further fields of `Signal`."""
    tell = self.relay.relay_signal if self.relay else self.tell_server
    tell(Signal(kind, self.worker, value, position=self.position, **facts))

  def repeat_signal(
    self, hello: WorkerMessage = WorkerMessage.HELLO, undelivered: int = 0
  ) -> None:
    """Sends, when it is time, HELLO or NOT_FINITE while joining, heartbeats afterwards.

    Args:
      hello: HELLO or NOT_FINITE.
      undelivered: in rounds, the weight that was trained for and not delivered.
    """
    if self.now < self._next_signal:
      return
    if self.state == "joining":
      self.tell(hello, self.fetching, address=self.address, alike=self.alike)
      self._next_signal = self.now + RETRY
    else:
      self.tell(WorkerMessage.BEAT, undelivered)
      self._next_signal = self.now + min(self.limit / _BEATS, _PULSE)

  def hear(self) -> None:
    """The server has sent something."""
    self.silence = max(self.now - self._heard, _DECAY * self.silence)
    self._heard = self.now
    limit = limit_after(self.silence, self.limit, self.most)
    self.server_until = self.now + limit + self.reconnect

  def warn(self, text: str) -> None:
    """Logs why this worker does not go on: when that changes, and after 10, 20, 40, … seconds while it does not."""
    self._log.say(text, f"worker {self.worker} {text}", self.now)

  def learn(self, addresses: dict[int, str | None]) -> None:
    """Notes addresses that the server has told: by worker, comma-separated by process; None if it has left."""
    for worker, address in addresses.items():
      self.addresses.pop(worker, None)
      if counterpart := self._counterpart(address or ""):
        self.addresses[worker] = counterpart

  def _counterpart(self, addresses: str) -> str:
    """The address of process `part` in the comma-separated addresses of a worker; "" if it has fewer processes."""
    return "".join(addresses.split(",")[self.part : self.part + 1])

  def parse_group(self, content: Content) -> WorkerGroup:
    """The group in a GROUP answer; raises Rejected without this worker, or an address of each member."""
    group = WorkerGroup.parse(content)
    others = {*group.members} - {self.worker}
    if not group.has(self.worker) or not self.addresses.keys() >= others:
      raise Rejected(
        f"malformed: a group without worker {self.worker}, or the address of a member: {group.names}"
      )
    return group

  def enter(self, limit: float, donor: str | None, most: float = 1.0) -> None:
    """The server, perhaps another one than before, has answered WELCOME with these values of the fields."""
    self.state = "joined"
    self.limit = limit
    self.most = most
    # silences of the server before say nothing about this one
    self.silence = 0.0
    self._heard = self.now
    self.donor = donor

  def join_again(self, delay: float) -> None:
    """From now on this worker is no member, and says HELLO after so many seconds."""
    self.state = "joining"
    self._next_signal = self.now + delay

  def await_peer(self) -> None:
    """Waits for `timeout` seconds for the next message of another worker."""
    self.peer_until = self.now + self.timeout

  @property
  def donors(self) -> list[str]:
    """The addresses that are asked for a model: the first donor's, or all after exactly one fetch in vain."""
    donors = transfers.choose((self.donor or "").split(), self.in_vain)
    return [*filter(None, map(self._counterpart, donors))]

  def fetch(self, round_: int = 0, id_: int = 0) -> None:
    """Asks the donor for its model; in rounds for links from the own anchor on, or donors for slices of their anchor.

    Args:
      round_: in rounds, the donor answers once it has been through so many rounds.
      id_: in rounds, the id of the last round of the own anchor.
    """
    self.state = "fetching"
    # The time of the first of several requests is kept.
    self.fetches_since = self.now if self.fetches_since is None else self.fetches_since
    self._await_donor()
    requests = transfers.requests(
      self.donors, self.in_vain, round_, self.worker, self.position.round, id_
    )
    for request in requests:
      self.send(*request)

  def _await_donor(self) -> None:
    """The donor may be silent for a while from now on."""
    self.stalled_until = self.now + min(self.timeout, transfers.STALLED)

  def hear_donor(self) -> None:
    """One of `donors` has sent a chunk of its model, or WAITS: deadlines are extended."""
    if self.state == "fetching":
      self.await_peer()
      self._await_donor()

  def miss_donor(self, address: str) -> None:
    """The worker at an address cannot be reached: if it is asked for its model, the server names another donor."""
    if self.state == "fetching" and address in self.donors:
      self.in_vain += 1
      self.join_again(RETRY)  # WELCOME names a donor

  def open_request(self) -> bool:
    """The training loop has a request; True if it can begin now, False if it begins when this worker has joined."""
    self.waits = True
    if self.state == "joined":
      self.await_peer()
    return self.state == "joined"

  def reply(self, answer: Any) -> None:
    """Answers the request of the training loop, and closes it."""
    self.state = "joined"
    self.waits = False
    self.donor = self.fetches_since = None
    self.answer(answer)

  def answer(self, answer: Any) -> None:
    """Answers the training loop; the request stays open."""
    (self.relay.relay_answer if self.relay else self.answer_loop)(answer)

  def take_rejection(self, reason: str, *, awaits_group: bool) -> bool:
    """Handles REJECTED, whose reason begins with its kind and a colon.

        absent       the server does not know this worker, which joins again
        duplicate    while joining: HELLO is repeated, the number may become free
        any other    the training loop raises ValueError; a worker that joins ends.
                     Ignored by a worker that neither joins nor awaits a group.

    Args:
      reason: as the server gives it.
      awaits_group: whether the rejected signal may be that of the open request.

    Returns:
      Whether the server does not know this worker.
    """
    kind = reason.partition(":")[0]
    is_joining = self.state == "joining"
    if kind != "absent":
      if kind != "duplicate" and (awaits_group or is_joining):
        # If no request is open, the next one raises the error.
        self.reply(ValueError(f"worker {self.worker}: {reason}"))
        if is_joining:
          self.state = "ended"
      elif is_joining:
        self.warn(f"is not admitted yet: {reason}")
    # the server has dropped this worker and aborted its group, or is another server
    elif not is_joining:
      self.await_peer()
      self.join_again(RETRY)
    return kind == "absent"

  def lose(self, awaited: str, seconds: float) -> None:
    """Ends without the server: the message `awaited` has not come for so many seconds."""
    self.state = "ended"
    self.lost = awaited, seconds


@dataclasses.dataclass(eq=False)
class EarlyPieces:
  """Pieces of a group that the server has not named yet: a member sends as soon as it hears of the group."""

  # values, in words of 4 bytes, that all members may send before this one hears of the
  # group; more are forged, and could fill the memory
  entries: int
  # by sender and tag
  pieces: dict[tuple[int, int], Piece] = dataclasses.field(default_factory=dict)
  kept: int = 0  # words of memory of these pieces

  def keep(self, piece: Piece) -> None:
    """Keeps a piece, in place of an earlier one with its sender and tag; drops it if there is no room."""
    if former := self.pieces.pop((piece.sender, piece.tag), None):
      self.kept -= former.words
    if self.kept + piece.words <= self.entries + _EARLY_WORDS:
      self.pieces[piece.sender, piece.tag] = piece
      self.kept += piece.words

  def take(self, group_number: int) -> list[Piece]:
    """The pieces of a group; no other group can come any more."""
    pieces = [piece for piece in self.pieces.values() if piece.number == group_number]
    self.pieces.clear()
    self.kept = 0
    return pieces


class HasGroup(Protocol):
  """What a member computes with its group."""

  group: WorkerGroup


E = TypeVar("E", bound=HasGroup)


@dataclasses.dataclass(eq=False)
class WorkerProtocol(Generic[E]):
  """The protocol of one worker; partial reduce and rounds implement the methods without a body.

  Attributes:
    membership: the place of the worker at its server.
    _run: the exchange under way, or in rounds one whose result is not known to count;
      None if there is none.
    _settled: the number of the last group that this worker has nothing more to do with.
    _early: pieces of a group of which the server has not told yet.
    _log: warnings of the module of the subclass.
  """

  membership: Membership

  def __post_init__(self) -> None:
    self._log = Warnings(logging.getLogger(type(self).__module__))
    self._run: E | None = None
    self._settled = 0
    self._early = EarlyPieces(0)  # until WELCOME

  def handle(self, event: object, now: float) -> None:
    """Does what an event asks for, at the time `now` in seconds; nothing after the end."""
    if self.membership.state != "ended":
      self.membership.now = now
      self._handle(event)

  def _handle(self, event: object) -> None:
    """Handles events that both products have: answers, pieces, and workers that cannot be reached."""
    membership = self.membership
    match event:
      case Answer(kind, content):
        # addresses first: an answer with a group needs them
        membership.learn(content.get("addresses", {}))
        self._take_answer(kind, content)
        # last, with the limit that WELCOME has changed
        membership.hear()
      case Piece(PieceKind.MODEL):
        if membership.state == "fetching":
          self._take_model(event)
      case Piece():
        self._take_piece(event)
      case Unreachable(address):
        membership.miss_donor(address)

  def tick(self, now: float) -> None:
    """Time has passed: repeats signals, and gives up what has taken too long."""
    membership = self.membership
    if membership.state == "ended":
      return
    membership.tick(now)
    # `peer_until` counts while this worker exchanges, joins or fetches: else it awaits
    # no other worker.
    if now > membership.peer_until and (self._run or membership.state != "joined"):
      self._give_up()
    elif now > membership.server_until:
      self._miss_server()
    else:
      self._repeat_signal()

  @property
  def _awaits_group(self) -> bool:
    """Whether a GROUP message may still be in transit."""
    membership = self.membership
    return membership.state == "joined" and membership.waits and self._run is None

  def _run_of(self, group_number: int) -> E | None:
    """The exchange that runs or has a result, if it is that of this group."""
    return self._run if self._run and self._run.group.number == group_number else None

  def _take_answer(self, kind: ServerMessage, content: Content) -> None:
    """Takes an answer of the server."""

  def _take_model(self, piece: Piece) -> None:
    """Takes the model of a donor."""

  def _take_piece(self, piece: Piece) -> None:
    """Takes a piece of another member."""

  def _give_up(self) -> None:
    """Goes on without the message that has not come for `timeout` seconds, if possible."""

  def _miss_server(self) -> None:
    """The server has been silent for too long."""

  def _repeat_signal(self) -> None:
    """Sends HELLO or a heartbeat when it is time."""


@dataclasses.dataclass
class Member:
  """What a server knows of a worker that has joined."""

  connection: bytes = b""  # ZeroMQ identity of the connection by which it has joined
  address: str = ""  # where other workers reach it
  heard: float = 0.0  # when its last message came
  silence: float = 0.0  # longest recent seconds between two messages, which decay
  told: int = 0  # number of the last change of addresses that it has been told
  # by connection of another process: the time of its first HELLO with this number
  rivals: dict[bytes, float] = dataclasses.field(default_factory=dict)


M = TypeVar("M", bound=Member)


@dataclasses.dataclass(eq=False)
class Members(Generic[M]):
  """The workers at a server: who has joined by which connection, and who is dead."""

  # makes what the server knows of a worker: a `Member` with what the product adds
  record: Callable[[], M]
  # a frame to a connection without waiting; False if it is gone, or full
  send: Callable[[bytes, bytes], bool]
  limit: float  # seconds of silence after which a worker is dropped
  now: float  # time of the last message or tick, in seconds
  # by worker: the time at which it is dropped if no message comes before
  dead_at: dict[int, float] = dataclasses.field(default_factory=dict)
  rejected: int = 0  # messages
  # times `limit`: after so long at most a worker is dropped that was silent before
  most: float = 1.0
  # by worker: what is known of those that have joined
  known: dict[int, M] = dataclasses.field(default_factory=dict)
  alike: Alike = _UNKNOWN  # what the workers that are there have alike

  def __post_init__(self) -> None:
    self._last_tick = self.now
    self._last_probe = -float("inf")
    self._changes = 0  # how often workers have joined and left
    # by worker: the number of its last change, and its address, None if it has left
    self._addresses = dict[int, tuple[int, str | None]]()

  def receive(
    self,
    connection: bytes,
    frames: list[bytes],
    now: float,
    handle: Callable[[bytes, Signal], None],
  ) -> None:
    """Handles a message of a worker, or answers REJECTED.

    Args:
      connection: the ZeroMQ identity of the connection that has sent the message.
      frames: of the message, one in a valid signal.
      now: the time in seconds.
      handle: does what a valid signal of a connection asks for, or raises Rejected.
    """
    self.now = now
    try:
      signal = messages.parse_signal(frames)
      handle(connection, signal)
    except Rejected as error:
      self.rejected += 1
      self.send(
        connection, messages.pack_answer(ServerMessage.REJECTED, reason=str(error))
      )
      return
    member = self.known.get(signal.worker)
    # Only messages by the connection that has joined are signs of life.
    if member and member.connection == connection:
      member.silence = max(now - member.heard, _DECAY * member.silence)
      member.heard = now
      self.dead_at[signal.worker] = now + self.limit_of(member)

  def limit_of(self, member: Member) -> float:
    """Seconds of silence after which this worker is dropped."""
    return limit_after(member.silence, self.limit, self.most)

  def tick(self, now: float, **beat: Any) -> list[int]:
    """Sends heartbeats, and returns the workers that are dead; to be called several times in `limit` seconds.

    Args:
      now: the time in seconds.
      beat: the fields of the heartbeats.
    """
    self.now = now
    # This process was suspended: messages of workers may be unread.
    if now - self._last_tick > self.limit / 2:
      self.dead_at = {
        worker: max(end, now + self.limit) for worker, end in self.dead_at.items()
      }
    self._last_tick = now
    # computed in each tick: the lead of several processes changes `limit`
    interval = self.limit / _PROBES
    if now > self._last_probe + interval:
      self._last_probe = now
      frame = messages.pack_answer(ServerMessage.BEAT, **beat)
      for worker, member in self.known.items():
        # The connection is gone: the worker is dropped a little later, after its last
        # messages.
        if not self.send(member.connection, frame):
          self.dead_at[worker] = min(self.dead_at[worker], now + interval)
    return [worker for worker, end in self.dead_at.items() if end < now]

  def tell(self, workers: Iterable[int], kind: ServerMessage, **content: Any) -> None:
    """Sends an answer to those of the workers that are there."""
    frame = messages.pack_answer(kind, **content)
    for worker in workers:
      if worker in self.known:
        self.send(self.known[worker].connection, frame)

  def tell_group(self, group: WorkerGroup) -> None:
    """Tells the members that they are a group, and each one the addresses that it has not been told."""
    # Members that were told equally much get one frame, which is packed once.
    by_told = dict[int, list[M]]()
    for worker in group.members:
      by_told.setdefault(self.known[worker].told, []).append(self.known[worker])
    for told, members in by_told.items():
      addresses = {
        worker: address
        for worker, (change, address) in self._addresses.items()
        if change > told
      }
      frame = messages.pack_answer(
        ServerMessage.GROUP, **group._asdict(), addresses=addresses
      )
      for member in members:
        # A member whose connection takes no frame gets these addresses with its next
        # group.
        if self.send(member.connection, frame):
          member.told = self._changes

  def find(self, connection: bytes, worker: int) -> M:
    """What is known of a worker that has joined by this connection; raises Rejected for any other."""
    member = self.known.get(worker)
    if member is None or member.connection != connection:
      raise Rejected(
        f"absent: worker {worker} has not joined by this connection, it has to send HELLO"
      )
    return member

  def check(self, connection: bytes, signal: Signal, *, at_start: bool) -> None:
    """Raises Rejected unless a worker may join: its number is free, and its layout and options are those of the others.

    Args:
      connection: by which it has sent `signal`.
      signal: HELLO or NOT_FINITE.
      at_start: whether nobody has trained yet, so that start values are compared too.
    """
    worker = signal.worker
    member = self.known.get(worker)
    if member and member.connection != connection:
      # processes that still ask for the number
      member.rivals = {
        rival: at
        for rival, at in member.rivals.items()
        if at > self.now - _RIVALRY * self.limit
      }
      asked = member.rivals.setdefault(connection, self.now)
      # The member was heard after its rival had asked, and its connection is there:
      # both live.
      if member.heard > asked and self.send(
        member.connection, messages.pack_answer(ServerMessage.BEAT)
      ):
        del member.rivals[connection]
        raise Rejected(
          f"taken: a living worker has the number {worker}, choose another one or end that worker first"
        )
      raise Rejected(
        f"duplicate: worker {worker} has joined; if it died, it is dropped after {self.limit:g} s"
      )
    # without this worker: one that joins again replaces itself
    others = [known for peer, known in self.known.items() if peer != worker]
    if others and (unlike := signal.alike.difference(self.alike, at_start=at_start)):
      raise Rejected(f"unlike: worker {worker} has {unlike}")
    # the numbers of processes, each of which has an address
    parts = 1 + signal.address.count(",")
    if others and parts != (theirs := 1 + others[0].address.count(",")):
      raise Rejected(
        f"unlike: worker {worker} has {parts} addresses, the others have {theirs}"
      )

  def join(self, connection: bytes, signal: Signal) -> M:
    """Joins a worker, or joins it again; returns what is known of it, to which the caller adds its own fields."""
    member = self.known.setdefault(signal.worker, self.record())
    member.connection = connection
    member.address = signal.address
    member.heard = self.now
    self.dead_at[signal.worker] = self.now + self.limit
    member.rivals.clear()
    member.told = 0  # a process that was restarted knows no addresses
    self._note(signal.worker, signal.address)
    self.alike = signal.alike
    return member

  def forget(self, worker: int) -> M | None:
    """A worker has left, or is dead; returns what was known of it, None if it had not joined."""
    self.dead_at.pop(worker, None)
    if worker in self.known:
      self._note(worker, None)
    return self.known.pop(worker, None)

  def _note(self, worker: int, address: str | None) -> None:
    """Numbers a change of a worker's address (None: it has left), which members of later groups are told."""
    self._changes += 1
    self._addresses[worker] = self._changes, address
