"""The command line: `python -m jaxsparse.launch --ranks=6 -- COMMAND`."""

import argparse
import signal
import sys

from jaxsparse import launch


def main() -> None:
  """Runs COMMAND as ranks; the exit status is 0 where all ranks have ended well."""
  description = (launch.__doc__ or "").split("\n")[0]
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.launch", description=description)
  parser.add_argument("--ranks", type=int, required=True, help="how many ranks")
  parser.add_argument("--engine", choices=("processes", "mpi"), default="processes", help="who starts them")
  parser.add_argument(
    "--start_timeout", type=float, default=launch.START_TIMEOUT, help="seconds until all must have come (%(default)g)"
  )
  parser.add_argument("--limit", type=float, help="seconds that the run may take")
  parser.add_argument(
    "--grace",
    type=float,
    default=launch.GRACE,
    help="seconds from the first rank's end to the last one's (%(default)g)",
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
    launch.run(command, **options)
  except (launch.RunFailed, ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt as error:
    sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))


if __name__ == "__main__":
  main()
