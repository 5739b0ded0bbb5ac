r"""Seconds an iteration with communication hidden behind backward: the ASC-WFBP paper's setting on paper, or in a lab.

On paper, beside what the paper measured: with no --rate. With --rate (needs root) a model of many small tensors is
trained on hosts of the network lab, whose links are that fast: see benchmarks/hiding.py.

Layers are those of the real networks (benchmarks/architectures.py), their backward times a roofline scaled to the
paper's total. Where the paper does not print the seconds of computing, Tables IV and V say them: S · t(ASC) / P, and a
third of it is forward as it is for ResNet-152, which gives back the S_max that the paper prints. Predicted is forward
and the plan's iteration time, with a start-up of --alpha for each all-reduce and --beta for each byte.

S is the throughput of all workers over that of one. S_max is Eq. 42: a link that is always full, at 9.43 Gbit/s. "α of
WFBP" is the start-up that would explain the measured time of WFBP, all else as it is. Figures of the timelines are
overlap_MODEL.png in --report_dir.

Examples:
  python -m benchmarks.overlap
  python -m benchmarks.overlap --model=bert_base --plan=mg_wfbp,asc_wfbp --gamma=2
  python -m benchmarks.overlap --rate=1gbit,100mbit --workers=4
  python -m benchmarks.overlap --alpha=5e-5 --ways=4 --json | jq '.[] | [.model, .plan, .seconds]'
"""

import json
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple, get_args

import rich.console
import rich.progress
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import architectures, entry, hiding, netlab, papers, workers
from benchmarks.workers import make_console
from jaxsparse import launch
from jaxsparse.overlap.plans import Kind

_KINDS = list(get_args(Kind))
_WORKERS = 32
_LINK = 9.43e9 / 8  # bytes a second, as the paper measured it with iperf3

