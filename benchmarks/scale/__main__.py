r"""Scale on paper: the predicted time of an update on the wire for 8 … 4096 workers, and the making of its program.

Predicted is the wire alone, `messages · α + bytes · β` by each algorithm's formula, an upper bound where the sizes of
messages vary. Selection and sums come on top: a worker selects among the same n entries whatever P is, and the sums
grow with the words that it receives; `benchmarks.collectives` measures both. Also left out are the integers that
workers agree on (`benchmarks.costs` lists them) and the averaging of parameters that A2SGD needs; its totals differ
between workers, so it does not compete for the fastest. In `spardl:teams=best` the number of teams is the fastest
divisor of P in that network.

Measured are the seconds to trace, lower and compile the update for P forced CPU devices, with compilation caches off:
the update does not run, and n hardly matters. SparDL has 2⌈log₂P⌉ rounds, so the seconds should grow as a + b log₂P:
the fit is printed, and how much longer the largest P takes than the smallest, beside the same ratio of log₂P. The
figure is scale.png in --report_dir.

With --first_step nothing is predicted: measured are the seconds to trace, lower and compile the first step of
`js.make_train_step` for 1,000,000 parameters and P = 4, of dense, SparDL (exact, chunked, reuse, teams) and the other
algorithms. The goal of 3 s at most is checked for each; the exit status is 1 where one misses it.

Examples:
  python -m benchmarks.scale
  python -m benchmarks.scale --first_step
  python -m benchmarks.scale --first_step --schedule_of=spardl,oktopk --n=16000000 --repeats=1
  python -m benchmarks.scale --network=25GbE --network=wifi:alpha=2e-3:beta=4e-8 --workers=6,14,30 --schedule_of=
  python -m benchmarks.scale --schedule_of=spardl,spardl:teams=4,gtopk,oktopk --workers=8,16,32,64
  python -m benchmarks.scale --json | jq '.predicted[] | select(.workers == 4096 and .algorithm == "spardl")'
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.progress
from absl import flags

from benchmarks import entry, report, specs
from benchmarks.scale import compiling
from benchmarks.scale.compiling import Program, growth_table, growths, program_table
from benchmarks.scale.figure import figure
from benchmarks.scale.predicting import BEST, PRESETS, Network, parse_network, predict, speed_table

FIRST_N, FIRST_WORKERS, FIRST_SECONDS = 1_000_000, 4, 3.0
_FIRST_OF = ["dense", "spardl", "spardl:selector=chunked", "spardl:selector=reuse", "spardl:teams=2", "spardl:teams=4"]

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = flags.DEFINE_list("workers", [str(2**bit) for bit in range(3, 13)], "Numbers of workers.")
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_NETWORK = flags.DEFINE_multi_string(
  "network",
  list(PRESETS),
  f"Networks to predict for: {', '.join(PRESETS)}, or your own as name:alpha=seconds a message:beta=seconds a byte.",
)
_SCHEDULE_OF = flags.DEFINE_list(
  "schedule_of",
  ["spardl"],
  "Algorithms to trace, lower and compile; none with --schedule_of=. Making more than 4096 devices takes minutes.",
)
_FIRST_STEP = flags.DEFINE_bool(
  "first_step",
  False,
  f"Make the first training step of many algorithms instead, by default of n = {FIRST_N:,} for P = {FIRST_WORKERS}: "
  f"does each compile in {FIRST_SECONDS:g} s?",
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "How often to make each program; the median counts.")
_PATIENCE = flags.DEFINE_float("patience", 15, "No larger P for an algorithm once a program took so many seconds.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figure scale.png.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the result as JSON on standard output, everything else on standard error."
)


def _labels() -> list[str]:
  """The algorithms to predict, with "all" written out."""
  every = [*specs.of_vectors(), f"spardl:{BEST}"]
  given = [label for value in _ALGORITHM.value for label in value.split(",")]
  return list(dict.fromkeys(name for label in given for name in (every if label == "all" else [label])))


def _sizes() -> list[int]:
  """The numbers of workers, increasing."""
  for text in _WORKERS.value:
    if not text.strip().isdecimal() or int(text) < 2:
      raise ValueError(f"--workers={text}, choose whole numbers of at least 2")
  if not _WORKERS.value:
    raise ValueError("--workers is empty, choose at least one number")
  return sorted(set(map(int, _WORKERS.value)))


def _checked() -> tuple[list[int], list[Network]]:
  """Numbers of workers and networks; raises ValueError before anything is done."""
  for flag in (_N, _REPEATS):
    if flag.value < 1:
      raise ValueError(f"--{flag.name}={flag.value}, choose at least 1")
  networks = [parse_network(text) for value in _NETWORK.value for text in value.split(",")]
  if len({network.name for network in networks}) < len(networks):
    raise ValueError(f"--network={','.join(_NETWORK.value)}, choose each name once")
  return _sizes(), networks


def _make(program_of: compiling.ProgramOf, console: rich.console.Console) -> list[Program]:
  """The programs that the flags name, made behind a progress bar."""
  sizes, n, labels = _sizes(), _N.value, _SCHEDULE_OF.value
  if _FIRST_STEP.value:
    others = sorted(set(specs.of_vectors()) - set(_FIRST_OF))
    labels = labels if _SCHEDULE_OF.present else [*_FIRST_OF, *others]
    n, sizes = n if _N.present else FIRST_N, sizes if _WORKERS.present else [FIRST_WORKERS]
  plan = compiling.Plan(program_of, labels, sizes, n, _DENSITY.value, _REPEATS.value, _PATIENCE.value)
  if not labels:
    return []
  with rich.progress.Progress(console=console, transient=True) as progress:
    bar = progress.add_task("compiling", total=_REPEATS.value * len(labels) * len(sizes))
    return compiling.make_all(plan, lambda: progress.advance(bar))


def _first_step(console: rich.console.Console) -> None:
  """Makes the first steps and checks the goal."""
  programs = _make(compiling.step_of, console)
  n = _N.value if _N.present else FIRST_N
  title = f"seconds to make the first training step of n = {n:,} parameters, CPU devices, median of the runs"
  console.print(program_table(programs, title))
  slowest = max(programs, key=lambda program: program.total)
  what = f"the first step of every algorithm compiles in {FIRST_SECONDS:g} s, slowest {slowest.algorithm}"
  goal = report.Goal(what, slowest.total, slowest.total <= FIRST_SECONDS)
  report.say([goal], console)
  if _JSON.value:
    plain = [program._asdict() | {"total": program.total} for program in programs]
    print(json.dumps({"n": n, "density": _DENSITY.value, "first_step": plain, "goals": [goal._asdict()]}))
  sys.exit(0 if goal.met else 1)


def main() -> None:
  """Predicts, measures and reports."""
  console = rich.console.Console(stderr=_JSON.value, width=None if sys.stdout.isatty() else 130)
  sizes, networks = _checked()
  if _FIRST_STEP.value:
    _first_step(console)
  of_place = [(workers, label) for workers in sizes for label in _labels()]
  found = [predict(label, workers, networks, _N.value, _DENSITY.value) for workers, label in of_place]
  predicted = [row for rows in zip(*found, strict=True) for row in rows]  # a network after the other
  programs = _make(compiling.update_of, console)
  title = f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}"
  grown, path = growths(programs), pathlib.Path(_REPORT_DIR.value) / "scale.png"
  figure(predicted, programs, networks, title, path)
  console.print(speed_table(predicted, f"{title}: predicted on the wire"))
  if programs:
    console.print(program_table(programs, f"{title}: seconds to make the program"))
  if grown:
    console.print(growth_table(grown))
  console.print(f"figure: {path}")
  if _JSON.value:
    tables: dict[str, Sequence[Any]] = {
      "networks": networks,
      "predicted": predicted,
      "compiled": programs,
      "growth": grown,
    }
    plain = {name: [row._asdict() for row in rows] for name, rows in tables.items()}
    print(json.dumps({"n": _N.value, "density": _DENSITY.value, **plain}))


if __name__ == "__main__":
  entry.run(main)
