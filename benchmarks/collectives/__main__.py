r"""Milliseconds per update of every all-reduce, selection included, with the ranks in step, every timed result checked.

With --rate the ranks run on hosts of the network lab (needs root), whose links are that fast; several rates, numbers of
workers, sizes or densities are run one after the other. With --pin each rank has a core of its own, as on hosts with
processors of their own. A program that mpirun or srun started measures with the ranks of that job, on their network.

Gradients are recorded ones of a language model's training, another in every step (`benchmarks.recorded`, which the
first run calls), or normals. Residuals grow in the --warm_up steps. An algorithm with a period (Ok-Topk: thresholds
every 32 steps, regions every 64) is timed over whole periods, 70 steps at least, warm-up included; others over
--repetitions.

A row is printed as soon as it is measured, and kept as a line of collectives.jsonl in --report_dir: what interrupts the
run, Ctrl-C, SIGTERM or an algorithm that fails or exceeds --limit, loses none of them. Ranks start again behind an
algorithm that failed. At the end follow a table, and a figure, collectives.png. The exit status is 0 if all was
measured, and nothing wrong.

Columns: ms, mean, p90: median, mean and 90th percentile over the timed steps of the slowest rank's time; × f32, × bf16:
dense's median / this one (above 1: this one is faster); algbw, busbw: GB/s as in nccl-tests, 4n bytes / median, and
that times 2(P − 1)/P; #wrong: entries of all timed steps that were lost, made up, or not the same bits on every rank;
words: of 4 bytes that a rank sent; select, wire, merge: arithmetic until the first message and after it, measured
without a network with all ranks at work at once, and the rest.

Ranks share compiled programs, and find those of earlier runs, in --cache_dir.

Examples:
  python -m benchmarks.collectives --rate=1gbit
  python -m benchmarks.collectives --rate=1gbit --workers=2 --pin
  python -m benchmarks.collectives --rate=10mbit,100mbit,1gbit,none --algorithms=spardl,dense --predict
  python -m benchmarks.collectives --engine=mpi --gradients=normal --n=1000000 --density=0.001,0.01,0.1
  python -m benchmarks.collectives --engine=devices --workers=2,4,8 --n=100000 --json | jq '.[].busbw'
  mpirun -n 64 python -m benchmarks.collectives --engine=mpi --workers=64
"""

import contextlib
import datetime
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

import jaxsparse as js
from benchmarks import entry, netlab, papers, recorded, specs, workers
from benchmarks.collectives import rows
from benchmarks.collectives.rows import Kept, Measured
from benchmarks.collectives.updates import Bench
from jaxsparse import launch

_ALGORITHMS = flags.DEFINE_multi_string("algorithms", ["all"], specs.HELP)
flags.DEFINE_alias("algorithm", "algorithms")
_ENGINE = flags.DEFINE_enum("engine", "processes", list(workers.ENGINES), workers.ENGINE_HELP)
_WORKERS = flags.DEFINE_list("workers", ["6"], "Numbers of workers P.")
_N = flags.DEFINE_list("n", ["14_728_266"], "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_list("density", ["0.01"], "Fractions of the entries to deliver.")
_RATE = flags.DEFINE_list(
  "rate", [], "Rates of the lab's links, as tc writes them: 1gbit, 100mbit; none for links that are not shaped."
)
_PIN = flags.DEFINE_bool("pin", False, "Pin each rank to a core of its own; takes as many cores as workers.")
_GRADIENTS = flags.DEFINE_enum(
  "gradients", "recorded", ["recorded", "normal"], "Gradients of a training, or independent normals."
)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Timed steps of an algorithm without a period.")
_WARM_UP = flags.DEFINE_integer(
  "warm_up", None, "Untimed steps, in which residuals grow; by default 30 with recorded gradients, 1 with normal ones."
)
_LIMIT = flags.DEFINE_float("limit", 900, "Seconds that one algorithm may take, compiling included.")
_PREDICT = flags.DEFINE_bool("predict", False, "Also fit the cost model on the same workers and show its predictions.")
_CACHE_DIR = flags.DEFINE_string("cache_dir", "out/cache", recorded.CACHE_HELP)
_SHARE = flags.DEFINE_bool("share_programs", True, "Share compiled programs between ranks and runs.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for collectives.jsonl and the figure collectives.png.")
_PAPERS = flags.DEFINE_bool("papers", False, papers.HELP)
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)
_RUN = flags.DEFINE_string(
  "run", None, "Names the run in collectives.jsonl; set for the ranks that this program starts."
)
_FIRST = flags.DEFINE_integer("first", 0, "Number of the first row to measure; set for the ranks likewise.")


