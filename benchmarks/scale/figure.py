"""Figures of `benchmarks.scale`: predicted seconds on the wire, and the seconds that programs take to make."""

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from matplotlib import axes
from matplotlib import colors as mcolors

from benchmarks import report
from benchmarks.scale.compiling import PHASES, Program
from benchmarks.scale.predicting import Network, Predicted


def figure(
  predicted: Sequence[Predicted],
  programs: Sequence[Program],
  networks: Sequence[Network],
  title: str,
  path: pathlib.Path,
) -> None:
  """A panel for each network, and one for the making of the programs."""
  count = len(networks) + bool(programs)
  columns = min(2, count)
  rows = math.ceil(count / columns)
  plot, grid = report.pyplot.subplots(
    rows, columns, figsize=(5.2 * columns + 2, 4.2 * rows), squeeze=False, layout="constrained"
  )
  for panel in grid.flat[count:]:
    panel.remove()
  colors = _colors([row.algorithm for row in predicted] + [row.algorithm for row in programs])
  for panel, network in zip(grid.flat, networks, strict=False):
    _draw_network(panel, [row for row in predicted if row.network == network.name], colors)
    panel.set_title(f"{network.name}: α = {1e6 * network.alpha:g} µs, β = {1e9 * network.beta:g} ns/byte")
  if programs:
    _draw_programs(grid.flat[count - 1], programs, colors)
  for panel in grid.flat[:count]:
    _label_workers(panel, sorted({row.workers for row in predicted}))
  plot.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
  report.save(plot, title, path)


def _draw_network(panel: axes.Axes, rows: Sequence[Predicted], colors: Mapping[str, str]) -> None:
  for label in dict.fromkeys(row.algorithm for row in rows):
    line = [row for row in rows if row.algorithm == label]
    panel.plot(
      [row.workers for row in line],
      [row.seconds for row in line],
      linestyle="--" if ":" in label else "-",
      color=colors[label],
      linewidth=2.5 if label in ("dense", "spardl") else 1.5,
      marker=".",
      label=label,
    )
  panel.set(yscale="log", ylabel="seconds an update on the wire")


def _draw_programs(panel: axes.Axes, rows: Sequence[Program], colors: Mapping[str, str]) -> None:
  """A line for each phase: straight over log₂P where it grows no faster."""
  for label in dict.fromkeys(row.algorithm for row in rows):
    line = [row for row in rows if row.algorithm == label]
    for phase, dashes in zip(PHASES, (":", "--", "-"), strict=True):
      panel.plot(
        [row.workers for row in line],
        [getattr(row, phase) for row in line],
        linestyle=dashes,
        color=colors[label],
        marker=".",
        label=f"{label}, {phase}",
      )
  panel.set(title="making the program", ylabel="seconds", ylim=(0, None))
  panel.legend(fontsize="small")


def _colors(labels: Iterable[str]) -> dict[str, str]:
  """One for each algorithm; dense and SparDL have theirs."""
  fixed = {"dense": "black", "spardl": "tab:red"}
  others = itertools.cycle(name for name in mcolors.TABLEAU_COLORS if name not in fixed.values())
  return {label: fixed.get(label) or next(others) for label in dict.fromkeys(labels)}


def _label_workers(panel: axes.Axes, sizes: Sequence[int]) -> None:
  panel.set_xscale("log", base=2)
  panel.set_xticks(sizes, list(map(str, sizes)), fontsize="small")
  panel.minorticks_off()
  panel.set_xlabel("workers P")
  panel.title.set_fontsize("medium")
  panel.grid(alpha=0.3)
