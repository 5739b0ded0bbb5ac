"""Workers, the server and the controller together, in virtual time, over a network that delays, crashes and suspends.

Real `WorkerProtocol`s and a real `ServerProtocol` exchange real bytes with the server; only sockets and clocks are
simulated. Whatever the schedule: every living worker ends its training, and no average mixes pieces of two groups.
"""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.partial import messages
from jaxsparse.partial.messages import Kind, Piece, Says
from jaxsparse.partial.server import ServerProtocol
from jaxsparse.partial.worker_protocol import (
  Model,
  Request,
  Unreachable,
  WorkerProtocol,
)

ENTRIES, ITERATIONS = 5, 4
LIMIT, TIMEOUT, RECONNECT, LATENCY, STEP = 5.0, 20.0, 10.0, 1.0, 0.2


class Process:
  """One process of a worker; it trains, synchronizes at the end, and leaves."""

  def __init__(self, network, number, serial):
    self.network, self.number = network, number
    self.connection, self.address = b"%d" % serial, f"tcp://127.0.0.1:{serial}"
    start = np.zeros(ENTRIES, np.float32)
    outlets = {
      "tell": lambda signal: network.post(self, "server", signal.pack()),
      "send": self.send,
      "reply": self.take,
    }
    self.protocol = WorkerProtocol(number, start, self.address, TIMEOUT, RECONNECT, network.now, **outlets)
    self.dead, self.lost, self.suspended, self.since, self.found = False, False, False, 0.0, []
    self.computes: Model | None = None

  @property
  def finished(self):
    return self.protocol.state == "ended"

  def handle(self, event):
    if not self.dead:
      self.protocol.handle(event, self.network.now)

  def tick(self):
    self.protocol.tick(self.network.now)
    if self.protocol.lost[0]:
      assert not self.network.serves  # all others have left: the server has ended
      self.lost = True

  def send(self, address, piece):
    self.network.post(self, address, piece._replace(values=piece.values.copy()))

  def take(self, model):
    assert isinstance(model, Model), model
    assert np.ptp(model.vector) == 0  # every entry has the same history
    assert 0 <= model.vector[0] <= 4
    self.found.append(model)
    self.computes, self.since = model, self.network.now

  def compute(self):
    """A step of a tenth of the way to the own number; synchronizes at the end, then leaves."""
    if self.computes is None or self.dead or self.suspended:
      return
    (vector, iteration), self.computes = self.computes, None
    if len(self.found) == ITERATIONS + 2:
      self.handle(Request(Says.BYE))
    elif len(self.found) == ITERATIONS + 1:
      self.handle(Request(Says.SYNCHRONIZE, Model(vector, iteration)))
    else:
      step = np.float32(0.1) * (np.float32(self.number + 1) - vector)
      self.handle(Request(Says.READY, Model(vector + step, iteration + 1)))


