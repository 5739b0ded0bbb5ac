"""Tables of the pages, made at build time of the files that the benchmarks write: no number is copied."""

import itertools
import json
import pathlib
from collections.abc import Sequence

from IPython.display import Markdown

from benchmarks import papers
from benchmarks.heterogeneous import virtual
from benchmarks.race import report
from benchmarks.race.results import Results
from benchmarks.race.standings import Target, standings

RACE = pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "race_lm.json"
STRAGGLERS = RACE.with_name("heterogeneous.json")
TARGET = Target(steps=300)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Markdown:
  """A table whose first `left` columns are text; the others are right-aligned numbers."""
  rule = ["---"] * left + ["--:"] * (len(head) - left)
  return Markdown("\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows]))


def race() -> Markdown:
  """Seconds to dense's loss, of every method at every rate of the kept race."""
  results, rows = Results(RACE, None), []
  for rate in dict.fromkeys(pace.rate for pace in results.rows["paces"]):
    for one in standings(results, rate, TARGET):
      if one.pace:
        spreads = zip((one.seconds, one.speed_up, one.steps), (0, 2, 0), strict=True)
        numbers = [report.spread_text(spread, digits) for spread, digits in spreads]
        rows.append([report.links(rate), one.method, one.optimizer, *numbers, f"{one.words:,.0f}"])
  return table(["links", "method", "optimizer", "seconds", "× dense", "steps", "words a step"], rows, left=3)


def stragglers() -> Markdown:
  """Seconds of virtual time to the target, by heterogeneity level, of the kept rows of `benchmarks.heterogeneous`."""
  kept = [row for row in virtual.from_json(json.loads(STRAGGLERS.read_text())["rows"]) if row.part == "levels"]
  seconds = {(row.label, row.environment.level): row for row in kept if row.environment.occupancy == 1}
  levels = sorted({level for _, level in seconds})
  text = lambda row: f"{row.reached} of {row.runs} reach it" if row.seconds is None else f"{row.seconds:.0f}"
  labels = dict.fromkeys(label for label, _ in seconds)
  rows = [[label, *(text(seconds[label, level]) for level in levels)] for label in labels]
  return table(["method", *(f"HL = {level}" for level in levels)], rows)


def paper(name: str) -> Markdown:
  """All numbers of a paper beside ours, a section for each of its tables: `python -m benchmarks.fidelity --paper=NAME`.

  Raises:
    ValueError: for a paper without a table, with the choices.
  """
  cells = [cell for cell in papers.every() if cell.paper == name]
  if not cells:
    known = dict.fromkeys(cell.paper for cell in papers.every())
    raise ValueError(f"paper {name!r}, choose one of {', '.join(known)}")
  parts = []
  for title, group in itertools.groupby(cells, lambda cell: cell.table):
    same = list(group)
    first = same[0]
    rows = [[cell.name, papers.paper_text(cell), papers.text(cell.ours), cell.verdict] for cell in same]
    notes = [f"{first.what}. Paper: {first.setting}. Ours: `python -m benchmarks.{first.benchmark}`"]
    notes += [f"; {first.differs}"] if first.differs else [""]
    why = f" Why they differ: {first.reason}." if first.reason else ""
    parts += [f"**{title}**: {''.join(notes)}.{why}", table(["", "paper", "ours", "verdict"], rows).data]
  return Markdown("\n\n".join(parts))
