r"""What every algorithm sends for one update: counted from its schedule, beside the paper's formula (SparDL, Table 1).

The formula is the upper end where sizes vary. The ratio compares the counted words with 2k(P − 1)/P, what any sparse
all-reduce has to send.

Examples:
  python -m benchmarks.costs --workers=2,4,6,8,14,64,256
  python -m benchmarks.costs --algorithm=spardl,spardl:teams=2,spardl:teams=7 --workers=14 --n=110000000 --density=0.001
  python -m benchmarks.costs --json | jq '.[] | select(.workers == 64)'
"""

import json
import math
import sys
from typing import Any, NamedTuple

import rich.console
import rich.progress
import rich.table
from absl import app, flags, logging

import jaxsparse as js
from benchmarks import specs

_ALGORITHM = flags.DEFINE_multi_string("algorithm", ["all"], specs.HELP)
_WORKERS = flags.DEFINE_list("workers", ["2", "4", "6", "8", "14", "64", "256"], "Numbers of workers.")
_N = flags.DEFINE_integer("n", 14_728_266, "Gradient entries; VGG-16 by default.")
_DENSITY = flags.DEFINE_float("density", 0.01, "Share of the entries to deliver.")
_JSON = flags.DEFINE_bool(
  "json", False, "Print the rows as JSON on standard output, everything else on standard error."
)


class Row(NamedTuple):
  """One algorithm at one number of workers: what was counted, what the formula says, words over the lower bound."""

  algorithm: str
  workers: int
  messages: int
  messages_formula: int
  words: int
  words_formula: int
  agreements: int
  ratio: float
  varies: bool


def row(spec: specs.Spec, workers: int, n: int, density: float) -> Row:
  """Counts and predicts one algorithm.

  Raises:
    RuntimeError: where the two contradict each other: a benchmark checks what it prints.
  """
  counted = js.costs.count(spec.name, n=n, workers=workers, **spec.config)
  formula = js.costs.predict(spec.name, n=n, workers=workers, **spec.config)
  varies = js.make_collective(spec.name, **spec.config).sizes_vary
  if counted != formula and not (varies and all(was <= most for was, most in zip(counted, formula, strict=True))):
    raise RuntimeError(f"{spec.label} at {workers} workers: counted {counted}, the formula says {formula}")
  bound = 2 * math.ceil(density * n) * (workers - 1) / workers
  ratio = counted.words / bound if bound else float("nan")
  messages, words = (counted.messages, formula.messages), (counted.words, formula.words)
  return Row(spec.label, workers, *messages, *words, counted.agreements, ratio, varies)


def table(rows: list[Row], title: str) -> rich.table.Table:
  """The rows, those of one number of workers together."""
  result = rich.table.Table(title=title, caption="≤: sizes vary from step to step, the formula is their upper end")
  result.add_column("P", justify="right")
  result.add_column("algorithm", no_wrap=True)
  for head in ("messages", "formula", "words", "formula", "agreed", "× 2k(P−1)/P"):
    result.add_column(head, justify="right")
  for number, one in enumerate(rows):
    last = number + 1 == len(rows) or rows[number + 1].workers != one.workers
    sign = "≤ " if one.varies else ""
    cells = [str(one.workers), one.algorithm, str(one.messages), sign + str(one.messages_formula)]
    cells += [f"{one.words:,}", f"{sign}{one.words_formula:,}", str(one.agreements), f"{one.ratio:,.2f}"]
    result.add_row(*cells, end_section=last)
  return result


def _rows(console: rich.console.Console) -> list[Row]:
  sizes = [int(value) for value in _WORKERS.value]
  chosen: list[tuple[specs.Spec, int]] = []
  for workers in sizes:
    if workers < 1:
      raise ValueError(f"--workers={workers}, choose at least 1")
    teams: list[str] = []
    if _ALGORITHM.value == ["all"]:
      teams = [f"spardl:teams={d}" for d in (2, 4, 7) if workers % d == 0 and workers > d]
    names = [*js.collective_names(), *teams] if teams else _ALGORITHM.value
    chosen += [(spec, workers) for spec in specs.parse(names, workers, density=_DENSITY.value)]
  work: Any = rich.progress.track(chosen, "tracing", console=console, transient=True)
  return [row(spec, workers, _N.value, _DENSITY.value) for spec, workers in work]


def main(argv: list[str]) -> None:
  """Counts every chosen algorithm and reports."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}: options are --name=value")
  logging.set_verbosity(logging.WARNING)
  console = rich.console.Console(stderr=_JSON.value)
  try:
    rows = _rows(console)
  except ValueError as error:
    sys.exit(f"error: {error}")
  console.print(
    table(rows, f"one update of n = {_N.value:,} entries, density {_DENSITY.value:g}, 4-byte words a worker")
  )
  if _JSON.value:
    print(json.dumps([one._asdict() for one in rows]))


if __name__ == "__main__":
  app.run(main)
