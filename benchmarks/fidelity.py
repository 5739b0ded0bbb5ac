r"""The papers' numbers beside ours, all of them, each with a verdict.

The numbers are those of benchmarks/paper_tables.toml: ours were measured by the benchmark that is named, whose tables
are in benchmarks/pages.

  reproduced     within 10 % of the paper's number; of a ratio, the gain over a draw is within a quarter of the paper's
  contradicted   further off in the paper's own setting; of a ratio, in any setting, no gain where the paper has one, or
                 less than a tenth of it
  other setting  further off, and our setting differs
  undecided      within its noise our number could have another verdict
  calibrated     a parameter of ours was chosen so that ours is the paper's number
  repeated       restates a prediction that is judged in another table
  not run        ours or the paper's is missing

Examples:
  python -m benchmarks.fidelity
  python -m benchmarks.fidelity --paper=SparDL,Ok-Topk --verdict=contradicted
  python -m benchmarks.fidelity --json | jq '.[] | select(.verdict == "not run") | [.paper, .table, .name]'
"""

import collections
import json
from typing import get_args

from absl import flags

from benchmarks import entry, papers
from benchmarks.workers import make_console

_PAPER = flags.DEFINE_list("paper", [], "Only these papers.")
_VERDICT = flags.DEFINE_list("verdict", [], f"Only these: {', '.join(get_args(papers.Verdict))}.")
_JSON = flags.DEFINE_bool("json", False, "Print the cells as JSON on standard output, all else on standard error.")


def _chosen() -> list[papers.Cell]:
  known = list(dict.fromkeys(cell.paper for cell in papers.every()))
  for flag, choices in ((_PAPER, known), (_VERDICT, get_args(papers.Verdict))):
    for value in flag.value:
      if value not in choices:
        raise ValueError(f"--{flag.name}={value}, choose from {', '.join(choices)}")
  wanted = lambda cell: cell.paper in (_PAPER.value or known) and cell.verdict in (_VERDICT.value or [cell.verdict])
  return [cell for cell in papers.every() if wanted(cell)]


def main() -> None:
  """Prints the chosen cells, and how many there are of each verdict."""
  cells = _chosen()
  console = make_console(stderr=_JSON.value)
  console.print(papers.beside(cells))
  counts = collections.Counter(cell.verdict for cell in cells)
  console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(papers.Verdict)), highlight=False)
  if _JSON.value:
    print(json.dumps([{**cell._asdict(), "verdict": cell.verdict} for cell in cells]))


if __name__ == "__main__":
  entry.run(main)
