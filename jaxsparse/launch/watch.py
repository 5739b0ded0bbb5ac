"""Finds the rank that made a run fail, in what ranks and their guards have recorded."""

import json
import math
import pathlib
import re
import signal
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

HEARTBEAT = 10  # seconds without a heartbeat after which a rank counts as dead

_NEVER = math.inf
# The exception, or the last line, of a rank that lost its connection to another one.
# The type distinguishes it from exceptions of the program that use the same words.
_LOST = re.compile(
  r"(?:[\w.]+\.)?(?:JaxRuntimeError|XlaRuntimeError): .*"
  r"(?:[Gg]loo|[Cc]oordination|distributed service|[Hh]eartbeat|UNAVAILABLE)"
  # from the dispatch of a jitted function
  r"|ValueError: [A-Z]+: Gloo [\w -]+ failed: "
  r"|(?:(?:[\w.]+\.)?Exception: |\[\S+\] )?(?:\*\*\* )?(?:MPI_ERR|PMIX)"
)


class RunFailed(RuntimeError):
  """A run failed; the message names the rank that caused it.

  Attributes:
    lost: the ranks that died, are stopped or did not join, or that left the run so that
      the connections of others failed; none where the run failed for another reason.
  """

  def __init__(self, message: str, lost: Collection[int] = ()):
    super().__init__(message)
    self.lost = frozenset(lost)


class Life(NamedTuple):
  """The recorded state of one rank; times are in seconds of the monotonic clock, and infinite where nothing happened.

  Attributes:
    rank: its number.
    arrived: whether it has begun to join the run.
    left: time at which it left the run in order.
    said: the exception that ended it.
    ended: time at which its process ended, unless its guard was told to end it.
    status: exit status of its process, negative for a signal; 0 while it runs.
    line: the last line of its output.
    stopped: time since which its process is stopped (SIGSTOP).
    steps: number of training steps of all ranks that it has begun.
  """

  rank: int
  arrived: bool = False
  left: float = _NEVER
  said: str = ""
  ended: float = _NEVER
  status: int = 0
  line: str = ""
  stopped: float = _NEVER
  steps: int = 0

  @property
  def over(self) -> float:
    """Time at which it left the run in order or its process ended."""
    return min(self.left, self.ended)

  @property
  def is_cause(self) -> bool:
    """Whether it is stopped or has failed for a reason of its own, so that the other ranks fail."""
    if self.status > 0:
      return not lost_another(self.said or self.line)
    # JAX aborts a rank that has lost another one, so SIGABRT is no cause.
    return self.stopped < _NEVER or self.status not in (0, -signal.SIGABRT)

  def __str__(self) -> str:
    """A sentence: how it failed, left or ended."""
    if self.stopped < _NEVER:
      how = "is stopped (SIGSTOP)"
    elif self.status and self.said:
      how = f"failed: {self.said}"
    elif self.status < 0:
      # Most real-time signals have no name.
      names = {known.value: known.name for known in signal.Signals}
      how = f"was ended by {names.get(-self.status, f'signal {-self.status}')}"
    elif self.status:
      how = f"exited with status {self.status}{': ' if self.line else ''}{self.line}"
    else:
      how = "left the run" if self.ended == _NEVER else "ended with status 0"
    return f"rank {self.rank} {how}"


def read_life(folder: pathlib.Path, rank: int, status: int | None = None) -> Life:
  """The state of one rank, from what it and its guard have recorded.

  Args:
    folder: of the records of a run.
    rank: number of the rank.
    status: exit status of its guard, which is taken for the rank's where the guard was
      killed before it recorded one; None while the guard runs, and under mpirun of
      several ranks.
  """
  life = Life(rank)
  file = folder / str(rank)
  steps = folder / f"{rank}.steps"
  # Ranks and guards append JSON lines of fields of `Life`; the last value counts.
  text = file.read_text() if file.exists() else ""
  for line in text.split("\n")[:-1]:  # the last piece is empty or incomplete
    life = life._replace(**json.loads(line))
  if status is not None and life.ended == _NEVER:
    life = life._replace(ended=time.monotonic(), status=status, stopped=_NEVER)
  # The file `steps` has a byte for each step.
  return life._replace(steps=steps.stat().st_size if steps.exists() else 0)


def lost_another(said: str) -> bool:
  """Whether an exception, or a last line of output, says that the connection to another rank is lost."""
  return bool(_LOST.match(said))


