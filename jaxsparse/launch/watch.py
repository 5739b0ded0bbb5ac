"""Starts a run, watches its ranks until they have ended, and leaves no process behind."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jaxsparse.launch import records, start
from jaxsparse.launch.guard import HAS_PROC, KILL_AFTER
from jaxsparse.launch.rank import GRACE, HEARTBEAT, START_TIMEOUT
from jaxsparse.launch.records import Life, names
from jaxsparse.launch.start import Engine, Host

_POLL = 0.05  # seconds between two looks at the ranks
_SETTLE = 0.5  # seconds after the first failure in which the other ranks may record theirs
_NOTICE = 2.0  # seconds after which the launcher prints that a rank has ended and others have not
_PATIENCE = KILL_AFTER + 15.0  # seconds that a guard gets to end all its descendants


class RunFailed(RuntimeError):
  """A run failed; the message names the rank that caused it.

  Attributes:
    lost: the ranks that died, are stopped or did not join; none where the run failed for another reason.
  """

  def __init__(self, message: str, lost: Collection[int] = ()):
    super().__init__(message)
    self.lost = frozenset(lost)


class _Limits(NamedTuple):
  """Limits in seconds: until all ranks have arrived, for the whole run, and between the first and the last end.

  `begun` is when the run was started first, before it was started again.
  """

  start: float
  whole: float | None
  grace: float
  begun: float


def run(
  command: Sequence[str],
  ranks: int,
  engine: Engine = "processes",
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

  Rank 0 writes to the standard output of this process; all other output of the ranks goes to standard error, line by
  line. Ranks allocate huge pages and keep the memory that they free, unless GLIBC_TUNABLES is set: page faults cost
  more than the arithmetic of a sparse all-reduce. Each rank has GPUs of its own where there are enough, else all use
  the CPU.

  SIGINT, SIGTERM and SIGHUP in the main thread end the run; then the program's own handlers run. When this process is
  killed, its ranks are killed too.

  Args:
    command: a program that calls `join` or makes a `js.MpiComm`, and its arguments.
    ranks: number of ranks.
    engine: "processes" connects the ranks by `jax.distributed`, "mpi" by mpirun and MPI.
    devices: number of devices of each rank: GPUs where there are enough for all ranks, else CPU devices.
    hosts: rank r starts on host r mod len(hosts); by default the hosts of JAXSPARSE_HOSTS, else this machine.
    start_timeout: seconds until every rank must have called `join`.
    limit: seconds that the whole run may take; None for no limit.
    grace: seconds that ranks get to end after the first rank has ended with status 0.
    prefix: whether lines on standard error begin with `[rank r]`.
    restarts: how often the run is started again when ranks die, are stopped or do not join: the others are ended, and
      as many as are left start again, as ranks 0, 1 and so on. `attempt` tells the program, which goes on from its
      checkpoint.
    min_ranks: the run is not started again with fewer ranks.

  Raises:
    ValueError: for less than one rank or device, several devices of a rank of MPI, another engine, or `restarts` or
      `min_ranks` that do not fit.
    FileNotFoundError: if the program, or mpirun, does not exist.
    RunFailed: if a rank died, did not join, did not end, or ended without having joined the run; no rank is left
      running.
  """
  if ranks < 1:
    raise ValueError(f"ranks={ranks}, choose at least 1")
  if devices < 1 or (devices > 1 and engine == "mpi"):
    raise ValueError(
      f"devices={devices}, choose {'1, a rank of MPI is one device' if engine == 'mpi' else 'at least 1'}"
    )
  if engine not in ("processes", "mpi"):
    raise ValueError(f"engine={engine!r}, choose 'processes' or 'mpi'")
  if restarts < 0 or not 1 <= min_ranks <= ranks:
    raise ValueError(f"restarts={restarts}, min_ranks={min_ranks}: choose at least 0, and from 1 to ranks={ranks}")
  limits = _Limits(start_timeout, limit, grace, time.monotonic())
  with _noted_signals() as signals:
    for attempt in range(restarts + 1):
      try:
        with tempfile.TemporaryDirectory(prefix="jaxsparse-", ignore_cleanup_errors=True) as folder:
          commands = start.commands(command, ranks, engine, devices, hosts, folder, grace, prefix, attempt)
          _run_once(commands, ranks, start.records_in(folder), limits, signals)
        return
      except RunFailed as error:
        ranks = _left(error, ranks, min_ranks, restarts - attempt)
        if signals:
          return


def _run_once(
  commands: Sequence[start.Command], ranks: int, folder: pathlib.Path, limits: _Limits, signals: Sequence[int]
) -> None:
  processes: list[subprocess.Popen] = []
  with _all_ended(processes):
    for arguments, environment in commands:
      processes.append(start.guarded(arguments, environment))
    _watch(processes, ranks, folder, limits, signals)


def _left(error: RunFailed, ranks: int, min_ranks: int, restarts: int) -> int:
  """How many ranks start again after a failure; raises RunFailed if none do."""
  left = ranks - len(error.lost)
  if not restarts or not error.lost:
    raise error
  if left < min_ranks:
    raise RunFailed(f"{error}; {left} of {ranks} are left, fewer than min_ranks={min_ranks}", error.lost) from error
  print(
    f"jaxsparse.launch: {error}; {left} of {ranks} start again, {restarts - 1} restarts remain",
    file=sys.stderr,
    flush=True,
  )
  return left


