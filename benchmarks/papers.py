"""The papers' numbers beside ours: `paper_tables.toml`, read by the benchmarks that measure them."""

import collections
import functools
import math
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import rich.console
import rich.table

from benchmarks import report

Kind = Literal["", "formula", "construction", "drawing"]
Verdict = Literal[
  "reproduced",
  "calibrated",
  "undecided",
  "other setting",
  "contradicted",
  "the task does not tell",
  "no control",
  "repeated",
  "not run",
  "formula",
  "by construction",
  "drawing",
]
# verdicts on results of a paper; the others are not counted
JUDGED = (
  "reproduced",
  "undecided",
  "other setting",
  "contradicted",
  "the task does not tell",
)
TOLERANCE = 0.1  # of the paper's number
RATIO_TOLERANCE = 0.25  # of the paper's gain over a draw
NO_GAIN = 0.1  # of it
_HEADS = "", "", "paper", "ours", "noise", "control", "verdict"
_BOUNDS = {"above": ">", "below": "<", "paper": ""}
_FILE = tomllib.loads(pathlib.Path(__file__).with_name("paper_tables.toml").read_text())


class Cell(NamedTuple):
  """A number of a paper, or a table or figure of it without numbers."""

  paper: str  # whose it is
  table: str  # the table or figure
  name: str  # of the cell, "" where the table has none
  what: str  # the quantity and its unit
  setting: str = ""  # of the paper
  benchmark: str = ""  # that measures ours, "" for none
  paper_value: float | None = None  # the paper's number; None where it has a curve only
  bound: Literal["", ">", "<"] = (
    ""  # ">" or "<" where the paper says only that it is above or below this number
  )
  ours: float | None = None  # our number; None where it was not measured
  differs: str = ""  # how our setting differs, "" for the same
  draw: float | None = (
    None  # the number of which neither side is ahead, None where no sides are compared
  )
  reason: str = ""  # why ours differs, "" where that is not known
  noise: float = 0.0  # standard error of our number, a fraction of it
  fitted: bool = (
    False  # whether a parameter of ours was chosen so that ours is the paper's number
  )
  # the table whose predictions these numbers restate, "" where they are of their own
  repeats: str = ""
  kind: Kind = ""  # what it is where the paper has no result
  trained: bool = False  # whether it is a result of trainings, which takes a control
  # loss, error or seconds without an exchange / those of the best methods, inf where the
  # target is not reached without one; None if not measured
  control: float | None = None
  # a formula or count of `js.costs`: collective with options, workers, and which number
  by: tuple[str, int, str] | tuple[()] = ()

  @property
  def verdict(self) -> Verdict:
    """What ours says of the paper's; benchmarks/pages/papers.md says what each verdict means."""
    if self.kind == "drawing":
      return "drawing"
    if self.ours is None or self.paper_value is None:
      return "not run"
    if self.fitted or self.repeats:
      return "calibrated" if self.fitted else "repeated"
    if self.trained and self.control is None:
      return "no control"
    # Without an exchange the task is learned as well: it cannot tell methods apart.
    if self.control is not None and self.control <= 1 + self.noise:
      return "the task does not tell"
    # Ours minus to plus one standard error: a verdict has to hold on the whole range.
    scales = [1 + self.noise * part / 10 for part in range(-10, 11)]
    judged = {_judge(self, self.paper_value, self.ours * scale) for scale in scales}
    if judged == {"reproduced"} and self.kind:
      return "formula" if self.kind == "formula" else "by construction"
    return judged.pop() if len(judged) == 1 else "undecided"


def _judge(cell: Cell, paper_value: float, ours: float) -> Verdict:
  """The verdict on our number `ours`, without noise, beside the paper's.

  Both are compared by what they gain over the draw, the number of which neither side is
  ahead, or over 0 where no sides are compared. `near` is the tolerance of the gain.
  """
  draw, near = (0.0, TOLERANCE) if cell.draw is None else (cell.draw, RATIO_TOLERANCE)
  # The paper's number may be below the draw: its gain counts as positive, too.
  sign = 1 if paper_value >= draw else -1
  claimed, gained = sign * (paper_value - draw), sign * (ours - draw)
  is_near = abs(gained - claimed) <= near * claimed
  if {"": is_near, ">": ours > paper_value, "<": ours < paper_value}[cell.bound]:
    return "reproduced"
  no_gain = cell.draw is not None and gained <= NO_GAIN * claimed
  return "contradicted" if no_gain or not cell.differs else "other setting"


