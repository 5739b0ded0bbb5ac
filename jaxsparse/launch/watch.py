"""Finds the rank that made a run fail, in what ranks and their guards have recorded."""

import json
import pathlib
import re
import signal
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxsparse.launch.guard import STEPS

HEARTBEAT = 10  # seconds without a heartbeat after which a rank counts as dead

_NOTICE = 2.0  # seconds after which the launcher prints that a rank has ended and others have not
# The exception, or the last line, of a rank that lost its connection to another one. The type distinguishes it from
# exceptions of the program that use the same words.
_LOST = re.compile(
  r"(?:[\w.]+\.)?(?:JaxRuntimeError|XlaRuntimeError): .*"
  r"(?:[Gg]loo|[Cc]oordination|distributed service|[Hh]eartbeat|UNAVAILABLE)"
  r"|ValueError: [A-Z]+: Gloo [\w -]+ failed: "  # from the dispatch of a jitted function
  r"|(?:(?:[\w.]+\.)?Exception: |\[\S+\] )?(?:\*\*\* )?(?:MPI_ERR|PMIX)"
)


class RunFailed(RuntimeError):
  """A run failed; the message names the rank that caused it.

  Attributes:
    lost: the ranks that died, are stopped or did not join; none where the run failed for another reason.
  """

  def __init__(self, message: str, lost: Collection[int] = ()):
    super().__init__(message)
    self.lost = frozenset(lost)


class Limits(NamedTuple):
  """Seconds until all ranks must have joined, for the run since `begun`, and between the first and the last end."""

  start: float
  whole: float | None
  grace: float
  begun: float


class Life(NamedTuple):
  """The recorded state of one rank; times are in seconds of the monotonic clock.

  Attributes:
    rank: its number.
    arrived: whether it has begun to join the run.
    left: time at which it left the run in order.
    raised: time at which the exception `said` ended it.
    said: that exception.
    ended: time at which its process ended.
    status: exit status of its process, negative for a signal.
    line: the last line of its output.
    told: whether its guard received a signal to end it, as from mpirun after the failure of another rank.
    stopped: time since which its process is stopped (SIGSTOP); None where it is not.
    steps: number of training steps of all ranks that it has begun.
  """

  rank: int
  arrived: bool = False
  left: float | None = None
  raised: float | None = None
  said: str = ""
  ended: float | None = None
  status: int | None = None
  line: str = ""
  told: bool = False
  stopped: float | None = None
  steps: int = 0

  @property
  def over(self) -> float | None:
    """Time at which it left the run in order or its process ended; None while it runs."""
    return self.ended if self.left is None else self.left

  @property
  def failed(self) -> float | None:
    """Time at which it failed; None if it has not."""
    if self.raised is not None:
      return self.raised
    return self.ended if self.status else None

  @property
  def is_cause(self) -> bool:
    """Whether it is stopped or has failed for a reason of its own, so that the other ranks fail."""
    if self.stopped is not None or self.failed is None:
      return self.stopped is not None
    if self.status is not None and self.status < 0:
      return not self.told and self.status != -signal.SIGABRT
    return not lost_another(self.said or self.line)

  def __str__(self) -> str:
    """A sentence: how it failed, left or ended."""
    said = f": {self.line}" if self.status and self.line else ""
    if self.stopped is not None:
      how = "is stopped (SIGSTOP)"
    elif self.raised is not None:
      how = f"failed: {self.said}"
    elif self.status is not None and self.status < 0:
      how = f"was ended by {signal.Signals(-self.status).name}"
    elif self.ended is None:
      how = "left the run"
    else:
      how = f"{'exited' if self.status else 'ended'} with status {self.status or 0}{said}"
    return f"rank {self.rank} {how}"


def read_life(folder: pathlib.Path, rank: int, status: int | None = None) -> Life:
  """The records of a rank, in the folder of a run; `status` is that of its guard, which may have been killed first."""
  life, file, steps = Life(rank), folder / str(rank), folder / f"{rank}.steps"
  text = file.read_text() if file.exists() else ""
  for line in text.split("\n")[:-1]:  # the rest is a line that is still being written
    life = life._replace(**json.loads(line))
  if status is not None and life.ended is None:
    life = life._replace(ended=time.monotonic(), status=status, stopped=None)
  written = steps.read_bytes() if steps.exists() else b""
  return life._replace(steps=STEPS.unpack(written)[0] if written else 0)