class Setting(NamedTuple):
  """What one run of ranks measures."""

  workers: int  # P
  rate: str  # of the lab's links, or "" without a lab
  n: list[int]  # gradient entries, one after the other
  density: list[float]  # likewise

  def cases(self) -> list[tuple[int, float, specs.Spec]]:
    """(n, density, algorithm) of every row."""
    return [(n, density, spec) for n in self.n for density in self.density for spec in _chosen(self.workers, density)]


def _settings() -> list[Setting]:
  """What the flags ask for; raises ValueError before anything runs."""
  over_network = _ENGINE.value in ("processes", "mpi")
  for flag in (_RATE, _PIN):
    if flag.value and not over_network:
      raise ValueError(f"--{flag.name} needs ranks that talk over a network, --engine=processes or mpi")
  if _REPETITIONS.value < 1 or (_WARM_UP.value is not None and _WARM_UP.value < 1) or not _LIMIT.value > 0:
    raise ValueError("--repetitions and --warm_up: choose at least 1; --limit: more than 0")
  sizes, densities = _numbers("n", _N.value, int), _numbers("density", _DENSITY.value, float)
  counts = _numbers("workers", _WORKERS.value, int)
  if _PIN.value and max(counts) > (cores := len(os.sched_getaffinity(0))):
    raise ValueError(f"--pin takes a core for each rank: --workers={max(counts)}, but there are {cores} cores")
  settings = [Setting(*one, sizes, densities) for one in itertools.product(counts, _RATE.value or [""])]
  for one in settings:
    one.cases()
  return settings


def _numbers(name: str, values: Sequence[str], kind: Callable[[str], Any]) -> list[Any]:
  try:
    numbers = [kind(value) for value in values]
  except ValueError:
    numbers = []
  if not numbers or min(numbers) <= 0:
    raise ValueError(f"--{name}={','.join(values)}, give numbers above 0, separated by commas")
  return numbers


def _chosen(size: int, density: float) -> list[specs.Spec]:
  """The algorithms to time with so many workers."""
  names = _ALGORITHMS.value
  if names == ["all"]:
    teams = [f"spardl:teams={d}" for d in range(2, size + 1) if size % d == 0]
    first = ["dense", "dense:dtype=bfloat16", "spardl", *teams]
    names = [*first, *sorted(set(specs.of_vectors()) - set(first))]
  return specs.parse(names, size, density=density)


def _measure(setting: Setting, kept: Kept) -> bool:
  """What the ranks of this run do; whether this one reports."""
  if _PIN.value:
    workers.pin()
  if _SHARE.value:
    workers.share_programs(pathlib.Path(_CACHE_DIR.value) / "programs")
  place = workers.here(_ENGINE.value, setting.workers)
  cases = setting.cases()[_FIRST.value :]
  profile = _profile(place, [spec for _, _, spec in cases])
  show = lambda text: print(text, file=sys.stderr if _JSON.value else sys.stdout, flush=True)
  for n, of_size in itertools.groupby(cases, lambda case: case[0]):
    bench = _bench(place, n)
    for _, density, spec in of_size:
      if place.reports and (n, density, spec) == cases[0]:
        show(rows.heading(_PREDICT.value))
      with _limited(spec.label):
        row = bench.row(spec, density, setting.rate, _PIN.value)
      if place.reports:
        measured = Measured(row, _predicted(profile, spec, n))
        kept.add(measured.as_dict())
        show(rows.line(measured))
  return place.reports


def _bench(place: workers.Workers, n: int) -> Bench:
  real = _GRADIENTS.value == "recorded"
  gradients = recorded.gradients(place, recorded.path_in(_CACHE_DIR.value), n) if real else None
  warm_up = _WARM_UP.value or (30 if real else 1)
  return Bench(place, _ENGINE.value, n, warm_up, _REPETITIONS.value, gradients)


@contextlib.contextmanager
def _limited(label: str) -> Iterator[None]:
  """Ends this rank, and so the run of ranks, if the block takes longer than --limit."""
  timer = threading.Timer(_LIMIT.value, launch.fail, [f"{label} takes more than {_LIMIT.value:g} s (--limit)"])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _profile(place: workers.Workers, chosen: Sequence[specs.Spec]) -> js.costs.Profile | None:
  if not _PREDICT.value:
    return None
  return js.costs.fit(place.where, algorithms=list(dict.fromkeys(map(_label, chosen))), seconds=math.inf)