def _watch(
  processes: Sequence[subprocess.Popen], ranks: int, folder: pathlib.Path, limits: _Limits, signals: Sequence[int]
) -> None:
  """Returns when all ranks have ended with status 0, or after a signal; raises RunFailed when a rank fails."""
  begin, failed_at, told = time.monotonic(), None, False
  while not signals:
    statuses = [process.poll() for process in processes]
    now = time.monotonic()
    lives = _lives(folder, ranks, statuses, now)
    if problem := _failure(lives, statuses):
      failed_at = failed_at or now
      if None not in statuses or now - failed_at > _SETTLE:
        raise problem
    elif None not in statuses:
      return
    elif problem := _overdue(lives, now - begin, now, limits):
      raise problem
    elif not told and (notice := _notice(lives, now, limits.grace)):
      print(f"jaxsparse.launch: {notice}", file=sys.stderr, flush=True)
      told = True
    time.sleep(_POLL)


def _lives(folder: pathlib.Path, ranks: int, statuses: Sequence[int | None], now: float) -> list[Life]:
  """The records of all ranks; the exit status of a guard stands in for the record that a killed guard did not write."""
  lives = [records.read(folder, rank) for rank in range(ranks)]
  if len(statuses) == ranks:
    pairs = zip(lives, statuses, strict=True)
    lives = [
      life if status is None or life.ended is not None else records.ended(life, now, status) for life, status in pairs
    ]
  return lives


def _failure(lives: Sequence[Life], statuses: Sequence[int | None]) -> RunFailed | None:
  """The cause of a failure, or None."""
  if any(life.failed is not None for life in lives):
    return RunFailed(records.first_cause(lives), records.lost(lives))
  over = None not in statuses
  alone = {life.rank for life in lives if not life.arrived and (over or life.ended is not None)}
  if any(statuses):
    first = records.first_over(lives)
    cause = f"rank {first.rank} {first.how} before the others, then " if first else ""
    return RunFailed(f"{cause}mpirun ended with status {next(filter(None, statuses))}; its message is above")
  if alone and len(lives) > 1:
    return RunFailed(
      f"{names(alone)} of {len(lives)} ended with status 0 without having joined the run, so it ran by itself: "
      "call jaxsparse.launch.join() before anything else uses JAX, or make js.MpiComm() with --engine=mpi"
    )
  return None


def _overdue(lives: Sequence[Life], waited: float, now: float, limits: _Limits) -> RunFailed | None:
  """The limit that a rank or the run has exceeded, or None."""
  running = {life.rank for life in lives if life.ended is None}
  missing = {life.rank for life in lives if not life.arrived}
  if missing and len(lives) > 1 and waited > limits.start:
    return RunFailed(f"{names(missing)} did not join within {limits.start:g} s; the run is ended", missing)
  for life in lives:
    if life.stopped is not None and now - life.stopped > HEARTBEAT:
      said = f"rank {life.rank} is stopped (SIGSTOP), for more than {HEARTBEAT} s; the run is ended"
      return RunFailed(said, {life.rank})
  if problem := _early(lives, now, limits.grace):
    return RunFailed(problem)
  if limits.whole is not None and now - limits.begun > limits.whole:
    said = f"the run has taken more than {limits.whole:g} s; {names(running)} still ran and the run is ended"
    return RunFailed(said)
  return None


def _early(lives: Sequence[Life], now: float, grace: float) -> str:
  """The problem if a rank has ended and others still need it, or an empty string."""
  first, going_on = records.first_over(lives), [life for life in lives if life.over is None]
  if first is None or first.over is None:
    return ""
  ended = f"rank {first.rank} {first.how}"
  for life in going_on:
    if life.steps > first.steps:
      return (
        f"{ended} after {first.steps} training steps, and {_names(going_on)} still ran: rank {life.rank} was in step "
        f"{life.steps}, which needs all ranks. Give every rank the same number of steps; the run is ended"
      )
  if going_on and now - first.over > grace:
    return (
      f"{ended} and {_names(going_on)} still ran {grace:g} s later: they wait for it, or need a longer --grace; "
      "the run is ended"
    )
  if not going_on and now - max(life.over or now for life in lives) > grace:
    still = [life for life in lives if life.ended is None]
    return (
      f"{_names(still) if still else 'mpirun'} did not end within {grace:g} s after the last rank; the run is ended"
    )
  return ""


def _notice(lives: Sequence[Life], now: float, grace: float) -> str:
  """The notice, printed once, that a rank has ended and others have not, or an empty string."""
  first, going_on = records.first_over(lives), [life for life in lives if life.over is None]
  if first is None or first.over is None or not going_on or now - first.over < _NOTICE:
    return ""
  return f"rank {first.rank} {first.how}, {_names(going_on)} still run and get {grace:g} s to end (--grace)"


def _names(lives: Sequence[Life]) -> str:
  return names([life.rank for life in lives])


@contextlib.contextmanager
def _all_ended(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
  """Ends the processes and all their descendants when the block ends."""
  try:
    yield
  finally:
    for process in processes:
      process.terminate()  # a guard then ends all descendants that it finds
    end = time.monotonic() + _PATIENCE
    for process in processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - time.monotonic()))
      if not HAS_PROC or process.returncode is None or process.returncode < 0:
        start.kill_group(process)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
  """Records signals in the block, and calls the program's handler of the first one afterwards.

  A signal that the program ignores (nohup) stays ignored. Raises KeyboardInterrupt if the handler raises nothing.
  """
  noted: list[int] = []
  handlers = {}
  if threading.current_thread() is threading.main_thread():  # no other thread may have handlers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      handler = signal.getsignal(number)
      if handler not in (signal.SIG_IGN, None):
        handlers[number] = handler
        signal.signal(number, lambda number, _: noted.append(number))
  try:
    yield noted
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if noted:
    handler = handlers[signal.Signals(noted[0])]
    if callable(handler) and handler is not signal.default_int_handler:
      handler(noted[0], None)
    raise KeyboardInterrupt(noted[0])
