"""Updates of our collectives, in a rank that `benchmarks.peers` started."""

import json
import pathlib
import time
from typing import Any

from benchmarks import netlab, specs, workers
from benchmarks.collectives.laws import Laws
from jaxsparse.collectives import Collective
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of

_MOST = 20.0  # seconds of the untimed updates of a method, and of the timed ones, after which fewer have to do


def _sized(spec: specs.Spec, shapes: list[list[int]]) -> Collective:
  collective = spec.collective
  return collective.for_leaves(tuple(map(tuple, shapes))) if collective.needs_shapes else collective


def measure(setting: dict[str, Any]) -> None:
  """Appends a JSON line for each method to the file of the setting: what `torch_ddp` says of its own."""
  workers.share_programs(pathlib.Path(setting["cache"]) / "programs")
  place = workers.here(setting["engine"], setting["size"])
  engine = engine_of(place.where, "workers")
  watch = timing.Stopwatch(engine)
  make = timing.gradients(engine, setting["n"])
  for spec in specs.parse(setting["methods"], setting["size"], density=setting["density"]):
    update = timing.Update(engine, _sized(spec, setting["shapes"]), engine.comm, setting["n"])
    laws, state = Laws(engine, spec, update.specs), update.state
    seconds, sent = list[float](), list[float]()
    wrong, steps, warming = 0, 0, 0.0
    while len(seconds) < setting["repetitions"] and sum(seconds) < _MOST:
      grads = make(0)
      before = laws.before(grads, state)
      watch.gather(0.0)
      counted = netlab.sent_bytes()
      took, (mean, state) = watch.time(update.program, grads, state)
      time.sleep(0.05)  # what is under way
      count = float(watch.gather(float(netlab.sent_bytes() - counted)).max())
      wrong += laws.wrong(mean, state, before)
      if steps >= setting["warm_up"] or warming > _MOST:
        seconds.append(took)
        sent.append(count)
      else:
        warming += took
      steps += 1
    if place.reports:
      row = {"method": spec.label, "seconds": seconds, "bytes": sent, "wrong": float(wrong)}
      with pathlib.Path(setting["rows"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
