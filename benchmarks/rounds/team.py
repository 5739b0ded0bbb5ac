"""The workers of `benchmarks.rounds` and their controller, on hosts of the lab, and what is done to them."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from benchmarks import netlab, watching
from benchmarks.rounds.worker import Settings
from jaxsparse.launch.start import MALLOC, Host
from jaxsparse.partial.net.sockets import Keys

LIMIT = 3.0  # seconds, of the controller
# Every start would compile for tens of seconds on a machine whose cores six workers
# share.
PROGRAMS = {
  "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path("out/cache/programs").resolve())
}
PROGRAMS |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
PROGRAMS |= MALLOC  # as of ranks that jaxsparse.launch starts
_JOB = 480.0  # seconds in which a job on a host has to end
_PORT = 2900
# seconds that its lighthouse waits for others where ours chooses them itself
_TORCHFT_GRACE = 1.0
_TORCHFT = pathlib.Path(__file__).parents[1] / "peers" / "torchft_worker.py"


class Team:
  """A controller on the last host, and a worker on each of the others; `with` ends them."""

  def __init__(
    self,
    hosts: Sequence[Host],
    quorum: int,
    grace: float | Literal["auto"],
    settings: Settings,
  ):
    *self.hosts, self.controller_host = hosts
    self._quorum, self._grace, self.folder = (
      quorum,
      grace,
      pathlib.Path(settings.folder),
    )
    server = f"{'http' if settings.torchft else 'tcp'}://{self.controller_host.address}:{_PORT}"
    self.settings = [
      settings._replace(number=number, server=server, address=f"tcp://{host.address}:*")
      for number, host in enumerate(self.hosts)
    ]
    self.processes: dict[int, subprocess.Popen[bytes]] = {}
    Keys.make().write(self.folder / "keys")

  def __enter__(self) -> "Team":
    self.start_controller()
    for number in range(len(self.hosts)):
      self.start(number)
    self.wait(
      lambda: len(self.events("joined")) == len(self.hosts), "all workers to join"
    )
    (self.folder / "begin").touch()
    self.settle(1)
    return self

  def __exit__(self, *_: object) -> None:
    self.end()

  def end(self) -> None:
    """Ends all processes."""
    for process in (*self.processes.values(), self.controller):
      process.kill()
      process.wait(10)

  def start_controller(self) -> None:
    """Starts the controller, at the same address each time."""
    options: dict[str, Any] = {
      "workers": len(self.hosts),
      "quorum": self._quorum,
      "grace": self._grace,
      "limit": LIMIT,
    }
    options |= {"address": self.settings[0].server, "keys": self.folder / "keys"}
    program = [sys.executable, "-m", "jaxsparse.partial"]
    if python := self.settings[0].torchft:
      options = {
        "bind": f"0.0.0.0:{_PORT}",
        "min_replicas": self._quorum,
        "heartbeat_timeout_ms": int(1000 * LIMIT),
      }
      grace = _TORCHFT_GRACE if self._grace == "auto" else self._grace
      options["join_timeout_ms"] = int(1000 * grace)
      program = [str(pathlib.Path(python).with_name("torchft_lighthouse"))]
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [*self.controller_host.enter, *program, *flags]
    with (self.folder / "controller").open("ab") as log:
      self.controller = subprocess.Popen(command, stdout=log, stderr=log)

  def start(self, number: int, **changes: Any) -> None:
    """Starts a worker, in place of one that has ended."""
    one = self.settings[number] = self.settings[number]._replace(
      life=self.settings[number].life + 1, **changes
    )
    program = [sys.executable, "-m", "benchmarks.rounds", f"--worker={json.dumps(one)}"]
    if one.torchft:
      program = [
        one.torchft,
        str(_TORCHFT),
        json.dumps(one._asdict() | {"quorum": self._quorum}),
      ]
    command = [*self.hosts[number].enter, *program]
    with (self.folder / "output").open("ab") as log:
      self.processes[number] = subprocess.Popen(
        command, stdout=log, stderr=log, env=os.environ | PROGRAMS
      )

  def kill(self, number: int) -> None:
    """Ends a worker by SIGKILL."""
    self.processes[number].kill()
    self.processes[number].wait(10)

  def replace(self, number: int, **changes: Any) -> None:
    """Kills a worker, starts another one, and waits until that has joined."""
    self.kill(number)
    self.start(number, **changes)
    self.wait_for(number)

  def wait_for(self, number: int) -> None:
    """Waits until the last worker of a number has joined."""
    last = number, self.settings[number].life
    joined = lambda: (
      last in [(one["worker"], one["life"]) for one in self.events("joined")]
    )
    self.wait(joined, f"worker {number} to join")

  def finish(self) -> list[dict[str, Any]]:
    """Ends all workers in good order: how each one ended."""
    for process in self.processes.values():
      process.send_signal(signal.SIGTERM)
    self.wait(
      lambda: all(process.poll() is not None for process in self.processes.values()),
      "workers to end",
    )
    return self.events("end")

  def wait(self, holds: Callable[[], bool], what: str) -> None:
    """Waits until a condition holds; RuntimeError with the workers' output if it does not."""
    watching.wait(holds, what, [self.folder / "output"])

  def settle(self, rounds: int = 3) -> float:
    """Waits until there have been so many rounds of all workers: the time of the first one."""
    begin = time.monotonic()

    def found() -> list[float]:
      rounds = self.events("round", begin=begin)
      return list(
        {
          one["number"]: one["time"]
          for one in rounds
          if len(one["members"]) == len(self.hosts)
        }.values()
      )

    self.wait(lambda: len(found()) >= rounds, f"{rounds} rounds of all workers")
    return min(found())

  def lost(self) -> list[int]:
    """The steps that workers had trained and not delivered which the controller took for lost."""
    return [
      int(steps)
      for steps in re.findall(
        r"trained for (\d+) steps", (self.folder / "controller").read_text()
      )
    ]

  def events(
    self, *kinds: str, begin: float = 0.0, end: float = float("inf")
  ) -> list[dict[str, Any]]:
    """What workers have written from `begin` to `end`, in order of time."""
    found = watching.events(self.folder.glob("worker*"), kinds)
    return [event for event in found if begin <= event["time"] <= end]

  @contextlib.contextmanager
  def stopped(self, number: int) -> Iterator[None]:
    """A worker is suspended during the block."""
    process = self.processes[number]
    process.send_signal(signal.SIGSTOP)
    try:
      yield
    finally:
      process.send_signal(signal.SIGCONT)

  @contextlib.contextmanager
  def cut(self, number: int) -> Iterator[None]:
    """No packet comes from a host, or gets there, during the block."""
    switch, port = netlab.port_of(self.hosts[number])
    link = ["ip", "-n", switch, "link", "set", port]
    subprocess.run([*link, "down"], check=True, timeout=10)
    try:
      yield
    finally:
      subprocess.run([*link, "up"], check=True, timeout=10)

  def send_garbage(self, count: int) -> None:
    """Sends so many messages that are none to the controller and to a worker."""
    last = self.events("joined")[-1]
    addresses = [self.settings[0].server, last["address"]]
    self._run(self.hosts[0], "garbage", addresses, str(self.folder / "keys"), count)

  def read(self, donors: int, waits: Sequence[int]) -> list[tuple[float, int]]:
    """Seconds and bytes of fetches of a reader on the controller's host, as `worker.read` prints them."""
    one = self.settings[0]
    keys = str(self.folder / "keys")
    facts = one.server, keys, int(one.task), one.transform, donors, waits
    fetches: list[tuple[float, int]] = json.loads(
      self._run(self.controller_host, "reader", *facts)
    )
    return fetches

  def _run(self, host: Host, job: str, *facts: Any) -> bytes:
    """What a job of `benchmarks.rounds` prints on a host."""
    job = f"--{job}={json.dumps(facts)}"
    command = [*host.enter, sys.executable, "-m", "benchmarks.rounds", job]
    done = subprocess.run(command, check=True, timeout=_JOB, stdout=subprocess.PIPE)
    return done.stdout
