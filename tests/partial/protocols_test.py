"""Workers, the server and the controller together, in virtual time, over a network that delays, crashes and suspends.

Real `GroupProtocol`s and a real `GroupServer` exchange real bytes with the server; only
sockets and clocks are simulated. Whatever the schedule: every living worker ends its
training, and no average mixes pieces of two groups.
"""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsparse as js
from benchmarks.thousands.timeline import Timeline
from jaxsparse.partial.groups.protocol import GroupProtocol, GroupRequest, Model
from jaxsparse.partial.groups.server import GroupMember, GroupServer
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.membership import Members, Membership, Unreachable
from jaxsparse.partial.net.messages import Piece, PieceKind, WorkerMessage

ITERATIONS = 4
LIMIT, TIMEOUT, RECONNECT, LATENCY, STEP = 5.0, 20.0, 10.0, 1.0, 0.2
DISTURBANCES = st.lists(
  st.sampled_from(["dead", "restart", "suspended", "resume", "serve", "diverges"]),
  max_size=8,
)


class Process:
  """One process of a worker; it trains, synchronizes at the end, and leaves."""

  def __init__(self, network, number):
    self.network, self.number, self.serial = network, number, len(network.processes)
    self.address = f"tcp://127.0.0.1:{self.serial + 1}"
    self.dead = self.failed = self.suspended = self.diverges = self.leaves = False
    # what has come while it is suspended, and the models that it has trained with
    self.held, self.found = (
      [],
      [],
    )
    start = np.zeros(network.entries, np.float32)
    outlets = self.tell, self.send, self.take
    place = Membership(
      number,
      self.address,
      TIMEOUT,
      network.now,
      *outlets,
      limit=TIMEOUT,
      reconnect=RECONNECT,
    )
    self.protocol = GroupProtocol(place, start)

  @property
  def lives(self):
    return not self.dead and self.protocol.membership.state != "ended"

  def handle(self, event):
    if self.lives:
      self.protocol.handle(event, self.network.now)

  def tell(self, signal):
    self.network.post(
      (self, "server"), None, self.network.hear, self.serial, signal.pack()
    )

  def send(self, address, piece):
    to = self.network.processes[int(address.rpartition(":")[2]) - 1]
    self.network.post(
      (self, to), to, to.receive, self, piece._replace(values=piece.values.copy())
    )

  def receive(self, sender, piece):
    if not self.lives:
      sender.handle(Unreachable(self.address))
    elif piece.kind == PieceKind.FETCH:
      vector, iteration = self.protocol.model
      self.network.post(
        (self, sender),
        sender,
        sender.handle,
        Piece(PieceKind.MODEL, iteration, self.number, vector),
      )
    else:
      self.handle(piece)

  def take(self, answer):
    """The training loop gets the answer to a request, and computes until it has the next one."""
    if isinstance(answer, FloatingPointError):
      self.failed = True
    else:
      assert np.ptp(answer.vector) == 0  # every entry has the same history
      assert 0 <= answer.vector[0] <= 4
      self.found.append(answer)
    until = self.network.now + 2 * LATENCY * self.network.random.random()
    self.network.at(until, self, self.handle, self.next_request(*self.found[-1]))

  def next_request(self, vector, iteration):
    """A step of a tenth of the way to the own number, which may diverge; the average of all, and the end."""
    diverges, self.diverges = self.diverges, False
    if self.failed or len(self.found) == ITERATIONS + 2:
      return GroupRequest(WorkerMessage.BYE)
    if len(self.found) == ITERATIONS + 1:
      return GroupRequest(WorkerMessage.SYNCHRONIZE, Model(vector, iteration))
    step = np.float32(0.1) * (np.float32(self.number + 1) - vector)
    return (
      GroupRequest(WorkerMessage.NOT_FINITE)
      if diverges
      else GroupRequest(WorkerMessage.READY, Model(vector + step, iteration + 1))
    )

  def tick(self):
    self.protocol.tick(self.network.now)
    if self.protocol.membership.lost[0]:
      # all others have left: the server has ended
      assert not self.network.controller.alive
      self.failed = True


