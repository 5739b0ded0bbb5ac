"""The tables and the figure of a race, from its results alone."""

import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import rich.table

from benchmarks import report
from benchmarks.race.results import Advised, Curve, Pace, Results, Whole
from benchmarks.race.standings import DENSE, Spread, Standing, Target, standings

ADVISED = "1gbit"  # where advice has a goal
_PARTS = "ms a step: compute (forward, backward) + rest (selection, sums, optimizer) + exchange (what messages add)"
GOALS = {"100mbit": 3.0, "10mbit": 15.0}  # dense's seconds to its loss / those of the best, of the task `lm`


def table(results: Results, rate: str, target: Target) -> rich.table.Table:
  """The methods at one rate, the fastest first."""
  seeds = target.of_seeds(results)
  links = f"{rate} links: " if rate else ""
  title = f"{links}seconds to {target}, from seeds {', '.join(map(str, sorted(seeds)))} (± standard deviation)"
  found = rich.table.Table(title=title, caption=f"{_PARTS}; (1 missing): of a seed not trained, or not as far")
  for head in ("method", "optimizer"):
    found.add_column(head, overflow="fold")
  for head in ("seconds", "× dense", "steps", "ms a step", "words a step", "drift"):
    found.add_column(head, justify="right", no_wrap=True)
  for head in ("loss, equal steps", "loss, equal seconds"):
    found.add_column(head, justify="right")
  for one in standings(results, rate, target):
    found.add_row(
      one.method,
      one.optimizer,
      spread_text(one.seconds, 1),
      spread_text(one.speed_up, 2),
      spread_text(one.steps, 0),
      milliseconds(one.pace),
      f"{one.words:,.0f}",
      f"{one.drift:.3g}" if one.drift else "–",
      spread_text(one.loss, 3),
      spread_text(one.loss_in_time, 3),
    )
  return found


def paces(results: Results) -> rich.table.Table:
  """Milliseconds a step of every method at every rate, for a race without curves."""
  found = rich.table.Table(title="milliseconds a step", caption=_PARTS)
  for head in ("rate", "method", "ms a step", "× dense", "MB a host and step"):
    found.add_column(head, justify="left" if head == "method" else "right")
  for one in results.rows["paces"]:
    dense = results.find("paces", rate=one.rate, method=DENSE)
    gain = f"{dense[0].seconds / one.seconds:.2f}" if dense else "–"
    found.add_row(one.rate, one.method, milliseconds(one), gain, f"{one.bytes / 1e6:,.3f}")
  return found


def milliseconds(pace: Pace | None) -> str:
  """Milliseconds a step and their parts; – without a pace."""
  if pace is None:
    return "–"
  return f"{1e3 * pace.seconds:,.0f} = " + " + ".join(f"{1e3 * part:,.0f}" for part in pace.parts)


def spread_text(spread: Spread | None, digits: int) -> str:
  """Mean ± standard deviation, and how many seeds have no number; – without any."""
  if spread is None:
    return "–"
  deviation = f" ± {spread.deviation:,.{digits}f}" if spread.deviation else ""
  return f"{spread.mean:,.{digits}f}{deviation}" + (f" ({spread.missing} missing)" if spread.missing else "")


def wholes(results: Results) -> rich.table.Table:
  """Whole trainings on the clock, beside steps times seconds a step."""
  found = rich.table.Table(title="whole trainings on the clock, beside the curve and the pace of the same method")
  for head in ("rate", "method", "optimizer", "seed", "steps", "seconds", "steps × pace", "loss", "loss of the curve"):
    found.add_column(head, justify="left" if head in ("method", "optimizer") else "right", no_wrap=True)
  for one in results.rows["wholes"]:
    paces = results.find("paces", rate=one.rate, method=one.method)
    curves = results.find("curves", method=one.method, optimizer=one.optimizer, seed=one.seed)
    at = dict(zip(curves[0].steps, curves[0].loss, strict=True)) if curves else {}
    found.add_row(
      one.rate,
      one.method,
      one.optimizer,
      str(one.seed),
      str(one.steps[-1]),
      f"{one.seconds[-1]:,.1f}",
      f"{(one.steps[-1] - 1) * paces[0].seconds:,.1f}" if paces else "–",
      f"{one.loss[-1]:.3f}",
      f"{at[one.steps[-1]]:.3f}" if one.steps[-1] in at else "–",
    )
  return found


def goals(results: Results, target: Target) -> list[report.Goal]:
  """Whether the best method is as much sooner as it should be; for the task `lm`."""
  found = []
  for rate, ratio in GOALS.items():
    ratios = [
      one.speed_up.mean for one in standings(results, rate, target) if one.speed_up and not one.speed_up.missing
    ]
    best = max(ratios, default=None)
    what = f"at {rate} the best method reaches {target} {ratio:g} × as soon as dense"
    found.append(report.Goal(what, best, None if best is None else best >= ratio))
  for advised in results.find("advice", rate=ADVISED):
    what = (
      f"at {ADVISED} what js.costs.advise picks ({advised.method}) takes at most 1.05 × dense's seconds to its loss"
    )
    fastest = next((one for one in standings(results, ADVISED, target) if one.method == advised.method), None)
    of = fastest and fastest.speed_up
    longer = 1 / of.mean if of and not of.missing else None
    found.append(report.Goal(what, longer, None if longer is None else longer <= 1.05))
  return found


