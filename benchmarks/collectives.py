r"""Seconds per update of every all-reduce, selection included, with the ranks in step, every timed result checked.

With --rate the ranks run on hosts of the network lab (needs root), whose links are that fast; several rates, numbers of
workers, sizes or densities are run one after the other and drawn as a figure, collectives.png in --report_dir. A
program that mpirun or srun started measures with the ranks of that job, on the network they have.

The columns: the median over repetitions of the slowest worker's time; its ratio to dense float32 and to dense bfloat16
(above 1: this one is faster); words that a worker sent; bus bandwidth as nccl-tests defines it for an all-reduce,
2(P − 1)/P · 4n bytes / time; and where the time went: until the first message (selection), arithmetic after it (merge),
measured without a network but with all workers at work at once, and the rest (wire).

Examples:
  python -m benchmarks.collectives --rate=1gbit
  python -m benchmarks.collectives --rate=10mbit,100mbit,1gbit,none --algorithms=spardl,dense --predict
  python -m benchmarks.collectives --engine=mpi --n=1000000 --density=0.001,0.01,0.1
  python -m benchmarks.collectives --engine=devices --workers=2,4,8 --n=100000 --json | jq '.[].seconds'
  mpirun -n 64 python -m benchmarks.collectives --engine=mpi --workers=64
"""

import contextlib
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import entry, netlab, report, specs, workers
from benchmarks.updates import Bench, Row
from jaxsparse import launch

