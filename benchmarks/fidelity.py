r"""The papers' numbers beside ours, those of paper_tables.toml, each with a verdict (benchmarks/pages/papers.md).

Examples:
  python -m benchmarks.fidelity --paper=SparDL,Ok-Topk --verdict=contradicted
  python -m benchmarks.fidelity --json | jq '.[] | select(.verdict == "not run") | [.paper, .table, .name]'
"""

from typing import get_args

from absl import flags

from benchmarks import entry, papers, report
from benchmarks.workers import make_console

_PAPER = flags.DEFINE_list("paper", [], "Only these papers.")
_VERDICTS = get_args(papers.Verdict)
_VERDICT = flags.DEFINE_list("verdict", [], f"Only these: {', '.join(_VERDICTS)}.")
_JSON = entry.define_json()

entry.require_choices(_PAPER, [cell.paper for cell in papers.every()])
entry.require_choices(_VERDICT, _VERDICTS)


def main() -> None:
  """Prints the chosen cells, and how many have which verdict."""
  wanted = lambda cell: (
    cell.paper in (_PAPER.value or [cell.paper])
    and cell.verdict in (_VERDICT.value or _VERDICTS)
  )
  cells = [cell for cell in papers.every() if wanted(cell)]
  console = make_console(stderr=_JSON.value)
  console.print(papers.beside(cells))
  console.print(papers.totals(cells), highlight=False, soft_wrap=True)
  if _JSON.value:
    report.print_json([cell._asdict() | {"verdict": cell.verdict} for cell in cells])


if __name__ == "__main__":
  entry.run(main)
