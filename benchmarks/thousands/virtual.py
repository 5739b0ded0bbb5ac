"""Workers and servers of rounds in virtual time: real protocols, and what sockets and threads do around them.

`benchmarks.thousands` simulates thousands of workers with it,
tests/partial/rounds_protocol_test.py every schedule of a few.
"""

from typing import Any

from benchmarks.thousands.timeline import Timeline
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.membership import (
  Members,
  Membership,
  Unreachable,
)
from jaxsparse.partial.net.messages import Answer, Piece, PieceKind, Signal
from jaxsparse.partial.net.transfers import Assembly, Transfers
from jaxsparse.partial.rounds.protocol import RoundProtocol
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.server import RoundMember, RoundServer

# a server, a worker by its serial number, and which of its visits this is
Connection = tuple[int, int, int]


class VirtualWorker:
  """One process of a worker: its protocol, and what an `Endpoint` does.

  A subclass has the methods of an `Exchanger` that the protocol calls, `take(answer)`,
  which is the training loop, and those without a body here.

  Attributes:
    serial: of the process; a worker that is started again is another process with the
      same number.
    visits: of servers, one after the other.
  """

  def __init__(
    self, network: "VirtualNetwork", number: int, *, entries: int, timeout: float
  ):
    self.network = network
    self.number = number
    self.serial = len(network.processes)
    self.address = f"tcp://127.0.0.1:{self.serial + 1}"
    self.dead = self.suspended = False
    self.held: list[Any] = []
    self.visits = 0
    # of the anchor to other processes, one after the other
    self._transfers = Transfers()
    self._assembly = Assembly(longest=1000)
    self._busy_until = 0.0
    self._receiver: VirtualWorker | None = None
    outlets = self.tell, self.send, self.take
    servers = len(network.servers)
    place = Membership(
      number, self.address, timeout, network.now, *outlets, limit=timeout / servers
    )
    self.protocol = self.make_protocol(place, self, entries, self.switch, servers)

  def make_protocol(self, *facts: Any) -> RoundProtocol:
    """The protocol, of these arguments."""
    return RoundProtocol(*facts)

  @property
  def lives(self) -> bool:
    """Whether it has neither crashed nor left."""
    return not self.dead and self.protocol.membership.state != "ended"

  def take(self, answer: Any) -> None:
    """The training loop gets the answer to its request."""
    raise NotImplementedError

  def make_model(self, peer: "VirtualWorker", request: Piece) -> tuple[Piece, float]:
    """The slice of the anchor, or of links, that a peer has asked for, and the seconds that it takes."""
    raise NotImplementedError

  def handle(self, event: Any) -> None:
    """Gives the protocol an event."""
    if self.lives:
      self.protocol.handle(event, self.network.now)

  def switch(self) -> None:
    """Connects to the next server."""
    self.visits += 1

  def tell(self, signal: Signal) -> None:
    """Sends a signal to its server."""
    server = self.visits % len(self.network.servers)
    frame = signal.pack()
    connection = (server, self.serial, self.visits)
    self.network.post(
      (self, server), None, self.network.hear, connection, frame, size=len(frame)
    )

  def send(self, address: str, piece: Piece) -> None:
    """Sends a piece to another process."""
    to = self.network.process_at(address)
    self.network.post(
      (self, to), to, to.receive, self, piece._replace(values=piece.values.copy())
    )

  def hear(self, visit: int, answer: Answer) -> None:
    """A message of the server of one of its visits has come."""
    if visit == self.visits:
      self.handle(answer)

  def receive(self, sender: "VirtualWorker", piece: Piece) -> None:
    """A piece of another process has come."""
    if not self.lives:
      sender.handle(Unreachable(self.address))
    elif piece.kind == PieceKind.FETCH:
      self._transfers.ask(sender, piece, self.network.now)
      self.send_model()
    else:
      self.handle(piece)

  def send_model(self) -> None:
    """Begins the next transfer."""
    now = self.network.now
    round_ = self.protocol.membership.position.round
    if now >= self._busy_until and (asked := self._transfers.next(round_, now)):
      peer, request = asked
      piece, seconds = self.make_model(peer, request)
      self._busy_until = now + seconds
      self._receiver = peer
      self.network.at(self._busy_until, self, self._end_transfer, peer, piece)

  def _end_transfer(self, peer: "VirtualWorker", model: Piece) -> None:
    if self.lives:
      self.network.post((self, peer), peer, peer.take_slice, self.address, model)
    else:
      peer.handle(Unreachable(self.address))

  def hear_donor(self, address: str) -> None:
    """Another process sends something, or says that others get it first."""
    if address in self.protocol.membership.donors:
      self.protocol.membership.hear_donor()

  def take_slice(self, address: str, piece: Piece) -> None:
    """A slice of another process has come."""
    place = self.protocol.membership
    if address in place.donors and (
      model := self._assembly.add(address, piece, place.donors)
    ):
      self.handle(model)

  def tick(self) -> None:
    """Time has passed."""
    self.send_model()
    busy = (
      [self._receiver] if self._receiver and self.network.now < self._busy_until else []
    )
    for peer in self._transfers.waiting(self.network.now) + busy:
      self.network.post((self, peer), peer, peer.hear_donor, self.address)
    self.protocol.tick(self.network.now)


class VirtualNetwork(Timeline):
  """Processes and their servers; the connection of a process is another one at each of its visits.

  Attributes:
    processes: all that there have been.
    servers: a controller and its protocol each.
  """

  processes: list[Any]
  servers: list[Any]
  _parsed: tuple[bytes, Answer] | None = None

  def process_at(self, address: str) -> Any:
    """The process that other processes reach there."""
    return self.processes[int(address.rpartition(":")[2]) - 1]

  def note(self, answer: Answer, frame: bytes) -> None:
    """A server sends an answer to a process."""

  def send(self, connection: Connection, frame: bytes) -> bool:
    """Sends as `Server._send`; whether the connection is there."""
    server, serial, visit = connection
    process = self.processes[serial]
    if not process.lives or visit != process.visits:
      # a closed connection is noticed after its last message
      return self.arrivals[process, server] > self.now
    # the members of a round get the same frame
    if self._parsed is None or self._parsed[0] is not frame:
      self._parsed = frame, messages.parse_answer(frame)
    answer = self._parsed[1]
    self.note(answer, frame)
    self.post((server, process), process, process.hear, visit, answer, size=len(frame))
    return True

  def hear(self, connection: Connection, frame: bytes) -> None:
    """A message has come to a server."""
    controller, server = self.servers[connection[0]]
    if not controller.over:
      server.receive(connection, [frame], self.now)

  def tick_server(self) -> None:
    """Time has passed at the servers."""
    for controller, server in self.servers:
      if not controller.over:
        server.tick(self.now)

  def start_server(
    self, number: int, controller: Quorum, limit: float, most: float = 1.0
  ) -> None:
    """Starts a server that knows nobody, in place of the one before."""
    send: Any = self.send
    members = Members(RoundMember, send, limit, self.now, most=most)
    self.servers[number] = controller, RoundServer(controller, members)
