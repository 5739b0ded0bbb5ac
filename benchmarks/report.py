"""What all benchmarks report with: whether goals are reached, files that are replaced whole, and figures."""

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import rich.console

mpl.use("Agg")
from matplotlib import axes, pyplot


class Goal(NamedTuple):
  """A ratio to reach."""

  what: str  # the goal in words
  measured: float | None  # the ratio, of the worst case where there are several; None where none was measured
  met: bool | None  # whether it is reached


def say(goals: Sequence[Goal], console: rich.console.Console) -> None:
  """Prints a line for each goal: the measured ratio, and whether the goal is met."""
  for goal in goals:
    verdict = "not measured" if goal.measured is None else f"{goal.measured:.2f}, {'met' if goal.met else 'not met'}"
    console.print(f"goal: {goal.what}: {verdict}", highlight=False, soft_wrap=True)


def replace(path: pathlib.Path, content: str) -> None:
  """Writes a file: it has all of `content` or what it had before."""
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_name(f"{path.name}.new")
  beside.write_text(content)
  beside.rename(path)


def rounded(value: Any) -> Any:
  """The same with every float to six digits, more than any repetition agrees on."""
  return jax.tree.map(lambda leaf: float(f"{leaf:.6g}") if isinstance(leaf, float) else leaf, value)


def finite(value: Any) -> Any:
  """The same with None for numbers that are not finite, which JSON does not have."""
  is_number = lambda leaf: not isinstance(leaf, float) or math.isfinite(leaf)
  return jax.tree.map(lambda leaf: leaf if is_number(leaf) else None, value)


def band(
  panel: axes.Axes,
  x: Sequence[float],
  lines: Sequence[Sequence[float]],
  label: str,
  linewidth: float = 1.5,
  color: Any = None,
) -> None:
  """Draws the mean of `lines` over `x`, and a band from the least to the most."""
  columns = list(zip(*lines, strict=True))
  (line,) = panel.plot(
    x, [statistics.mean(column) for column in columns], label=label, linewidth=linewidth, color=color
  )
  if len(lines) > 1:
    panel.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=line.get_color(), alpha=0.2)
  panel.grid(alpha=0.3)


def save(plot: pyplot.Figure, title: str, path: pathlib.Path) -> None:
  """Writes a figure with a title over it."""
  plot.suptitle(title, fontsize="medium")
  path.parent.mkdir(parents=True, exist_ok=True)
  plot.savefig(path, dpi=150)
  pyplot.close(plot)
