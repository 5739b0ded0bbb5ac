"""The tables and figures of a race, from its results alone."""

import functools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import rich.table

from benchmarks import netlab, report
from benchmarks.race.results import Curve, Pace, Results, Whole
from benchmarks.race.standings import (
  DENSE,
  Point,
  Standing,
  Target,
  crossing,
  points,
  standings,
)
from benchmarks.report import number

PACE = "ms a step = compute + rest + exchange"
_PARTS = "compute: forward, backward; rest: selection, sums, optimizer; exchange: what messages add"
_LOSS = "% above dense", "accuracy", "bits", "drift"
_BITS = "bits: sent by a worker, a parameter and step; drift: largest RMS distance of workers from the mean of all"
NAMES = {  # of methods in tables and figures
  "dense": "dense",
  "updates:apply_residual=True/onebit": "signs, every step",
  "local:every=4:apply_residual=True/onebit": "signs, every 4 steps",
  "local:every=8/spardl:density=0.3:wire=int8": "SparDL 30 %, every 8 steps",
  "spardl:density=0.01": "SparDL 1 %",
  "spardl:density=0.05:wire=int8": "SparDL 5 %, 8 bits",
  "spardl:teams=2:density=0.01": "SparDL 1 %, 2 teams",
  "oktopk:density=0.01": "Ok-Topk 1 %",
  "topka:density=0.01": "TopkA 1 %",
  "topkdsa:density=0.01": "TopkDSA 1 %",
  "local:apply_residual=True:every=2/onebit": "signs, every 2 steps",
  "local:every=8:apply_residual=True/onebit": "signs, every 8 steps",
  "local:every=16:apply_residual=True/onebit": "signs, every 16 steps",
  "local:every=16:apply_residual=True/nbit:bits=2": "2 bits, every 16 steps",
  "local:every=4:doubles=300:apply_residual=True/onebit": "signs, every 4 … 32 steps",
  "local:every=8:doubles=300:apply_residual=True/onebit": "signs, every 8 … 64 steps",
  "updates:apply_residual=True:averaged=16/onebit": "signs, every step; momentum, every 16",
  "local:every=4:apply_residual=True:averaged=32/onebit": "signs, every 4 steps; momentum, every 32",
  "updates/dense": "updates, dense",
  "updates/spardl:density=0.01": "updates, SparDL 1 %",
  "updates:apply_residual=True/spardl:density=0.01": "updates, SparDL 1 %, applied residual",
  "updates:apply_residual=True/powersgd:rank=4:alternate=True": "updates, PowerSGD rank 4",
  "updates:apply_residual=True/powersgd:rank=16:alternate=True": "updates, PowerSGD rank 16",
}


def table(results: Results, rate: str, target: Target) -> rich.table.Table:
  """The methods at one rate, the fastest first; of all that were timed there, if a rate is given."""
  seeds = ", ".join(map(str, sorted(target.of_seeds(results))))
  title = (
    f"{rate} links: " * bool(rate)
    + f"seconds to {target}, from seeds {seeds} (± standard deviation)"
  )
  lines = []
  for one in standings(results, rate, target):
    if rate and not one.pace:
      continue
    lines.append(
      [
        one.method,
        one.optimizer,
        number(one.seconds, ",.1f"),
        number(one.speed_up, ",.2f"),
      ]
    )
    lines[-1] += [
      number(one.steps, ",.0f"),
      number(one.more_steps, ",.2f"),
      milliseconds(one.pace),
    ]
    lines[-1] += [f"{one.words:,.0f}", number(one.loss, ",.3f")]
  heads = [
    "method",
    "optimizer",
    "seconds",
    "× dense",
    "steps",
    "steps / dense's",
    PACE,
    "words a step",
  ]
  caption = f"{_PARTS}; (1 missing): of a seed not trained, or not as far"
  loss = f"loss at {target.steps} steps"
  return report.table(
    title,
    [*heads, loss],
    lines,
    text=2,
    caption=caption,
    wraps=[*heads[:2], PACE, loss],
  )


