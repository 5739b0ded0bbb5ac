r"""Starts the ranks of a run on this machine, and ends the run if a rank fails or hangs.

    python -m jaxsparse.launch --ranks=6 -- python train.py                 # JAX's own multi-process runtime
    python -m jaxsparse.launch --ranks=2 --devices=4 -- python train.py     # ranks with several devices each
    python -m jaxsparse.launch --ranks=6 --engine=mpi -- python train.py    # mpirun
    python -m jaxsparse.launch --ranks=6 --restarts=3 --min_ranks=4 -- python train.py

This launcher is for one machine. In `train.py`, `jaxsparse.launch.join()` makes the
process a rank of the run, whether this launcher started it or one of a cluster: mpirun,
srun, torchrun, Ray Train, Kubernetes, Cloud TPU. If a rank of this launcher dies, does
not join, or ends before the others, the run ends within a stated time, with a message
that names the rank; with `--restarts` as many ranks as are left start again, and
`attempt()` counts. When the launcher ends, even by SIGKILL, its ranks end.

`start` starts and ends a run, `guard` is the parent process of each rank, which ends
the rank, `rank` has the functions that a rank calls, `launchers` is the table of all
launchers, `environment` reads how many ranks those of MPI and Slurm have started, and
`watch` finds the cause of a failure in the records of ranks and guards. Importing them
changes nothing.
"""

from jaxsparse.launch.rank import attempt, fail, fail_on_exceptions, is_rank, join
from jaxsparse.launch.start import run
from jaxsparse.launch.watch import RunFailed

__all__ = [
  "RunFailed",
  "attempt",
  "fail",
  "fail_on_exceptions",
  "is_rank",
  "join",
  "run",
]
