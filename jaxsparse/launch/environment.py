"""How many ranks were started with this process, by variables of our launcher, of MPI and of Slurm."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsparse.launch import guard

JOIN = "jaxsparse.launch.join()"
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class RankCount(NamedTuple):
  """A number of ranks that a variable states.

  Attributes:
    variable: its name, or the call that states it.
    ranks: the number.
    exact: False where the variable holds the number of this rank, so that there are at
      least `ranks`.
  """

  variable: str
  ranks: int
  exact: bool = True

  def allows(self, ranks: int) -> bool:
    """Whether there may be `ranks` ranks."""
    return ranks == self.ranks if self.exact else ranks >= self.ranks

  def __str__(self) -> str:
    value = f"={os.environ[self.variable]}" if self.variable in os.environ else ""
    return f"{self.variable}{value} states {'' if self.exact else 'at least '}{self.ranks} ranks"


def read_launched() -> list[RankCount] | None:
  """What this library's launcher states with `--engine=processes`; None in any other process."""
  return read(guard.RANK, guard.RANKS) if guard.COORDINATOR in os.environ else None


def read_mpi() -> list[RankCount] | None:
  """What a launcher of MPI states; None where none has started this process, or where Slurm counts.

  mpirun may start its ranks by srun: mpirun counts. But an mpirun of one rank, as that
  of a shell, does not count where srun states several tasks. srun sets variables of PMI
  and PMIx, too: if they agree with its number of tasks, they are not MPI's.
  """
  # The number of ranks of this library's launcher, which starts mpirun with
  # `--engine=mpi`.
  launched = read(guard.RANK, guard.RANKS)
  slurm = _read_step()
  mpi = [
    count
    for rank, size in guard.MPI.items()
    if os.environ.get(rank)
    for count in read(rank, size)
  ]
  mpi = [
    count
    for count in mpi
    if not (
      count.variable.startswith("PMI")
      and any(count.allows(stated.ranks) for stated in slurm)
    )
  ]
  # A launcher of one rank does not count beside one of several.
  if several := [count for count in launched + mpi if count.ranks > 1]:
    return several
  return None if read_slurm() else launched + mpi or None


def read_slurm() -> list[RankCount] | None:
  """What srun states of several tasks; None where it states one, or has not started this process."""
  return [count for count in _read_step() if count.ranks > 1] or None


def _read_step() -> list[RankCount]:
  """What srun states; [] where it has not started this process. A batch script has variables of Slurm, but no step.

  SLURM_NTASKS counts only without SLURM_STEP_NUM_TASKS: in the shell of salloc, a step
  of one task, it is that of the job.
  """
  if "SLURM_STEP_ID" not in os.environ:
    return []
  tasks_of_step, tasks = SLURM
  return read("", tasks_of_step) or read("", tasks)


def check_mpi(who: str, counts: Sequence[RankCount], mpi: Any) -> None:
  """Raises RuntimeError unless COMM_WORLD has the stated number of ranks: it has 1 if another MPI started this rank.

  Args:
    who: the call that checks, which begins the message.
    counts: the numbers of ranks that variables state.
    mpi: the module `mpi4py.MPI`.
  """
  library = name_mpi(mpi)
  advice = (
    f"mpi4py was built for {library}, probably another MPI than the launcher's: this rank would train without the "
    f"others. Start the program by the mpirun of {library}, or under Slurm by an srun --mpi=TYPE that it supports; or "
    f"build mpi4py and mpi4jax for the launcher's MPI (docs/how_to/many_hosts.md). Without MPI, call {JOIN} and start "
    "it by python -m jaxsparse.launch --ranks=N"
  )
  check(who, counts, mpi.COMM_WORLD.Get_size(), "MPI.COMM_WORLD has size", advice)


def name_mpi(mpi: Any) -> str:
  """Name and version of the MPI that `mpi4py.MPI` was built for."""
  return mpi.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")


def check(
  who: str, counts: Sequence[RankCount], ranks: int, counted: str, advice: str
) -> None:
  """Raises RuntimeError with the variable, both numbers and the advice unless each of `counts` allows `ranks`.

  Args:
    who: the call that checks, which begins the message.
    counts: the numbers of ranks that variables state.
    ranks: the number that is compared with them.
    counted: the words before `ranks` in the message, such as "COMM_WORLD has size".
    advice: ends the message.
  """
  for count in counts:
    if not count.allows(ranks):
      # Of several variables, one may be left over from another launcher.
      unset = (
        f"Unset {count.variable} if its launcher did not start this process. "
        if len(counts) > 1
        else ""
      )
      raise RuntimeError(f"{who}: {count}, but {counted} {ranks}. {unset}{advice}")


def read(rank: str, size: str) -> list[RankCount]:
  """What two variables state, the number of this rank and the number of ranks: one `RankCount`, [] if neither is set.

  Args:
    rank: name of the variable for the number of this rank, from 0; "" for none.
    size: name of the variable for the number of ranks, which is preferred; "" for none.

  Raises:
    ValueError: for a value that is no number.
  """
  for name, exact in ((size, True), (rank, False)):
    if value := os.environ.get(name):  # an empty one is not set
      if not value.isdecimal():
        raise ValueError(
          f"{name}={value!r} is not a number, as launchers set it for each rank: unset it"
        )
      # If this rank is r, there are at least r + 1 ranks.
      return [RankCount(name, int(value) + (not exact), exact)]
  return []


def is_loopback(host: str) -> bool:
  """Whether a name or address of a host is one by which only this machine reaches itself.

  Example:
    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("node-0")
    (True, True, False)
  """
  try:
    return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
  except ValueError:
    return False


def free_port() -> int:
  """A port of this machine on which no process listens now.

  Example:
    >>> 0 < free_port() < 2**16
    True
  """
  with socket.socket() as probe:
    # port 0: the kernel chooses a free one
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
