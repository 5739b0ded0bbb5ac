r"""Starts the ranks of a run on this machine, and never lets it hang.

    python -m jaxsparse.launch --ranks=6 -- python train.py                 # JAX's own multi-process runtime
    python -m jaxsparse.launch --ranks=6 --engine=mpi -- python train.py    # mpirun

In `train.py`, `jaxsparse.launch.join()` makes the process a rank of the run, whether it was started from here, by
mpirun or by srun, so that the same program runs on a cluster. A rank that dies, does not come, or ends before the
others ends the run within a stated time, with a message that names it. When the launcher ends, even by SIGKILL, so do
its ranks.

`start` makes the commands of a run, `guard` is the process above each rank that ends it, `rank` is what a rank calls,
`records` are what ranks and guards write for the launcher, and `watch` reads them until all ranks have ended.
`command` is the command line.
"""

from jaxsparse.launch.command import main
from jaxsparse.launch.guard import KILL_AFTER
from jaxsparse.launch.rank import (
  GRACE,
  HEARTBEAT,
  START_TIMEOUT,
  arrived,
  fail,
  fail_on_exceptions,
  is_rank,
  join,
)
from jaxsparse.launch.start import HOSTS, TUNABLES, Engine, Host, free_port
from jaxsparse.launch.watch import RunFailed, run

__all__ = [
  "GRACE",
  "HEARTBEAT",
  "HOSTS",
  "KILL_AFTER",
  "START_TIMEOUT",
  "TUNABLES",
  "Engine",
  "Host",
  "RunFailed",
  "arrived",
  "fail",
  "fail_on_exceptions",
  "free_port",
  "is_rank",
  "join",
  "main",
  "run",
]
