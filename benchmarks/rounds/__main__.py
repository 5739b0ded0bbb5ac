"""Rounds with real processes in the lab: what an exchange costs a step, and what faults cost.

--parts chooses what is measured, on hosts of the network lab, which needs root:

    race         seconds until the transformer of 3.3 M parameters has dense Adam's loss after 300 steps
    hidden       a step of the transformer of 3.3 M parameters with an exchange in flight, and without
    vector       steps of a vector's workers that are in the model, likewise, or with another --fault, which lasts 10 s;
                 by --exchanges: rounds of a transform, or torchft's DiLoCo in the environment of `make peers`
    transformer  likewise, with the transformer of 0.66 M parameters, which Adam trains
    interrupted  a worker of vector stopped, and cut off: waits and gaps, by --exchanges
    goodput      examples that are in the model, a second, with a worker killed every --kill_every seconds and another
                 one started at once, against none killed
    faults       a worker stopped, cut off, slow, with NaN; the controller killed twice; garbage: waits and gaps
    fetches      of a reader of vector that receives at --download: its first anchor, from four and from one, and links;
                 of a worker that was stopped for two rounds
    synchronous  goodput of training that starts again from a checkpoint with the ranks that are left

Workers of goodput and faults train the digits CNN in steps of at least --pace seconds,
in which the core is idle for most of the time, as on a host with an accelerator.
benchmarks/pages/faults.md explains the numbers.

Example:
  python -m benchmarks.rounds --parts=goodput --seconds=120 --seed=1
  python -m benchmarks.rounds --parts=vector --rate=25mbit --every=16 --pace=2 --kill_every=30
  python -m benchmarks.rounds --parts=fetches --rate=25mbit --entries=15500000 --every=1 --pace=18
"""

import contextlib
import functools
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from benchmarks import entry, netlab, report, tables
from benchmarks.peers.training import write_data
from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE
from benchmarks.rounds import measures, worker
from benchmarks.rounds import report as rounds
from benchmarks.rounds.team import Team
from benchmarks.rounds.worker import Settings
from benchmarks.tasks.base import model_of

