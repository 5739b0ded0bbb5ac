"""Writes what was measured into the library, for `js.costs.advise`.

evidence.json, from the curves in benchmarks/results/race_*.json and best_lm.json: the
steps of each method to the loss that dense has after its last step, over the steps of
dense. A method that did not reach it from every seed has none: null.

From results/sweeps percents of each recipe's loss above that of dense.

predictions.json, from the kept table of predictions: milliseconds of updates as
predicted, and as measured.
"""

import json
import pathlib
from typing import Any

import jaxsparse as js
from benchmarks import entry, methods, report, tables
from benchmarks.race.results import Results
from benchmarks.race.standings import (
  DENSE,
  Point,
  Target,
  baselines,
  points,
  standings,
)
from benchmarks.report import Spread
from benchmarks.sweep import training as sweep
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
      # None, for never, if a seed did not reach dense's loss
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


def _above(point: Point) -> Spread:
  """Percent over dense: every seed of a sweep has dense."""
  assert point.above is not None
  return point.above


def sweep_rows(results: Results) -> list[dict[str, Any]]:
  """A row for each method of a sweep but dense, at the best of its rates that do not diverge."""
  steps = results.rows["curves"][0].steps[-1]
  # points of a method at one rate, without those of which a seed diverged
  trained = [one for one in points(results, steps) if not _above(one).missing]
  # Only rates that were trained from as many seeds as any count.
  seeds = max(one.seeds for one in trained)
  best: dict[str, Point] = {}
  for one in trained:  # the lowest loss first
    if one.seeds == seeds:
      best.setdefault(one.method, one)
  rate_of = lambda point: point.optimizer.split(":")[1]
  same_rate = [one for one in trained if rate_of(one) == rate_of(best[DENSE])]
  # gaps at the rate that is best for dense
  untuned = {one.method: _above(one).mean for one in same_rate}
  task = registry.make(results.setting["task"])
  hosts = results.setting["hosts"]
  found = []
  for name, one in best.items():
    (method,) = methods.parse("method", [name], hosts)
    row = {
      "method": name,
      "collective": js.costs.label_of(method.spec.name, method.spec.config),
      "every": method.every,
      "optimizer": one.optimizer,
      "task": f"{task.name}, {task.entries:,} parameters",
      "workers": hosts,
      "steps": None,
      "deviation": None,
      "seeds": seeds,
      "gap": _above(one).mean,
      "gap_error": _above(one).deviation / seeds**0.5,
      "gap_untuned": untuned.get(name),
      "bits": one.bits,
      "own_data": task.name.endswith("_apart"),
    }
    found += [row] if name != DENSE else []
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
  found = [row for path in RESULTS for row in rows(Results(path, None))]
  for path in sorted(sweep.FOLDER.glob("*.json")):
    found += sweep_rows(Results(path, None))
  evidence = list(map(report.rounded, found))
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
