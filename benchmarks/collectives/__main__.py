r"""Milliseconds per update of every all-reduce, selection included, with the ranks in step, every timed result checked.

With --rate the ranks run on hosts of the network lab (needs root), whose links are that
fast. A program that mpirun or srun started measures with the ranks of that job. Each
row is a line of collectives.jsonl as soon as it is measured; the exit status is 0 if
all was measured, and nothing wrong. benchmarks/pages/updates.md says what the columns
are. Where the words depend on the shapes of leaves (powersgd), the n entries are the
leaves of VGG-16, in their order; with --gradients=zipf they are one embedding, whose
rows have 64 entries.

Examples:
  python -m benchmarks.collectives --rate=10mbit,100mbit,1gbit,none --algorithms=spardl,dense --predict
  python -m benchmarks.collectives --engine=devices --workers=2,4,8 --n=100000 --json | jq '.[].busbw'
  mpirun -n 64 python -m benchmarks.collectives --engine=mpi --workers=64
"""

import contextlib
import datetime
import itertools
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

import jaxsparse as js
from benchmarks import entry, netlab, recorded, report, specs, workers
from benchmarks.collectives import embedding, updates
from benchmarks.collectives.updates import Bench, Kept, Row
from jaxsparse import launch
from jaxsparse.train.engine import engine_of

_ALGORITHMS = flags.DEFINE_multi_string("algorithms", ["all"], specs.HELP)
flags.DEFINE_alias("algorithm", "algorithms")
_ENGINE = flags.DEFINE_enum(
  "engine", "processes", list(workers.ENGINES), workers.ENGINE_HELP
)
_WORKERS = entry.define_numbers("workers", [6], "Numbers of workers P.")
_N = entry.define_numbers("n", [14_728_266], "Gradient entries; VGG-16 by default.")
_DENSITY = entry.define_numbers(
  "density", [0.01], "Fractions of the entries to deliver.", flags.FloatParser(0.0)
)
_RATE = flags.DEFINE_list(
  "rate",
  [],
  "Rates of the lab's links, as tc writes them, e.g. 100mbit; none for any speed.",
)
_PIN = flags.DEFINE_bool(
  "pin", False, "Pin each rank to a core of its own; takes as many cores as workers."
)
_KINDS = {
  "recorded": "of a training",
  "normal": "normal numbers",
  "zipf": "of an embedding, ids by Zipf's law",
}
_GRADIENTS = flags.DEFINE_enum("gradients", "recorded", list(_KINDS), str(_KINDS))
_IDS = flags.DEFINE_integer(
  "ids",
  4000,
  "Ids that a worker looks up in a step, with --gradients=zipf.",
  lower_bound=1,
)
_EXPONENT = flags.DEFINE_float("exponent", 1.1, "Of Zipf's law.", lower_bound=0.0)
_REPETITIONS = flags.DEFINE_integer(
  "repetitions", 5, "Timed steps of an algorithm without a period.", lower_bound=1
)
_WARM_UP = flags.DEFINE_integer(
  "warm_up", None, "Untimed steps; 30 with recorded gradients, 1 with normal ones.", 1
)
_PREDICT = flags.DEFINE_bool(
  "predict",
  False,
  "Also fit the cost model on the same workers and show its predictions.",
)
_CACHE_DIR = entry.define_cache_dir()
_REPORT_DIR = entry.define_report_dir("collectives.jsonl")
_JSON = entry.define_json()
_RUN = flags.DEFINE_string("run", None, "Internal: names the run in collectives.jsonl.")


def _settings() -> list[tuple[int, str]]:
  """(number of workers, rate or "" without a lab) of each run of ranks; raises ValueError before anything runs."""
  for flag in (_RATE, _PIN):
    if flag.value and _ENGINE.value not in ("processes", "mpi"):
      raise ValueError(
        f"--{flag.name} needs ranks that talk over a network, --engine=processes or mpi"
      )
  if _GRADIENTS.value == "zipf" and (
    odd := [n for n in _N.value if n % embedding.WIDTH]
  ):
    raise ValueError(
      f"--n={odd[0]}: with --gradients=zipf give rows of {embedding.WIDTH} entries, a multiple of that"
    )
  if _PIN.value and max(_WORKERS.value) > (cores := len(os.sched_getaffinity(0))):
    raise ValueError(
      f"--pin takes a core for each rank: --workers={max(_WORKERS.value)}, but there are {cores} cores"
    )
  for size in _WORKERS.value:
    _cases(size)
  return list(itertools.product(_WORKERS.value, _RATE.value or [""]))


def _cases(size: int) -> list[tuple[int, float, specs.Spec]]:
  """(n, density, algorithm) of every row with so many workers."""
  names = _ALGORITHMS.value
  if names == ["all"]:
    teams = [f"spardl:teams={d}" for d in range(2, size + 1) if size % d == 0]
    first = ["dense", "dense:dtype=bfloat16", "spardl", *teams]
    names = [*first, *sorted(set(js.collective_names()) - set(first))]
  return [
    (n, density, spec)
    for n, density in itertools.product(_N.value, _DENSITY.value)
    for spec in specs.parse(names, size, density=density)
  ]


def _path() -> pathlib.Path:
  return pathlib.Path(_REPORT_DIR.value) / "collectives.jsonl"


