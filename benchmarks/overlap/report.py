"""Tables of `benchmarks.overlap`, and the figure of exposed communication."""

import pathlib
from collections.abc import Sequence

import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.overlap import hiding
from benchmarks.overlap.contention import Curve
from benchmarks.overlap.iterations import PAPER, WORKERS, Row, bound_of, layers_of, start_up_of_wfbp


def table(rows: list[Row], link: js.overlap.Link, ways: int) -> rich.table.Table:
  """The rows, those of one network together."""
  setting = f"α = {1e3 * link.alpha:g} ms, β = {1e9 * link.beta:g} ns/byte, γ = {link.gamma:g}, {ways} at once"
  result = _number_table(
    f"seconds an iteration, {WORKERS} workers, {setting}: predicted, and by the paper",
    ("network", "plan"),
    ("sent", "at once", "s", "paper", "± %", "exposed s", "paper", "wfbp / this", "paper", "S", "S_max"),
  )
  for number, one in enumerate(rows):
    wfbp = next((other.seconds for other in rows if (other.model, other.plan) == (one.model, "wfbp")), None)
    paper = ["–"] * 3
    if one.measured:
      percent, ratio = 100 * (one.seconds / one.measured - 1), PAPER[one.model].seconds["wfbp"] / one.measured
      paper = [f"{one.measured:.3f}", f"{percent:+.0f}", f"{ratio:.2f}"]
    result.add_row(
      *(one.model, one.plan, str(one.groups), str(one.most_at_once), f"{one.seconds:.3f}", *paper[:2]),
      *(f"{one.exposed:.3f}", "–" if one.paper_exposed is None else f"{one.paper_exposed:.3f}"),
      *(f"{wfbp / one.seconds:.2f}" if wfbp else "–", paper[2], f"{one.speed_up:.1f}", f"{one.bound:.1f}"),
      end_section=number + 1 == len(rows) or rows[number + 1].model != one.model,
    )
  return result


def network_table(models: list[str], beta: float) -> rich.table.Table:
  """The inputs of the predictions: the networks, and the paper's figures for them."""
  heads = ("tensors", "parameters", "< 8 kB", "forward s", "backward s", "S_max", "paper", "α of WFBP, ms")
  result = _number_table("the networks, and the paper's figures for them", ("network",), heads)
  for model in models:
    paper, (_, sizes) = PAPER[model], layers_of(model)
    counts = f"{len(sizes)}", f"{sum(sizes) / 4:,.0f}", f"{sum(size < 8192 for size in sizes)}"
    seconds = f"{paper.forward:.3f}", f"{paper.backward:.3f}"
    start_up = f"{1e3 * start_up_of_wfbp(model, beta):.2f}"
    result.add_row(model, *counts, *seconds, f"{bound_of(model):.1f}", f"{paper.bound:.1f}", start_up)
  return result


def lab_table(setting: hiding.Setting, rows: list[hiding.Measured]) -> rich.table.Table:
  """The rows of one rate."""
  link = f"α = {1e3 * setting.alpha:.2f} ms, β = {1e9 * setting.beta:.1f} ns/byte, γ = {setting.gamma:.2f}"
  runtime = f"two start-ups take {setting.start_ups:.2f} × one, {100 * setting.hidden:.0f} % of an all-reduce is hidden"
  model = f"{setting.tensors} tensors, {setting.bytes / 1e6:.2f} MB, forward {1e3 * setting.forward:.1f} ms, "
  title = f"{setting.rate}: {model}backward {1e3 * setting.backward:.1f} ms, {link}; {runtime}"
  heads = ("sent", "ms", "predicted", "± %", "exposed ms", "predicted", "wfbp / this", "xla default / this")
  result = _number_table(title, ("plan, collective",), heads)
  times = {row.name: row.seconds for row in rows}
  exposed = lambda seconds: f"{1e3 * (seconds - times[hiding.ALONE]):.1f}"
  ratio = lambda name, row: f"{times[name] / row.seconds:.2f}" if name in times else "–"
  for row in rows:
    ms, off, hidden = "–", "–", "–"
    if row.predicted:
      ms, hidden = f"{1e3 * row.predicted:.1f}", exposed(row.predicted)
      off = f"{100 * (row.predicted / row.seconds - 1):+.0f}"
    measured = row.name, str(row.groups or "–"), f"{1e3 * row.seconds:.1f}"
    result.add_row(
      *measured, ms, off, exposed(row.seconds), hidden, ratio("wfbp, dense", row), ratio(hiding.DEFAULT, row)
    )
  return result


def contention_table(curve: Curve) -> rich.table.Table:
  """All-reduces of every size on one network."""
  title = f"{curve.name}, {curve.workers} workers: all-reduces of each size, α = {1e3 * curve.start_up:.2f} ms"
  result = _number_table(title, (), ("kB", "one ms", "two at once ms", "2 × one / two", "γ", "link: one", "two"))
  percent = lambda share: "–" if share is None else f"{100 * share:.0f} %"
  for point in curve.points:
    ratios = f"{2 * point.one / point.two:.2f}", f"{curve.gamma(point):.2f}"
    shares = curve.share(point.size, point.one), curve.share(2 * point.size, point.two)
    times = f"{1e3 * point.one:.2f}", f"{1e3 * point.two:.2f}"
    result.add_row(f"{point.size / 1024:,.0f}", *times, *ratios, *map(percent, shares))
  return result


def _number_table(title: str, texts: Sequence[str], heads: Sequence[str]) -> rich.table.Table:
  """An empty table, with columns of texts and then of numbers."""
  result = rich.table.Table(title=title)
  for head in (*texts, *heads):
    result.add_column(head, justify="left" if head in texts else "right", no_wrap=True)
  return result


def draw_exposed(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Computing and the communication that it does not hide, Figure 6; a diamond where the paper's iteration ends."""
  models = list(dict.fromkeys(row.model for row in rows))
  size = 3.2 * len(models), 4
  plot, panels = report.pyplot.subplots(1, len(models), figsize=size, squeeze=False, layout="constrained")
  for panel, model in zip(panels[0], models, strict=True):
    own = [row for row in rows if row.model == model]
    names, computing = [row.plan for row in own], PAPER[model].forward + PAPER[model].backward
    panel.bar(names, computing, color="0.8", label="computing")
    panel.bar(names, [row.exposed for row in own], bottom=computing, color="tab:red", label="exposed communication")
    paper = {row.plan: row.measured for row in own if row.measured is not None}
    panel.plot(list(paper), list(paper.values()), "D", color="black", label="iteration, paper")
    panel.set_title(model, fontsize="small")
    panel.tick_params(axis="x", rotation=60)
  panels[0][0].set_ylabel("seconds of an iteration, predicted")
  handles, labels = panels[0][0].get_legend_handles_labels()
  plot.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
  report.save(plot, f"{WORKERS} workers: communication that backward does not hide", path)
