r"""Messages and words of one update: counted from the schedule, beside the paper's formula (SparDL, Table 1).

Where sizes vary from step to step, the schedule has a switch: its least and its most words are counted, and the formula
is an upper bound of the most. The ratio is to 2k(P − 1)/P, the least words of any sparse all-reduce.

Examples:
  python -m benchmarks.costs --workers=2,4,6,8,14,64,256
  python -m benchmarks.costs --algorithm=spardl,spardl:teams=2,spardl:teams=7 --workers=14 --n=110000000 --density=0.001
  python -m benchmarks.costs --json | jq '.[] | select(.workers == 64)'
"""

import json
import math
import operator
from typing import Any, NamedTuple

import rich.console
import rich.progress
import rich.table
from absl import flags

import jaxsparse as js
from benchmarks import entry, papers, specs
from benchmarks.workers import make_console
from jaxsparse.costs import counting

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = flags.DEFINE_list("workers", ["2", "4", "6", "8", "14", "64", "256"], "Numbers of workers.")
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Fraction of the entries to deliver.")
_PAPERS = flags.DEFINE_bool("papers", False, papers.HELP)
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)


class Row(NamedTuple):
  """One algorithm at one number of workers: counted, and by the formula."""

  algorithm: str  # as it was asked for
  workers: int  # P
  least: js.Cost  # the `js.Cost` of the branches with the least words
  most: js.Cost  # that of the branches with the most
  formula: js.Cost  # the paper's
  bound: float  # 2k(P − 1)/P words


def row(spec: specs.Spec, workers: int, n: int, density: float) -> Row:
  """Counts and predicts one algorithm.

  Raises:
    RuntimeError: where the two contradict each other: a benchmark checks what it prints.
  """
  collective = spec.collective
  jaxpr = counting.schedule(collective, n, workers)
  least, most = (counting.count_jaxpr(jaxpr, workers, branch) for branch in ("least", "most"))
  formula = collective.cost(n, workers)
  if most != formula and not (collective.sizes_vary and all(map(operator.le, most, formula))):
    raise RuntimeError(f"{spec.label} at {workers} workers: counted {most}, the formula says {formula}")
  return Row(spec.label, workers, least, most, formula, 2 * math.ceil(density * n) * (workers - 1) / workers)


def table(rows: list[Row], title: str) -> rich.table.Table:
  """The rows, those of one number of workers together."""
  result = rich.table.Table(title=title)
  result.add_column("P", justify="right")
  result.add_column("algorithm", no_wrap=True)
  for head in ("messages", "formula", "words", "formula", "agreed", "× 2k(P−1)/P"):
    result.add_column(head, justify="right", no_wrap=True)
  for number, one in enumerate(rows):
    last = number + 1 == len(rows) or rows[number + 1].workers != one.workers
    exact = one.most == one.formula
    ratios = [cost.words / one.bound if one.bound else 1.0 for cost in (one.least, one.most)]
    result.add_row(
      str(one.workers),
      one.algorithm,
      _range(one.least.messages, one.most.messages),
      f"{'' if exact else '≤ '}{one.formula.messages}",
      _range(one.least.words, one.most.words),
      f"{'' if exact else '≤ '}{one.formula.words:,}",
      _range(one.least.agreements, one.most.agreements),
      f"{ratios[0]:.2f}" if ratios[0] == ratios[1] else f"{ratios[0]:.2f} … {ratios[1]:.2f}",
      end_section=last,
    )
  return result


def _range(least: int, most: int) -> str:
  return f"{most:,}" if least == most else f"{least:,} … {most:,}"


def _rows(console: rich.console.Console) -> list[Row]:
  sizes = [int(value) for value in _WORKERS.value]
  chosen: list[tuple[specs.Spec, int]] = []
  for workers in sizes:
    if workers < 1:
      raise ValueError(f"--workers={workers}, choose at least 1")
    names = _ALGORITHM.value
    if names == ["all"]:
      teams = [f"spardl:teams={d}" for d in (2, 4, 7) if workers % d == 0 and workers > d]
      names = [*specs.of_vectors(), *teams]
    chosen += [(spec, workers) for spec in specs.parse(names, workers, density=_DENSITY.value)]
  work: Any = rich.progress.track(chosen, "tracing", console=console, transient=True)
  return [row(spec, workers, _N.value, _DENSITY.value) for spec, workers in work]


def _plain(value: Any) -> Any:
  return value._asdict() if isinstance(value, js.Cost) else value


def main() -> None:
  """Counts every chosen algorithm and reports."""
  console = make_console(stderr=_JSON.value)
  rows = _rows(console)
  if _PAPERS.value:
    console.print(papers.beside(papers.of("costs")))
  console.print(
    table(rows, f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}, 4-byte words a worker")
  )
  if _JSON.value:
    print(json.dumps([{name: _plain(value) for name, value in one._asdict().items()} for one in rows]))


if __name__ == "__main__":
  entry.run(main)