def first_over(lives: Sequence[Life]) -> Life | None:
  """The first rank that left the run in order or ended with status 0; None if there is none."""
  over = [life for life in lives if life.over < _NEVER and not life.status]
  return min(over, key=lambda life: life.over, default=None)


def find_failure(
  lives: Sequence[Life], statuses: Sequence[int | None]
) -> RunFailed | None:
  """The first cause of a failure, or None.

  A rank that loses its connection to a failed one fails too, perhaps before the first
  failure is recorded. So the cause is the earliest rank that was stopped or failed for
  a reason of its own; without one, a rank that left or ended with status 0; without
  that, the earliest failure.

  Args:
    lives: states of all ranks.
    statuses: exit statuses of the processes that the launcher started, a guard of each
      rank or one of mpirun; None while a process runs.
  """
  first = first_over(lives)
  before = f"{first} before the others, then " if first else ""
  if failed := [life for life in lives if life.status]:
    # ranks that failed for a reason of their own, or are stopped and have no status
    causes = [life for life in lives if life.is_cause]
    cause = min(causes or failed, key=lambda life: min(life.stopped, life.ended))
    # `RunFailed.lost`: the others failed because of these, and may start again.
    lost = causes or [first or cause]
    others = f"the other {len(lives) - 1} of {len(lives)} ranks were ended"
    return RunFailed(
      f"{'' if causes else before}{cause}; {others}", [life.rank for life in lost]
    )
  # No rank has failed, so a status other than 0 is that of mpirun.
  if status := next(filter(None, statuses), None):
    return RunFailed(f"{before}mpirun ended with status {status}; its message is above")
  # Ranks that ended well but never joined: each of them has trained alone.
  alone = [
    life
    for life in lives
    if not life.arrived and (None not in statuses or life.ended < _NEVER)
  ]
  if alone and len(lives) > 1:
    advice = "call jaxsparse.launch.join() before anything else uses JAX, or make js.MpiComm() with --engine=mpi"
    return RunFailed(
      f"{_names(alone)} of {len(lives)} ended with status 0 without having joined the run: {advice}"
    )
  return None


def find_overdue(
  lives: Sequence[Life],
  waited: float,
  now: float,
  *,
  start: float,
  grace: float,
  limit: float,
  begun: float,
) -> RunFailed | None:
  """The limit that a rank or the run has exceeded, or None.

  Args:
    lives: states of all ranks.
    waited: seconds since these ranks were started.
    now: time of the monotonic clock.
    start: seconds until all ranks must have joined.
    grace: seconds that ranks get to end after the first one has ended.
    limit: seconds that the run may take, restarts included.
    begun: time at which the run began, before any restart.
  """
  missing = [life for life in lives if not life.arrived]
  stopped = [life for life in lives if now - life.stopped > HEARTBEAT]
  # ranks whose process has not ended
  running = [life for life in lives if life.ended == _NEVER]
  first = first_over(lives)
  # ranks that have neither left the run nor ended
  going_on = [life for life in lives if life.over == _NEVER]
  # Ranks in a step that `first` has not begun: it needs all ranks, so it never ends.
  ahead = [life for life in going_on if first and life.steps > first.steps]
  lost: list[Life] = []
  if missing and len(lives) > 1 and waited > start:
    problem = f"{_names(missing)} did not join within {start:g} s"
    lost = missing
  elif stopped:
    problem = f"{stopped[0]}, for more than {HEARTBEAT} s"
    lost = stopped[:1]
  elif first and ahead:
    problem = (
      f"{first} after {first.steps} training steps, and {_names(going_on)} still ran: rank {ahead[0].rank} was in step "
      f"{ahead[0].steps}, which needs all ranks. Give every rank the same number of steps"
    )
  elif first and going_on and now - first.over > grace:
    late = f"{grace:g} s later: they wait for it, or need a longer --grace"
    problem = f"{first} and {_names(going_on)} still ran {late}"
  # All ranks have left or ended, but a process, perhaps mpirun, still runs.
  elif not going_on and now - max(life.over for life in lives) > grace:
    problem = f"{_names(running) if running else 'mpirun'} did not end within {grace:g} s after the last rank"
  elif now - begun > limit:
    problem = f"the run has taken more than {limit:g} s and {_names(running)} still ran"
  else:
    return None
  return RunFailed(f"{problem}; the run is ended", [life.rank for life in lost])


def _names(lives: Sequence[Life]) -> str:
  """`rank 1`, or `ranks 0, 2`."""
  return ("rank " if len(lives) == 1 else "ranks ") + ", ".join(
    str(life.rank) for life in lives
  )
