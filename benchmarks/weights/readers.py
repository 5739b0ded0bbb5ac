"""Four readers of published weights, each behind a link of the network lab: seconds and bytes of versions.

The publisher is the benchmark's own process. Its folder is served by `python -m
http.server` on the first host of the lab, whose link all readers share, as they would
that of a trainer; each reader is a process on a host of its own (`reader.py`).
"""

import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import jaxsparse as js
from benchmarks import netlab, watching
from benchmarks.weights import reader
from benchmarks.weights.report import Fetch
from jaxsparse.launch.start import Host
from jaxsparse.weights import files

READERS = 4
_PORT = 8000
_PAUSE = 0.02

Leaves = list[np.ndarray]  # of a version, in the serving dtype


class Team:
  """A server of a publisher's folder on the first host, and a reader on each of the others; `with` ends them."""

  def __init__(self, hosts: Sequence[Host], folder: pathlib.Path, like: Leaves):
    self._server_host, *self._hosts = hosts
    self.folder = folder / "published"
    self._readers = folder / "readers"
    self._readers.mkdir()
    self._like = like
    self._dtype = like[0].dtype.name
    self.publisher = self.make_publisher()
    self._starts = 0
    self._logs: dict[int, pathlib.Path] = {}
    self._processes: dict[int, subprocess.Popen[bytes]] = {}
    self._digests: dict[int, int] = {}  # of the versions that were published

  def make_publisher(self) -> js.weights.Publisher:
    """A publisher, whose first version is an anchor."""
    return js.weights.Publisher(self.folder, self._like, self._dtype)

  def __enter__(self) -> "Team":
    options = ["--bind", self._server_host.address, "--directory", str(self.folder)]
    server = [sys.executable, "-m", "http.server", str(_PORT), *options]
    self._server = subprocess.Popen(
      [*self._server_host.enter, *server],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    for number in range(len(self._hosts)):
      self.start(number)
    return self

  def __exit__(self, *_: object) -> None:
    for process in (*self._processes.values(), self._server):
      process.kill()
      process.wait(10)

  def start(self, number: int) -> None:
    """Starts a reader without any version."""
    self._starts += 1
    log = self._readers / f"{number}.{self._starts}.log"
    self._logs[number] = log
    server = f"http://{self._server_host.address}:{_PORT}"
    shapes = [list(leaf.shape) for leaf in self._like]
    settings = reader.Settings(server, str(log), shapes, self._dtype)
    program = [sys.executable, "-m", "benchmarks.weights.reader", json.dumps(settings)]
    command = [*self._hosts[number].enter, *program]
    with open(log.with_suffix(".output"), "wb") as output:
      self._processes[number] = subprocess.Popen(command, stdout=output, stderr=output)
    self._wait(
      lambda: bool(self.events(number, "started")), f"reader {number} to start"
    )

  def kill(self, number: int) -> None:
    """Ends a reader by SIGKILL."""
    self._processes[number].kill()
    self._processes[number].wait(10)

  def kill_while_it_reads(self, number: int, begin: int, least: int) -> int:
    """Ends a reader by SIGKILL when so many bytes have come to its host since `begin`; the bytes that had."""
    size = lambda: self.bytes_of_host(number) - begin
    self._wait(lambda: size() >= least, f"reader {number} to read")
    part = size()
    self.kill(number)
    return part

  def bytes_of_host(self, number: int) -> int:
    """The bytes that have come to the host of a reader, headers and lists of files among them."""
    devices = pathlib.Path(f"/proc/{self._processes[number].pid}/net/dev").read_text()
    # behind two lines of titles: the name of a device, a colon, and the bytes received
    rows = [line.replace(":", " ").split() for line in devices.splitlines()[2:]]
    return sum(int(row[1]) for row in rows if row[0] != "lo")

  def events(self, number: int, kind: str) -> list[dict[str, Any]]:
    """What a reader has written of a kind."""
    log = self._logs[number]
    return watching.events([log] if log.exists() else [], [kind])

  def publish(self, leaves: Leaves) -> int:
    """Publishes a version; its number."""
    version = self.publisher.publish(leaves)
    self._digests[version] = reader.digest_of(leaves)
    return version

  def received(self, number: int, version: int) -> dict[str, Any]:
    """Waits until a reader has a version, and compares the bits: its event."""
    own = lambda: [
      event for event in self.events(number, "version") if event["version"] == version
    ]
    self._wait(lambda: bool(own()), f"reader {number} to have version {version}")
    event = own()[0]
    if event["digest"] != self._digests[version]:
      raise RuntimeError(f"reader {number} has other bits of version {version}")
    return event

  def _wait(self, holds: Callable[[], bool], what: str) -> None:
    outputs = sorted(self._readers.glob("*.output"))
    watching.wait(holds, what, outputs, pause=_PAUSE)


def _row(what: str, rate: float, found: list[tuple[float, list[int]]]) -> Fetch:
  seconds = [one for one, _ in found]
  received = list(itertools.chain.from_iterable(sizes for _, sizes in found))
  times = statistics.mean(seconds), max(seconds)
  return Fetch(what, rate, len(found), *times, statistics.mean(received))


def _send(team: Team, leaves: Leaves) -> tuple[float, list[int]]:
  """Seconds from the call of `publish` until the last reader has the version, and bytes of each reader."""
  begin = time.monotonic()
  version = team.publish(leaves)
  found = [team.received(number, version) for number in range(READERS)]
  return max(one["time"] for one in found) - begin, [one["bytes"] for one in found]


def _alone(team: Team, number: int, version: int) -> tuple[float, list[int]]:
  """Seconds from the start of a reader's process, behind its imports, until it has a version, and its bytes."""
  event = team.received(number, version)
  start = team.events(number, "started")[0]["time"]
  return event["time"] - start, [event["bytes"]]


def _jump(leaves: Leaves, seed: int) -> Leaves:
  """Other weights, whose difference is longer than an anchor: any bits."""
  random = np.random.default_rng(seed)
  draw = lambda leaf: random.integers(0, 256, leaf.nbytes, np.uint8)
  return [draw(leaf).view(leaf.dtype).reshape(leaf.shape) for leaf in leaves]


def full_copies(team: Team, rate: float, versions: list[Leaves]) -> Iterator[Fetch]:
  """Each version by a new publisher, so an anchor."""
  found = []
  for leaves in versions:
    team.publisher = team.make_publisher()
    found.append(_send(team, leaves))
  yield _row("full copies", rate, found)


def links(team: Team, rate: float, versions: list[Leaves]) -> Iterator[Fetch]:
  """The anchor, and each link."""
  first, *rest = versions
  yield _row("first anchor", rate, [_send(team, first)])
  yield _row("links", rate, [_send(team, leaves) for leaves in rest])


def disturbed(team: Team, rate: float, versions: list[Leaves]) -> Iterator[Fetch]:
  """A reader that is killed and started again, and one that comes after the chain was pruned."""
  last = READERS - 1
  begin = team.bytes_of_host(last)
  version = team.publish(_jump(versions[-1], 1))
  whole = sum(leaf.nbytes for leaf in versions[-1])
  part = team.kill_while_it_reads(last, begin, whole // 3)
  team.start(last)
  what = "killed when {:.0%} of an anchor had come, and started again"
  yield _row(what.format(part / whole), rate, [_alone(team, last, version)])
  for number in range(last):
    team.received(number, version)
  # a second anchor, and links behind it: what is older is removed
  for leaves in (_jump(versions[-1], 2), *versions[-2:]):
    version = team.publish(leaves)
    for number in range(READERS):
      team.received(number, version)
  oldest = files.names(team.publisher._folder)[0]
  if oldest.version == 1:
    raise RuntimeError(f"{oldest} is there: the chain was not pruned")
  team.kill(last)
  team.start(last)
  yield _row("late, the chain was pruned", rate, [_alone(team, last, version)])


def measure(
  link: str, versions_of: Iterator[tuple[float, list[Leaves]]]
) -> Iterator[Fetch]:
  """The rows of each rate of the optimizer; full copies of the first one, kills and late readers of the last one."""
  steps: list[Callable[..., Iterator[Fetch]]] = [full_copies]
  with netlab.lab(READERS + 1, link) as hosts:
    for rate, versions in versions_of:
      for make in [*steps, links]:
        with _team(hosts, versions[0]) as team:
          yield from make(team, rate, versions)
      steps = []
    with _team(hosts, versions[0]) as team:
      _send(team, versions[0])
      yield from disturbed(team, rate, versions)


@contextlib.contextmanager
def _team(hosts: Sequence[Host], like: Leaves) -> Iterator[Team]:
  with (
    tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder,
    Team(hosts, pathlib.Path(folder), like) as team,
  ):
    yield team