def losses(results: Results, *steps: float, seeds: int = 1) -> rich.table.Table:
  """The methods that were trained from as many seeds, after equal steps, the lowest loss first."""
  lines = []
  for one in (one for one in points(results, *steps) if one.seeds >= seeds):
    lines.append(
      [
        one.method,
        one.optimizer,
        str(one.seeds),
        *(number(loss, ",.3f") for loss in one.losses),
      ]
    )
    lines[-1] += [
      number(one.above, ",.1f"),
      f"{one.accuracy:.3f}",
      f"{one.bits:.2g}",
      f"{one.drift:.3g}",
    ]
  heads = [
    "method",
    "optimizer",
    "seeds",
    *(f"loss at {one:g}" for one in steps),
    *_LOSS,
  ]
  return report.table(
    "loss after equal steps", heads, lines, text=2, caption=_BITS, wraps=heads[:2]
  )


def paces(results: Results) -> rich.table.Table:
  """Milliseconds a step of every method at every rate, for a race without curves."""
  lines = []
  for one in results.rows["paces"]:
    ours = [
      row.seconds
      for row in results.find("paces", rate=one.rate)
      if row.method.startswith("spardl")
    ]
    times = report.ratio(one.seconds, ours[0] if ours else None)
    lines.append([rate_text(one.rate), one.method, milliseconds(one), times])
  return report.table(
    "milliseconds a step",
    ("links", "method", PACE, "/ SparDL's"),
    lines,
    text=2,
    caption=_PARTS,
  )


def milliseconds(pace: Pace | None) -> str:
  """Milliseconds a step and their parts; – without a pace."""
  if pace is None:
    return "–"
  return f"{1e3 * pace.seconds:,.0f} = " + " + ".join(
    f"{1e3 * part:,.0f}" for part in pace.parts
  )


def wholes(results: Results) -> rich.table.Table:
  """Whole trainings on the clock, beside steps times seconds a step."""
  lines = []
  for one in results.rows["wholes"]:
    pace = results.pace_of(one, one.rate)
    curves = results.find(
      "curves", method=one.method, optimizer=one.optimizer, seed=one.seed
    )
    at = dict(zip(curves[0].steps, curves[0].loss, strict=True)) if curves else {}
    expected = (one.steps[-1] - 1) * pace.seconds if pace else None
    lines.append(
      [
        one.rate,
        one.method,
        one.optimizer,
        str(one.seed),
        str(one.steps[-1]),
        f"{one.seconds[-1]:,.1f}",
      ]
    )
    lines[-1] += [
      number(expected, ",.1f"),
      f"{one.loss[-1]:.3f}",
      number(at.get(one.steps[-1]), ".3f"),
    ]
  heads = (
    "rate",
    "method",
    "optimizer",
    "seed",
    "steps",
    "seconds",
    "steps × pace",
    "loss",
    "loss of the curve",
  )
  return report.table(
    "whole trainings on the clock, beside curve and pace of the same method",
    heads,
    lines,
    text=3,
  )


def name_of(method: str) -> str:
  """A method as the pages call it; one without a name as the command does."""
  return NAMES.get(method, method)


def rate_text(rate: str) -> str:
  """A rate as people write it: 10 Mbit/s for 10mbit."""
  number, unit = rate.rstrip("abcdefghijklmnopqrstuvwxyz"), rate.lstrip("0123456789.")
  return f"{number} {unit.capitalize()}/s" if number else "not limited"


def slow_first(rates: Iterable[str]) -> list[str]:
  """Rates in ascending order, links without a limit at the end."""
  return sorted(
    dict.fromkeys(rates),
    key=lambda rate: math.inf if rate == "none" else netlab.bits(rate),
  )


def title(results: Results) -> str:
  """The setting in words."""
  setting = results.setting
  return f"{setting['task']}, {setting['hosts']} workers, {setting['batch_size']} inputs each, {setting['recipe']}"


