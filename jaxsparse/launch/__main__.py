"""The command line: `python -m jaxsparse.launch --ranks=6 -- COMMAND`."""

import argparse
import contextlib
import signal
import sys

from jaxsparse.launch import guard
from jaxsparse.launch.rank import GRACE, START_TIMEOUT
from jaxsparse.launch.start import run
from jaxsparse.launch.watch import RunFailed


def main() -> None:
  """Runs COMMAND as ranks; the exit status is 0 if all ranks have ended with status 0."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxsparse.launch",
    description="Starts the ranks of a run on this machine, and ends the run if a rank fails or hangs.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add(
    "-n",
    "--ranks",
    type=int,
    required=True,
    help="number of ranks",
    default=argparse.SUPPRESS,
  )
  add("--devices", type=int, default=1, help="number of devices of each rank")
  add(
    "--engine",
    choices=("processes", "mpi"),
    default="processes",
    help="connects ranks: jax.distributed, or MPI",
  )
  add(
    "--start_timeout",
    type=float,
    default=START_TIMEOUT,
    help="seconds until all ranks must have joined",
  )
  add(
    "--restarts",
    type=int,
    default=0,
    help="how often the ranks that are left start again after the loss of one",
  )
  add("--min_ranks", type=int, default=1, help="start again with no fewer ranks")
  add(
    "--limit",
    type=float,
    help="seconds that the run may take",
    default=argparse.SUPPRESS,
  )
  add(
    "--grace",
    type=float,
    default=GRACE,
    help="seconds to end for the others after the first rank has ended",
  )
  add(
    "--prefix",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="begin lines of stderr with [rank r]",
  )
  add(
    "command", nargs=argparse.REMAINDER, help="the program and its arguments, after --"
  )
  options = vars(parser.parse_args())
  command = options.pop("command")
  # argparse keeps the "--" before the command
  command = command[command[:1] == ["--"] :]
  if not command:
    parser.error("give the program to run after --")
  try:
    run(command, **options)
  except (RunFailed, ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt as error:
    # `run` raises it with the number of the signal that ended the run.
    signal_number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal may be closed
      ended = f"the run of {guard.shorten(' '.join(command))} has ended, no rank is left running"
      print(
        f"jaxsparse.launch: {signal_number.name}, {ended}", file=sys.stderr, flush=True
      )
    sys.exit(128 + signal_number)


if __name__ == "__main__":
  main()
