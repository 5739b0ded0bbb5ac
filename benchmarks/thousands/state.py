"""What a server of rounds keeps and sends: two rounds of all workers at its protocol, without a network."""

import time
import tracemalloc
from typing import NamedTuple

from jaxsparse.partial.net.membership import Members
from jaxsparse.partial.net.messages import (
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.server import RoundMember, RoundServer

_START = RoundPosition()


class State(NamedTuple):
  """What was measured."""

  workers: int
  cpu_event: float  # seconds of CPU of the server for a message of a worker
  memory: float  # MB of its Python objects
  first: int  # bytes of the message that begins the first round, with all addresses
  later: int  # bytes of that which begins the second one


class _Server:
  """A server, and what it sends to begin rounds."""

  def __init__(self, workers: int):
    self.sizes = dict[bytes, int]()  # bytes of the messages that begin a round
    self._workers = workers
    quorum = Quorum(workers, quorum=workers, first=0)
    self._protocol = RoundServer(quorum, Members(RoundMember, self._send, 5.0, 0.0))
    self._tell(WorkerMessage.HELLO)
    self._protocol.tick(0.0)  # all are there
    self._tell(WorkerMessage.READY, value=1)
    self._tell(WorkerMessage.DONE, value=1, digest=7)
    self._tell(WorkerMessage.READY, value=1, position=RoundPosition(1, 1))

  def _send(self, _: bytes, frame: bytes) -> bool:
    if frame[0] == ServerMessage.GROUP:
      self.sizes[frame] = len(frame)
    return True

  def _tell(
    self,
    kind: WorkerMessage,
    value: int = 0,
    digest: int = 0,
    position: RoundPosition = _START,
  ) -> None:
    for worker in range(self._workers):
      address = (
        f"tcp://10.0.{worker // 256}.{worker % 256}:29500"
        if kind == WorkerMessage.HELLO
        else ""
      )
      signal = Signal(kind, worker, value, address, position, digest=digest)
      self._protocol.receive(worker.to_bytes(5, "big"), [signal.pack()], 0.0)


def measure(workers: int) -> State:
  """Once for the seconds, and once for the memory."""
  begin = time.thread_time()
  first, later = _Server(workers).sizes.values()
  seconds = time.thread_time() - begin
  tracemalloc.start()
  server = _Server(workers)
  server.sizes.clear()
  used, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  return State(workers, seconds / (4 * workers), used / 1e6, first, later)
