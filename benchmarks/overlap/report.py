"""Tables and the figure of `benchmarks.overlap`."""

import pathlib
from collections.abc import Sequence

import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.overlap import hiding
from benchmarks.overlap.iterations import PAPER, WORKERS, Row, bound_of, layers_of, start_up_of_wfbp


def table(rows: list[Row], link: js.overlap.Link, ways: int) -> rich.table.Table:
  """The rows, those of one network together."""
  setting = f"α = {1e3 * link.alpha:g} ms, β = {1e9 * link.beta:g} ns/byte, γ = {link.gamma:g}, {ways} at once"
  result = rich.table.Table(title=f"seconds an iteration, {WORKERS} workers, {setting}: predicted, and by the paper")
  for head in ("network", "plan"):
    result.add_column(head, no_wrap=True)
  for head in ("sent", "at once", "s", "paper", "± %", "exposed s", "paper", "wfbp / this", "paper", "S", "S_max"):
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
      f"{one.exposed:.3f}",
      "–" if one.paper_exposed is None else f"{one.paper_exposed:.3f}",
      f"{wfbp.seconds / one.seconds:.2f}" if wfbp else "–",
      f"{paper['wfbp'] / one.measured:.2f}" if one.measured else "–",
      f"{one.speed_up:.1f}",
      f"{one.bound:.1f}",
      end_section=number + 1 == len(rows) or rows[number + 1].model != one.model,
    )
  return result


def network_table(models: list[str], beta: float) -> rich.table.Table:
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
      f"{1e3 * start_up_of_wfbp(model, beta):.2f}",
    )
  return result


def lab_table(setting: hiding.Setting, rows: list[hiding.Measured]) -> rich.table.Table:
  """The rows of one rate."""
  link = f"α = {1e3 * setting.alpha:.2f} ms, β = {1e9 * setting.beta:.1f} ns/byte, γ = {setting.gamma:.2f}"
  runtime = f"two start-ups take {setting.start_ups:.2f} × one, {100 * setting.hidden:.0f} % of an all-reduce is hidden"
  model = f"{setting.tensors} tensors, {setting.bytes / 1e6:.2f} MB, forward {1e3 * setting.forward:.1f} ms, "
  title = f"{setting.rate}: {model}backward {1e3 * setting.backward:.1f} ms, {link}; {runtime}"
  result = rich.table.Table(title=title)
  result.add_column("plan, collective", no_wrap=True)
  for head in ("sent", "ms", "predicted", "± %", "exposed ms", "predicted", "wfbp / this", "xla default / this"):
    result.add_column(head, justify="right", no_wrap=True)
  times = {row.name: row.seconds for row in rows}
  exposed = lambda seconds: f"{1e3 * (seconds - times[hiding.ALONE]):.1f}" if seconds else "–"
  ratio = lambda name, row: f"{times[name] / row.seconds:.2f}" if name in times else "–"
  for row in rows:
    result.add_row(
      row.name,
      str(row.groups or "–"),
      f"{1e3 * row.seconds:.1f}",
      f"{1e3 * row.predicted:.1f}" if row.predicted else "–",
      f"{100 * (row.predicted / row.seconds - 1):+.0f}" if row.predicted else "–",
      exposed(row.seconds),
      exposed(row.predicted),
      ratio("wfbp, dense", row),
      ratio(hiding.DEFAULT, row),
    )
  return result


def draw_exposed(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Computing and the communication that it does not hide, Figure 6; a diamond where the paper's iteration ends."""
  models = list(dict.fromkeys(row.model for row in rows))
  plot, panels = report.pyplot.subplots(
    1, len(models), figsize=(3.2 * len(models), 4), squeeze=False, layout="constrained"
  )
  for panel, model in zip(panels[0], models, strict=True):
    own = [row for row in rows if row.model == model]
    names, computing = [row.plan for row in own], PAPER[model].forward + PAPER[model].backward
    panel.bar(names, computing, color="0.8", label="computing")
    panel.bar(names, [row.exposed for row in own], bottom=computing, color="tab:red", label="exposed communication")
    measured = [row for row in own if row.measured is not None]
    panel.plot(
      [row.plan for row in measured], [row.measured for row in measured], "D", color="black", label="iteration, paper"
    )
    panel.set_title(model, fontsize="small")
    panel.tick_params(axis="x", rotation=60)
  panels[0][0].set_ylabel("seconds of an iteration, predicted")
  handles, labels = panels[0][0].get_legend_handles_labels()
  plot.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
  report.save(plot, f"{WORKERS} workers: communication that backward does not hide", path)
