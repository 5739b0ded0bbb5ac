"""`python -m jaxsparse.partial status ADDRESS`: what a server of rounds knows of its run."""

import argparse
import pathlib
import sys
from typing import Any

from jaxsparse.partial.net import messages, sockets
from jaxsparse.partial.net.messages import ServerMessage, Signal, WorkerMessage
from jaxsparse.partial.net.sockets import Keys

_TIMEOUT = 5.0  # seconds


def ask(address: str, keys: Keys | None = None) -> dict[str, Any]:
  """The status of the server of rounds at an address, as `RoundServer.status` says.

  Raises:
    TimeoutError: if there is no answer within 5 s.
    ValueError: for a malformed address, one that requires keys, the server's own keys,
      and a server of partial reduce.
  """
  sockets.check_address(address, keys, reachable=True, any_port=False)
  worker = sockets.number_of(keys)
  network = sockets.Network(keys)
  try:
    socket = network.client()
    socket.connect(address)
    socket.send(Signal(WorkerMessage.STATUS, worker).pack())
    if not socket.poll(round(1000 * _TIMEOUT)):
      raise TimeoutError(
        f"no server of rounds at {address} answers within {_TIMEOUT:g} s: has it these keys?"
      )
    answer = messages.parse_answer(socket.recv())
  finally:
    network.close(linger=0)
  if answer.kind != ServerMessage.STATUS:
    raise ValueError(
      f"{address} is not the server of rounds: {answer.content['reason']}"
    )
  return answer.content


def describe(status: dict[str, Any]) -> str:
  """A status, as `ask` returns it, in words, and a line for each worker.

  Example:
    >>> worker = {"worker": 3, "doing": "trains", "round": 7, "undelivered": 16, "address": "tcp://h:1"}
    >>> totals = {"rounds_counted": 7, "rounds_failed": 1, "steps_delivered": 90, "steps_lost": 10}
    >>> worker |= {"silent": 0.2, "limit": 5.0, "link": False}
    >>> times = {"seconds": 2.5, "since": 1.0, "window": 0.3, "turn": 2.0}
    >>> print(describe({"run": "3f", "round": 7, **times, **totals, "workers": [worker]}))
    run 3f: round 7, ended 1.0 s ago, one every 2.5 s; 7 counted and 1 failed at this server
    goodput 90.0 %: steps of the weight 90 delivered, 10 lost
    the last window was open for 0.3 s; enough workers are ready 2.0 s after a round
    worker  link  doing                  round  undelivered  silent  of at most  address
    3             trains                     7           16   0.2 s       5.0 s  tcp://h:1
  """
  last = f"round {status['round']}, ended {_seconds(status['since'])} ago, one every {_seconds(status['seconds'])}"
  # Weights of steps; work that may still be delivered is in neither.
  made = status["steps_delivered"] + status["steps_lost"]
  counts = f"{status['rounds_counted']} counted and {status['rounds_failed']} failed at this server"
  goodput = f"{100 * status['steps_delivered'] / made:.1f} %" if made else "unknown"
  lines = [
    f"run {status['run']}: {last}; {counts}",
    f"goodput {goodput}: steps of the weight {status['steps_delivered']} delivered, {status['steps_lost']} lost",
    f"the last window was open for {_seconds(status['window'])}; "
    f"enough workers are ready {_seconds(status['turn'])} after a round",
    f"{'worker':6}  link  {'doing':21}  round  undelivered  silent  of at most  address",
  ]
  row = (
    "{worker:<6}  {mark:4}  {doing:21}  {round:5}  {undelivered:11}  {silent:4.1f} s  "
    "{limit:8.1f} s  {address}"
  )
  rows = [
    row.format(mark="yes" if worker["link"] else "", **worker)
    for worker in status["workers"]
  ]
  return "\n".join([*lines, *rows])


def _seconds(value: float | None) -> str:
  """Seconds in words; None while they are not known."""
  return "unknown seconds" if value is None else f"{value:.1f} s"


def main(arguments: list[str]) -> None:
  """The command line; its arguments are those behind `status`."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxsparse.partial status", description=__doc__
  )
  parser.add_argument("address", help="of the server, tcp://HOST:PORT")
  parser.add_argument(
    "--keys", type=pathlib.Path, help="file of keys of the run, or of a worker"
  )
  options = parser.parse_args(arguments)
  try:
    keys = Keys.read(options.keys) if options.keys else None
    print(describe(ask(options.address, keys)), flush=True)
  except (ModuleNotFoundError, OSError, ValueError) as error:
    sys.exit(f"error: {error}")
