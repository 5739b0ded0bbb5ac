"""Writes what was measured into the library, for `js.costs.advise`.

evidence.json, from the curves in benchmarks/results/race_*.json and best_lm.json: the
steps of each method to the loss that dense has after its last step, over the steps of
dense. A method that did not reach it from every seed has none: null.

predictions.json, from the kept table of predictions: milliseconds of updates as
predicted, and as measured.
"""

import json
import pathlib
from typing import Any

import jaxsparse as js
from benchmarks import entry, methods, report, tables
from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE, Target, baselines, standings
from benchmarks.tasks import registry

_FOLDER = pathlib.Path(__file__).parent / "results"
RESULTS = [*sorted(_FOLDER.glob("race_*.json")), _FOLDER / "best_lm.json"]
COSTS = pathlib.Path(js.costs.__file__).parent


def rows(results: Results) -> list[dict[str, Any]]:
  """A row for each method of a race but dense that was trained from every seed, with dense's kind of optimizer."""
  steps = max(curve.steps[-1] for curve in results.find("curves", method=DENSE))
  task = registry.make(results.setting["task"])
  dense, hosts = baselines(results, steps), results.setting["hosts"]
  # window_adam is an adam
  seeds, kind_of = (
    len(dense),
    lambda optimizer: optimizer.split(":")[0].split("_")[-1],
  )
  kinds = {kind_of(curve.optimizer) for curve in dense.values()}
  same = {
    "task": f"{task.name}, {task.entries:,} parameters",
    "workers": hosts,
    "seeds": seeds,
  }
  found = []
  for one in standings(results, "", Target(steps)):
    if one.method == DENSE or kind_of(one.optimizer) not in kinds:
      continue
    if len(results.find("curves", method=one.method, optimizer=one.optimizer)) == seeds:
      (method,) = methods.parse("method", [one.method], hosts)
      ratio = one.more_steps if one.more_steps and not one.more_steps.missing else None
      collective = js.costs.label_of(method.spec.name, method.spec.config)
      row = {
        "method": one.method,
        "collective": collective,
        "every": method.every,
        "optimizer": one.optimizer,
      }
      found.append(
        row
        | {"steps": ratio and ratio.mean, "deviation": ratio and ratio.deviation}
        | same
      )
  return found


def predictions() -> list[dict[str, Any]]:
  """A row for each algorithm and network of the kept table."""
  found = []
  for row in tables.kept_rows("predictions"):
    for network in [head for head in row if f"predicted, {head}" in row]:
      times = {"measured": row[network], "predicted": row[f"predicted, {network}"]}
      found.append({"algorithm": row["algorithm"], "network": network} | times)
  return found


def texts() -> dict[str, str]:
  """The files, by name."""
  evidence = [
    report.rounded(row) for path in RESULTS for row in rows(Results(path, None))
  ]
  files = {"evidence.json": evidence, "predictions.json": predictions()}
  return {
    name: "[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n"
    for name, found in files.items()
  }


def main() -> None:
  """Writes the files."""
  for name, text in texts().items():
    report.replace(COSTS / name, text)


if __name__ == "__main__":
  entry.run(main)
