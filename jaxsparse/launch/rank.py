"""Functions of a rank: join the run, and record its progress for the launcher."""

import atexit
import functools
import io
import os
import pathlib
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from absl import logging

from jaxsparse import _compat
from jaxsparse.launch import environment, guard, launchers, watch

START_TIMEOUT = 120.0  # seconds until every rank must have called `join`
GRACE = (
  60.0  # seconds that ranks get to end after the first rank has ended with status 0
)

_RECORD_DELAY = (
  0.3  # seconds to wait for the record of another rank whose connection has failed
)
_SHUTDOWN = 70  # seconds that JAX waits for the other ranks when this one ends
# seconds instead under our launcher, which ends ranks much earlier, and names the cause;
# the most seconds to wait for ranks to join
_DAY = 86_400


def join(*, timeout: float = START_TIMEOUT) -> str | None:
  """Makes this process a rank of the run that started it; call it before any other use of JAX.

  In a rank it calls `jax.distributed.initialize`; `jax.devices()` are then the devices
  of all ranks: of each rank its GPUs or TPUs, else one CPU device, or as many as
  `--devices` of our launcher says. It does nothing in another process, nor where
  `jax.distributed.initialize` was called before, as Ray Train does on TPUs and GPUs. A
  program that uses `js.MpiComm` needs no `join`: the comm itself joins MPI.

  Ranks are those of `run`; of torchrun; workers of Ray Train; ranks of mpirun; tasks of
  srun; pods with TPUs of GKE; processes with RANK, WORLD_SIZE, MASTER_ADDR and
  MASTER_PORT; pods of a JobSet or a Job of Kubernetes; and hosts of a Cloud TPU. Where
  one launcher has started another, the inner one counts, which comes first in this
  list. It is an error if variables of two launchers contradict each other, or if the
  number of ranks is not what a variable states: with an MPI other than that of mpirun,
  for example, each rank would train alone. PMIx alone states no number; there only
  ranks above 0 notice that they train alone.

  From then on a failure ends this rank at once, as `fail_on_exceptions` says.

  Args:
    timeout: seconds until every rank must have joined, a day at most.

  Returns:
    The name of the launcher, which is also logged (absl, INFO); None in a process that
    is not a rank; "jax.distributed.initialize" where that was called before.

  Raises:
    RuntimeError: if the ranks are not as many as a variable of the launcher states, if
      variables contradict each other or some are missing; of JAX, if a rank does not
      join in time.
    ImportError: in a rank of mpirun on several hosts without mpi4py, and in a pod
      without kubernetes.

  Example:
    >>> import jaxsparse.launch
    >>> jaxsparse.launch.join()  # this process is not a rank
  """
  if jax.distributed.is_initialized():
    return "jax.distributed.initialize"
  launcher_and_counts = launchers.find()
  if launcher_and_counts is None:
    return None
  launcher, counts = launcher_and_counts
  launchers.check_agreement(launcher, counts)
  _arrive()
  options = launcher.options(counts)
  if options.get("process_id") == 0:
    launchers.claim_port(options["coordinator_address"])  # held until the process ends
  # What C++ writes to standard output, as gloo does, goes to standard error; the output
  # of Python stays there.
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  jax.config.update("jax_num_cpu_devices", int(os.environ.get(guard.DEVICES, "1")))
  try:
    jax.distributed.initialize(
      initialization_timeout=round(min(timeout, _DAY)),
      heartbeat_timeout_seconds=watch.HEARTBEAT,
      shutdown_timeout_seconds=_DAY if guard.RECORDS in os.environ else _SHUTDOWN,
      **options,
    )
  except (ValueError, OSError) as error:
    raise RuntimeError(
      f"{environment.JOIN}: JAX does not find the run of {launcher.name}: {error}"
    ) from error
  advice = "JAX_COORDINATOR_ADDRESS and other variables of JAX may name another run"
  environment.check(
    environment.JOIN, counts, jax.process_count(), "jax.process_count() is", advice
  )
  _arrive()  # again, for a host of a Cloud TPU, which is a rank only now
  _connect()
  stated = f" ({'; '.join(map(str, counts))})" if counts else ""
  rank = f"rank {jax.process_index()} of {jax.process_count()}"
  logging.info("%s: %s, by %s%s", environment.JOIN, rank, launcher.name, stated)
  return launcher.name


def join_mpi() -> list[environment.RankCount]:
  """Makes this process a rank of MPI; `js.MpiComm()` calls it before MPI starts.

  Returns:
    The numbers of ranks that its launcher states.

  Raises:
    RuntimeError: in one of several ranks of `--engine=processes`, each of which MPI
      would take for its only rank.
  """
  _arrive()
  counts = launchers.read_counts()
  ranks = counts[0].ranks if counts else 1
  # The launcher sets this variable with `--engine=processes` only.
  if guard.COORDINATOR in os.environ and ranks > 1:
    raise RuntimeError(
      f"js.MpiComm() in rank {guard.rank()} of {ranks}, whose --engine=processes has no MPI. Start the program with "
      f"--engine=mpi --ranks={ranks}, or call jaxsparse.launch.join() and give a mesh in place of the comm"
    )
  return counts


def fail(error: object) -> NoReturn:
  """Ends this process with `error: …`; a rank ends at once, where a normal exit would wait for the other ranks."""
  if not is_rank():
    sys.exit(f"error: {error}")
  print(f"error: {error}", file=sys.stderr)
  _end(str(error))