def _measure(size: int, rate: str, kept: Kept) -> bool:
  """What the ranks of this run do; whether this one reports."""
  if _PIN.value:
    workers.pin()
  workers.share_programs(pathlib.Path(_CACHE_DIR.value) / "programs")
  place, kind = workers.here(_ENGINE.value, size), _GRADIENTS.value
  cases = _cases(size)
  label = lambda spec: js.costs.label_of(spec.name, spec.config)
  profile = None
  if _PREDICT.value:
    # the model scales one n to others
    fitted = [spec for _, _, spec in cases if not spec.collective.traits.needs_shapes]
    labels = list(dict.fromkeys(map(label, fitted)))
    profile = js.costs.fit(place.where, algorithms=labels, seconds=math.inf)
  for n, of_size in itertools.groupby(cases, lambda case: case[0]):
    warm_up = _WARM_UP.value or (30 if kind == "recorded" else 1)
    gradients, shapes = _gradients(place, n)
    bench = Bench(
      place,
      _ENGINE.value,
      n,
      warm_up,
      _REPETITIONS.value,
      gradients,
      kind=kind,
      shapes=shapes,
    )
    for _, density, spec in of_size:
      row = bench.row(spec, density, rate, _PIN.value)
      if place.reports:
        predictions = js.costs.advise(n, profile).predictions if profile else []
        row = row._replace(
          predicted=next(
            (one.seconds for one in predictions if one.label == label(spec)), None
          )
        )
        kept.add(row)
        print(
          updates.line(row), file=sys.stderr if _JSON.value else sys.stdout, flush=True
        )
  return place.reports


def _gradients(place: workers.Workers, n: int) -> tuple[Any, Any]:
  """The gradients of all workers in a step, of its number, and the shapes of leaves; None for those of `Bench`."""
  if _GRADIENTS.value == "recorded":
    return recorded.gradients(place, recorded.path_in(_CACHE_DIR.value), n), None
  if _GRADIENTS.value == "normal":
    return None, None
  ids = embedding.draw(n // embedding.WIDTH, place.size, _IDS.value, _EXPONENT.value)
  if place.reports:
    print(embedding.describe(ids), file=sys.stderr, flush=True)
  return embedding.gradients(
    engine_of(place.where, "workers"), n, ids
  ), embedding.shapes


def _run(size: int, rate: str, kept: Kept, run: str) -> list[str]:
  """Starts the ranks of one setting, in a lab if it has a rate; what failed."""
  given = f"--workers={size}", f"--rate={rate}", f"--run={run}"
  ranks = size if _ENGINE.value in ("processes", "mpi") else 1
  before = len(kept.read())
  try:
    with netlab.lab(size, rate) if rate else contextlib.nullcontext() as hosts:
      workers.start_again(ranks, _ENGINE.value, *given, hosts=hosts)
  except launch.RunFailed as error:
    later = [spec.label for _, _, spec in _cases(size)][len(kept.read()) - before :]
    return [f"{later[0] if later else 'after the last row'}: {error}"]
  return []


def _report(measured: Sequence[Row], failed: Sequence[str]) -> bool:
  """Shows all rows and what failed; whether everything is as it should be."""
  console = workers.make_console(stderr=_JSON.value)
  if measured:
    console.print(updates.table(measured))
    console.print(f"rows: {_path()}", soft_wrap=True)
  wrong = sum(row.wrong for row in measured)
  console.print(f"wrong: {wrong:,}{'' if wrong else ' OK'}")
  for problem in failed:
    print(f"error: {problem}", file=sys.stderr)
  if _JSON.value:
    report.print_json([row._asdict() | {"busbw": row.busbw} for row in measured])
  return not wrong and not failed


def main() -> None:
  """Starts the ranks of every setting and reports; in a rank, measures."""
  settings = _settings()
  run = _RUN.value or f"{datetime.datetime.now():%Y-%m-%dT%H:%M:%S} {os.getpid()}"
  kept = Kept(_path(), run)
  path = recorded.path_in(_CACHE_DIR.value)
  missing = _GRADIENTS.value == "recorded" and not path.exists()
  if launch.is_rank():
    if len(settings) > 1:
      raise ValueError(
        "a job of mpirun or srun has one number of workers and no lab: give one of each"
      )
    if missing:
      raise ValueError(
        f"record gradients first: python -m benchmarks.recorded --cache_dir={_CACHE_DIR.value}"
      )
    if _measure(*settings[0], kept) and not _RUN.value:
      _report(kept.read(), [])
    return
  if missing:
    print(
      "recording gradients of a training, once, in about a minute",
      file=sys.stderr,
      flush=True,
    )
    command = [
      sys.executable,
      "-m",
      "benchmarks.recorded",
      f"--cache_dir={_CACHE_DIR.value}",
    ]
    subprocess.run(
      command, check=True, stdout=sys.stderr, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
  failed: list[str] = []
  status = 0
  try:
    for size, rate in settings:
      failed += _run(size, rate, kept, run)
  except KeyboardInterrupt as error:
    status = 128 + (error.args[0] if error.args else signal.SIGINT)
  except SystemExit as error:  # what SIGTERM raises in the lab
    status = int(error.code or 1)
  fine = _report(kept.read(), failed)
  sys.exit(status or int(not fine))


if __name__ == "__main__":
  entry.run(main)