def _label(spec: specs.Spec) -> str:
  return js.costs.label_of(spec.name, spec.config)


def _predicted(profile: js.costs.Profile | None, spec: specs.Spec, n: int) -> float | None:
  if profile is None:
    return None
  return next(one.seconds for one in js.costs.advise(n, profile).predictions if one.label == _label(spec))


def _run(setting: Setting, kept: Kept, run: str) -> list[str]:
  """Starts the ranks of one setting, in a lab if it has a rate, and again behind a row that fails; what failed."""
  engine = _ENGINE.value
  command = [sys.executable, "-m", "benchmarks.collectives", *sys.argv[1:]]
  command += [f"--workers={setting.workers}", f"--rate={setting.rate}", f"--run={run}"]
  ranks = setting.workers if engine in ("processes", "mpi") else 1
  labels = [spec.label for _, _, spec in setting.cases()]
  failed: list[str] = []
  first = 0
  with contextlib.ExitStack() as stack:
    hosts: list[launch.Host] | None = None
    if setting.rate:
      rate = None if setting.rate == "none" else setting.rate
      hosts = stack.enter_context(netlab.lab(setting.workers, rate))
    while first < len(labels) and len(failed) < first + 2:  # two failures and no row: a third will not differ
      before = len(kept.read())
      try:
        launch.run([*command, f"--first={first}"], ranks, "mpi" if engine == "mpi" else "processes", hosts=hosts)
        break
      except launch.RunFailed as error:
        first += len(kept.read()) - before
        failed.append(f"{labels[first] if first < len(labels) else 'after the last row'}: {error}")
        first += 1
  return failed


def _report(measured: Sequence[Measured], failed: Sequence[str]) -> bool:
  """Shows all rows and what failed; whether everything is as it should be."""
  console = workers.make_console(stderr=_JSON.value)
  folder = pathlib.Path(_REPORT_DIR.value)
  if measured:
    if _PAPERS.value:
      console.print(papers.beside(papers.of("collectives")))
    console.print(rows.table(measured))
    rows.figure(measured, folder / "collectives.png")
    console.print(f"rows: {folder / 'collectives.jsonl'}, figure: {folder / 'collectives.png'}", soft_wrap=True)
  wrong = sum(one.row.wrong for one in measured)
  console.print(f"wrong entries: {wrong:,}{'' if wrong else ' OK'}")
  for problem in failed:
    print(f"error: {problem}", file=sys.stderr)
  if _JSON.value:
    print(json.dumps([one.as_dict() for one in measured]))
  return not wrong and not failed


def _record(path: pathlib.Path) -> None:
  """Records gradients in a process of its own, on CPU, unless that was done."""
  if _GRADIENTS.value == "recorded" and not path.exists():
    print("recording gradients of a training, once, in about a minute", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.recorded", f"--cache_dir={_CACHE_DIR.value}"]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def main() -> None:
  """Starts the ranks of every setting and reports; in a rank, measures."""
  settings = _settings()
  run = _RUN.value or f"{datetime.datetime.now():%Y-%m-%dT%H:%M:%S} {os.getpid()}"
  kept = Kept(pathlib.Path(_REPORT_DIR.value) / "collectives.jsonl", run)
  if launch.is_rank():
    _rank(settings, kept)
    return
  _record(recorded.path_in(_CACHE_DIR.value))
  failed: list[str] = []
  status = 0
  try:
    for setting in settings:
      failed += _run(setting, kept, run)
  except KeyboardInterrupt as error:
    status = 128 + (error.args[0] if error.args else signal.SIGINT)
  except SystemExit as error:  # what SIGTERM raises in the lab
    status = int(error.code or 1)
  fine = _report(kept.read(), failed)
  sys.exit(status or int(not fine))


def _rank(settings: Sequence[Setting], kept: Kept) -> None:
  if len(settings) > 1:
    raise ValueError("a job of mpirun or srun has one number of workers and no lab: give one of each")
  if _GRADIENTS.value == "recorded" and not recorded.path_in(_CACHE_DIR.value).exists():
    raise ValueError(f"record gradients first: python -m benchmarks.recorded --cache_dir={_CACHE_DIR.value}")
  if _measure(settings[0], kept) and not _RUN.value:
    _report(kept.read(), [])


if __name__ == "__main__":
  entry.run(main)