def lost_another(said: str) -> bool:
  """Whether an exception, or a last line of output, says that the connection to another rank is lost."""
  return bool(_LOST.match(said))


def first_over(lives: Sequence[Life]) -> Life | None:
  """The first rank that left the run in order or ended with status 0; None if there is none."""
  over = [life for life in lives if life.over is not None and life.failed is None]
  return min(over, key=lambda life: life.over or 0.0, default=None)


def find_failure(lives: Sequence[Life], statuses: Sequence[int | None]) -> RunFailed | None:
  """The first cause of a failure, or None.

  A rank that loses its connection to a failed one fails too, perhaps before the first failure is recorded. So the cause
  is the earliest rank that was stopped or failed for a reason of its own; without one, a rank that left or ended with
  status 0; without that, the earliest failure.

  Args:
    lives: of all ranks.
    statuses: exit statuses of the processes that the launcher started, a guard of each rank or one of mpirun; None of
      one that runs.
  """
  first = first_over(lives)
  before = f"{first} before the others, then " if first else ""
  if failed := [life for life in lives if life.failed is not None]:
    causes = [life for life in lives if life.is_cause]
    cause = min(causes or failed, key=lambda life: life.stopped or life.failed or 0.0)
    lost = [life.rank for life in causes or [first or cause]]
    others = f"the other {len(lives) - 1} of {len(lives)} ranks were ended"
    return RunFailed(f"{'' if causes else before}{cause}; {others}", lost)
  if status := next(filter(None, statuses), None):
    return RunFailed(f"{before}mpirun ended with status {status}; its message is above")
  alone = [life for life in lives if not life.arrived and (None not in statuses or life.ended is not None)]
  if alone and len(lives) > 1:
    advice = "call jaxsparse.launch.join() before anything else uses JAX, or make js.MpiComm() with --engine=mpi"
    return RunFailed(f"{_names(alone)} of {len(lives)} ended with status 0 without having joined the run: {advice}")
  return None


def find_overdue(lives: Sequence[Life], waited: float, now: float, limits: Limits) -> RunFailed | None:
  """The limit that a rank or the run has exceeded, or None; `waited` are the seconds since the ranks started."""
  missing = [life for life in lives if not life.arrived]
  running = [life for life in lives if life.ended is None]
  problem, lost = _find_early_end(lives, now, limits.grace), list[Life]()
  if missing and len(lives) > 1 and waited > limits.start:
    problem, lost = f"{_names(missing)} did not join within {limits.start:g} s", missing
  elif stopped := [life for life in lives if life.stopped is not None and now - life.stopped > HEARTBEAT]:
    problem, lost = f"{stopped[0]}, for more than {HEARTBEAT} s", stopped[:1]
  elif not problem and limits.whole is not None and now - limits.begun > limits.whole:
    problem = f"the run has taken more than {limits.whole:g} s and {_names(running)} still ran"
  return RunFailed(f"{problem}; the run is ended", [life.rank for life in lost]) if problem else None


def find_notice(lives: Sequence[Life], now: float, grace: float) -> str:
  """The notice that a rank has ended and others have not, after some seconds; else an empty string."""
  first, going_on = first_over(lives), [life for life in lives if life.over is None]
  if not first or not going_on or now - (first.over or now) < _NOTICE:
    return ""
  return f"{first}, {_names(going_on)} still run and get {grace:g} s to end (--grace)"


def _find_early_end(lives: Sequence[Life], now: float, grace: float) -> str:
  """The problem if a rank has ended and others still need it, or did not end; else an empty string."""
  first, going_on = first_over(lives), [life for life in lives if life.over is None]
  if not first:
    return ""
  for life in going_on:
    if life.steps > first.steps:
      return (
        f"{first} after {first.steps} training steps, and {_names(going_on)} still ran: rank {life.rank} was in step "
        f"{life.steps}, which needs all ranks. Give every rank the same number of steps"
      )
  if going_on and now - (first.over or now) > grace:
    return f"{first} and {_names(going_on)} still ran {grace:g} s later: they wait for it, or need a longer --grace"
  if not going_on and now - max(life.over or now for life in lives) > grace:
    running = [life for life in lives if life.ended is None]
    return f"{_names(running) if running else 'mpirun'} did not end within {grace:g} s after the last rank"
  return ""


def _names(lives: Sequence[Life]) -> str:
  """`rank 1`, or `ranks 0, 2`."""
  return ("rank " if len(lives) == 1 else "ranks ") + ", ".join(str(life.rank) for life in lives)
