"""Who is there: `Membership` is a worker's place at its server, `Members` are the workers at a server.

State machines without sockets and clocks, which the protocols of both products have as
a part. All times are seconds.

The server alone decides that a worker is dead: its connection is gone, or its thread
has sent no heartbeat for `limit` seconds, whatever its training loop does. A message
that is malformed, or a signal that is unknown, duplicate or stale, is answered by
REJECTED with the reason, and changes nothing.

A HELLO with the number of a worker that has joined comes from its successor, restarted
after a crash that the server has not noticed yet, or from a second worker that was
given the same number by mistake. It is rejected as "duplicate", and may try again; once
the worker that has joined has been heard again, it is rejected as "taken", for good.
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

  Attributes:
    worker: the number of this worker.
    address: where other workers reach this one.
    timeout: how long to wait for WELCOME, and for each message of another worker.
    now: time of the last event or tick.
    tell_server: sends a signal to the server.
    send: sends a piece to an address; may handle `Unreachable` before it returns.
    answer_loop: gives the training loop an answer, or an exception that it raises.
    limit: how long the server may be silent; WELCOME states the limit of the server.
    disconnect: closes the connection to an address; may handle `Unreachable` before it
      returns.
    most: a server that was silent for long before is lost after `most * limit` at most.
    silence: longest recent silence between two messages of the server; it decays.
    reconnect: how long to wait for a server that has been silent for its limit.
    state: as above.
    position: in rounds, how far this worker is.
    alike: what all workers need alike.
    donor: the address of the worker whose model has to replace the model of this one;
      in rounds addresses of several donors, with spaces. None if the own model stays.
    in_vain: how often donors have been asked in vain: one for links, then all for
      slices of their anchor, then one for its anchor.
    fetches_since: when it began to ask for a model that has not come; None if it asks
      for none.
    waits: whether a request of the training loop is open; the first one asks for the
      model to start from.
    addresses: by worker of whom the server has told, this one too: the address of its
      process with the number `part`.
    part: the number of this process among those of the worker.
    lost: once the server is lost, which message has not come for how many seconds.
    relay: passes signals and answers on if the worker has several processes; else None.
    server_until: deadline of the next message of the server.
    peer_until: deadline of WELCOME, or of the next message of another worker.
    stalled_until: deadline of the next chunk of a model, or WAITS, of a donor.
    _heard: when the last message of the server came.
    _next_signal: when the next HELLO, NOT_FINITE or BEAT is sent.
  """

  worker: int
  address: str
  timeout: float
  now: float
  tell_server: Callable[[Signal], None]
  send: Callable[[str, Piece], None]
  answer_loop: Callable[[Any], None]
  limit: float
  disconnect: Callable[[str], None] = lambda _: None
  most: float = 1.0
  silence: float = 0.0
  reconnect: float = 0.0
  state: Literal["joining", "fetching", "joined", "ended"] = "joining"
  position: RoundPosition = _START
  alike: Alike = _UNKNOWN
  donor: str | None = None
  in_vain: int = 0
  fetches_since: float | None = None
  waits: bool = True
  addresses: dict[int, str] = dataclasses.field(default_factory=dict)
  part: int = 0
  lost: tuple[str, float] = "", 0.0
  relay: Relay | None = None

  def __post_init__(self) -> None:
    now = self.now
    self._heard = now
    self.server_until = now + self.limit
    self.peer_until = now + self.timeout
    self.stalled_until = now
    self._last_tick = now
    self._log = Warnings(_LOG)
    self._next_signal = now

  @property
  def interval(self) -> float:
    """Seconds between two ticks, at most."""
    return min(RETRY, self.limit / _BEATS)

  @property
  def fetching(self) -> int:
    """Seconds for which it has asked for a model that has not come; 0 if it does not ask."""
    return 0 if self.fetches_since is None else round(self.now - self.fetches_since)

  def tick(self, now: float) -> None:
    """Sets the time; if no byte of the donors has come for too long, disconnects them and asks for a model again."""
    self.now = now
    # Ticks come far more often: this process was suspended, and messages may be unread.
    # So deadlines are extended.
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
        # Counts the fetch as in vain, and joins again: WELCOME names a donor. No effect
        # after the first donor, or if `disconnect` has handled `Unreachable`.
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
      hello: NOT_FINITE where the model of this worker has NaN or Inf, so that WELCOME
        comes only once there is a donor; else HELLO.
      undelivered: in rounds, the weight that was trained for and not delivered.
    """
    if self.now < self._next_signal:
      return
    if self.state == "joining":
      # `fetching`: seconds for which it has asked for a model in vain, else 0
      self.tell(hello, self.fetching, address=self.address, alike=self.alike)
      self._next_signal = self.now + RETRY
    else:
      self.tell(WorkerMessage.BEAT, undelivered)
      # several heartbeats in the limit of the server, and one each second
      self._next_signal = self.now + min(self.limit / _BEATS, _PULSE)

  def hear(self) -> None:
    """Notes a message of the server: extends `server_until`, after which the server counts as lost.

    The deadline is its limit, longer if it was silent for long before, and `reconnect`
    seconds more, in which a server that was restarted may answer.
    """
    # the longest recent silence, which decays at each message
    self.silence = max(self.now - self._heard, _DECAY * self.silence)
    self._heard = self.now
    limit = limit_after(self.silence, self.limit, self.most)
    self.server_until = self.now + limit + self.reconnect

  def warn(self, text: str) -> None:
    """Logs why this worker does not go on: when that changes, and after 10, 20, 40, … seconds while it does not."""
    self._log.say(text, f"worker {self.worker} {text}", self.now)

  def learn(self, addresses: dict[int, str | None]) -> None:
    """Updates `addresses` by what the server has told.

    Args:
      addresses: by worker, the addresses of its processes, comma-separated; None if the
        worker has left.
    """
    for worker, address in addresses.items():
      self.addresses.pop(worker, None)
      # the address of its process with the number `part`; "" if there is none
      if counterpart := self._counterpart(address or ""):
        self.addresses[worker] = counterpart

  def _counterpart(self, addresses: str) -> str:
    """The address of process `part` in the comma-separated addresses of a worker; "" if it has fewer processes."""
    return "".join(addresses.split(",")[self.part : self.part + 1])

  def parse_group(self, content: Content) -> WorkerGroup:
    """The group in a GROUP answer; raises Rejected if it lacks this worker, or a member's address is not known."""
    group = WorkerGroup.parse(content)
    others = {*group.members} - {self.worker}
    if not group.has(self.worker) or not self.addresses.keys() >= others:
      raise Rejected(
        f"malformed: a group without worker {self.worker}, or the address of a member: {group.names}"
      )
    return group

  def enter(self, limit: float, donor: str | None, most: float = 1.0) -> None:
    """Joins: a server, perhaps another one than before, has answered WELCOME with these values.

    Args:
      limit: how long the server may be silent.
      donor: address of the worker whose model this worker has to fetch, or None; in
        rounds addresses of several, with spaces.
      most: a server that was silent for long before is lost after `most * limit` at
        most.
    """
    # With a donor, too: `fetch`, with which the protocol begins the open request, sets
    # "fetching".
    self.state = "joined"
    self.limit = limit
    self.most = most
    # Silences of an earlier server say nothing about this one.
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
    """Sends FETCH to the donors: for a model; in rounds for the links since the own anchor, or for slices of theirs.

    Args:
      round_: in rounds, a donor answers once its anchor has been through so many of
        them.
      id_: in rounds, the id of the last round of the own anchor, from which links lead
        on.
    """
    self.state = "fetching"
    # The time of the first of several requests is kept.
    self.fetches_since = self.now if self.fetches_since is None else self.fetches_since
    self._await_donor()  # sets `stalled_until`
    requests = transfers.requests(
      self.donors, self.in_vain, round_, self.worker, self.position.round, id_
    )
    for request in requests:  # an address, and a FETCH
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
    """The training loop has a request; True if it can begin now, False if it begins once the state is "joined"."""
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
        any other    the training loop raises ValueError, and a joining worker ends.
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
  """Pieces of a group that the server has not named yet: a member sends as soon as it hears of the group.

  Attributes:
    entries: values, in words of 4 bytes, that all members may send before this one
      hears of the group; more are forged, and could fill the memory.
    pieces: by sender and tag.
    kept: words of memory of these pieces: their values, and the objects around them.
  """

  entries: int
  pieces: dict[tuple[int, int], Piece] = dataclasses.field(default_factory=dict)
  kept: int = 0

  def keep(self, piece: Piece) -> None:
    """Keeps a piece in place of an earlier one of the same sender and tag; drops it if all take too much memory."""
    if former := self.pieces.pop((piece.sender, piece.tag), None):
      self.kept -= former.words
    # `_EARLY_WORDS` are for the objects around the values.
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
      # asks for another donor, if the worker there is asked for its model
      case Unreachable(address):
        membership.miss_donor(address)

  def tick(self, now: float) -> None:
    """Repeats signals when it is time, and gives up what has taken too long."""
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
  """The workers at a server: who has joined by which connection, and who is dead.

  Attributes:
    record: makes an empty `Member`, with the fields that the product adds.
    send: sends a frame to a connection without waiting; False if the connection is
      gone, or full.
    limit: seconds of silence after which a worker is dropped.
    now: time of the last message or tick.
    dead_at: by worker, the time at which it is dropped if no message comes before.
    rejected: how many messages were rejected.
    most: a worker that was silent before is dropped after `most * limit` at most.
    known: by worker that has joined, its `Member`: connection, address, when it was
      heard last, its longest recent silence, the number of the last change of addresses
      that it was told (`told`), and `rivals`: connections of other processes that ask
      for its number, each with the time of its first HELLO.
    alike: what the workers that have joined have alike.
    _last_probe: when the server sent heartbeats last.
    _changes: how often workers have joined and left, which numbers these changes.
    _addresses: by worker, the number of its last change, and its address, None if it
      has left.
  """

  record: Callable[[], M]
  send: Callable[[bytes, bytes], bool]
  limit: float
  now: float
  dead_at: dict[int, float] = dataclasses.field(default_factory=dict)
  rejected: int = 0
  most: float = 1.0
  known: dict[int, M] = dataclasses.field(default_factory=dict)
  alike: Alike = _UNKNOWN

  def __post_init__(self) -> None:
    self._last_tick = self.now
    self._last_probe = -float("inf")
    self._changes = 0
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
      frames: the frames of the message; a valid signal has one.
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
    # Only messages by the connection that has joined are signs of life. `member` is
    # None if the worker has left by this message, or has not joined.
    if member and member.connection == connection:
      member.silence = max(now - member.heard, _DECAY * member.silence)
      member.heard = now
      self.dead_at[signal.worker] = now + self.limit_of(member)

  def limit_of(self, member: Member) -> float:
    """Seconds of silence after which this worker is dropped."""
    return limit_after(member.silence, self.limit, self.most)

  def tick(self, now: float, **beat: Any) -> list[int]:
    """Sends heartbeats, and returns the dead workers, which the caller drops; called several times in `limit` seconds.

    Args:
      now: the time in seconds.
      beat: the fields of the heartbeats.
    """
    self.now = now
    # This process was suspended: messages of workers may be unread, so nobody is dead.
    if now - self._last_tick > self.limit / 2:
      self.dead_at = {
        worker: max(end, now + self.limit) for worker, end in self.dead_at.items()
      }
    self._last_tick = now
    # Computed in each tick: where a worker is several processes, `limit` changes.
    interval = self.limit / _PROBES
    if now > self._last_probe + interval:
      self._last_probe = now
      frame = messages.pack_answer(ServerMessage.BEAT, **beat)
      for worker, member in self.known.items():
        # A worker whose connection is gone is dropped a little later, after its last
        # messages.
        if not self.send(member.connection, frame):
          self.dead_at[worker] = min(self.dead_at[worker], now + interval)
    return [worker for worker, end in self.dead_at.items() if end < now]

  def tell(self, workers: Iterable[int], kind: ServerMessage, **content: Any) -> None:
    """Sends an answer to those of the workers that have joined."""
    frame = messages.pack_answer(kind, **content)
    for worker in workers:
      if worker in self.known:
        self.send(self.known[worker].connection, frame)

  def tell_group(self, group: WorkerGroup) -> None:
    """Sends GROUP to the members, to each with the addresses that it has not been told."""
    # Members with the same `told` get the same addresses: their frame is packed once.
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
      # Forgets processes whose first HELLO was long ago: one that still asks is new.
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
        # another HELLO of the rival is rejected as "duplicate" at first
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
    # the numbers of processes of this worker and of others: each process has an address
    parts = 1 + signal.address.count(",")
    if others and parts != (theirs := 1 + others[0].address.count(",")):
      raise Rejected(
        f"unlike: worker {worker} has {parts} addresses, the others have {theirs}"
      )

  def join(self, connection: bytes, signal: Signal) -> M:
    """Joins a worker, or joins it again; returns its `Member`, whose further fields the caller sets."""
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