def line(row: Curve | Pace | Whole) -> str:
  """One row in words."""
  if isinstance(row, Pace):
    return f"{row.rate}, {row.method}: {milliseconds(row)} ms a step, {row.bytes / 1e6:.3f} MB a host"
  head = f"{row.method}, {row.optimizer}, seed {row.seed}: loss {row.loss[-1]:.4f} after {row.steps[-1]} steps"
  return (
    f"{row.rate}, {head}, {row.seconds[-1]:.1f} s" if isinstance(row, Whole) else head
  )


def draw_curves(
  results: Results, rates: Sequence[str], target: Target, path: pathlib.Path
) -> None:
  """Loss above the target over steps, and over seconds at each rate: a line for each seed, a dot at its target."""
  rates, targets = slow_first(rates), target.of_seeds(results)
  plot, panels = report.pyplot.subplots(
    1,
    1 + len(rates),
    figsize=(3.4 * (1 + len(rates)), 4.2),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  colours = _colours_of(results)
  above: list[float] = []
  for panel, rate in zip(panels[0], ["", *rates], strict=True):
    for curve in results.rows["curves"]:
      pace = results.pace_of(curve, rate)
      if curve.seed not in targets or (rate and not pace):
        continue
      scale, goal = pace.seconds if pace else 1.0, targets[curve.seed]
      above += [loss - goal for loss in curve.loss]
      style: dict[str, Any] = {"color": colours[curve.method], "linewidth": 1.2}
      panel.plot(
        [scale * step for step in curve.steps],
        [loss - goal for loss in curve.loss],
        **style,
      )
      end = crossing(curve, goal)
      if end is not None:
        panel.plot(
          [scale * end], [0], "o", markersize=4, color=colours[curve.method], zorder=3
        )
    panel.axhline(0, color="black", linestyle="--", linewidth=1)
    panel.set(
      xlabel=f"seconds at {rate_text(rate)}" if rate else "steps",
      xscale="log" if rate else "linear",
    )
    panel.grid(alpha=0.3)
  scale_of_y = (
    {"yscale": "symlog"} if max(above, default=0.0) > 20 else {"ylim": (-0.1, None)}
  )
  panels[0][0].set(ylabel="held-out loss above the target, nats", **scale_of_y)
  handles = [
    report.pyplot.Line2D([], [], color=colour, label=name_of(method))
    for method, colour in colours.items()
  ]
  handles.append(
    report.pyplot.Line2D(
      [], [], color="black", linestyle="--", label=f"target: {target}"
    )
  )
  plot.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
  report.save(plot, f"{title(results)}; a line for each seed", path)


def draw_bars(
  results: Results, rates: Sequence[str], target: Target, path: pathlib.Path
) -> None:
  """Seconds to the target: a panel for each rate, slow links first, a bar for each method with its best optimizer."""
  rates, colours = slow_first(rates), _colours_of(results)
  found: dict[str, dict[str, Standing]] = {rate: {} for rate in rates}
  for rate in rates:
    for one in standings(results, rate, target):
      if one.seconds and not one.seconds.missing:
        found[rate].setdefault(one.method, one)  # the fastest first
  names = [method for method in colours if any(method in own for own in found.values())]
  columns = max(1, len(rates))
  size = 2 + 3.4 * columns, 1.6 + 0.45 * len(names)
  plot, panels = report.pyplot.subplots(
    1, columns, figsize=size, squeeze=False, sharey=True, layout="constrained"
  )
  for panel, (rate, own) in zip(panels[0], found.items(), strict=False):
    bars = [
      (names.index(method), one.seconds, colours[method])
      for method, one in own.items()
      if one.seconds
    ]
    heights, spreads, colors = zip(*bars, strict=True) if bars else ((), (), ())
    means = [spread.mean for spread in spreads]
    drawn = panel.barh(
      heights, means, xerr=[spread.deviation for spread in spreads], color=colors
    )
    if dense := own.get(DENSE):
      halved = _in_16_bits(dense)
      at = names.index(DENSE)
      panel.barh(at, halved, color="none", edgecolor="white", hatch="//")
    panel.bar_label(
      drawn, [_bar_text(one) for one in own.values()], padding=4, fontsize="small"
    )
    # room for the numbers
    panel.set(
      title=rate_text(rate), xlabel="seconds", xlim=(0, 1.75 * max(means, default=1.0))
    )
    panel.set_yticks(range(len(names)), [name_of(method) for method in names])
    panel.spines[["top", "right"]].set_visible(False)
  panels[0][0].invert_yaxis()
  note = "× = times as fast as dense; hatched: dense in 16 bits, computed with half of the exchange"
  report.save(plot, f"seconds to {target}: {title(results)}\n{note}", path)


def _in_16_bits(dense: Standing) -> float:
  """Seconds of dense whose exchange takes half as long: of 16 bits, which XLA on CPU sends as 32."""
  if not dense.pace or not dense.seconds:
    return 0.0
  share = dense.pace.parts[-1] / 2 / dense.pace.seconds
  return dense.seconds.mean * (1 - share)


def _bar_text(one: Standing) -> str:
  """The numbers beside a bar."""
  if one.method == DENSE:
    return f"{one.seconds:,.0f}; 16 bits: {_in_16_bits(one):,.0f}"
  gain = f", {one.speed_up.mean:.3g} ×" if one.speed_up else ""
  return f"{one.seconds:,.0f}{gain}"


def draw_frontier(results: Results, steps: int, path: pathlib.Path) -> None:
  """Loss after equal steps over the bits that a worker sends a parameter and step, and a line of the lowest loss."""
  found, colours = points(results, steps), _colours_of(results)
  markers = dict(
    zip(
      dict.fromkeys(_recipe(one.optimizer) for one in found), "os^Dvp*X", strict=False
    )
  )
  plot, panel = report.pyplot.subplots(figsize=(8, 6), layout="constrained")
  lowest: list[Point] = []
  for one in sorted(found, key=lambda one: (one.bits, one.loss)):
    style: dict[str, Any] = {
      "color": colours[one.method],
      "markersize": 6,
      "capsize": 2,
    }
    deviation = one.losses[-1].deviation if one.losses[-1] else 0
    panel.errorbar(
      one.bits, one.loss, deviation, marker=markers[_recipe(one.optimizer)], **style
    )
    lowest += [one] if not lowest or one.loss < lowest[-1].loss else []
  line = [one.bits for one in lowest], [one.loss for one in lowest]
  panel.step(*line, where="post", color="black", linewidth=0.8, zorder=1)
  panel.set(xscale="log", xlabel="bits that a worker sends a parameter and step")
  panel.xaxis.set_major_formatter("{x:g}")
  panel.set(ylabel=f"held-out loss after {steps} steps, nats")
  panel.grid(alpha=0.3)
  mark = functools.partial(report.pyplot.Line2D, [], [], linestyle="")
  shown = [method for method in colours if any(one.method == method for one in found)]
  handles = [
    mark(color=colours[method], marker="o", label=name_of(method)) for method in shown
  ]
  handles += [
    mark(color="black", fillstyle="none", marker=one, label=kind)
    for kind, one in markers.items()
  ]
  plot.legend(handles=handles, loc="outside lower center", ncols=2, fontsize="small")
  report.save(plot, f"{title(results)}\nline: the lowest loss for so many bits", path)


def _recipe(optimizer: str) -> str:
  """An optimizer without what is tuned for each method, its rate and its window."""
  name, _, *options = optimizer.split(":")
  return ":".join(
    [name, *(option for option in options if not option.startswith("window="))]
  )


def _colours_of(results: Results) -> dict[str, Any]:
  """A colour for each method, in the order of the text, others after it."""
  methods = dict.fromkeys(curve.method for curve in results.rows["curves"])
  order = [
    *(method for method in NAMES if method in methods),
    *(method for method in methods if method not in NAMES),
  ]
  palette = report.pyplot.get_cmap("tab10" if len(order) <= 10 else "tab20")
  return {method: palette(number % palette.N) for number, method in enumerate(order)}
