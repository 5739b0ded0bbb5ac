r"""Seconds an iteration with communication hidden behind backward: the ASC-WFBP paper's setting on paper, or in a lab.

Without --rate predictions for the layers of real networks, beside what the paper
measured. With --rate (needs root) a model of many small tensors is trained on hosts of
the network lab, whose links are that fast. With --contention one all-reduce and two at
once by message size, and γ (Figures 4 and 5), in the paper's model or measured.

"exposed" is communication that backward does not hide (Figure 6). S is the throughput
of all workers over that of one; S_max is Eq. 42, a link that is always full, at 9.43
Gbit/s.

Examples:
  python -m benchmarks.overlap
  python -m benchmarks.overlap --model=bert_base --plan=mg_wfbp,asc_wfbp --gamma=2
  python -m benchmarks.overlap --rate=1gbit,100mbit --workers=4
  python -m benchmarks.overlap --contention --rate=1gbit,100mbit --json | jq '.[].points'
"""

import json
import pathlib
from typing import Any, get_args

import rich.console
import rich.progress
from absl import flags

import jaxsparse as js
from benchmarks import entry, netlab, papers, report, workers
from benchmarks.overlap import architectures, contention, hiding, iterations
from benchmarks.overlap import report as tables
from benchmarks.workers import make_console
from jaxsparse import launch
from jaxsparse.overlap.plans import Kind

_KINDS = list(get_args(Kind))

_MODEL = flags.DEFINE_list("model", list(architectures.MODELS), "Networks.")
_PLAN = flags.DEFINE_list("plan", _KINDS, "Kinds of plans.")
for _flag, _choices in ((_MODEL, list(architectures.MODELS)), (_PLAN, _KINDS)):
  entry.require_choices(_flag, _choices, empty=False)
_ALPHA = flags.DEFINE_float("alpha", 1.4e-3, "Seconds to start an all-reduce.")
_BETA = flags.DEFINE_float("beta", 1.7e-9, "Seconds a byte of an all-reduce.")
_GAMMA = flags.DEFINE_float(
  "gamma", 1.5, "Two all-reduces at once take so many times as long for a byte."
)
_WAYS = flags.DEFINE_integer("ways", 2, "How many may be under way at once.")
_CONTENTION = flags.DEFINE_bool(
  "contention", False, "Two all-reduces at once by message size, instead of plans."
)
_RATE = flags.DEFINE_list(
  "rate",
  [],
  "Measure, on lab links of these speeds, as tc writes them: 1gbit, 100mbit, none.",
)
_HOSTS = flags.DEFINE_integer(
  "workers", 4, "Hosts of the lab, a worker on each.", lower_bound=2
)
_REPETITIONS = flags.DEFINE_integer(
  "repetitions", 9, "Timed steps of each plan in the lab.", lower_bound=1
)
_ROWS = flags.DEFINE_string(
  "rows",
  None,
  "Write the rows here and print nothing: how ranks tell who started them.",
)
_JSON = entry.define_json()


def _link() -> js.overlap.Link:
  return js.overlap.Link(_ALPHA.value, _BETA.value, _GAMMA.value)


def _measure_rank(path: pathlib.Path) -> None:
  """Measures in a rank of the lab; rank 0 writes the rows."""
  if _CONTENTION.value:
    communicator, rate = js.MpiComm().communicator, _RATE.value[0]
    speed = None if rate == "none" else netlab.bits(rate) / 8
    found: Any = contention.measured(communicator, rate, speed, _REPETITIONS.value)
    reports = communicator.Get_rank() == 0
  else:
    place = workers.here("processes", _HOSTS.value)
    lab = hiding.Lab(place, _RATE.value[0], repetitions=_REPETITIONS.value)
    found, reports = [lab.setting, lab.rows(_PLAN.value)], place.reports
  if reports:
    path.write_text(json.dumps(found))


def _measure_lab(rate: str) -> Any:
  transport = "mpi" if _CONTENTION.value else "processes"
  return workers.measure_in_lab("benchmarks.overlap", _HOSTS.value, rate, transport)


def _report_paper(console: rich.console.Console) -> list[Any]:
  """Plans for every network."""
  rows, kinds = [], list[Any](_PLAN.value)
  for model in rich.progress.track(
    _MODEL.value, "planning", console=console, transient=True
  ):
    times, sizes = iterations.layers_of(model)
    plans = [
      js.overlap.plan(kind, times, sizes, **_link()._asdict(), ways=_WAYS.value)
      for kind in kinds
    ]
    rows += [iterations.row(model, plan) for plan in plans]
  console.print(tables.table(rows, _link(), _WAYS.value))
  console.print(papers.beside(papers.of("overlap"), iterations.measured(rows)))
  return rows


def _report_lab(console: rich.console.Console) -> list[Any]:
  found = []
  for rate in _RATE.value:
    given, measured = _measure_lab(rate)
    setting, rows = hiding.Setting(*given), [hiding.Measured(*row) for row in measured]
    console.print(tables.lab_table(setting, rows))
    found.append({"setting": setting, "rows": rows})
  return found


def _report_contention(console: rich.console.Console) -> list[Any]:
  """Two all-reduces at once, measured at each rate, or in the paper's model."""
  link, curves = (
    _link(),
    [contention.Curve(*_measure_lab(rate)) for rate in _RATE.value],
  )
  curves = [
    curve._replace(points=[contention.Point(*point) for point in curve.points])
    for curve in curves
  ]
  if curves:
    now = contention.cells(curves[0])
  else:
    curves.append(contention.predicted(link, iterations.WORKERS))
    now = {
      "MB from which two fill the link": contention.full_from(link, iterations.WORKERS)
      / 2**20
    }
  console.print(*map(tables.contention_table, curves))
  console.print(
    papers.beside(
      [cell for cell in papers.of("overlap") if cell.table.startswith("Figure 4")], now
    )
  )
  return report.rounded(curves)


def main() -> None:
  """Plans for every network, or measures in the lab, and reports."""
  console = make_console(stderr=_JSON.value)
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the lab starts its own ranks: run this as one program")
    _measure_rank(pathlib.Path(_ROWS.value))
    return
  reports = (
    _report_contention
    if _CONTENTION.value
    else _report_lab
    if _RATE.value
    else _report_paper
  )
  found = reports(console)
  if _JSON.value:
    report.print_json(found)


if __name__ == "__main__":
  entry.run(main)
