"""The papers' numbers beside ours: `paper_tables.toml`, read by the benchmarks that measure them."""

import functools
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import rich.console
import rich.table

from benchmarks import report

Verdict = Literal["reproduced", "calibrated", "undecided", "other setting", "contradicted", "repeated", "not run"]
TOLERANCE = 0.1  # of the paper's number
RATIO_TOLERANCE = 0.25  # of the paper's gain over a draw
NO_GAIN = 0.1  # of it
_FILE = pathlib.Path(__file__).with_name("paper_tables.toml")


class Cell(NamedTuple):
  """A number of a paper."""

  paper: str  # whose it is
  table: str  # the table or figure
  name: str  # of the cell
  what: str  # the quantity and its unit
  setting: str  # of the paper
  benchmark: str  # that measures ours
  paper_value: float | None  # the paper's number; None where it has a curve only
  above: bool = False  # whether the paper says only that it is above this number
  ours: float | None = None  # our number; None where it was not measured
  differs: str = ""  # how our setting differs, "" for the same
  ratio: bool = False  # whether 1 is a draw
  reason: str = ""  # why ours differs, "" where that is not known
  noise: float = 0.0  # standard error of our number, a fraction of it
  fitted: bool = False  # whether a parameter of ours was chosen so that ours is the paper's number
  repeats: str = ""  # the table whose predictions these numbers restate, "" where they are of their own

  @property
  def verdict(self) -> Verdict:
    """What ours says of the paper's; benchmarks/pages/papers.md says what each verdict means."""
    if self.ours is None or self.paper_value is None:
      return "not run"
    if self.fitted or self.repeats:
      return "calibrated" if self.fitted else "repeated"
    scales = [1 + self.noise * part / 10 for part in range(-10, 11)]
    found = {_judge(self, self.paper_value, self.ours * scale) for scale in scales}
    return found.pop() if len(found) == 1 else "undecided"


def _judge(cell: Cell, paper_value: float, ours: float) -> Verdict:
  """The verdict on a number without noise."""
  if cell.above:
    return "reproduced" if ours > paper_value else "contradicted"
  draw, near = (1.0, RATIO_TOLERANCE) if cell.ratio else (0.0, TOLERANCE)
  gained = (ours - draw) / (paper_value - draw)
  if abs(gained - 1) <= near:
    return "reproduced"
  return "contradicted" if not cell.differs or (cell.ratio and gained < NO_GAIN) else "other setting"


@functools.cache
def every() -> tuple[Cell, ...]:
  """All cells, in the order of the file."""
  found = []
  for own in tomllib.loads(_FILE.read_text())["table"]:
    same = {field: value for field, value in own.items() if field not in ("name", "cells")}
    for name, values in own["cells"].items():
      number = {"paper_value": values.get("paper", values.get("above")), "above": "above" in values}
      number |= {"ours": values.get("ours"), "fitted": values.get("fitted", False)}
      found.append(Cell(table=own["name"], name=name, **same, **number))
  return tuple(found)


def number(paper: str, table: str, name: str) -> float:
  """The paper's number of a cell; KeyError if there is no such cell, or it has none."""
  values = {(one.paper, one.table, one.name): one.paper_value for one in every() if one.paper_value is not None}
  return values[paper, table, name]


def tables_of(cells: Sequence[Cell], measured: Iterable[str] = ()) -> list[rich.table.Table]:
  """The numbers of a paper's cells, those of `measured` with a star, and what each of its tables is."""
  rows: list[list[str]] = []
  about: dict[str, list[str]] = {}
  for one in cells:
    ours = text(one.ours) + "*" * (one.name in measured)
    rows.append([one.table, one.name, "> " * one.above + text(one.paper_value), ours, one.verdict])
    noise = f"; noise {one.noise:.0%}" if one.noise else ""
    setting = f"`{one.benchmark}`: {one.differs or 'the same'}{noise}"
    about.setdefault(one.table, [one.table, one.what, one.setting, setting, one.reason])
  heads = ("", "what", "paper's setting", "our benchmark and setting", "why ours differs")
  caption = "* measured by this run" if measured else None
  numbers = report.table(cells[0].paper, ("", "", "paper", "ours", "verdict"), rows, text=2, caption=caption)
  return [numbers, report.table("", heads, about.values(), text=len(heads), wraps=heads)]


def beside(cells: Sequence[Cell], measured: Mapping[str, float] | None = None) -> rich.console.Group:
  """The papers' numbers beside ours; `measured` are ours of this run by name of the cell."""
  now = measured or {}
  groups: dict[str, list[Cell]] = {}
  for cell in cells:
    groups.setdefault(cell.paper, []).append(cell._replace(ours=now.get(cell.name, cell.ours)))
  return rich.console.Group(*(table for own in groups.values() for table in tables_of(own, now)))


def of(benchmark: str) -> list[Cell]:
  """The cells that a benchmark measures."""
  return [cell for cell in every() if cell.benchmark == benchmark]


def text(value: float | None) -> str:
  """A number to four digits, whole ones to all of them; – for None."""
  if value is None:
    return "–"
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
