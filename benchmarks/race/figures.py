"""The figures of a race, from its results alone: loss over seconds, and seconds to the target."""

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.race.report import NAMES, name_of, rate_text, slow_first, spread_text, title
from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE, Standing, Target, crossing, standings
from benchmarks.report import pyplot, save


def curves(results: Results, rates: Sequence[str], target: Target, path: pathlib.Path) -> None:
  """Loss above the target over steps, and over seconds at each rate, slow links first: a line for each seed.

  A dot is where a line reaches the target of its seed.
  """
  rates, targets = slow_first(rates), target.of_seeds(results)
  plot, panels = pyplot.subplots(
    1, 1 + len(rates), figsize=(3.4 * (1 + len(rates)), 4.2), sharey=True, squeeze=False, layout="constrained"
  )
  colours = _colours_of(results)
  above: list[float] = []
  for panel, rate in zip(panels[0], ["", *rates], strict=True):
    for curve in results.rows["curves"]:
      paces = results.find("paces", rate=rate, method=curve.method)
      if curve.seed not in targets or (rate and not paces):
        continue
      scale, goal = paces[0].seconds if rate else 1.0, targets[curve.seed]
      above += [loss - goal for loss in curve.loss]
      style: dict[str, Any] = {"color": colours[curve.method], "linewidth": 1.2}
      panel.plot([scale * step for step in curve.steps], [loss - goal for loss in curve.loss], **style)
      end = crossing(curve, goal)
      if end is not None:
        panel.plot([scale * end], [0], "o", markersize=4, color=colours[curve.method], zorder=3)
    panel.axhline(0, color="black", linestyle="--", linewidth=1)
    panel.set(xlabel=f"seconds at {rate_text(rate)}" if rate else "steps", xscale="log" if rate else "linear")
    panel.grid(alpha=0.3)
  scale_of_y = {"yscale": "symlog"} if max(above, default=0.0) > 20 else {"ylim": (-0.1, None)}
  panels[0][0].set(ylabel="held-out loss above the target, nats", **scale_of_y)
  handles = [pyplot.Line2D([], [], color=colour, label=name_of(method)) for method, colour in colours.items()]
  handles.append(pyplot.Line2D([], [], color="black", linestyle="--", label=f"target: {target}"))
  plot.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
  save(plot, f"{title(results)}; a line for each seed", path)


def bars(results: Results, rates: Sequence[str], target: Target, path: pathlib.Path) -> None:
  """Seconds to the target: a panel for each rate, slow links first, a bar for each method with its best optimizer."""
  rates, colours = slow_first(rates), _colours_of(results)
  found: dict[str, dict[str, Standing]] = {rate: {} for rate in rates}
  for rate in rates:
    for one in standings(results, rate, target):
      if one.seconds and not one.seconds.missing:
        found[rate].setdefault(one.method, one)  # the fastest first
  names = [method for method in colours if any(method in own for own in found.values())]
  plot, panels = pyplot.subplots(
    1,
    max(1, len(rates)),
    figsize=(2 + 3.4 * max(1, len(rates)), 1.6 + 0.45 * len(names)),
    squeeze=False,
    sharey=True,
    layout="constrained",
  )
  for panel, (rate, own) in zip(panels[0], found.items(), strict=False):
    spreads = {method: one.seconds for method, one in own.items() if one.seconds}
    shown = [method for method in names if method in spreads]
    drawn = panel.barh(
      [names.index(method) for method in shown],
      [spreads[method].mean for method in shown],
      xerr=[spreads[method].deviation for method in shown],
      color=[colours[method] for method in shown],
    )
    gain = lambda one: f", {one.speed_up.mean:.3g} ×" if one.speed_up and one.method != DENSE else ""
    texts = [f"{spread_text(spreads[method], 0)}{gain(own[method])}" for method in shown]
    panel.bar_label(drawn, texts, padding=4, fontsize="small")
    longest = max((spread.mean for spread in spreads.values()), default=1.0)
    panel.set(title=rate_text(rate), xlabel="seconds", xlim=(0, 1.75 * longest))  # room for the numbers
    panel.set_yticks(range(len(names)), [name_of(method) for method in names])
    panel.spines[["top", "right"]].set_visible(False)
  panels[0][0].invert_yaxis()
  save(plot, f"seconds to {target}: {title(results)}; × = times as soon as dense", path)


def _colours_of(results: Results) -> dict[str, Any]:
  """A colour for each method, in the order of the text, others after it."""
  methods = dict.fromkeys(curve.method for curve in results.rows["curves"])
  order = [*(method for method in NAMES if method in methods), *(method for method in methods if method not in NAMES)]
  palette = pyplot.get_cmap("tab10" if len(order) <= 10 else "tab20")
  return {method: palette(number % palette.N) for number, method in enumerate(order)}
