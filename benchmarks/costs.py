r"""Messages and words of one update: counted from the schedule, beside the paper's formula (SparDL, Table 1).

Where sizes vary from step to step, the schedule has a switch: its least and its most
words are counted, and the formula is an upper bound of the most. The ratio is to 2k(P −
1)/P, the least words of any sparse all-reduce.

Examples:
  python -m benchmarks.costs --workers=2,4,6,8,14,64,256
  python -m benchmarks.costs --algorithm=spardl,spardl:teams=2,spardl:teams=7 --workers=14 --n=110000000 --density=0.001
  python -m benchmarks.costs --json | jq '.[] | select(.workers == 64)'
"""

import math
import operator
from typing import Any, NamedTuple

import rich.console
import rich.progress
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import entry, report, specs
from benchmarks.workers import make_console
from jaxsparse.costs import counting

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = entry.define_numbers(
  "workers", [2, 4, 6, 8, 14, 64, 256], "Numbers of workers."
)
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_JSON = entry.define_json()


class Row(NamedTuple):
  """One algorithm at one number of workers: counted, and by the formula."""

  algorithm: str  # as it was asked for
  workers: int  # P
  least: js.Cost  # the `js.Cost` of the branches with the least words
  most: js.Cost  # that of the branches with the most
  formula: js.Cost  # the paper's
  bound: float  # 2k(P − 1)/P words


def row(spec: specs.Spec, workers: int, n: int, density: float) -> Row:
  """Counts and predicts one algorithm; RuntimeError where the two contradict each other."""
  collective = spec.collective
  jaxpr = counting.schedule(collective, n, workers)
  # A switch of the schedule has branches of other sizes: least and most words of them.
  least, most = (
    counting.count_jaxpr(jaxpr, workers, branch) for branch in ("least", "most")
  )
  formula = collective.cost(n, workers)
  if most != formula and not (
    collective.traits.sizes_vary and all(map(operator.le, most, formula))
  ):
    raise RuntimeError(
      f"{spec.label} at {workers} workers: counted {most}, the formula says {formula}"
    )
  return Row(
    spec.label,
    workers,
    least,
    most,
    formula,
    2 * math.ceil(density * n) * (workers - 1) / workers,
  )


def table(rows: list[Row], title: str) -> rich.table.Table:
  """The rows, those of one number of workers together."""
  lines = []
  for one in rows:
    # The formula is exact, or an upper bound of the schedule.
    formula = "" if one.most == one.formula else "≤ "
    messages, words, agreements = map(_range, one.least, one.most)
    least, most = (
      cost.words / one.bound if one.bound else 1.0 for cost in (one.least, one.most)
    )
    counts = [
      messages,
      f"{formula}{one.formula.messages}",
      words,
      f"{formula}{one.formula.words:,}",
      agreements,
    ]
    lines.append([str(one.workers), one.algorithm, *counts, _range(least, most, ".2f")])
  heads = (
    "P",
    "algorithm",
    "messages",
    "formula",
    "words",
    "formula",
    "agreed",
    "× 2k(P−1)/P",
  )
  return report.table(title, heads, lines, text=2)


def _range(least: float, most: float, form: str = ",") -> str:
  """Both numbers as text, or one of them if they are equal."""
  return f"{most:{form}}" if least == most else f"{least:{form}} … {most:{form}}"


def _rows(console: rich.console.Console) -> list[Row]:
  chosen: list[tuple[specs.Spec, int]] = []
  for workers in _WORKERS.value:
    names = _ALGORITHM.value
    if names == ["all"]:
      teams = [
        f"spardl:teams={d}" for d in (2, 4, 7) if workers % d == 0 and workers > d
      ]
      names = [*specs.of_vectors(), *teams]
    chosen += [
      (spec, workers) for spec in specs.parse(names, workers, density=_DENSITY.value)
    ]
  work: Any = rich.progress.track(chosen, "tracing", console=console, transient=True)
  return [row(spec, workers, _N.value, _DENSITY.value) for spec, workers in work]


def main() -> None:
  """Counts every chosen algorithm and reports."""
  console = make_console(stderr=_JSON.value)
  rows = _rows(console)
  console.print(
    table(
      rows,
      f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}, 4-byte words a worker",
    )
  )
  if _JSON.value:
    report.print_json(rows)


if __name__ == "__main__":
  entry.run(main)