def contents() -> dict[str, list[str]]:
  """The tables and figures of each paper, as in "Table IV" and "Figure 8"."""
  figures = lambda count: [str(number) for number in range(1, count + 1)]
  numbers = lambda own: {"Table": own["tables"], "Figure": figures(own["figures"])}
  return {
    paper: [f"{kind} {one}" for kind, known in numbers(own).items() for one in known]
    for paper, own in _FILE["papers"].items()
  }


@functools.cache
def every() -> tuple[Cell, ...]:
  """All cells, in the order of the file."""
  found = []
  for own in _FILE["table"]:
    same = {
      field: value for field, value in own.items() if field not in ("name", "cells")
    }
    # A table without cells is one cell without a name, and without a number.
    for name, values in own.get("cells", {"": {}}).items():
      key = next(iter(_BOUNDS.keys() & values), "paper")
      number = {"paper_value": values.get(key), "bound": _BOUNDS[key]}
      own_fields = {field: values[field] for field in values if field not in _BOUNDS}
      fields = same | own_fields | number
      fields["by"] = tuple(fields.get("by", ()))
      found.append(Cell(table=own["name"], name=name, **fields))
  return tuple(found)


def number(paper: str, table: str, name: str) -> float:
  """The paper's number of a cell; KeyError if there is no such cell, or it has none."""
  values = {
    (one.paper, one.table, one.name): one.paper_value
    for one in every()
    if one.paper_value is not None
  }
  return values[paper, table, name]


def tables_of(
  cells: Sequence[Cell], measured: Iterable[str] = ()
) -> list[rich.table.Table]:
  """The numbers of a paper's cells, those of `measured` with a star, and what each of its tables is."""
  rows: list[list[str]] = []
  about: dict[str, list[str]] = {}
  for one in cells:
    ours = text(one.ours) + "*" * (one.name in measured)
    rows.append(
      [
        one.table,
        one.name,
        f"{one.bound} {text(one.paper_value)}".strip(),
        ours,
        f"{one.noise:.0%}" if one.noise else "",
        _control_text(one.control),
        one.verdict,
      ]
    )
    setting = f"`{one.benchmark}`: {one.differs or 'the same'}" if one.benchmark else ""
    # The first cell of a table says what all have in common; others add what differs.
    own = [one.table, one.what, one.setting, setting, one.reason]
    row = about.setdefault(one.table, own)
    # what a cell has of its own
    for column, more in (3, one.differs), (4, one.reason):
      if more not in row[column]:
        row[column] = "; ".join(filter(None, [row[column], f"{one.name}: {more}"]))
  heads = (
    "",
    "what",
    "paper's setting",
    "our benchmark and setting",
    "why ours differs",
  )
  caption = "* measured by this run" if measured else None
  numbers = report.table(cells[0].paper, _HEADS, rows, text=2, caption=caption)
  return [
    numbers,
    report.table("", heads, about.values(), text=len(heads), wraps=heads),
  ]


def beside(
  cells: Sequence[Cell], measured: Mapping[str, float] | None = None
) -> rich.console.Group:
  """The papers' numbers beside ours; `measured` are ours of this run by name of the cell."""
  now = measured or {}
  groups: dict[str, list[Cell]] = {}
  for cell in cells:
    groups.setdefault(cell.paper, []).append(
      cell._replace(ours=now.get(cell.name, cell.ours))
    )
  return rich.console.Group(
    *(table for own in groups.values() for table in tables_of(own, now))
  )


def totals(cells: Iterable[Cell]) -> str:
  """How many cells have which verdict: those on results of a paper, then those that are not counted."""
  counts = collections.Counter[str](cell.verdict for cell in cells)
  known: tuple[str, ...] = get_args(Verdict)
  said = lambda names: ", ".join(f"{counts[name]} {name}" for name in names)
  judged = sum(counts[name] for name in JUDGED)
  others = [name for name in known if name not in JUDGED]
  return f"{judged} judged: {said(JUDGED)}; not counted: {said(others)}"


def of(benchmark: str) -> list[Cell]:
  """The cells that a benchmark measures."""
  return [cell for cell in every() if cell.benchmark == benchmark]


def _control_text(control: float | None) -> str:
  if control is None:
    return ""
  return "not reached" if math.isinf(control) else f"{control:.3g}"


def text(value: float | None) -> str:
  """A number to four digits, whole ones to all of them; – for None."""
  if value is None:
    return "–"
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