class Network(Timeline):
  """Each message is at most `LATENCY` late."""

  kind = Process

  def __init__(self, random, workers, size, entries):
    super().__init__()
    self.random, self.workers, self.size, self.entries, self.processes = (
      random,
      workers,
      size,
      entries,
      [],
    )
    self.starts = itertools.count()  # of servers
    self.serve()
    for number in range(workers):
      self.processes.append(self.kind(self, number))

  def living(self):
    return [process for process in self.processes if process.lives]

  def delay(self, channel, size):
    return LATENCY * self.random.random()

  def send(self, connection, frame):
    process = self.processes[connection]
    if not process.lives:
      # a closed connection is noticed after its last message
      return self.arrivals[process, "server"] > self.now
    self.post(
      ("server", process), process, process.handle, messages.parse_answer(frame)
    )
    return True

  def hear(self, connection, frame):
    if not self.controller.over:
      self.server.receive(connection, [frame], self.now)

  def advance(self, seconds=STEP):
    """Time passes: messages are delivered, and all that are not suspended tick."""
    super().advance(seconds)
    for process in self.living():
      if not process.suspended:
        process.tick()
    self.tick_server()

  def tick_server(self):
    if not self.controller.over:
      self.server.tick(self.now)

  def serve(self):
    """Starts the server, or starts it again: it knows nobody."""
    self.controller = js.partial.Controller(self.workers, self.size)
    expected = dict.fromkeys(self.controller.alive, self.now + TIMEOUT)
    members = Members(GroupMember, self.send, LIMIT, self.now, expected)
    # a real one draws 61 bits: never those of another
    first = (next(self.starts) << 30) + self.random.getrandbits(30)
    self.server = GroupServer(self.controller, members, first=first)

  def disturb(self, kind):
    """A worker crashes, is restarted, suspended, resumed, or diverges; one always runs. Or the server is restarted."""
    living = self.living()
    stays = lambda process: (
      not process.suspended
      and not process.leaves
      and process.protocol.membership.state == "joined"
    )
    running = [process for process in living if stays(process)]
    if kind == "serve":
      if not self.controller.over:
        self.serve()
    elif kind == "restart":
      crashed = {process.number for process in self.processes if process.dead} - {
        process.number for process in living
      }
      self.processes += [self.kind(self, number) for number in sorted(crashed)[:1]]
    elif kind == "resume":
      for process in living:
        process.suspended, held, process.held = False, process.held, []
        for deliver, content in held:
          deliver(*content)
    elif len(running) > 1:
      setattr(self.random.choice(running), kind, True)


@settings(max_examples=2 * settings().max_examples)
@given(st.randoms(use_true_random=False), st.integers(2, 4), st.just([]) | DISTURBANCES)
def test_no_lost_worker_holds_up_another_and_without_a_loss_all_end_with_one_model(
  random, workers, disturbances
):
  """A random schedule with the disturbances in it, then a quiet one until nobody is left."""
  network = Network(
    random, workers, size=random.randint(2, workers), entries=random.randint(1, 5)
  )
  for kind in disturbances:
    network.at(random.random() * 15, None, network.disturb, kind)
  while network.living():
    network.advance()
    # a worker that is new may be waiting for a model since the start
    if network.now > TIMEOUT - 4 * LATENCY:
      network.disturb("resume")
    assert network.now < (120 if disturbances else 80)
  for process in network.processes:
    assert process.dead or process.failed or len(process.found) == ITERATIONS + 2
  if not disturbances:
    assert (
      len({process.found[-1].vector.tobytes() for process in network.processes}) == 1
    )
    assert not any(process.dead or process.failed for process in network.processes)
    assert network.server.members.rejected == 0
