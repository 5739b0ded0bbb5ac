"""A real server under load: workers that join at once, then come and go, with real protocols and sockets.

The server is a process of its own. All workers are in this one, without JAX: their
exchanges are simulated, and take as long as the protocol needs.
"""

import contextlib
import logging
import multiprocessing
import os
import pathlib
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

import jaxsparse as js
from benchmarks.thousands.members import Link, Member, Setting
from benchmarks.thousands.simulation import Simulation
from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.messages import Signal, WorkerMessage
from jaxsparse.partial.rounds import status
from jaxsparse.partial.rounds.protocol import RoundRequest

_STEP = 0.02  # seconds for which messages are awaited
_TICK = 0.2  # seconds between two ticks of a worker
_LIMIT = 5.0  # of the server, for heartbeats
_MOST_GROWTH = 16.0  # MB that the server may grow while workers come and go
_OTHER_FILES = 40  # descriptors of the server but for connections


class Load(NamedTuple):
  """What was measured."""

  workers: int  # that join at once
  members: float  # of a round while workers come and go, median
  seconds: float  # in which they do
  joining: float  # seconds until all are there
  first: float  # seconds from then to the first round of all
  joined: int  # workers that came later
  left: int  # in good order
  killed: int
  rounds: int  # that counted while workers came and went
  failed: int
  gap: float  # seconds from one that counts to the next, median
  longest: float
  rejected: int  # messages
  # MB of the server: before the first worker, with all, at the end
  memory: tuple[float, float, float]
  files: tuple[int, int, int]  # descriptors, likewise
  threads: int  # at most
  cpu_joining: float  # seconds of CPU of the server until all are there
  cpu: float  # seconds of CPU a second afterwards


class Client(Member):
  """A worker with a connection to the real server."""

  network: "Crowd"

  def __init__(self, network: "Crowd", number: int):
    self._socket = network.sockets.client()
    self._socket.connect(network.address)
    network.sockets.listen(
      self._socket, lambda frames: self.handle(messages.parse_answer(frames[0]))
    )
    super().__init__(network, number)

  @property
  def has_joined(self) -> bool:
    """Whether it trains."""
    return self._since is not None

  def tell(self, signal: Signal) -> None:
    """Sends a signal to the server."""
    with contextlib.suppress(sockets.zmq.Again):
      self._socket.send(signal.pack(), sockets.zmq.NOBLOCK)

  def end(self, *, kill: bool) -> None:
    """Leaves, or ends without a word."""
    if not kill:
      self.handle(RoundRequest(WorkerMessage.BYE))
    self.dead = True
    self.drop()
    sent = self.network.now + (0.0 if kill else 1.0)
    self.network.at(sent, None, self.network.sockets.forget, self._socket)


class Crowd(Simulation):
  """Workers of a real server; time is that of the clock."""

  def begin(self) -> None:
    """Nothing: workers are started by `start`."""
    self.sockets = sockets.Network(None)
    self.links = [Link(0.0, float("inf"))] * self.setting.workers
    self._ticked = 0.0

  def connect(self, address: str) -> None:
    """From now on workers are those of this server."""
    self.address = address
    self._zero = time.monotonic() - self.now

  def start(self, number: int) -> None:
    """Starts a worker."""
    process = Client(self, number)
    self.processes.append(process)
    self.working[number] = process

  def end(self, number: int, *, kill: bool) -> None:
    """Ends a worker."""
    process = self.working[number]
    process.end(kill=kill)
    if self._exchange and number in self._exchange.group.members:
      self._exchange.lose(process, 0.0)

  def living(self) -> list[int]:
    """The numbers of the workers that have joined."""
    return [
      number
      for number, process in enumerate(self.working)
      if process and process.lives and process.has_joined
    ]

  def free(self) -> list[int]:
    """The numbers that no worker has."""
    return [
      number
      for number, process in enumerate(self.working)
      if not (process and process.lives)
    ]

  def live(self) -> None:
    """Time passes for as long as messages are awaited."""
    self.sockets.wait(_STEP)
    self.advance(time.monotonic() - self._zero - self.now)
    if self.now >= self._ticked + _TICK:
      self._ticked = self.now
      for process in self.working:
        if process and process.lives:
          process.tick()


def _serve(workers: int, quorum: int, pipe: Connection) -> None:
  """The server's process: sends its address first, and at the end how many messages it has rejected."""
  logging.disable(logging.WARNING)  # of each worker that is lost
  server = js.partial.Server(
    js.partial.Quorum(workers, quorum=quorum, grace=0.5), limit=_LIMIT
  )
  pipe.send(server.address)
  with server:
    pipe.recv()
  pipe.send(server.rejected)