_MODEL = flags.DEFINE_list("model", list(architectures.MODELS), "Networks.")
_PLAN = flags.DEFINE_list("plan", _KINDS, "Kinds of plans.")
_ALPHA = flags.DEFINE_float("alpha", 1.4e-3, "Seconds to start an all-reduce.")
_BETA = flags.DEFINE_float("beta", 1.7e-9, "Seconds a byte of an all-reduce.")
_GAMMA = flags.DEFINE_float("gamma", 1.5, "Two all-reduces at once take so many times as long for a byte.")
_WAYS = flags.DEFINE_integer("ways", 2, "How many may be under way at once.")
_RATE = flags.DEFINE_list("rate", [], "Measure, on lab links of these speeds, as tc writes them: 1gbit, 100mbit, none.")
_HOSTS = flags.DEFINE_integer("workers", 4, "Hosts of the lab, a worker on each.")
_DEPTH = flags.DEFINE_integer("depth", 20, "Layers of the lab's model, a matrix and a bias each.")
_WIDTH = flags.DEFINE_integer("width", 128, "Of each layer of the lab's model.")
_BATCH = flags.DEFINE_integer("batch", 256, "Rows for each worker of the lab.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries that SparDL delivers in the lab.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 9, "Timed steps of each plan in the lab.")
_ROWS = flags.DEFINE_string("rows", None, "Write the rows here and print nothing: how ranks tell who started them.")
_REPORT_DIR = flags.DEFINE_string("report_dir", "out", "Folder for the figures.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)


class Paper(NamedTuple):
  """The paper's measurements of a network on 32 GPUs, Tables IV and V.

  Attributes:
    seconds: of an iteration, by kind of plan.
    speed_up: S of ASC-WFBP over one GPU.
    bound: S_max.
    computing: seconds of forward and backward, where the text has them.
  """

  seconds: dict[str, float]
  speed_up: float
  bound: float
  computing: float | None = None

  @property
  def forward(self) -> float:
    """Seconds of forward, a third of computing."""
    return self._computing / 3

  @property
  def backward(self) -> float:
    """Seconds of backward."""
    return self._computing * 2 / 3

  @property
  def _computing(self) -> float:
    return self.computing or self.speed_up * self.seconds["asc_wfbp"] / _WORKERS


def _paper_of(model: str, computing: float | None = None) -> Paper:
  """Its figures for a network, from Tables IV and V."""
  number = lambda table, cell: papers.number("ASC-WFBP", table, f"{model} {cell}")
  seconds = {kind: number("Table IV", kind) for kind in ("wfbp", "mg_wfbp", "asc_wfbp")}
  return Paper(seconds, number("Table V, S", "speed_up"), number("Table V, S_max", "bound"), computing)


PAPER = {model: _paper_of(model, 0.091 + 0.182 if model == "resnet152" else None) for model in architectures.MODELS}


class Row(NamedTuple):
  """One plan for one network.

  Attributes:
    model: the network.
    plan: the kind of plan.
    groups: communications.
    most_at_once: of them.
    seconds: predicted, of an iteration with its forward pass.
    measured: by the paper, or None.
    speed_up: predicted S.
    bound: S_max by Eq. 42.
  """

  model: str
  plan: str
  groups: int
  most_at_once: int
  seconds: float
  measured: float | None
  speed_up: float
  bound: float


def layers_of(model: str) -> tuple[list[float], list[float]]:
  """Seconds of backward, scaled to the paper's total, and bytes of the float32 gradient of every tensor."""
  tensors = architectures.MODELS[model]()
  scale = PAPER[model].backward / sum(tensor.seconds for tensor in tensors)
  return [scale * tensor.seconds for tensor in tensors], [4.0 * tensor.entries for tensor in tensors]


def bound_of(model: str) -> float:
  """S_max, Eq. 42: the link always full, backward or sending hidden by the other."""
  _, sizes = layers_of(model)
  forward, backward, sending = PAPER[model].forward, PAPER[model].backward, 2 * sum(sizes) / _LINK
  computing = forward + backward
  return _WORKERS * computing / (computing + sending - min(backward, sending))


def row(model: str, plan: js.overlap.Plan) -> Row:
  """The prediction beside the measurement."""
  paper = PAPER[model]
  seconds = paper.forward + plan.iteration_time
  spans = plan.timeline
  at_once = max(1 + sum(other.end > one.start for other in spans[:number]) for number, one in enumerate(spans))
  speed_up = _WORKERS * (paper.forward + paper.backward) / seconds
  measured = paper.seconds.get(plan.kind)
  return Row(model, plan.kind, len(plan.groups), at_once, seconds, measured, speed_up, bound_of(model))


def plans_of(model: str) -> list[js.overlap.Plan]:
  """The plans that the flags ask for."""
  times, sizes = layers_of(model)
  link = {"alpha": _ALPHA.value, "beta": _BETA.value, "gamma": _GAMMA.value}
  kinds: Any = _PLAN.value
  return [js.overlap.plan(kind, times, sizes, **link, ways=_WAYS.value) for kind in kinds]


def start_up_of_wfbp(model: str) -> float:
  """The α that would explain the paper's WFBP, which is bound by sending from the first gradient on."""
  times, sizes = layers_of(model)
  sending = PAPER[model].seconds["wfbp"] - PAPER[model].forward - times[-1]
  return (sending - _BETA.value * sum(sizes)) / len(sizes)


def table(rows: list[Row]) -> rich.table.Table:
  """The rows, those of one network together."""
  link = (
    f"α = {1e3 * _ALPHA.value:g} ms, β = {1e9 * _BETA.value:g} ns/byte, γ = {_GAMMA.value:g}, {_WAYS.value} at once"
  )
  result = rich.table.Table(title=f"seconds an iteration, {_WORKERS} workers, {link}: predicted, and by the paper")
  for head in ("network", "plan"):
    result.add_column(head, no_wrap=True)
  for head in ("sent", "at once", "s", "paper", "± %", "wfbp / this", "paper", "S", "S_max"):
    result.add_column(head, justify="right", no_wrap=True)
  for number, one in enumerate(rows):
    own = {other.plan: other for other in rows if other.model == one.model}
    wfbp, paper = own.get("wfbp"), PAPER[one.model].seconds
    result.add_row(
      one.model,
      one.plan,
      str(one.groups),
      str(one.most_at_once),
      f"{one.seconds:.3f}",
      f"{one.measured:.3f}" if one.measured else "–",
      f"{100 * (one.seconds / one.measured - 1):+.0f}" if one.measured else "–",
      f"{wfbp.seconds / one.seconds:.2f}" if wfbp else "–",
      f"{paper['wfbp'] / one.measured:.2f}" if one.measured else "–",
      f"{one.speed_up:.1f}",
      f"{one.bound:.1f}",
      end_section=number + 1 == len(rows) or rows[number + 1].model != one.model,
    )
  return result


def network_table(models: list[str]) -> rich.table.Table:
  """The inputs of the predictions: the networks, and the paper's figures for them."""
  result = rich.table.Table(title="the networks, and the paper's figures for them")
  result.add_column("network", no_wrap=True)
  for head in ("tensors", "parameters", "< 8 kB", "forward s", "backward s", "S_max", "paper", "α of WFBP, ms"):
    result.add_column(head, justify="right", no_wrap=True)
  for model in models:
    paper, (_, sizes) = PAPER[model], layers_of(model)
    result.add_row(
      model,
      str(len(sizes)),
      f"{sum(sizes) / 4:,.0f}",
      f"{sum(size < 8192 for size in sizes)}",
      f"{paper.forward:.3f}",
      f"{paper.backward:.3f}",
      f"{bound_of(model):.1f}",
      f"{paper.bound:.1f}",
      f"{1e3 * start_up_of_wfbp(model):.2f}",
    )
  return result


def _checked(name: str, values: list[str], choices: list[str]) -> None:
  for value in values or [""]:
    if value not in choices:
      raise ValueError(f"--{name}={value}, choose from {', '.join(choices)}")


def _paper(console: rich.console.Console) -> list[Row]:
  """Plans for every network, with a figure of each."""
  rows = []
  for model in rich.progress.track(_MODEL.value, "planning", console=console, transient=True):
    plans = plans_of(model)
    rows += [row(model, plan) for plan in plans]
    path = pathlib.Path(_REPORT_DIR.value) / f"overlap_{model}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    js.overlap.figure(*plans).savefig(path, dpi=120)
  return rows


def _rank(path: pathlib.Path) -> None:
  """Measures in a rank of the lab; rank 0 writes the rows."""
  place = workers.here("processes", _HOSTS.value)
  sizes = (_DEPTH.value, _WIDTH.value, _BATCH.value)
  lab = hiding.Lab(place, _RATE.value[0], *sizes, _DENSITY.value, _REPETITIONS.value)
  rows = lab.rows(_PLAN.value)
  if place.reports:
    path.write_text(json.dumps([lab.setting, rows]))


def _lab(rate: str, path: pathlib.Path) -> tuple[hiding.Setting, list[hiding.Measured]]:
  """Starts the ranks on hosts whose links are that fast, and reads their rows."""
  command = [sys.executable, "-m", "benchmarks.overlap", *sys.argv[1:], f"--rate={rate}", f"--rows={path}"]
  with netlab.lab(_HOSTS.value, None if rate == "none" else rate) as hosts:
    launch.run(command, _HOSTS.value, hosts=hosts)
  setting, rows = json.loads(path.read_text())
  return hiding.Setting(*setting), [hiding.Measured(*row) for row in rows]


def lab_table(setting: hiding.Setting, rows: list[hiding.Measured]) -> rich.table.Table:
  """The rows of one rate."""
  link = f"α = {1e3 * setting.alpha:.2f} ms, β = {1e9 * setting.beta:.1f} ns/byte, γ = {setting.gamma:.2f}"
  runtime = f"two start-ups take {setting.start_ups:.2f} × one, {100 * setting.hidden:.0f} % of an all-reduce is hidden"
  model = f"{setting.tensors} tensors, {setting.bytes / 1e6:.2f} MB, forward {1e3 * setting.forward:.1f} ms, "
  title = f"{setting.rate}: {model}backward {1e3 * setting.backward:.1f} ms, {link}; {runtime}"
  result = rich.table.Table(title=title)
  result.add_column("plan, collective", no_wrap=True)
  for head in ("sent", "ms", "predicted", "± %", "wfbp / this", "xla default / this"):
    result.add_column(head, justify="right", no_wrap=True)
  times = {row.name: row.seconds for row in rows}
  ratio = lambda name, row: f"{times[name] / row.seconds:.2f}" if name in times else "–"
  for row in rows:
    result.add_row(
      row.name,
      str(row.groups or "–"),
      f"{1e3 * row.seconds:.1f}",
      f"{1e3 * row.predicted:.1f}" if row.predicted else "–",
      f"{100 * (row.predicted / row.seconds - 1):+.0f}" if row.predicted else "–",
      ratio("wfbp, dense", row),
      ratio(hiding.DEFAULT, row),
    )
  return result


def _report_paper(console: rich.console.Console) -> list[Any]:
  rows = _paper(console)
  console.print(network_table(_MODEL.value), table(rows), papers.beside(papers.of("overlap"), _measured(rows)))
  console.print(f"figures: {pathlib.Path(_REPORT_DIR.value) / 'overlap_*.png'}")
  return [one._asdict() for one in rows]


def _measured(rows: list[Row]) -> dict[str, float]:
  """The cells of the paper's tables that were predicted, by their names."""
  seconds = {(row.model, row.plan): row.seconds for row in rows}
  found = {f"{row.model} {row.plan}": row.seconds for row in rows}
  found |= {f"{row.model} speed_up": row.speed_up for row in rows if row.plan == "asc_wfbp"}
  found |= {f"{row.model} bound": row.bound for row in rows}
  for model in PAPER:
    own = [seconds.get((model, plan)) for plan in ("mg_wfbp", "asc_wfbp")]
    found |= {f"{model} s2": own[0] / own[1]} if own[0] and own[1] else {}
  return found


def _report_lab(console: rich.console.Console) -> list[Any]:
  found = []
  with tempfile.TemporaryDirectory() as folder:
    for rate in _RATE.value:
      setting, rows = _lab(rate, pathlib.Path(folder) / "rows.json")
      console.print(lab_table(setting, rows))
      found.append({"setting": setting._asdict(), "rows": [row._asdict() for row in rows]})
  return found


def main() -> None:
  """Plans for every network, or measures in the lab, and reports."""
  console = make_console(stderr=_JSON.value)
  _checked("model", _MODEL.value, list(architectures.MODELS))
  _checked("plan", _PLAN.value, _KINDS)
  for flag in (_HOSTS, _DEPTH, _WIDTH, _BATCH, _REPETITIONS):
    if flag.value < 1 + (flag is _HOSTS):
      raise ValueError(f"--{flag.name}={flag.value}, choose at least {1 + (flag is _HOSTS)}")
  if launch.is_rank():
    if not _ROWS.value:
      raise ValueError("the lab starts its own ranks: run this as one program")
    _rank(pathlib.Path(_ROWS.value))
    return
  found = (_report_lab if _RATE.value else _report_paper)(console)
  if _JSON.value:
    print(json.dumps(found))


if __name__ == "__main__":
  entry.run(main)
