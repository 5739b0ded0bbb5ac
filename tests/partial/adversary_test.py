"""Rounds in virtual time with a member that lies: forged positions, with forks, leaves, and returns from files."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.membership import Unreachable
from jaxsparse.partial.net.messages import RoundPosition, Signal, WorkerMessage
from tests.partial import rounds_protocol_test
from tests.partial.rounds_protocol_test import (
  CUT,
  LASTING,
  PASSING,
  ROUNDS,
  Reader,
  check_residuals,
  lineage_of,
)

FORGER = -1  # the serial number of a process that there is not
ADDRESS = "tcp://127.0.0.1:60000"
KINDS = [*PASSING, *LASTING, "returns", "returns", "forges", "forges", "rewinds"]
FORGED = {
  WorkerMessage.READY: 0.2,
  WorkerMessage.LEAVING: 0.1,
  WorkerMessage.DONE: 0.1,
  WorkerMessage.FAILED: 0.1,
}


class Process(rounds_protocol_test.Process):
  """A process that does not reach the forger."""

  def send(self, address, piece):
    if address == ADDRESS:
      until = self.network.now + 0.5
      self.network.at(until, self, self.handle, Unreachable(address))
    else:
      super().send(address, piece)


class Network(rounds_protocol_test.Network):
  """The last worker is a forger, until the end."""

  kind = Process
  claim = None  # its position, and what it says that it has alike
  claims = 0
  said = 0.0

  def send(self, connection, frame):
    return connection[1] == FORGER or super().send(connection, frame)

  def process_at(self, address):
    return None if address == ADDRESS else super().process_at(address)

  def disturb(self, kind):
    if kind == "forges":
      self.claim = self.forge()
      self.claims += 1
    elif kind == "rewinds":
      self.rewind()
    else:
      super().disturb(kind)

  def forge(self):
    """Rounds that follow any that there have been, or that nobody knows of."""
    random = self.random
    newest = max((process.anchor for process in self.processes), key=len)
    lineage = lineage_of(newest[: random.randint(0, len(newest))])
    if random.random() < 0.5:
      lineage = lineage_of(newest)
    number = newest[-1] if newest else 0
    for _ in range(random.choice([0, 1, 2, 5, 250])):
      number = random.getrandbits(40)
      lineage = lineage.after(number)
    if random.random() < 0.3:
      lineage = lineage._replace(round=random.choice([1000, 2**39]))
    last = random.choice([0, 0, 5, *newest[-1:]])
    run = random.choice([1234, self.servers[0][1]._run])
    position = RoundPosition(lineage.round, number, last)
    return position, Alike(run=run, lineage=lineage.ids)

  def rewind(self):
    """All are dead, and begin again with any of their files, or with none."""
    for process in self.processes:
      process.dead = True
    self.start(0)
    for number in range(self.workers - 1):
      if self.saved[number] and self.random.random() < 0.8:
        self.restores[number] = self.random.choice(self.saved[number])
      self.processes.append(self.kind(self, number))

  def advance(self):
    super().advance()
    if self.claim and self.now > self.said + 1:
      self.said = self.now
      self.say(WorkerMessage.BEAT)
      for kind, probability in FORGED.items():
        if self.random.random() < probability:
          self.say(kind, digest=7)
      if self.random.random() < 0.3:
        self.say(WorkerMessage.HELLO, address=ADDRESS, alike=self.claim[1])

  def say(self, kind, **facts):
    signal = Signal(kind, self.workers - 1, 3, position=self.claim[0], **facts)
    self.hear((0, FORGER, self.claims), signal.pack())


def run_until_goal(network):
  """As there, also where all that live have been refused."""
  while not network.goal or any(
    len(process.anchor) < network.goal for process in network.living()
  ):
    network.advance()
    if network.now > 31 + CUT:
      if network.living() and not network.goal:
        rounds = max(len(process.anchor) for process in network.living())
        network.goal = ROUNDS + rounds
      network.disturb("resume")
      network.disturb("restart")
      if network.servers[0][0].over:
        network.start(0)
    assert network.now < 200 + CUT


@settings(max_examples=2 * settings().max_examples)
@given(
  st.integers(0, 2**32 - 1),
  st.integers(2, 4),
  st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
)
@example(1479, 2, ["forges"] * 12)
@example(
  1,
  2,
  [
    *("resume", "resume", "rewinds", "forges", "rewinds", "suspended", "dead"),
    *("suspended", "forges", "suspended", "suspended", "suspended"),
  ],
)
@example(
  3053,
  3,
  [
    *("suspended", "suspended", "suspended", "cut", "suspended", "suspended"),
    *("leaves", "cut", "suspended"),
  ],
)
@example(7, 3, ["rewinds", "forges", "forges", "serve", "returns", "leaves"])
@example(3, 3, ["suspended", "cut", "suspended", "forges", "leaves"])
def test_a_member_that_lies_stops_no_rounds_and_nothing_is_counted_twice(
  seed, workers, disturbances
):
  network = Network(Random(seed), workers + 1, (workers + 1) // 2 + 1, servers=1)
  network.processes.pop()
  for kind in disturbances:
    network.at(network.random.random() * 30, None, network.disturb, kind)
  reader = Reader(network)
  run_until_goal(network)
  for process in network.living():
    assert not process.failed
    process.check()
  anchor = network.living()[0].anchor
  reader.check_is_late(anchor)
  check_residuals(network, anchor)


@pytest.mark.parametrize("seed", range(4))
def test_rounds_begin_although_a_member_says_first_that_there_have_been_many(seed):
  network = Network(Random(seed), 4, 3, servers=1)
  network.processes.pop()
  network.claim = RoundPosition(2**39, 5), Alike(run=1234, lineage=(7,) * 256)
  network.say(WorkerMessage.HELLO, address=ADDRESS, alike=network.claim[1])
  run_until_goal(network)
