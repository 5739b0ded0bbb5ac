"""Parses the records of the ranks, and describes the first cause of a failure."""

import json
import pathlib
import re
import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxsparse.launch.guard import STEPS

# The exception, or the last line, of a rank that has lost another one. Other exceptions may use the same words.
_LOST = re.compile(
  r"(?:[\w.]+\.)?(?:JaxRuntimeError|XlaRuntimeError): .*"
  r"(?:[Gg]loo|[Cc]oordination|distributed service|[Hh]eartbeat|UNAVAILABLE)"
  r"|(?:(?:[\w.]+\.)?Exception: |\[\S+\] )?(?:\*\*\* )?(?:MPI_ERR|PMIX)"
)
_ABORT = -signal.SIGABRT


class Life(NamedTuple):
  """What the records of one rank say.

  Attributes:
    rank: its number.
    arrived: whether it was about to join the run.
    over: when it left the run in order or its process ended; None while it runs.
    raised: when an exception, which `said` names, ended it.
    ended: when its process ended.
    status: exit status of its process, negative for a signal.
    said: the exception, else the last line that it wrote before it ended.
    told: whether its process ended because somebody told it to, as mpirun does when it has lost another rank.
    stopped: since when its process is stopped (SIGSTOP), None where it is not.
    steps: training steps of all ranks that it has begun.
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
    """When the rank failed, None where it has not."""
    if self.raised is not None:
      return self.raised
    return self.ended if self.status else None

  @property
  def how(self) -> str:
    """How the rank failed, left or ended, without its number."""
    if self.raised is not None:
      return f"failed: {self.said}"
    if self.status is not None and self.status < 0:
      return f"was ended by {signal.Signals(-self.status).name}"
    if self.ended is None:
      return "left the run"
    said = f": {self.said}" if self.status and self.said else ""
    return f"{'exited' if self.status else 'ended'} with status {self.status or 0}{said}"


def read(folder: pathlib.Path, rank: int) -> Life:
  """The life of a rank until now."""
  life = Life(rank)
  file, steps = folder / str(rank), folder / f"{rank}.steps"
  text = file.read_text() if file.exists() else ""
  for line in text.split("\n")[:-1]:  # what follows the last end of a line is still being written
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
  """The life of a rank whose process has ended."""
  said = life.said or said
  return life._replace(over=life.over or when, ended=when, status=status, said=said, told=told, stopped=None)


def first_cause(lives: Sequence[Life]) -> str:
  """Names the rank that made a run fail, where some ranks have failed.

  A rank that has lost another one fails too, and may do so before the other one's end is recorded. So the cause is the
  earliest rank that was stopped or failed for a reason of its own; without one, a rank that left or ended with
  status 0; without that, the earliest failure.
  """
  failures = sorted((life.failed, life.rank) for life in lives if life.failed is not None)
  own = [(life.stopped, life.rank, "is stopped (SIGSTOP)") for life in lives if life.stopped is not None]
  own += [(life.failed, life.rank, life.how) for life in lives if life.failed is not None and not _lost_another(life)]
  if own:
    _, rank, how = min(own)
    return f"rank {rank} {how}; {_others(lives)}"
  _, failed = failures[0]
  first, then = first_over(lives), f"rank {failed} {lives[failed].how}"
  if first:
    then = f"rank {first.rank} {first.how} before the others, then {then}"
  return f"{then}; {_others(lives)}"


def has_cause(lives: Sequence[Life]) -> bool:
  """Whether a rank has ended or is stopped for a reason of its own, which makes the others lose it."""
  failed = any(life.failed is not None and not _lost_another(life) for life in lives)
  return failed or first_over(lives) is not None or any(life.stopped is not None for life in lives)


def lost_another(said: str) -> bool:
  """Whether an exception is that of a rank that has lost another one."""
  return bool(_LOST.match(said))


def first_over(lives: Sequence[Life]) -> Life | None:
  """The rank that was the first to leave the run in order, or to end with status 0; None where none has."""
  over = [life for life in lives if life.over is not None and life.failed is None]
  return min(over, key=lambda life: life.over or 0.0, default=None)


def names(ranks: Collection[int]) -> str:
  """`rank 1`, or `ranks 0, 2`."""
  return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _lost_another(life: Life) -> bool:
  if life.status is not None and life.status < 0:
    return life.told or life.status == _ABORT
  return lost_another(life.said)


def _others(lives: Sequence[Life]) -> str:
  return f"the other {len(lives) - 1} of {len(lives)} ranks were ended"
