"""The command line: `python -m jaxsparse.launch --ranks=6 -- COMMAND`."""

import argparse
import signal
import sys

from jaxsparse.launch.rank import GRACE, START_TIMEOUT
from jaxsparse.launch.watch import RunFailed, run


def main() -> None:
  """Runs COMMAND as ranks; the exit status is 0 if all ranks have ended with status 0."""
  description = "Starts the ranks of a run on this machine, and ends the run if a rank fails or hangs."
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.launch", description=description)
  parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
  parser.add_argument("--devices", type=int, default=1, help="number of devices of each rank (%(default)s)")
  parser.add_argument(
    "--engine", choices=("processes", "mpi"), default="processes", help="what connects them: jax.distributed, or MPI"
  )
  parser.add_argument(
    "--start_timeout", type=float, default=START_TIMEOUT, help="seconds until all ranks must have joined (%(default)g)"
  )
  parser.add_argument(
    "--restarts", type=int, default=0, help="how often the ranks that are left start again after the loss of one (0)"
  )
  parser.add_argument("--min_ranks", type=int, default=1, help="start again with no fewer ranks (%(default)d)")
  parser.add_argument("--limit", type=float, help="seconds that the run may take")
  parser.add_argument(
    "--grace",
    type=float,
    default=GRACE,
    help="seconds that the other ranks get to end after the first has ended (%(default)g)",
  )
  parser.add_argument(
    "--prefix",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="begin lines on standard error with [rank r] (default)",
  )
  parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments, after --")
  options = vars(parser.parse_args())
  command = options.pop("command")
  command = command[command[:1] == ["--"] :]
  if not command:
    parser.error("give the program to run after --")
  try:
    run(command, **options)
  except (RunFailed, ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt as error:
    sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
