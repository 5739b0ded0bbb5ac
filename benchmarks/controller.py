r"""Signals a second that the controller of partial reduce takes, and how long a worker waits for its group.

A server with its controller in one process; workers in another, each a connection that
says READY as soon as it has heard of its group, and computes nothing. Throughput is of
all of them together. Latency is that of a lone group: of P workers, from the last one's
READY until it hears of the group.

Examples:
  python -m benchmarks.controller
  python -m benchmarks.controller --workers=64 --group_size=4 --seconds=10
  python -m benchmarks.controller --curve --json | jq .signals_per_second
"""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq
from absl import flags

import jaxsparse as js
from benchmarks import entry, report, workers
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.messages import ServerMessage, Signal, WorkerMessage
from jaxsparse.partial.net.sockets import Keys, Network

_WORKERS = flags.DEFINE_integer("workers", 32, "Number of workers.")
_GROUP_SIZE = flags.DEFINE_integer("group_size", 4, "Workers in a group.")
_SECONDS = flags.DEFINE_float(
  "seconds", 5, "How long to measure throughput.", lower_bound=0.1
)
_GROUPS = flags.DEFINE_integer(
  "groups", 500, "How many groups to measure latency with.", lower_bound=2
)
_CURVE = flags.DEFINE_bool(
  "curve", False, "Encrypt, as on any other network than loopback."
)
_JSON = entry.define_json()

_GOAL = 2000  # "thousands of signals a second"


class Result(NamedTuple):
  """What was measured."""

  signals_per_second: float  # READY signals of all workers
  groups_per_second: float  # formed of them
  latency: float  # median seconds from READY to GROUP while no other worker sends
  latency_99: float  # the 99th percentile
  signal_bytes: int  # of one signal
  group_bytes: int  # of one answer to a member
  rejected: int  # messages that the server rejected; there should be none


def _serve(keys: Keys | None, workers: int, group_size: int, pipe: Connection) -> None:
  """The server's process: sends its address first, and at the end how many messages it rejected."""
  controller = js.partial.Controller(workers, group_size, "dynamic")
  server = js.partial.Server(controller, keys=keys, limit=60)
  pipe.send(server.address)
  server.serve()
  pipe.send(server.rejected)


def measure(address: str, keys: Keys | None) -> Result:
  """Throughput, then latency, of the server at that address; `rejected` is left for the server to say."""
  network, size, count = Network(keys), _GROUP_SIZE.value, _WORKERS.value
  sockets = [network.client() for _ in range(count)]
  iterations = [0] * count

  def ready(worker: int) -> None:
    iterations[worker] += 1
    sockets[worker].send(Signal(WorkerMessage.READY, worker, iterations[worker]).pack())

  def heard(worker: int) -> int:
    kind, content, frame = ServerMessage.BEAT, dict[str, Any](), b""
    while kind == ServerMessage.BEAT:  # comes from time to time
      frame = sockets[worker].recv()
      kind, content = messages.parse_answer(frame)
    if kind != ServerMessage.GROUP:
      raise RuntimeError(f"worker {worker} heard {kind.name} {content}")
    iterations[worker] = content["iteration"]
    return len(frame)

  try:
    for worker, socket in enumerate(sockets):
      socket.connect(address)
      socket.send(Signal(WorkerMessage.HELLO, worker, 0, "tcp://127.0.0.1:9").pack())
      socket.recv()
    latencies = []
    # each has one member of the one before: the sync-graph stays connected
    for number in range(_GROUPS.value):
      *others, last = [(number * (size - 1) + place) % count for place in range(size)]
      for worker in others:
        ready(worker)
      time.sleep(0.001)  # they have arrived
      start = time.perf_counter()
      ready(last)
      heard(last)
      latencies.append(time.perf_counter() - start)
      for worker in others:
        heard(worker)
    rate, group_bytes = _throughput(sockets, ready, heard)
    for worker, socket in enumerate(sockets):
      socket.send(Signal(WorkerMessage.BYE, worker).pack())
    quantiles = statistics.quantiles(latencies, n=100)
    signal = len(Signal(WorkerMessage.READY, 0, 1).pack())
    return Result(
      rate,
      rate / size,
      statistics.median(latencies),
      quantiles[98],
      signal,
      group_bytes,
      0,
    )
  finally:
    network.close(linger=1000)


def _throughput(sockets: list[zmq.Socket], ready, heard) -> tuple[float, int]:  # type: ignore[no-untyped-def]
  """Signals a second of all workers, and the bytes of an answer."""
  poller, worker_of = (
    zmq.Poller(),
    {socket: worker for worker, socket in enumerate(sockets)},
  )
  for socket in sockets:
    poller.register(socket, zmq.POLLIN)
  for worker in worker_of.values():
    ready(worker)
  signals, size, start = 0, 0, time.perf_counter()
  while (took := time.perf_counter() - start) < _SECONDS.value:
    for socket, _ in poller.poll(1000):
      size = heard(worker_of[socket])
      ready(worker_of[socket])
      signals += 1
  return signals / took, size


def _measure_in_process(keys: Keys | None) -> Result:
  """Measures a server in a process of its own."""
  context = multiprocessing.get_context("spawn")
  pipe, end = context.Pipe()
  process = context.Process(
    target=_serve, args=(keys, _WORKERS.value, _GROUP_SIZE.value, end), daemon=True
  )
  process.start()
  end.close()  # so that `recv` fails if the server does
  try:
    result = measure(pipe.recv(), keys)
    return result._replace(rejected=pipe.recv())
  finally:
    process.terminate()


def main() -> None:
  """Starts the server, measures and reports."""
  console = workers.make_console(stderr=_JSON.value)
  # says what is wrong with the flags
  js.partial.Controller(_WORKERS.value, _GROUP_SIZE.value)
  keys = Keys.make() if _CURVE.value else None
  result = _measure_in_process(keys)
  for line in (
    f"{_WORKERS.value} workers, groups of {_GROUP_SIZE.value}, dynamic weights, {'CURVE' if keys else 'plain'} TCP",
    f"{result.signals_per_second:,.0f} signals of {result.signal_bytes} bytes a second, {result.rejected} rejected",
    f"{result.groups_per_second:,.0f} groups a second, each member is told in {result.group_bytes} bytes",
    f"READY to GROUP: {1e6 * result.latency:.0f} µs, 99 % within {1e6 * result.latency_99:.0f} µs",
  ):
    console.print(line, highlight=False, soft_wrap=True)
  goal = report.goal(
    f"at least {_GOAL:,} signals a second", result.signals_per_second, least=_GOAL
  )
  report.say([goal], console)
  if _JSON.value:
    report.print_json(
      {"workers": _WORKERS.value, "group_size": _GROUP_SIZE.value, **result._asdict()}
    )


if __name__ == "__main__":
  entry.run(main)
