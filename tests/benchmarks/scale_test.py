"""Scale on paper as a user asks for it: predictions, and programs that are made and not run."""

import functools
import json

import jaxsparse as js
from benchmarks import specs
from tests.benchmarks import commands

scale = functools.partial(commands.run, "benchmarks.scale")


def test_predictions_are_those_of_js_costs_and_programs_have_an_operation_for_each_message():
  done = scale("--workers=8,4", "--n=100000", "--repeats=1", "--network=25GbE,slow:alpha=1e-3:beta=1e-7", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  result = json.loads(done.stdout)
  rows = {(row["network"], row["workers"], row["algorithm"]): row for row in result["predicted"]}
  labels = [*specs.of_vectors(), "spardl:teams=best"]
  assert set(rows) == {(net, p, label) for net in ("25GbE", "slow") for p in (4, 8) for label in labels}
  cost = lambda name, **config: js.costs.predict(name, n=100_000, workers=8, **config)
  assert rows["25GbE", 8, "dense"]["words"] == cost("dense").words
  seconds = {d: cost("spardl", density=0.01, teams=d).seconds(alpha=1e-3, beta=1e-7) for d in (1, 2, 4, 8)}
  assert rows["slow", 8, "spardl"]["seconds"] == seconds[1]
  best = rows["slow", 8, "spardl:teams=best"]  # the fastest divisor
  assert (best["teams"], best["seconds"]) == (min(seconds, key=seconds.get), min(seconds.values()))
  made = [(row["workers"], row["messages"], row["collectives"]) for row in result["compiled"]]
  assert made == [(4, 4, 4), (8, 6, 6)]
  assert all(row[phase] > 0 for row in result["compiled"] for phase in ("trace", "lower", "compile", "cpu"))


def test_the_first_step_against_its_goal():
  done = scale("--first_step", "--schedule_of=dense,topka", "--n=1000", "--repeats=1", "--json")
  result = json.loads(done.stdout)
  assert [(row["algorithm"], row["workers"]) for row in result["first_step"]] == [("dense", 4), ("topka", 4)]
  (goal,) = result["goals"]
  assert goal["measured"] == max(row["total"] for row in result["first_step"])
  assert done.returncode == (0 if goal["met"] else 1)