class _Process:
  """What the kernel knows of the server."""

  def __init__(self, process: Any):
    self._folder = pathlib.Path(f"/proc/{process.pid}")

  @property
  def memory(self) -> float:
    """MB, resident."""
    return self._read("VmRSS") / 1000

  @property
  def threads(self) -> int:
    """Their number."""
    return self._read("Threads")

  @property
  def files(self) -> int:
    """Descriptors that are open."""
    return len(list((self._folder / "fd").iterdir()))

  @property
  def cpu(self) -> float:
    """Seconds, of the user and of the system."""
    fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  def _read(self, name: str) -> int:
    lines = (self._folder / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextlib.contextmanager
def _server(workers: int, quorum: int) -> Iterator[tuple[str, _Process, Connection]]:
  """A server in a process of its own."""
  context = multiprocessing.get_context("spawn")
  pipe, end = context.Pipe()
  process = context.Process(target=_serve, args=(workers, quorum, end), daemon=True)
  process.start()
  end.close()  # so that `recv` fails if the server does
  try:
    yield pipe.recv(), _Process(process), pipe
  finally:
    process.terminate()
    process.join()


def measure(
  workers: int, members: int, seconds: float, interval: float, seed: int
) -> Load:
  """Workers that join at once, all but `members` of which leave; then for `seconds` one comes or goes each half second.

  Raises:
    RuntimeError: if no two rounds count, or none for 20 intervals, or if the server
      keeps what it needs no more.
  """
  crowd = Crowd(
    Setting(
      workers,
      0,
      0,
      interval=interval,
      jitter=0.1,
      straggle=0,
      grace=0.5,
      seed=seed,
      entries=1000,
    )
  )
  with _server(workers, max(1, members // 2)) as (address, server, pipe):
    memory, files = [server.memory], [server.files]
    crowd.connect(address)
    begin = time.monotonic()
    cpu = server.cpu
    for number in range(workers):
      crowd.start(number)
    _wait(
      crowd, lambda: len(crowd.living()) == workers, 60, f"{workers} workers to join"
    )
    joining = time.monotonic() - begin
    cpu_joining = server.cpu - cpu
    _wait(crowd, lambda: crowd.counted, 60, "the first round")
    first = time.monotonic() - begin - joining
    memory.append(server.memory)
    files.append(server.files)
    for number in crowd.random.sample(range(workers), workers - members):
      crowd.end(number, kill=False)
    _wait(crowd, lambda: len(crowd.living()) == members, 10, "workers to leave")
    crowd.restart_counts()
    events = _churn(crowd, members, seconds, interval, server)
    found = status.ask(address)
    memory.append(server.memory)
    files.append(server.files)
    alive = len(crowd.living())
    if len(found["workers"]) > alive + 2 or files[-1] > files[0] + alive + _OTHER_FILES:
      raise RuntimeError(
        f"the server has {len(found['workers'])} workers, {files[-1]} descriptors; {alive} are alive"
      )
    if memory[-1] > memory[1] + _MOST_GROWTH:
      raise RuntimeError(
        f"the server has grown from {memory[1]:.0f} MB to {memory[-1]:.0f} MB"
      )
    pipe.send(None)
    rejected = pipe.recv()
  crowd.sockets.close(linger=0)
  gaps = np.diff(crowd.ended)
  if not gaps.size:
    raise RuntimeError(
      f"{len(crowd.ended)} rounds counted in {seconds:g} s: measure for longer than {4 * interval:g} s"
    )
  return Load(
    workers=workers,
    members=float(np.median([*crowd.counted.values()])),
    seconds=seconds,
    joining=joining,
    first=first,
    rounds=len(crowd.counted),
    failed=len(crowd.exchanges) - len(crowd.counted),
    gap=float(np.median(gaps)),
    longest=float(np.max(gaps)),
    rejected=rejected,
    memory=(memory[0], memory[1], memory[2]),
    files=(files[0], files[1], files[2]),
    cpu_joining=cpu_joining,
    **events,
  )


def _churn(
  crowd: Crowd, members: int, seconds: float, interval: float, server: _Process
) -> dict[str, Any]:
  """Each half second one comes, leaves or is killed: how many did, threads, and CPU seconds a second."""
  counts = {"joined": 0, "left": 0, "killed": 0}
  cpu, begin, threads = server.cpu, crowd.now, server.threads
  while crowd.now < begin + seconds:
    living, free = crowd.living(), crowd.free()
    if free and crowd.random.random() < 1 / 2 + (members - len(living)) / members:
      crowd.start(crowd.random.choice(free))
      counts["joined"] += 1
    elif len(living) > 1:
      kill = crowd.random.random() < 1 / 2
      crowd.end(crowd.random.choice(living), kill=kill)
      counts["killed" if kill else "left"] += 1
    until = crowd.now + 1 / 2
    _wait(crowd, lambda until=until: crowd.now >= until, 60, "time to pass")
    threads = max(threads, server.threads)
    last = crowd.ended[-1] if crowd.ended else begin
    if crowd.now > last + 20 * interval:
      raise RuntimeError(f"no round has counted for {crowd.now - last:.0f} s")
  return {**counts, "threads": threads, "cpu": (server.cpu - cpu) / (crowd.now - begin)}


def _wait(crowd: Crowd, holds: Any, seconds: float, what: str) -> None:
  end = time.monotonic() + seconds
  while not holds():
    if time.monotonic() > end:
      raise RuntimeError(f"waited {seconds:g} s for {what}")
    crowd.live()
