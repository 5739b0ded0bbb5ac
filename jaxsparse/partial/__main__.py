"""Runs the controller of partial reduce until all workers leave."""

import argparse
import pathlib
import sys

import zmq

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import messages
from jaxsparse.partial.controller import Controller
from jaxsparse.partial.server import LIMIT, Server


def main() -> None:
  """The command line; prints the address for `js.partial.Worker` as the first line of standard output."""
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.partial", description=__doc__)
  add = parser.add_argument
  add("--workers", type=int, required=True, help="number of workers, N")
  add("--group_size", type=int, required=True, help="number of workers in a group, P")
  add("--weights", choices=("constant", "dynamic"), default="constant", help="of models in an average (%(default)s)")
  add("--decay", type=float, default=0.5, help="of dynamic weights, in [0, 1) (%(default)s)")
  missing = "where dynamic weights of iterations without a member go (%(default)s)"
  add("--missing", choices=("closest", "initial"), default="closest", help=missing)
  add("--history", type=int, help="T: groups that it may take to connect all workers (10 times the smallest T)")
  add("--address", default=messages.LOOPBACK, help="where to listen (%(default)s)")
  add("--keys", type=pathlib.Path, help="file of the run's CURVE keys; created if it does not exist")
  add("--limit", type=float, default=LIMIT, help="seconds without heartbeat until a worker is dropped (%(default)s)")
  start = "seconds after which workers that have never joined are dropped (%(default)s)"
  add("--start_timeout", type=float, default=START_TIMEOUT, help=start)
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