class Network:
  """Channels that keep their order, each message at most `LATENCY` late."""

  def __init__(self, random, workers, size):
    self.random, self.now, self.serial = random, 0.0, 1
    self.channels = collections.defaultdict(collections.deque)  # (from, to): (time, message)
    self.workers, self.size = workers, size
    self.serve()
    self.processes = {}
    for number in range(workers):
      self.start(number)

  def serve(self):
    """Starts the server, or starts it again: it knows nobody."""
    self.controller = js.partial.Controller(self.workers, self.size)
    times = {"limit": LIMIT, "start_timeout": TIMEOUT, "now": self.now}
    self.server = ServerProtocol(self.controller, self.send, **times, first=self.random.getrandbits(30))

  def start(self, number):
    self.serial += 1
    self.processes[self.serial] = Process(self, number, self.serial)

  @property
  def serves(self):
    return bool(self.controller.alive)

  def living(self):
    return [process for process in self.processes.values() if not process.dead and not process.finished]

  def post(self, sender, to, message):
    self.channels[sender.address, to].append((self.now, message))

  def send(self, connection, frame):
    process = self.processes[int(connection)]
    if process.dead or process.finished:
      return bool(self.channels[process.address, "server"])  # a closed connection is noticed after its last message
    self.channels["server", process.address].append((self.now, messages.parse_answer(frame)))
    return True

  def deliver(self, channel):
    """The oldest message of a channel; False if its receiver is suspended."""
    sender, to = channel
    if to == "server":
      _, frame = self.channels[channel].popleft()
      if self.serves:
        self.server.receive(self.processes[int(sender.rpartition(":")[2])].connection, [frame], self.now)
      return True
    process = self.processes[int(to.rpartition(":")[2])]
    if process.suspended:
      return False
    _, message = self.channels[channel].popleft()
    gone = process.dead or process.finished
    if gone and sender != "server":
      self.processes[int(sender.rpartition(":")[2])].handle(Unreachable(to))
    elif isinstance(message, Piece) and message.kind == Kind.FETCH:
      vector, iteration = process.protocol.model
      self.channels[to, sender].append((self.now, Piece(Kind.MODEL, iteration, process.number, vector)))
    elif not gone:
      process.handle(message)
    return True

  def pending(self):
    return [channel for channel, queue in self.channels.items() if queue]

  def advance(self):
    """Time passes: what is late is delivered, workers that compute for too long end their step, all tick."""
    self.now += STEP
    for channel in self.pending():
      while self.channels[channel] and self.channels[channel][0][0] < self.now - LATENCY and self.deliver(channel):
        pass
    for process in self.living():
      if self.now - process.since > LATENCY:
        process.compute()
      if not process.suspended:
        process.tick()
    if self.serves:
      self.server.tick(self.now)


def disturb(network, kind):
  """A worker crashes, is restarted, is suspended or resumed; at least one always runs. Or the server is restarted."""
  living = network.living()
  numbers = {process.number for process in living}
  running = [process for process in living if not process.suspended and process.protocol.state == "joined"]
  if kind == "crash" and len(running) > 1:
    network.random.choice(running).dead = True
  elif kind == "restart":
    if crashed := sorted({process.number for process in network.processes.values() if process.dead} - numbers):
      network.start(network.random.choice(crashed))
  elif kind == "suspend" and len(running) > 1:
    network.random.choice(running).suspended = True
  elif kind == "resume":
    for process in living:
      process.suspended = False
  elif kind == "serve" and network.serves:
    network.serve()


def run(random, workers, size, disturbances):
  """A random schedule with the disturbances in it, then a quiet one until nobody is left."""
  network = Network(random, workers, size)
  planned = sorted((random.random() * 15, kind) for kind in disturbances)
  while network.living() and network.now < 120:
    while planned and planned[0][0] < network.now:
      disturb(network, planned.pop(0)[1])
    if network.now > TIMEOUT - 4 * LATENCY:  # a worker that is new may be waiting for a model since the start
      disturb(network, "resume")
    for _ in range(random.randrange(8)):
      if channels := network.pending():
        network.deliver(random.choice(channels))
      if computing := [process for process in network.living() if process.computes]:
        random.choice(computing).compute()
    network.advance()
  return network


DISTURBANCES = st.lists(st.sampled_from(["crash", "restart", "suspend", "resume", "serve"]), max_size=8)


@pytest.mark.parametrize(("examples", "disturbances"), [(30, st.just([])), (80, DISTURBANCES)])
def test_no_lost_worker_holds_up_another_and_without_a_loss_all_end_with_one_model(examples, disturbances):
  @settings(max_examples=examples)
  @given(st.randoms(use_true_random=False), st.integers(2, 4), disturbances, st.data())
  def holds(random, workers, disturbances, data):
    network = run(random, workers, data.draw(st.integers(2, workers)), disturbances)
    assert not network.living()
    for process in network.processes.values():
      assert process.dead or process.lost or len(process.found) == ITERATIONS + 2
    if not disturbances:
      assert network.now < 80
      assert len(network.processes) == workers
      assert len({process.found[-1].vector.tobytes() for process in network.processes.values()}) == 1
      assert not any(process.dead or process.lost for process in network.processes.values())
      assert network.server.rejected == 0

  holds()
