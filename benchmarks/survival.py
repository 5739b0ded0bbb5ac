r"""Outcomes of averages of groups as JAX's collectives when a member dies and is started again.

Three processes of `jax.distributed` with gloo, groups as sub-meshes. 0 and 1 average,
and 1 and 2. Then process 2 kills itself while 1 averages with it; 0 and 1 go on;
process 2 is started again and tries to average with 1; at the end process 0 leaves,
which holds the coordinator. Once as JAX comes, once with its jax_enable_recoverability.

It is why `js.partial.Worker` sends models over sockets of its own:
tests/partial/faults_test.py does the same to it.

Example:
  python -m benchmarks.survival
"""

import contextlib
import multiprocessing.process
import os
import pathlib
import signal
import tempfile
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import entry, report, workers
from jaxsparse import _compat
from jaxsparse.launch.start import free_port

_ENTRIES = 1_000_000  # of the model
_HEARTBEAT = 10  # seconds without a sign of life after which JAX takes one for dead
_SECONDS = 20.0  # how long the processes that are left go on after the death
_LATER = 10.0  # seconds that the others run on when process 0 has left
_GRACE = (
  30.0  # seconds beyond the time that the processes shall run, then they are ended
)
_Pair = tuple[int, int]


class Fate(NamedTuple):
  """The outcome of a run."""

  told: bool  # whether process 1 was told that its average with 2 failed
  others: int  # averages that 0 and 1 had after the death
  back: int  # averages that 2 had after its return
  alive: list[int]  # which of the processes 0 and 1 lived until 0 left
  outlives: bool  # whether 1 lived on then
  said: str  # the error that 2 met after its return, or 1 where it could not return


class _Process:
  """One of the three."""

  def __init__(self, rank: int, address: str, log: pathlib.Path, recoverable: bool):
    self._log = log.open("w", buffering=1)
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", recoverable)
    jax.distributed.initialize(address, 3, rank, heartbeat_timeout_seconds=_HEARTBEAT)
    self._mine = np.full(_ENTRIES, rank, np.float32)

  def average(self, pair: _Pair) -> None:
    """Tries one average and records its outcome."""
    try:
      mesh = Mesh(
        np.array([device for device in jax.devices() if device.process_index in pair]),
        ("group",),
      )
      spec = PartitionSpec("group")
      mean = jax.jit(
        _compat.shard_map(lambda x: jax.lax.pmean(x, "group"), mesh, (spec,), spec)
      )
      shape, place = (2 * _ENTRIES,), NamedSharding(mesh, spec)
      jax.block_until_ready(
        mean(jax.make_array_from_callback(shape, place, lambda _: self._mine))
      )
      self._log.write(f"{pair} came\n")
    except Exception as error:
      self._log.write(f"{pair} failed: {' '.join(str(error).split())}\n")


def _run(
  rank: int, address: str, folder: pathlib.Path, recoverable: bool, again: bool
) -> None:
  """The life of a process."""
  for stream in (1, 2):  # of what JAX says about the dead
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
  process = _Process(rank, address, folder / f"{rank}{'again' * again}", recoverable)
  if not again:
    for pair in ((0, 1), (1, 2)):
      if rank in pair:
        process.average(pair)
    if rank == 2:
      time.sleep(1)
      os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
      process.average((1, 2))
  end = time.monotonic() + _SECONDS + (_LATER if rank else 0)
  while time.monotonic() < end:
    if rank < 2:
      process.average((0, 1))
    if rank == 2 or (rank == 1 and (folder / "2again").exists()):
      process.average((1, 2))
    time.sleep(0.5)
  os._exit(0)  # at once: JAX would wait for the dead


def measure(recoverable: bool) -> Fate:
  """One run of three processes, one of which dies and is started again."""
  with (
    tempfile.TemporaryDirectory(prefix="jaxsparse-") as name,
    contextlib.ExitStack() as stack,
  ):
    folder, address = pathlib.Path(name), f"127.0.0.1:{free_port()}"

    def start(rank: int, again: bool = False) -> multiprocessing.process.BaseProcess:
      arguments = rank, address, folder, recoverable, again
      process = multiprocessing.get_context("spawn").Process(
        target=_run, args=arguments
      )
      process.start()
      stack.callback(process.join)
      stack.callback(process.kill)
      return process

    first = [start(rank) for rank in range(3)]
    first[2].join()
    time.sleep(5)
    back = start(2, again=True)
    end = time.monotonic() + _SECONDS + _GRACE
    first[0].join(_SECONDS + _GRACE)
    alive = [rank for rank in (0, 1) if first[rank].exitcode in (None, 0)]
    for process in (first[1], back):
      process.join(max(0.0, end - time.monotonic()))
    lines = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    failures = [
      line
      for name in ("1", "2again")
      for line in lines.get(name, [])
      if "failed" in line
    ]
    return Fate(
      told=any(line.startswith("(1, 2) failed") for line in lines["1"]),
      others=lines["0"].count("(0, 1) came") - 1,
      back=lines.get("2again", []).count("(1, 2) came"),
      alive=alive,
      outlives=first[1].exitcode == 0,
      said=failures[-1].partition(": ")[2][:110] if failures else "",
    )


def main() -> None:
  """Runs both ways and prints the outcomes."""
  yes = lambda holds: "yes" if holds else "no"
  lines = []
  for way in (False, True):
    fate = measure(way)
    alive = " and ".join(map(str, fate.alive)) or "neither"
    lines.append(
      [
        yes(way),
        yes(fate.told),
        str(fate.others),
        str(fate.back),
        alive,
        yes(fate.outlives),
        fate.said,
      ]
    )
  heads = (
    "recoverable",
    "1 is told",
    "averages of 0, 1 after it",
    "of 2 again",
    "alive",
    "1 outlives 0",
    "error",
  )
  title = "three processes of JAX over gloo; process 2 dies, and comes back"
  workers.make_console().print(
    report.table(title, heads, lines, text=len(heads), wraps=heads)
  )


if __name__ == "__main__":
  entry.run(main)
