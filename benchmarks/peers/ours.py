"""Updates of our collectives, in a rank that `benchmarks.peers` started."""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

from benchmarks import netlab, specs, workers
from benchmarks.collectives.updates import Bench
from jaxsparse.train import timing
from jaxsparse.train.engine import Engine, engine_of


class Counter(timing.Stopwatch):
  """Also counts the bytes that the interface of a rank sends in each program: the most of all ranks."""

  def __init__(self, engine: Engine):
    super().__init__(engine)
    self.sent: list[float] = []

  def time(self, program: Callable, *arguments: Any) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    self.gather(0.0)
    before = netlab.sent_bytes()
    timed = super().time(program, *arguments)
    time.sleep(0.05)  # what is under way
    self.sent.append(float(self.gather(float(netlab.sent_bytes() - before)).max()))
    return timed


def measure(setting: dict[str, Any]) -> None:
  """Appends a JSON line for each method to the file of the setting: what `torch_ddp` says of its own."""
  workers.share_programs(pathlib.Path(setting["cache"]) / "programs")
  place = workers.here(setting["engine"], setting["size"])
  engine = engine_of(place.where, "workers")
  counter, make = Counter(engine), timing.gradients(engine, setting["n"])
  bench = Bench(
    place,
    setting["engine"],
    setting["n"],
    setting["warm_up"],
    setting["repetitions"],
    lambda _: make(0),
    counter,
  )
  for spec in specs.parse(
    setting["methods"], setting["size"], density=setting["density"]
  ):
    collective = spec.collective
    if collective.traits.needs_shapes:
      collective = collective.for_leaves(tuple(map(tuple, setting["shapes"])))
    timed = bench.updates(spec, collective)
    sent = counter.sent[-len(timed.seconds) :]
    if place.reports:
      row = {
        "method": spec.label,
        "seconds": timed.seconds,
        "bytes": sent,
        "wrong": float(timed.wrong),
      }
      with pathlib.Path(setting["rows"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
