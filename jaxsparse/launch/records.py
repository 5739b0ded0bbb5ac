"""Parses the records of the ranks, and names the first cause of a failure."""

import json
import pathlib
import re
import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxsparse.launch.guard import STEPS

# The exception, or the last line, of a rank that lost its connection to another one. The type distinguishes it from
# exceptions of the program that use the same words.
_LOST = re.compile(
  r"(?:[\w.]+\.)?(?:JaxRuntimeError|XlaRuntimeError): .*"
  r"(?:[Gg]loo|[Cc]oordination|distributed service|[Hh]eartbeat|UNAVAILABLE)"
  r"|ValueError: [A-Z]+: Gloo [\w -]+ failed: "  # from the dispatch of a jitted function
  r"|(?:(?:[\w.]+\.)?Exception: |\[\S+\] )?(?:\*\*\* )?(?:MPI_ERR|PMIX)"
)
_ABORT = -signal.SIGABRT


class Life(NamedTuple):
  """The recorded state of one rank; times are in seconds of the monotonic clock.

  Attributes:
    rank: its number.
    arrived: whether it has begun to join the run.
    over: time at which it left the run in order or its process ended; None while it runs.
    raised: time at which the exception `said` ended it.
    ended: time at which its process ended.
    status: exit status of its process, negative for a signal.
    said: the exception, else the last line of its output.
    told: whether its guard received a signal to end it, as from mpirun after the failure of another rank.
    stopped: time since which its process is stopped (SIGSTOP); None where it is not.
    steps: number of training steps of all ranks that it has begun.
  """

  rank: int
  arrived: bool = False
  over: float | None = None
  raised: float | None = None
  ended: float | None = None
  status: int | None = None
  said: str = ""
  told: bool = False
  stopped: float | None = None
  steps: int = 0

  @property
  def failed(self) -> float | None:
    """Time at which the rank failed; None if it has not."""
    if self.raised is not None:
      return self.raised
    return self.ended if self.status else None

  @property
  def how(self) -> str:
    """Predicate of a sentence about the rank: how it failed, left or ended."""
    if self.raised is not None:
      return f"failed: {self.said}"
    if self.status is not None and self.status < 0:
      return f"was ended by {signal.Signals(-self.status).name}"
    if self.ended is None:
      return "left the run"
    said = f": {self.said}" if self.status and self.said else ""
    return f"{'exited' if self.status else 'ended'} with status {self.status or 0}{said}"


def read(folder: pathlib.Path, rank: int) -> Life:
  """Reads the records of a rank."""
  life = Life(rank)
  file, steps = folder / str(rank), folder / f"{rank}.steps"
  text = file.read_text() if file.exists() else ""
  for line in text.split("\n")[:-1]:  # the rest is a line that is still being written
    facts = json.loads(line)
    event, when = facts["event"], facts["time"]
    if event == "arrived":
      life = life._replace(arrived=True)
    elif event == "left":
      life = life._replace(over=when)
    elif event == "raised":
      life = life._replace(raised=when, said=facts["said"])
    elif event == "stopped":
      life = life._replace(stopped=when)
    elif event == "continued":
      life = life._replace(stopped=None)
    elif event == "ended":
      life = ended(life, when, facts["status"], facts["said"], facts["told"])
  written = steps.read_bytes() if steps.exists() else b""
  return life._replace(steps=STEPS.unpack(written)[0] if written else 0)


def ended(life: Life, when: float, status: int, said: str = "", told: bool = False) -> Life:
  """The record of a rank whose process has ended."""
  said = life.said or said
  return life._replace(over=life.over or when, ended=when, status=status, said=said, told=told, stopped=None)


def first_cause(lives: Sequence[Life]) -> str:
  """Names the rank that made a run fail, given that some rank has failed.

  A rank that loses its connection to a failed one fails too, perhaps before the first failure is recorded. So the cause
  is the earliest rank that was stopped or failed for a reason of its own; without one, a rank that left or ended with
  status 0; without that, the earliest failure.
  """
  if own := _causes(lives):
    _, rank, how = min(own)
    return f"rank {rank} {how}; {_others(lives)}"
  failed = _first_failure(lives)
  first, then = first_over(lives), f"rank {failed} {lives[failed].how}"
  if first:
    then = f"rank {first.rank} {first.how} before the others, then {then}"
  return f"{then}; {_others(lives)}"


def lost(lives: Sequence[Life]) -> Collection[int]:
  """The ranks that made a run fail, as `first_cause` names them: those that are not there to go on without another."""
  first = first_over(lives)
  return frozenset(rank for _, rank, _ in _causes(lives)) or {first.rank if first else _first_failure(lives)}


def has_cause(lives: Sequence[Life]) -> bool:
  """Whether a rank has ended or is stopped for a reason of its own, so that the others fail."""
  return bool(_causes(lives)) or first_over(lives) is not None


def lost_another(said: str) -> bool:
  """Whether an exception says that the connection to another rank is lost."""
  return bool(_LOST.match(said))


def first_over(lives: Sequence[Life]) -> Life | None:
  """The first rank that left the run in order or ended with status 0; None if there is none."""
  over = [life for life in lives if life.over is not None and life.failed is None]
  return min(over, key=lambda life: life.over or 0.0, default=None)


def names(ranks: Collection[int]) -> str:
  """`rank 1`, or `ranks 0, 2`."""
  return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _lost_another(life: Life) -> bool:
  if life.status is not None and life.status < 0:
    return life.told or life.status == _ABORT
  return lost_another(life.said)


def _causes(lives: Sequence[Life]) -> list[tuple[float, int, str]]:
  """When each rank was stopped or failed for a reason of its own, its number, and how."""
  own = [(life.stopped, life.rank, "is stopped (SIGSTOP)") for life in lives if life.stopped is not None]
  return own + [
    (life.failed, life.rank, life.how) for life in lives if life.failed is not None and not _lost_another(life)
  ]


def _first_failure(lives: Sequence[Life]) -> int:
  """The rank that failed first."""
  return min((life.failed, life.rank) for life in lives if life.failed is not None)[1]


def _others(lives: Sequence[Life]) -> str:
  return f"the other {len(lives) - 1} of {len(lives)} ranks were ended"
