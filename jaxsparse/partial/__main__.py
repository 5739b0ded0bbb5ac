"""The controller of a run: `python -m jaxsparse.partial --workers=8 --group_size=3`; ends when all have left."""

import argparse
import pathlib
import sys

import zmq

from jaxsparse.launch import START_TIMEOUT
from jaxsparse.partial import messages
from jaxsparse.partial.controller import Controller
from jaxsparse.partial.server import LIMIT, Server


def main() -> None:
  """The command line; the first line of standard output is the address that workers take."""
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.partial", description=(__doc__ or "").split(":")[0])
  parser.add_argument("--workers", type=int, required=True, help="how many workers there are")
  parser.add_argument("--group_size", type=int, required=True, help="how many average at once")
  parser.add_argument(
    "--weights", choices=("constant", "dynamic"), default="constant", help="of an average (%(default)s)"
  )
  parser.add_argument("--decay", type=float, default=0.5, help="of dynamic weights (%(default)s)")
  parser.add_argument("--missing", choices=("closest", "initial"), default="closest", help="likewise (%(default)s)")
  parser.add_argument("--history", type=int, help="any so many groups connect all workers")
  parser.add_argument("--address", default=messages.LOOPBACK, help="where to listen (%(default)s)")
  parser.add_argument("--keys", type=pathlib.Path, help="file of the run's keys; it is made if it is not there")
  parser.add_argument(
    "--limit", type=float, default=LIMIT, help="seconds after which a silent worker is dropped (%(default)s)"
  )
  parser.add_argument("--start_timeout", type=float, default=START_TIMEOUT, help="seconds until all must have come")
  options = parser.parse_args()
  kind = {name: getattr(options, name) for name in ("weights", "decay", "missing", "history")}
  try:
    controller = Controller(options.workers, options.group_size, **kind)
    if options.keys and not options.keys.exists():
      messages.write_keys(messages.make_keys(), options.keys)
    keys = messages.read_keys(options.keys) if options.keys else None
    limits = {"limit": options.limit, "start_timeout": options.start_timeout}
    server = Server(controller, options.address, keys=keys, **limits)
  except (ValueError, OSError, zmq.ZMQError) as error:
    sys.exit(f"error: {error}")
  print(server.address, flush=True)
  server.serve()


if __name__ == "__main__":
  main()
