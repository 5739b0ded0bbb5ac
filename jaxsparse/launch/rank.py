"""Functions of a rank: join the run, and record its progress for the launcher."""

import atexit
import contextlib
import functools
import itertools
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxsparse.launch import guard, records

START_TIMEOUT = 120.0  # seconds until every rank must have called `join`
HEARTBEAT = 10  # seconds without a sign of life after which a rank counts as dead
GRACE = 60.0  # seconds that ranks get to end after the first of them has ended with status 0

_OTHERS = 0.3  # seconds to wait for the record of a rank that this one has lost
_AFTER_LAUNCHER = 10.0  # seconds that JAX waits longer than the launcher, which then names the cause


def join(*, timeout: float = START_TIMEOUT) -> None:
  """Makes this process a rank of the run that started it; call it before anything else uses JAX.

  From `run`, mpirun (with mpi4py installed) or srun, it calls `jax.distributed.initialize` with its rank: the devices
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
  grace = float(os.environ.get(guard.GRACE, GRACE))
  limits: dict[str, Any] = {
    "initialization_timeout": round(timeout),
    "heartbeat_timeout_seconds": HEARTBEAT,
    "shutdown_timeout_seconds": round(grace + _AFTER_LAUNCHER),
  }
  _keep_stdout_clean()
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if guard.COORDINATOR in os.environ:
    address, ranks, rank = (os.environ[name] for name in (guard.COORDINATOR, guard.RANKS, guard.RANK))
    jax.distributed.initialize(address, int(ranks), int(rank), **limits)
  else:
    method = None if guard.rank() is None else "mpi4py"
    jax.distributed.initialize(cluster_detection_method=method, **limits)
  fail_on_exceptions()
  _connect()


def join_mpi() -> None:
  """Makes this process a rank of MPI before MPI starts; `js.MpiComm()` calls it.

  Raises:
    RuntimeError: in one of several ranks of `--engine=processes`, each of which MPI would take for its only rank.
  """
  if not is_rank():
    return
  arrived()
  fail_on_exceptions()
  ranks = int(os.environ.get(guard.RANKS, "1"))
  if guard.COORDINATOR in os.environ and ranks > 1:
    raise RuntimeError(
      f"js.MpiComm() in rank {guard.rank()} of {ranks}, which was started with --engine=processes: MPI would see one "
      f"rank. Start the program with python -m jaxsparse.launch --engine=mpi --ranks={ranks}, or call "
      "jaxsparse.launch.join() and give a mesh in place of the comm"
    )


def arrived() -> None:
  """Tells the launcher, if there is one, that this rank is about to join: what follows waits for all the others."""
  _once("arrived")


def fail(error: object) -> NoReturn:
  """Ends this process with `error: …`; a rank at once, without waiting for the others as a normal exit would."""
  if not is_rank():
    sys.exit(f"error: {error}")
  print(f"error: {error}", file=sys.stderr, flush=True)
  guard.record("raised", said=guard.shortened(str(error)))
  os._exit(1)


@functools.cache
def fail_on_exceptions() -> None:
  """From now on an uncaught exception ends this rank at once: others wait for it, and it for them.

  The launcher is told the exception, or at a normal exit that this rank leaves the run. A rank that fails because it
  has lost another one prints one line and no traceback: the other rank says what happened. `sys.exit` with a status
  other than 0 or a message is an uncaught exception too, unless the program catches it; `raise SystemExit` is not.
  """
  before = sys.excepthook

  def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    said = guard.shortened(f"{kind.__name__}: {error}")
    guard.record("raised", said=said)
    if _has_lost_another(said):
      print(f"this rank has lost another one: {said}", file=sys.stderr)
    else:
      before(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

  sys.excepthook = hook
  _replace_exit()
  _Exit.rank = os.getpid()
  atexit.register(_leave, os.getpid())  # runs before what JAX and MPI registered, which waits for the other ranks


def count_step(processes: int) -> None:
  """Tells the launcher, if there is one, that this rank begins a training step of so many processes.

  Counts only steps that need all ranks: if one rank ends and another has begun a later step, that step never completes.
  """
  if (write := _counter()) and processes == int(os.environ[guard.RANKS]):
    write()


def is_rank() -> bool:
  """Whether this process was started as one of several ranks: by `run`, by mpirun or by srun.

  Example:
    >>> is_rank()
    False
  """
  return guard.rank() is not None or ("SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


class _Exit(SystemExit):
  """Ends this rank at once when nobody catches it: exit handlers of JAX and MPI would wait for the other ranks.

  The interpreter calls no hook for SystemExit. It reads `code` when no Python frame is left that could catch it.

  Attributes:
    rank: process id of the rank, once others may wait for it; a forked process ends as usual.
  """

  rank: int | None = None

  def __getattribute__(self, name: str) -> Any:
    found = super().__getattribute__(name)
    if name != "code" or not found or sys._getframe().f_back or os.getpid() != _Exit.rank:
      return found
    if not isinstance(found, int):
      print(found, file=sys.stderr)
    guard.record("raised", said=guard.shortened(f"SystemExit: {found}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(found & 0xFF if isinstance(found, int) else 1)


@functools.cache
def _replace_exit() -> None:
  """Makes `sys.exit` raise `_Exit` in the main thread; in another one, SystemExit ends the thread alone."""
  leave = sys.exit

  def exit_(status: Any = None, /) -> NoReturn:
    if status and threading.current_thread() is threading.main_thread():
      raise _Exit(status)
    leave(status)

  sys.exit = exit_


def _has_lost_another(said: str) -> bool:
  """Whether this rank fails for the reason that `said` names because another one did, whose record may come later."""
  folder, ranks = os.environ.get(guard.RECORDS), range(int(os.environ.get(guard.RANKS, "1")))
  end = time.monotonic() + _OTHERS
  while folder and records.lost_another(said) and time.monotonic() < end:
    if records.has_cause([records.read(pathlib.Path(folder), rank) for rank in ranks]):
      return True
    time.sleep(0.02)
  return False


def _leave(rank: int) -> None:
  """Tells the launcher that this rank leaves the run, unless this process is a fork of the rank's process."""
  if os.getpid() == rank:
    _once("left")