def fail_on_exceptions() -> None:
  """Makes a failure end this rank at once, where a normal exit would wait for other ranks that wait for this one.

  It replaces `sys.excepthook` and `sys.exit`; `join` and `js.MpiComm()` call it. An
  uncaught exception then ends the rank, and so does `sys.exit` with a message or a
  status other than 0, unless the program catches it. The launcher is told the
  exception, or at a normal exit that the rank leaves the run. A rank that fails because
  another one did prints one line instead of a traceback. In a process that is not a
  rank nothing changes.

  In ``sys.exit(main())`` Python looks up `sys.exit` before `main` joins. Where `main`
  returns a status, call this function first:

      launch.fail_on_exceptions()
      sys.exit(main())

  A rank for which that was not done, or that ends by `raise SystemExit`, ends as if
  nothing had failed: the launcher ends the others in their next step or after
  `--grace`, JAX ends them after 70 s, and under `mpirun` they wait.
  """
  if is_rank():
    _replace_hooks()


@functools.cache
def _replace_hooks() -> None:
  """Replaces `sys.excepthook` and `sys.exit` by functions that end this rank at once."""
  show = sys.excepthook
  leave = sys.exit
  process_id = os.getpid()

  def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    said = guard.shorten(f"{kind.__name__}: {error}")
    if _has_lost_another(said):
      print(f"this rank has lost another one: {said}", file=sys.stderr)
    else:
      show(kind, error, trace)
    _end(said)

  def exit_(status: Any = None, /) -> NoReturn:
    # In another thread `sys.exit` ends only the thread. A forked process ends as usual.
    if (
      status
      and threading.current_thread() is threading.main_thread()
      and os.getpid() == process_id
    ):
      raise _Exit(status)
    leave(status)

  sys.excepthook = hook
  sys.exit = exit_
  # Runs before the exit handlers of JAX, which are registered earlier and wait for the
  # other ranks.
  atexit.register(_record_exit, os.getpid())


def count_step(processes: int) -> None:
  """Tells the launcher, if there is one, that this rank begins a training step of `processes` processes.

  Only steps of all ranks count: once a rank has ended, a later step of another rank
  never completes.
  """
  if processes == int(os.environ.get(guard.RANKS, "0")) and (file := _open_steps()):
    # The file has as many bytes as this rank has begun steps. One byte longer by its
    # size alone takes no block of the disk, which may be full.
    file.truncate(file.seek(0, os.SEEK_END) + 1)


def is_rank() -> bool:
  """Whether a launcher started this process as a rank, as `join` says; a host of a Cloud TPU is one once it has joined.

  Example:
    >>> is_rank()
    False
  """
  return bool(launchers.read_counts()) or jax.distributed.is_initialized()


def attempt() -> int:
  """How often the launcher has started this run again after the loss of a rank; 0 without a launcher.

  Example:
    >>> attempt()
    0
  """
  return int(os.environ.get(guard.ATTEMPT, "0"))


class _Exit(SystemExit):
  """A SystemExit that ends this rank at once if uncaught; exit handlers of JAX and MPI would wait for the other ranks.

  The interpreter calls no hook for SystemExit. It reads `code` when no Python frame is
  left that could catch it.
  """

  @property
  def code(self) -> Any:  # type: ignore[override]
    (status,) = self.args  # as given to `sys.exit`
    # A caller in Python may still catch the exception.
    if sys._getframe().f_back:
      return status
    if not isinstance(status, int):
      print(status, file=sys.stderr)
    return _end(
      f"SystemExit: {status}", status & 0xFF if isinstance(status, int) else 1
    )


def _arrive() -> None:
  """If this process is a rank, it tells the launcher that it joins, and failures end it at once."""
  if is_rank():
    guard.record(arrived=True)
    fail_on_exceptions()


def _has_lost_another(said: str) -> bool:
  """Whether this rank failed because another one ended; first waits `_RECORD_DELAY` for the record of that end.

  Args:
    said: type and message of the exception.
  """
  folder = os.environ.get(guard.RECORDS)
  if not folder or not watch.lost_another(said):
    return False
  time.sleep(_RECORD_DELAY)
  # States of all ranks. This rank itself counts neither as over nor as a cause: its
  # guard records a status only when it has ended.
  lives = [
    watch.read_life(pathlib.Path(folder), rank)
    for rank in range(int(os.environ[guard.RANKS]))
  ]
  # Another rank has left the run in order, is stopped, or has failed for a reason of
  # its own.
  return watch.first_over(lives) is not None or any(life.is_cause for life in lives)


def _end(said: str, status: int = 1) -> NoReturn:
  """Ends this process for the reason `said`, without exit handlers: those of JAX and MPI wait for the other ranks."""
  guard.record(said=guard.shorten(said))
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _record_exit(process_id: int) -> None:
  """Tells the launcher that this rank leaves the run, unless this process is a fork of the rank's process."""
  if os.getpid() == process_id:
    guard.record(left=time.monotonic())


@functools.cache
def _open_steps() -> io.FileIO | None:
  """The file whose length in bytes is the number of steps that this rank has begun; None without a launcher."""
  folder = os.environ.get(guard.RECORDS)
  rank = guard.rank()
  return (
    open(f"{folder}/{rank}.steps", "ab", buffering=0)
    if folder and rank is not None
    else None
  )


def _connect() -> None:
  """Connects all ranks by a collective whose result is not used; every rank must call.

  gloo connects in the first collective and waits 30 s for the others. Without this one
  it would time out where a rank compiles its first step 30 s longer than another.
  """
  mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
  total = lambda: jax.lax.psum(jax.lax.axis_index("ranks"), "ranks")
  jax.block_until_ready(
    jax.jit(_compat.shard_map(total, mesh, (), jax.sharding.PartitionSpec()))()
  )
