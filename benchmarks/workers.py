"""Where the workers of a benchmark run: devices of this process, processes, ranks of MPI, or simulated."""

import json
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
from jax.sharding import Mesh

import jaxsparse as js
from benchmarks import netlab
from jaxsparse import launch
from jaxsparse.launch import guard

AXIS = "workers"
ENGINES = {
  "devices": "accelerators of this process if there are as many as workers, else CPU devices",
  "processes": "a process a worker, in JAX's own multi-process runtime",
  "mpi": "a process a worker, over MPI",
  "sim": "all workers simulated on one device",
}
ENGINE_HELP = "; ".join(f"{name}: {what}" for name, what in ENGINES.items())


class Workers(NamedTuple):
  """The workers of a benchmark, seen from one process."""

  # the argument `mesh` of `js.init` and `js.make_train_step`: a mesh, or a comm
  where: Mesh | js.Comm
  # the argument `axis` of a transform: the axis of the mesh, or the comm
  axis: str | js.Comm
  size: int  # number of workers P
  # the number of workers whose part of a batch this process gives: all of them, or
  # under MPI one
  shares: int
  number: int  # of this process among those that run; the first one reports

  def __str__(self) -> str:
    platform = jax.default_backend()
    engines = {
      js.MpiComm: f"{platform} ranks of MPI",
      js.SimComm: f"one {platform} device, simulated",
    }
    where = f"{platform} processes" if jax.process_count() > 1 else platform
    return f"{self.size} workers on {engines.get(type(self.where), where)}"

  def share(self, size: int) -> slice:
    """The rows that this process gives, of a batch of `size` rows for each worker."""
    # A rank of MPI gives the rows of its own worker, any other process all rows.
    first = 0 if self.shares == self.size else self.number
    return slice(first * size, (first + self.shares) * size)

  @property
  def reports(self) -> bool:
    """Whether this process prints the results of all."""
    return self.number == 0

  def metrics(self, state: object) -> js.Metrics:
    """`js.metrics` over all workers."""
    # Under MPI a state is that of one worker, and `js.metrics` has to communicate.
    return js.metrics(state, None if self.shares == self.size else self.axis)


def launched(engine: str, workers: int) -> bool:
  """Runs this command again as `workers` ranks, if the engine takes ranks and this process is not one of them."""
  if engine not in ("processes", "mpi") or launch.is_rank():
    return False
  start_again(workers, engine)
  return True


def start_again(
  ranks: int, engine: Any = "processes", *flags: str, **options: Any
) -> None:
  """Runs this command, with these flags too, as ranks until they end; `options` are those of `launch.run`."""
  # `python -m NAME` has a spec, `python file.py` has none; of a package NAME it is that
  # of NAME.__main__.
  spec = sys.modules["__main__"].__spec__
  program = (
    ["-m", spec.name.removesuffix(".__main__")]
    if spec
    else [str(pathlib.Path(sys.argv[0]).resolve())]
  )
  transport: Any = "mpi" if engine == "mpi" else "processes"
  launch.run(
    [sys.executable, *program, *sys.argv[1:], *flags], ranks, transport, **options
  )


def measure_in_lab(
  program: str, hosts: int, rate: str, transport: Any = "processes", devices: int = 1
) -> Any:
  """Starts a rank on each host of a lab whose links are that fast; the JSON that rank 0 has written to --rows.

  Args:
    program: the module to run in each rank, with the flags of this command.
    hosts: number of hosts, and of ranks.
    rate: bandwidth of each link, "1gbit" for instance.
    transport: "processes" or "mpi".
    devices: number of CPU devices of a rank.
  """
  with tempfile.TemporaryDirectory() as folder, netlab.lab(hosts, rate) as team:
    path = pathlib.Path(folder) / "rows.json"
    # Of a flag that is given twice the last one counts.
    command = [
      sys.executable,
      "-m",
      program,
      *sys.argv[1:],
      f"--rate={rate}",
      f"--rows={path}",
    ]
    launch.run(command, hosts, transport, devices=devices, hosts=team)
    return json.loads(path.read_text())


def here(engine: str, workers: int) -> Workers:
  """The workers, in a process that does their work. Call it before anything else uses JAX: it makes the devices."""
  if workers < 1:
    raise ValueError(f"--workers={workers}, choose at least 1")
  if engine == "mpi":
    ranks = js.MpiComm()
    _check_ranks(workers, ranks.size)
    return Workers(ranks, ranks, workers, shares=1, number=int(ranks.rank))
  if engine == "sim":
    simulated = js.SimComm(AXIS, members=workers)
    return Workers(simulated, simulated, workers, shares=workers, number=0)
  if engine == "processes":
    launch.join()
    _check_ranks(workers, len(jax.devices()))
  # With several processes each has one device; alone, this one makes all of them.
  if not jax.distributed.is_initialized():
    jax.config.update("jax_num_cpu_devices", workers)
  # Accelerators only if each worker has one.
  devices = jax.devices() if len(jax.devices()) >= workers else jax.devices("cpu")
  mesh = Mesh(np.array(devices[:workers]), (AXIS,))
  return Workers(mesh, AXIS, workers, shares=workers, number=jax.process_index())


def share_programs(folder: pathlib.Path) -> None:
  """Keeps every compiled program in `folder` from now on, and has one rank compile for all; call it before `here`."""
  jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  # Rank 0 sends binaries to ranks with the same cache key. On CPU, JAX hashes the
  # devices of the process that asks, so keys differ; hash the kinds of all devices
  # instead. Without this private function every rank compiles for itself.
  from jax._src import cache_key

  if hasattr(cache_key, "_hash_accelerator_config") and hasattr(
    cache_key, "_hash_devices"
  ):
    setattr(cache_key, "_hash_accelerator_config", cache_key._hash_devices)  # noqa: B010  # private, so untyped
    jax.config.update("jax_share_binary_between_hosts", True)


def pin() -> None:
  """Pins this rank, and all threads that it starts from now on, to the core of its number; call it before `here`."""
  # A process that is no rank has no number, and takes the first core.
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[(guard.rank() or 0) % len(cores)]})


def make_console(stderr: bool = False) -> rich.console.Console:
  """A console as wide as the terminal, unless mpirun made that."""
  # None lets rich ask the terminal for its width.
  width = None if sys.stdout.isatty() and not launch.is_rank() else 160
  return rich.console.Console(stderr=stderr, width=width)


def _check_ranks(workers: int, ranks: int) -> None:
  if workers != ranks:
    raise ValueError(
      f"--workers={workers}, but the job has {ranks}: start as many ranks as workers"
    )
