"""What all benchmarks report with: tables, goals, files that are replaced whole, progress, and figures."""

import contextlib
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import numpy as np
import rich.console
import rich.progress
import rich.table

mpl.use("Agg")
from matplotlib import axes, pyplot


class Goal(NamedTuple):
  """A ratio to reach."""

  what: str  # the goal in words
  # the ratio, of the worst case where there are several; None where none was measured
  measured: float | None
  met: bool | None  # whether it is reached


def goal(
  what: str, measured: float | None, least: float = -math.inf, most: float = math.inf
) -> Goal:
  """A goal that is met where `least` <= `measured` <= `most`; of None it is not known."""
  return Goal(what, measured, None if measured is None else least <= measured <= most)


def say(goals: Sequence[Goal], console: rich.console.Console) -> None:
  """Prints a line for each goal: the measured ratio, and whether the goal is met."""
  for goal in goals:
    verdict = (
      "not measured"
      if goal.measured is None
      else f"{goal.measured:.2f}, {'met' if goal.met else 'not met'}"
    )
    console.print(f"goal: {goal.what}: {verdict}", highlight=False, soft_wrap=True)


def table(
  title: str,
  heads: Sequence[str],
  rows: Iterable[Sequence[str]],
  text: int = 1,
  caption: str | None = None,
  wraps: Sequence[str] = (),
) -> rich.table.Table:
  """A table whose first `text` columns are text, the others numbers; lines divide rows that share the first column.

  Cells under the heads `wraps` may take several lines.
  """
  rows = list(rows)
  # The first cell of each run of rows that share it.
  groups = [
    row[0]
    for row, before in zip(rows, [[None], *rows], strict=False)
    if row[0] != before[0]
  ]
  # Lines divide the runs if any has several rows, and no first cell begins two runs.
  grouped = len(set(groups)) == len(groups) < len(rows)
  found = rich.table.Table(title=title, caption=caption)
  for number, head in enumerate(heads):
    found.add_column(
      head,
      justify="left" if number < text else "right",
      no_wrap=head not in wraps,
      overflow="fold",
    )
  for row, after in zip(rows, [*rows[1:], [""]], strict=True):
    found.add_row(*row, end_section=grouped and row[0] != after[0])
  return found


class Spread(NamedTuple):
  """Numbers of several seeds; f"{spread:.1f}" is mean ± deviation, and how many seeds have no number."""

  mean: float  # over the seeds that have the number
  deviation: float  # standard deviation of these, 0 for one seed
  missing: int = (
    0  # seeds without a finite number: not trained, not as far, or diverged
  )

  @classmethod
  def of(cls, values: Sequence[float | None] | np.ndarray) -> "Spread | None":
    """The spread of the finite numbers; None if there is none."""
    known = [
      float(value) for value in values if value is not None and math.isfinite(value)
    ]
    if not known:
      return None
    return cls(
      statistics.mean(known),
      statistics.stdev(known) if len(known) > 1 else 0.0,
      len(values) - len(known),
    )

  def __format__(self, form: str) -> str:
    deviation = f" ± {self.deviation:{form}}" if self.deviation else ""
    return f"{self.mean:{form}}{deviation}" + (
      f" ({self.missing} missing)" if self.missing else ""
    )


def spread(values: Sequence[float | None], form: str) -> str:
  """Mean and standard deviation of several runs as text."""
  return number(Spread.of(values), form)


def means(
  rows: Iterable[dict[str, Any]], by: Sequence[str], forms: Mapping[str, str]
) -> list[list[str]]:
  """For each group of rows, that are equal in the fields `by`, these fields, and the spreads of those of `forms`.

  Args:
    rows: dictionaries from names of fields to values.
    by: names of the fields that a group shares.
    forms: for each field of numbers, of which a spread is shown, its format (",.2f").
  """
  groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault(tuple(str(row[name]) for name in by), []).append(row)
  spreads = lambda own: [
    spread([row[name] for row in own], form) for name, form in forms.items()
  ]
  return [[*key, *spreads(own)] for key, own in groups.items()]


def number(value: float | Spread | None, form: str) -> str:
  """A number, or a mean and its deviation, as text; – for none."""
  return "–" if value is None else f"{value:{form}}"


def milliseconds(seconds: float | None, digits: int = 1) -> str:
  """Seconds as text, in milliseconds; – for none."""
  return number(None if seconds is None else 1e3 * seconds, f",.{digits}f")


def ratio(above: float | None, below: float | None, digits: int = 2) -> str:
  """A ratio as text; – where a number is missing."""
  # A divisor of 0 counts as missing.
  return f"{above / below:,.{digits}f}" if above is not None and below else "–"


def replace(path: pathlib.Path, content: str) -> None:
  """Writes a file: it has all of `content` or what it had before."""
  # The rename is atomic.
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_name(f"{path.name}.new")
  beside.write_text(content)
  beside.rename(path)


def keep(
  path: pathlib.Path, head: Mapping[str, Any], lists: Mapping[str, Iterable[Any]]
) -> None:
  """Replaces a JSON file: what `head` has, and lists of records, a record a line; infinite numbers become null."""
  lines = [f'"{name}": {json.dumps(value)}' for name, value in head.items()]
  for name, records in lists.items():
    lines.append(
      f'"{name}": [\n' + ",\n".join(json.dumps(plain(one)) for one in records) + "\n]"
    )
  replace(path, "{" + ",\n".join(lines) + "}\n")


def rounded(value: Any) -> Any:
  """The same with every float to six digits, more than any repetition agrees on."""
  return jax.tree.map(
    lambda leaf: float(f"{leaf:.6g}") if isinstance(leaf, float) else leaf, value
  )


def plain(value: Any) -> Any:
  """The same for JSON: named tuples as dictionaries, numbers that are not finite as None."""
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  value = value._asdict() if hasattr(value, "_asdict") else value
  if isinstance(value, Mapping):
    return {name: plain(one) for name, one in value.items()}
  return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def print_json(value: Any) -> None:
  """Prints what --json asks for."""
  print(json.dumps(plain(value)))


@contextlib.contextmanager
def progress(
  console: rich.console.Console, name: str, steps: int
) -> Iterator[Callable[[int, float], None]]:
  """A line that shows the step and its loss while the block runs; it calls what it gets with both."""
  with rich.progress.Progress(
    console=console, transient=True, disable=not console.is_terminal
  ) as bars:
    bar = bars.add_task(name, total=steps)
    yield lambda step, loss: bars.update(
      bar, completed=step, description=f"{name}: loss {loss:.3f}"
    )


def band(
  panel: axes.Axes, x: Sequence[float], lines: Sequence[Sequence[float]], label: str
) -> None:
  """Draws the mean of `lines` over `x`, and a band from the least to the most."""
  columns = list(zip(*lines, strict=True))
  (line,) = panel.plot(x, list(map(statistics.mean, columns)), label=label)
  if len(lines) > 1:
    panel.fill_between(
      x,
      list(map(min, columns)),
      list(map(max, columns)),
      color=line.get_color(),
      alpha=0.2,
    )
  panel.grid(alpha=0.3)


def save(plot: pyplot.Figure, title: str, path: pathlib.Path) -> None:
  """Writes a figure with a title over it."""
  plot.suptitle(title, fontsize="medium")
  path.parent.mkdir(parents=True, exist_ok=True)
  plot.savefig(path, dpi=150)
  pyplot.close(plot)
