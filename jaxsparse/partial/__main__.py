"""Runs the controller of partial reduce until all workers leave."""

import argparse
import pathlib
import sys

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial import sockets
from jaxsparse.partial.controller import Controller
from jaxsparse.partial.server import LIMIT, Server
from jaxsparse.partial.sockets import Keys, zmq


def main() -> None:
  """The command line; prints the address for `js.partial.Worker` as the first line of standard output."""
  defaults = argparse.ArgumentDefaultsHelpFormatter
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.partial", description=__doc__, formatter_class=defaults)
  add = parser.add_argument
  add("--workers", type=int, required=True, default=argparse.SUPPRESS, help="number of workers, N")
  add("--group_size", type=int, required=True, default=argparse.SUPPRESS, help="number of workers in a group, P")
  add("--weights", choices=("constant", "dynamic"), default="constant", help="of models in an average")
  add("--decay", type=float, default=0.5, help="of dynamic weights, in [0, 1)")
  add("--missing", choices=("closest", "initial"), default="closest", help="where weights without a member go")
  add("--history", type=int, default=argparse.SUPPRESS, help="T: groups that it may take to connect all workers")
  add("--address", default=sockets.LOOPBACK, help="where to listen")
  add("--keys", type=pathlib.Path, help="file of the run's CURVE keys; created if it does not exist")
  add("--limit", type=float, default=LIMIT, help="seconds without heartbeat until a worker is dropped")
  add("--start_timeout", type=float, default=START_TIMEOUT, help="seconds until a worker that never joins is dropped")
  options = vars(parser.parse_args())
  address, path = options.pop("address"), options.pop("keys")
  limits = {name: options.pop(name) for name in ("limit", "start_timeout")}
  try:
    controller = Controller(**options)
    if path and not path.exists():
      Keys.make().write(path)
    server = Server(controller, address, keys=Keys.read(path) if path else None, **limits)
  except ModuleNotFoundError as error:
    sys.exit(f"error: {error}")
  except (ValueError, OSError, zmq.ZMQError) as error:
    sys.exit(f"error: {error}")
  print(server.address, flush=True)
  server.serve()


if __name__ == "__main__":
  main()
