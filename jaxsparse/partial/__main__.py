"""Runs the controller of partial reduce (--group_size), or of rounds (--quorum), until all workers leave.

`python -m jaxsparse.partial status ADDRESS` says what a server of rounds knows.
"""

import argparse
import pathlib
import sys

from jaxsparse.launch.rank import START_TIMEOUT
from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.net import sockets
from jaxsparse.partial.net.sockets import Keys, zmq
from jaxsparse.partial.rounds import status
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.server import LIMIT, Server


def _read_seconds(text: str) -> float | str:
  """Seconds, or "auto": the value of an option; argparse reports a ValueError as a wrong usage."""
  return text if text == "auto" else float(text)


def _make_parser() -> argparse.ArgumentParser:
  defaults = argparse.ArgumentDefaultsHelpFormatter
  parser = argparse.ArgumentParser(
    prog="python -m jaxsparse.partial",
    description=__doc__,
    formatter_class=defaults,
    # Options without a default are left out of the result if they are not given:
    # `Controller` and `Quorum` have defaults, and each refuses options of the other.
    argument_default=argparse.SUPPRESS,
  )
  add = parser.add_argument
  add("--workers", type=int, required=True, help="number of workers, N")
  kind = parser.add_mutually_exclusive_group(required=True).add_argument
  kind("--group_size", type=int, help="number of workers in a group, P")
  kind("--quorum", type=int, help="number of workers that a round takes, K")
  add(
    "--grace",
    type=_read_seconds,
    help="seconds that K workers wait for more, or auto, from the seconds that workers take; default auto",
  )
  add(
    "--weights",
    choices=("constant", "dynamic"),
    help="of models in an average of a group; default constant",
  )
  add("--decay", type=float, help="of dynamic weights, in [0, 1); default 0.5")
  add(
    "--missing",
    choices=("closest", "initial"),
    help="where weights without a member go; default closest",
  )
  add("--history", type=int, help="T: groups that it may take to connect all workers")
  add("--address", default=sockets.LOOPBACK, help="where to listen")
  keys = parser.add_mutually_exclusive_group().add_argument
  keys(
    "--keys",
    type=pathlib.Path,
    help="file of the run's CURVE keys; created if it does not exist",
  )
  hint = "folder of a file of keys for each worker, by its number, and one for the server; created if it does not exist"
  keys("--own_keys", type=pathlib.Path, help=hint)
  add(
    "--limit",
    type=_read_seconds,
    default="auto",
    help=f"seconds without heartbeat until a worker is dropped; auto: {LIMIT:g}, or more if it was silent before",
  )
  add(
    "--start_timeout",
    type=float,
    default=START_TIMEOUT,
    help="seconds until a worker that never joins is dropped",
  )
  return parser


def _prepare_keys(
  path: pathlib.Path | None, folder: pathlib.Path | None, workers: int
) -> Keys | None:
  """Reads the keys of the server; first makes the file, or the folder with its files, if it does not exist.

  Args:
    path: file of one key pair that the server and all workers share, or None.
    folder: folder with a file of keys for each worker and one for the server, or None.
      At most one of `path` and `folder` is given.
    workers: number of workers to make keys for.

  Returns:
    The keys; None if no path is given: any process that reaches the server may join.
  """
  if folder and not folder.exists():
    folder.mkdir(mode=0o700)  # secret keys: readable by their owner alone
    *of_workers, of_server = Keys.make_own(workers)
    for worker, keys in enumerate(of_workers):
      keys.write(folder / str(worker))
    of_server.write(folder / "server")
  if path and not path.exists():
    Keys.make().write(path)
  path = folder / "server" if folder else path
  return Keys.read(path) if path else None


def main() -> None:
  """The command line; prints the address for `js.partial.Worker` as the first line of standard output."""
  if sys.argv[1:2] == ["status"]:
    status.main(sys.argv[2:])
    return
  options = vars(_make_parser().parse_args())
  address = options.pop("address")
  paths = options.pop("keys", None), options.pop("own_keys", None)
  # for `Server`; what is left in `options` are arguments of the controller
  limits = {name: options.pop(name) for name in ("limit", "start_timeout")}
  make = Quorum if "quorum" in options else Controller
  try:
    # Where pyzmq is missing, `zmq.ZMQError` raises ModuleNotFoundError, and `refusals`
    # stays unset: the first `except` catches that error before the second one is read.
    refusals = TypeError, ValueError, OSError, zmq.ZMQError
    controller: Controller | Quorum = make(**options)
    keys = _prepare_keys(*paths, options["workers"])
    server = Server(controller, address, keys=keys, **limits)
  except ModuleNotFoundError as error:
    sys.exit(f"error: {error}")
  # TypeError: an option of the other controller was given.
  except refusals as error:
    sys.exit(f"error: {error}")
  print(server.address, flush=True)
  server.serve()


if __name__ == "__main__":
  main()