_OWN = ["goodput", "faults", "synchronous", "hidden", "race"]
_BESIDE_TORCHFT = ["vector", "transformer", "interrupted"]
_ALL = [*_OWN, *_BESIDE_TORCHFT, "fetches"]
_PARTS = flags.DEFINE_list("parts", _OWN, f"What to measure: {', '.join(_ALL)}.")
_WORKERS = flags.DEFINE_integer(
  "workers", 6, "Workers of goodput, faults, vector and fetches.", lower_bound=2
)
_QUORUM = flags.DEFINE_integer(
  "quorum", 4, "Workers that a round of theirs takes, K.", lower_bound=1
)
_SECONDS = flags.DEFINE_float(
  "seconds", 300, "Of each run of goodput, and of hidden.", lower_bound=1
)
_KILL_EVERY = flags.DEFINE_float(
  "kill_every", 60, "Seconds between two kills, or other faults.", lower_bound=1
)
_FAULT = flags.DEFINE_enum(
  "fault", measures.FAULTS[0], measures.FAULTS, "Of vector and transformer."
)
_HOLD = flags.DEFINE_float(
  "hold",
  30,
  "Seconds for which a worker is stopped; cut off for two thirds.",
  lower_bound=1,
)
_EVERY = flags.DEFINE_integer(
  "every", 5, "H of goodput, faults and vector.", lower_bound=1
)
_PACE = flags.DEFINE_float(
  "pace",
  0.2,
  "Seconds of a step of goodput, faults and vector at least.",
  lower_bound=0,
)
_RATES = flags.DEFINE_list(
  "rates", ["100mbit:16:8", "10mbit:32:16"], "Of hidden: the links, H and the delay."
)
_RACE = flags.DEFINE_list(
  "race", ["10mbit:4:2"], "Of the race: the links, H and the delay."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 40, "Of the race: so many are held.", lower_bound=8
)
_BESIDE = flags.DEFINE_string(
  "beside",
  "benchmarks/results/blocks_lm.json",
  "The synchronous race, with its optimizer; its pace is measured anew.",
)
_GRACE = entry.define_grace()
_EXCHANGES = flags.DEFINE_list(
  "exchanges", ["onebit", "dense", "torchft"], f"Of {', '.join(_BESIDE_TORCHFT)}."
)
_ENTRIES = flags.DEFINE_integer(
  "entries", 31_000_000, "Of vector, interrupted and fetches.", lower_bound=1
)
_PYTHON = flags.DEFINE_string(
  "python", ".venv-peers/bin/python", "The Python of torchft's environment."
)
_RATE = flags.DEFINE_string(
  "rate", "100mbit", "Speed of the links of goodput, faults, vector and fetches."
)
_DOWNLOAD = flags.DEFINE_string(
  "download", "100mbit", "Speed at which the reader of fetches receives."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of the workers that are killed.")
_REPORT_DIR = entry.define_report_dir("rounds.json")
_WORKER = flags.DEFINE_string(
  "worker", None, "Internal: the settings of a worker, as JSON."
)
_GARBAGE = flags.DEFINE_string(
  "garbage", None, "Internal: addresses, keys and number of messages, as JSON."
)
_READER = flags.DEFINE_string("reader", None, "Internal: what a reader reads, as JSON.")

_BATCH = {"cnn": 16, "lm": 4, "lm_medium": 4}
_DRAWN = 200  # batches of each worker, from which torchft's draw theirs
entry.require_choices(_PARTS, _ALL, empty=False)


@contextlib.contextmanager
def _team(
  rate: str,
  workers: int,
  quorum: int,
  task: str,
  every: int,
  delay: int,
  pace: float,
  transform: str,
  **options: Any,
) -> Iterator[Team]:
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxsparse-"))
    hosts = stack.enter_context(netlab.lab(workers + 1, rate))
    settings = Settings(
      task, _BATCH.get(task, 1), every, delay, pace, transform, folder=folder, **options
    )
    if settings.torchft and not task.isdecimal():
      found = worker.make_task(task)
      write_data(
        pathlib.Path(folder, "data.npz"),
        found,
        model_of(found, 0),
        0,
        workers,
        settings.batch,
        _DRAWN,
      )
    team = Team(hosts, quorum, entry.read_grace(_GRACE), settings)
    yield stack.enter_context(team)


def _six(task: str = "cnn", transform: str = "dense", **options: Any) -> Any:
  steps = _EVERY.value, _EVERY.value // 2
  return _team(
    _RATE.value,
    _WORKERS.value,
    _QUORUM.value,
    task,
    *steps,
    _PACE.value,
    transform,
    **options,
  )


def _hidden() -> Iterator[tuple[str, Any]]:
  for text in _RATES.value:
    rate, every, delay = text.split(":")
    with _team(rate, 4, 4, "lm", int(every), int(delay), 0.0, "onebit") as team:
      yield "hidden", measures.hidden(team, rate, _SECONDS.value)


def _race() -> Iterator[tuple[str, Any]]:
  path = pathlib.Path(_BESIDE.value)
  first = next(
    curve for curve in Results(path, None).rows["curves"] if curve.method != DENSE
  )
  for text in _RACE.value:
    rate, every, delay = text.split(":")
    results = measures.with_pace(path, first.method, first.optimizer, rate)
    for seed in range(3):
      options = {
        "optimizer": first.optimizer,
        "apply_residual": True,
        "keep": 2,
        "seed": seed,
      }
      with _team(
        rate, 4, 4, "lm", int(every), int(delay), 0.0, "onebit", **options
      ) as team:
        yield "race", measures.race(team, rate, results, _ROUNDS.value)


def _goodput() -> Iterator[tuple[str, Any]]:
  for kill_every in (0, _KILL_EVERY.value):
    with _six() as team:
      found, recoveries, curve = measures.goodput(
        team, _SECONDS.value, kill_every, _SEED.value
      )
    yield "goodput", found
    yield from (("recoveries", one) for one in recoveries)
    yield "curves", curve


def _mode(exchange: str) -> str:
  return f"{exchange}, H = {_EVERY.value}"


def _mode_of_fault(exchange: str) -> str:
  fault = _FAULT.value
  return (
    _mode(exchange) if fault == measures.FAULTS[0] else f"{_mode(exchange)}, {fault}"
  )


def _beside(exchange: str, task: str) -> Any:
  options = (
    {"torchft": _PYTHON.value} if exchange == "torchft" else {"transform": exchange}
  )
  return _six(task, **options, apply_residual=exchange == "onebit")


def _of_log(found: Any, exchange: str) -> Any:
  """What is lost is what the log of our controller says: unknown of torchft's."""
  return found._replace(lost=None) if exchange == "torchft" else found


def _killed(part: str) -> Iterator[tuple[str, Any]]:
  task = "lm_medium" if part == "transformer" else str(_ENTRIES.value)
  for exchange, kill_every in itertools.product(
    _EXCHANGES.value, (0, _KILL_EVERY.value)
  ):
    with _beside(exchange, task) as team:
      found, _, _ = measures.goodput(
        team, _SECONDS.value, kill_every, _SEED.value, _FAULT.value
      )
    yield part, _of_log(found, exchange)._replace(mode=_mode_of_fault(exchange))


def _interrupted() -> Iterator[tuple[str, Any]]:
  for exchange in _EXCHANGES.value:
    with _beside(exchange, str(_ENTRIES.value)) as team:
      for one in itertools.islice(measures.faults(team, _HOLD.value), 3):
        yield (
          "interrupted",
          _of_log(one, exchange)._replace(fault=f"{_mode(exchange)}: {one.fault}"),
        )


def _fetches() -> Iterator[tuple[str, Any]]:
  with _six(str(_ENTRIES.value), "onebit") as team:
    for one in measures.fetches(team, _DOWNLOAD.value):
      yield "fetches", one


def _faults() -> Iterator[tuple[str, Any]]:
  with _six() as team:
    begin, marks = time.monotonic(), []
    for one in measures.faults(team, _HOLD.value):
      yield "faults", one
      marks.append(time.monotonic())
    yield "faulty", measures.curve(team, "one fault after the other", begin, marks[:-1])


def _synchronous() -> Iterator[tuple[str, Any]]:
  with netlab.lab(_WORKERS.value, _RATE.value) as hosts:
    for kill_every in (0, _KILL_EVERY.value):
      seconds = _SECONDS.value if kill_every else min(_SECONDS.value, 60)
      yield "goodput", measures.synchronous(hosts, seconds, kill_every, _SEED.value)


def main() -> None:
  """Measures the parts, and reports."""
  if _WORKER.value:
    worker.run(Settings(*json.loads(_WORKER.value)))
    return
  if _GARBAGE.value:
    addresses, keys, count = json.loads(_GARBAGE.value)
    worker.send_garbage(addresses, pathlib.Path(keys), count)
    return
  if _READER.value:
    worker.read(*json.loads(_READER.value))
    return
  path = pathlib.Path(_REPORT_DIR.value, "rounds.json")
  result: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}
  kept = {
    "goodput": ["recoveries", "curves"],
    "faults": ["faults", "faulty"],
    "synchronous": [],
  }
  kept |= {part: [] for part in _BESIDE_TORCHFT}
  result |= {name: [] for part in _PARTS.value for name in kept.get(part, [part])}
  part_of = {"rounds": "goodput", "synchronous": "synchronous"}
  result["goodput"] = [
    row for row in result.get("goodput", []) if part_of[row["mode"]] not in _PARTS.value
  ]
  modes = tuple(map(_mode_of_fault, _EXCHANGES.value))
  interrupted = tuple(f"{_mode(exchange)}:" for exchange in _EXCHANGES.value)
  is_old = lambda row: (
    row["fault"].startswith(interrupted) if "fault" in row else row["mode"] in modes
  )
  for part in set(_BESIDE_TORCHFT).intersection(_PARTS.value):
    result[part] = list(itertools.filterfalse(is_old, result.get(part, [])))
  parts: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "goodput": _goodput,
    "fetches": _fetches,
    "faults": _faults,
    "hidden": _hidden,
    "synchronous": _synchronous,
    "race": _race,
    "vector": functools.partial(_killed, "vector"),
    "transformer": functools.partial(_killed, "transformer"),
    "interrupted": _interrupted,
  }
  for name, one in itertools.chain.from_iterable(
    make() for part, make in parts.items() if part in _PARTS.value
  ):
    result.setdefault(name, []).append(report.rounded(one._asdict()))
    report.keep(path, {}, result)
    print(one, flush=True)
  curves = [*result.pop("curves", []), *result.pop("faulty", [])]
  if curves:
    rounds.draw(curves, path.with_suffix(".png"))
  for name in filter(result.get, result):
    print(f"{name}:\n{tables.rounds(name, _REPORT_DIR.value)}\n")


if __name__ == "__main__":
  entry.run(main)