def figure(results: Results, rates: Sequence[str], path: pathlib.Path) -> None:
  """Loss over steps, and over seconds at each rate; a line for each method, the mean of the seeds, and their band."""
  names = dict.fromkeys((curve.method, curve.optimizer) for curve in results.rows["curves"])
  size = max(8.0, 4.5 * (1 + len(rates))), 3.7 + 0.2 * len(names)  # with room for the legend
  plot, panels = report.pyplot.subplots(
    1, 1 + len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained"
  )
  colours = _colours(names)
  for panel, rate in zip(panels[0], ["", *rates], strict=True):
    for method, optimizer in names:
      curves = results.find("curves", method=method, optimizer=optimizer)
      paces = results.find("paces", rate=rate, method=method)
      if rate and not paces:
        continue
      scale = paces[0].seconds if rate else 1.0
      shared, lines = _shared(curves)
      report.band(
        panel, [scale * step for step in shared], lines, f"{method}, {optimizer}", color=colours[method, optimizer]
      )
    panel.set(xlabel=f"seconds at {rate}" if rate else "step", xscale="log" if rate else "linear")
    panel.xaxis.set_minor_formatter(report.pyplot.NullFormatter())  # its labels overlap
  losses = [loss for curve in results.rows["curves"] for loss in curve.loss if math.isfinite(loss)] or [1.0]
  panels[0][0].set(ylabel="held-out loss", yscale="log" if max(losses) > 20 * min(losses) else "linear")
  plot.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", fontsize="small")
  report.save(plot, title(results), path)


def _shared(curves: Sequence[Curve]) -> tuple[list[int], list[list[float]]]:
  """The steps at which all were evaluated, and the losses of each there."""
  of = [dict(zip(curve.steps, curve.loss, strict=True)) for curve in curves]
  shared = sorted(set.intersection(*map(set, of)))
  return shared, [[losses[step] for step in shared] for losses in of]


def bars(results: Results, rates: Sequence[str], target: Target, path: pathlib.Path) -> None:
  """Seconds to the target: a panel for each rate, a bar for each method that reaches it, with its best optimizer."""
  best: dict[str, dict[str, Standing]] = {rate: {} for rate in rates}
  for rate in rates:
    for one in standings(results, rate, target):
      if one.seconds and not one.seconds.missing:
        best[rate].setdefault(one.method, one)  # the fastest first
  names = list(dict.fromkeys(method for found in best.values() for method in found))
  colours = _colours(names)
  most = max(map(len, best.values()), default=1)
  plot, panels = report.pyplot.subplots(
    1, max(1, len(rates)), figsize=(4 * max(1, len(rates)), 1.4 + 0.5 * most), squeeze=False, layout="constrained"
  )
  for panel, (rate, found) in zip(panels[0], best.items(), strict=False):
    order = sorted(found.values(), key=lambda one: -_mean(one.seconds))
    drawn = panel.barh(
      range(len(order)),
      [_mean(one.seconds) for one in order],
      xerr=[one.seconds.deviation if one.seconds else 0.0 for one in order],
      color=[colours[one.method] for one in order],
    )
    gain = lambda one: "" if one.method == DENSE else f", {_mean(one.speed_up):.3g} ×"
    texts = [f"{spread_text(one.seconds, 0)} s{gain(one)}" for one in order]
    panel.bar_label(drawn, texts, padding=4, fontsize="small")
    longest = max((_mean(one.seconds) for one in order), default=1.0)
    panel.set(title=links(rate), yticks=[], xticks=[], xlim=(0, 1.9 * longest))  # room for the numbers
    panel.spines[["top", "right", "bottom"]].set_visible(False)
  handles = [report.pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
  plot.legend(handles, names, loc="outside lower center", fontsize="small")
  report.save(plot, f"seconds to {target}: {title(results)}", path)


def _colours(names: Iterable[Any]) -> dict[Any, Any]:
  """A colour for each name."""
  distinct = dict.fromkeys(names)
  palette = report.pyplot.get_cmap("tab10" if len(distinct) <= 10 else "tab20")
  return {name: palette(number % palette.N) for number, name in enumerate(distinct)}


def _mean(spread: Spread | None) -> float:
  return spread.mean if spread else 0.0


def links(rate: str) -> str:
  """A rate as people write it: 10 Mbit/s for 10mbit.

  Example:
    >>> links("10mbit"), links("none")
    ('10 Mbit/s', 'not limited')
  """
  number, unit = rate.rstrip("abcdefghijklmnopqrstuvwxyz"), rate.lstrip("0123456789.")
  return f"{number} {unit.capitalize()}/s" if number else "not limited"


def title(results: Results) -> str:
  """The setting in words."""
  setting = results.setting
  return f"{setting['task']}, {setting['hosts']} workers, {setting['batch_size']} inputs each, {setting['recipe']}"


def line(row: Curve | Pace | Whole | Advised) -> str:
  """One row in words."""
  if isinstance(row, Advised):
    return f"{row.rate}, js.costs.advise: {row.why}"
  if isinstance(row, Pace):
    return f"{row.rate}, {row.method}: {milliseconds(row)} ms a step, {row.bytes / 1e6:.3f} MB a host"
  head = f"{row.method}, {row.optimizer}, seed {row.seed}: loss {row.loss[-1]:.4f} after {row.steps[-1]} steps"
  return f"{row.rate}, {head}, {row.seconds[-1]:.1f} s" if isinstance(row, Whole) else head


def as_json(results: Results, rates: Sequence[str], target: Target) -> dict[str, Any]:
  """The rows, and the standings at each rate; without a rate those by steps alone, at ""."""
  rows = {kind: [report.finite(row)._asdict() for row in rows] for kind, rows in results.rows.items()}
  plain = lambda one: {
    name: getattr(value, "_asdict", lambda value=value: value)() for name, value in one._asdict().items()
  }
  return {
    "setting": results.setting,
    **rows,
    "standings": {
      rate: [plain(report.finite(one)) for one in standings(results, rate, target)] for rate in rates or [""]
    },
  }