@functools.cache
def _once(event: str) -> None:
  guard.record(event)


@functools.cache
def _counter() -> Callable[[], int] | None:
  """Writes a number that is larger by one at each call; None without a launcher."""
  folder, rank = os.environ.get(guard.RECORDS), guard.rank()
  if not folder or rank is None:
    return None
  file, numbers = os.open(pathlib.Path(folder, f"{rank}.steps"), os.O_WRONLY | os.O_CREAT, 0o600), itertools.count(1)
  return lambda: os.pwrite(file, guard.STEPS.pack(next(numbers)), 0)


def _connect() -> None:
  """Opens the connections between all ranks now that all are here: gloo gives up after 30 s of one that compiles."""
  import jax
  import numpy as np
  from jax.sharding import Mesh, PartitionSpec

  from jaxsparse import _compat

  rank = lambda: jax.lax.psum(jax.lax.axis_index("ranks"), "ranks")
  total = _compat.shard_map(rank, Mesh(np.array(jax.devices()), ("ranks",)), (), PartitionSpec())
  with _without_gloo_lines():
    jax.block_until_ready(jax.jit(total)())


def _keep_stdout_clean() -> None:
  """Sends what C++ writes to standard output, as gloo does, to standard error; the output of Python stays there."""
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)


@contextlib.contextmanager
def _without_gloo_lines() -> Iterator[None]:
  """Drops gloo's lines from what C++ writes meanwhile: without a launcher, no guard drops them.

  Call after `_keep_stdout_clean`: descriptor 1 is a file meanwhile, whose text then goes to standard error.
  """
  with tempfile.TemporaryFile() as written:
    os.dup2(written.fileno(), 1)
    try:
      yield
    finally:
      os.dup2(2, 1)
      written.seek(0)
      os.write(2, guard.GLOO_LINE.sub(b"", written.read()))


if is_rank():
  _replace_exit()  # now: in `sys.exit(main())`, Python looks up `sys.exit` before `main` joins