_ALGORITHMS = flags.DEFINE_multi_string("algorithms", ["all"], specs.HELP)
flags.DEFINE_alias("algorithm", "algorithms")
_ENGINE = flags.DEFINE_enum("engine", "processes", list(workers.ENGINES), workers.ENGINE_HELP)
_WORKERS = flags.DEFINE_list("workers", ["6"], "Numbers of workers.")
_N = flags.DEFINE_list("n", ["14_728_266"], "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_list("density", ["0.01"], "Shares of the entries to deliver.")
_RATE = flags.DEFINE_list(
  "rate", [], "Speeds of the lab's links, as tc writes them: 1gbit, 100mbit; none for a lab without limits."
)
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Timed updates of each algorithm, after one that compiles.")
_PREDICT = flags.DEFINE_bool("predict", False, "Also fit the cost model on the same workers and show what it predicts.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figure collectives.png.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)
_ROWS = flags.DEFINE_string("rows", None, "Write the rows here and print nothing: how ranks tell who started them.")


_SETTING = ("workers", "rate", "n", "density")  # of a row, beside its algorithm


class Setting(NamedTuple):
  """What one run of ranks measures.

  Attributes:
    workers: P.
    rate: of the lab's links, or "" without a lab.
    n: gradient entries, one run after the other.
    density: likewise.
  """

  workers: int
  rate: str
  n: list[int]
  density: list[float]


class Measured(NamedTuple):
  """A row, and what the cost model said of it.

  Attributes:
    row: what was measured.
    predicted: seconds, or None.
  """

  row: Row
  predicted: float | None


def _settings() -> list[Setting]:
  """What the flags ask for; raises ValueError before anything runs."""
  sizes, densities = _numbers("n", _N.value, int), _numbers("density", _DENSITY.value, float)
  rates = _RATE.value or [""]
  if _RATE.value and _ENGINE.value not in ("processes", "mpi"):
    raise ValueError(f"--rate needs ranks that talk over a network, --engine=processes or mpi, not {_ENGINE.value}")
  if _REPETITIONS.value < 1:
    raise ValueError(f"--repetitions={_REPETITIONS.value}, choose at least 1")
  settings = [
    Setting(*one, sizes, densities) for one in itertools.product(_numbers("workers", _WORKERS.value, int), rates)
  ]
  for one in settings:
    _chosen(one.workers, densities[0])
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
    names = [
      "dense",
      "dense:dtype=bfloat16",
      "spardl",
      *teams,
      *sorted(set(js.collective_names()) - {"dense", "spardl"}),
    ]
  return specs.parse(names, size, density=density)


def _measure(setting: Setting) -> list[Measured] | None:
  """What the ranks of this run do; the rows at the rank that reports."""
  place = workers.here(_ENGINE.value, setting.workers)
  progress = workers.make_console(stderr=True, quiet=not place.reports)
  measured = []
  chosen = {density: _chosen(setting.workers, density) for density in setting.density}
  profile = _profile(place, [spec for some in chosen.values() for spec in some])
  for n in setting.n:
    bench = Bench(place, _ENGINE.value, n, _REPETITIONS.value)
    for density in setting.density:
      for spec in chosen[density]:
        row = bench.row(spec, density, setting.rate)
        measured.append(Measured(row, _predicted(profile, spec, n)))
        said = f"{setting.rate} P={setting.workers} n={n:,} {density:g} {spec.label}: {row.seconds:.4f} s"
        progress.print(f"{said}, median of {row.repetitions}")
  return measured if place.reports else None


def _profile(place: workers.Workers, chosen: Sequence[specs.Spec]) -> js.costs.Profile | None:
  if not _PREDICT.value:
    return None
  return js.costs.fit(place.where, algorithms=list(dict.fromkeys(map(_label, chosen))))


def _label(spec: specs.Spec) -> str:
  return js.costs.label_of(spec.name, spec.config)


def _predicted(profile: js.costs.Profile | None, spec: specs.Spec, n: int) -> float | None:
  if profile is None:
    return None
  return next(one.seconds for one in js.costs.advise(n, profile).predictions if one.label == _label(spec))


def _run(setting: Setting, rows: pathlib.Path) -> list[Measured]:
  """Starts the ranks of one setting, in a lab if it has a rate, and reads what they measured."""
  engine = _ENGINE.value
  command = [sys.executable, "-m", "benchmarks.collectives", *sys.argv[1:]]
  command += [f"--workers={setting.workers}", f"--rate={setting.rate}", f"--rows={rows}"]
  ranks = setting.workers if engine in ("processes", "mpi") else 1
  with contextlib.ExitStack() as stack:
    hosts: list[launch.Host] | None = None
    if setting.rate:
      rate = None if setting.rate == "none" else setting.rate
      hosts = stack.enter_context(netlab.lab(setting.workers, rate))
    launch.run(command, ranks, "mpi" if engine == "mpi" else "processes", hosts=hosts)
  return [Measured(Row(*row), predicted) for row, predicted in json.loads(rows.read_text())]


def _ratio(one: Measured, measured: Sequence[Measured], dense: str) -> str:
  """How many times as fast as the dense one of the same setting."""
  setting = lambda row: [getattr(row, name) for name in _SETTING]
  times = [
    other.row.seconds for other in measured if other.row.algorithm == dense and setting(other.row) == setting(one.row)
  ]
  return f"{times[0] / one.row.seconds:.2f}" if times else "–"


def _several(measured: Sequence[Measured]) -> list[str]:
  """What of the setting has several values."""
  return [name for name in _SETTING if len({getattr(one.row, name) for one in measured}) > 1]


def _table(measured: Sequence[Measured]) -> rich.table.Table:
  result = rich.table.Table(title=f"seconds per update, engine {_ENGINE.value}")
  several = _several(measured)
  for head in several:
    result.add_column(head, justify="right")
  result.add_column("algorithm", no_wrap=True)
  heads = [
    "ms",
    *(["predicted"] if _PREDICT.value else []),
    "× f32",
    "× bf16",
    "words",
    "GB/s",
    "select",
    "wire",
    "merge",
  ]
  for head in heads:
    result.add_column(head, justify="right", no_wrap=True)
  for one in measured:
    row = one.row
    shares = [f"{100 * part / row.seconds:.0f} %" for part in (row.selection, row.wire, row.merge)]
    result.add_row(
      *(f"{getattr(row, name):,}" if name == "n" else str(getattr(row, name)) for name in several),
      row.algorithm,
      f"{1e3 * row.seconds:,.1f}",
      *([f"{1e3 * one.predicted:,.1f}"] if one.predicted is not None else []),
      _ratio(one, measured, "dense"),
      _ratio(one, measured, "dense:dtype=bfloat16"),
      f"{row.words:,.0f}",
      f"{row.bus_bandwidth:.3f}",
      *shares,
    )
  return result


def _figure(measured: Sequence[Measured], path: pathlib.Path) -> None:
  """Seconds over the flag that has several values, or as bars of where the time went."""
  over = _several(measured)
  plot, panel = report.pyplot.subplots(figsize=(9, 5), layout="constrained")
  rows = [one.row for one in measured]
  labels = list(dict.fromkeys(row.algorithm for row in rows))
  if not over:
    left = [0.0] * len(rows)
    for part in ("selection", "merge", "wire"):
      widths = [getattr(row, part) for row in rows]
      panel.barh([row.algorithm for row in rows], widths, left=left, label=part)
      left = [start + width for start, width in zip(left, widths, strict=True)]
    panel.invert_yaxis()
    panel.set(xlabel="seconds per update")
  for label in labels if over else []:
    own = [row for row in rows if row.algorithm == label]
    panel.plot([getattr(row, over[0]) for row in own], [row.seconds for row in own], marker="o", label=label)
    panel.set(xlabel=over[0], ylabel="seconds per update", yscale="log")
    if over[0] != "rate":
      panel.set(xscale="log")
  panel.grid(alpha=0.3)
  panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
  same = [f"{name} {getattr(rows[0], name)}" for name in _SETTING if name not in over[:1]]
  report.save(plot, f"engine {_ENGINE.value}, " + ", ".join(same), path)


def main() -> None:
  """Starts the ranks of every setting and reports; in a rank, measures."""
  settings = _settings()
  if launch.is_rank():
    _rank(settings)
    return
  with tempfile.TemporaryDirectory() as folder:
    measured = [one for setting in settings for one in _run(setting, pathlib.Path(folder) / "rows.json")]
  _report(measured)


def _rank(settings: Sequence[Setting]) -> None:
  if len(settings) > 1:
    raise ValueError("a job of mpirun or srun has one number of workers and no lab: give one of each")
  measured = _measure(settings[0])
  if measured is None:
    return
  if _ROWS.value:
    pathlib.Path(_ROWS.value).write_text(json.dumps(measured))
  else:
    _report(measured)


def _report(measured: Sequence[Measured]) -> None:
  console = workers.make_console(stderr=_JSON.value)
  console.print(_table(measured))
  path = pathlib.Path(_REPORT_DIR.value) / "collectives.png"
  _figure(measured, path)
  console.print(f"figure: {path}")
  if _JSON.value:
    print(json.dumps([one.row._asdict() | {"predicted": one.predicted} for one in measured]))


if __name__ == "__main__":
  entry.run(main)
