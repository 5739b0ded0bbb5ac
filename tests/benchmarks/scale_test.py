"""Scale on paper as a user asks for it: predictions, programs that are made and not run, one figure."""

import functools
import json

import pytest

import jaxsparse as js
from benchmarks import specs
from tests.benchmarks import commands

scale = functools.partial(commands.run, "benchmarks.scale")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
  folder = tmp_path_factory.mktemp("scale")
  networks = ["--network=25GbE,slow:alpha=1e-3:beta=1e-7"]
  flags = ("--workers=8,4", "--n=100000", "--repeats=1", "--patience=1000", f"--report_dir={folder}")
  done = scale(*flags, *networks, "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  assert (folder / "scale.png").stat().st_size > 10_000
  assert "dense / spardl" in done.stderr
  return json.loads(done.stdout)


def test_predictions_are_those_of_js_costs(result):
  rows = {(row["network"], row["workers"], row["algorithm"]): row for row in result["predicted"]}
  labels = [*specs.of_vectors(), "spardl:teams=best"]
  assert set(rows) == {(net, p, label) for net in ("25GbE", "slow") for p in (4, 8) for label in labels}
  for name, config in (("spardl", {"density": 0.01}), ("dense", {})):
    cost = js.costs.predict(name, n=100_000, workers=8, **config)
    assert rows["slow", 8, name]["seconds"] == cost.seconds(alpha=1e-3, beta=1e-7)
    assert rows["25GbE", 8, name]["words"] == cost.words


def test_the_best_number_of_teams_is_the_fastest_divisor(result):
  (row,) = (r for r in result["predicted"] if r["teams"] and (r["network"], r["workers"]) == ("slow", 8))
  costs = {d: js.costs.predict("spardl", n=100_000, workers=8, density=0.01, teams=d) for d in (1, 2, 4, 8)}
  seconds = {d: cost.seconds(alpha=1e-3, beta=1e-7) for d, cost in costs.items()}
  assert row["teams"] == min(seconds, key=seconds.get) > 1
  assert row["seconds"] == min(seconds.values())


def test_programs_have_one_operation_for_each_message(result):
  assert [(row["workers"], row["messages"], row["collectives"]) for row in result["compiled"]] == [
    (4, 4, 4),
    (8, 6, 6),
  ]
  assert all(row[phase] > 0 for row in result["compiled"] for phase in ("trace", "lower", "compile", "cpu"))
  assert {row["phase"] for row in result["growth"]} == {"trace", "lower", "compile", "total", "cpu"}
  assert all(row["log_ratio"] == pytest.approx(3 / 2) for row in result["growth"])


def test_the_first_step_against_its_goal():
  done = scale("--first_step", "--schedule_of=dense,topka", "--n=1000", "--repeats=1", "--json")
  result = json.loads(done.stdout)
  assert [(row["algorithm"], row["workers"]) for row in result["first_step"]] == [("dense", 4), ("topka", 4)]
  assert all(row[phase] > 0 for row in result["first_step"] for phase in ("trace", "lower", "compile"))
  (goal,) = result["goals"]
  assert goal["measured"] == max(row["total"] for row in result["first_step"])
  assert done.returncode == (0 if goal["met"] else 1)


BAD_FLAGS = [
  (["--workers=8,0"], "error: --workers=0, choose whole numbers of at least 2"),
  (["--network=mine:alpha=1e-5"], "error: --network=mine:alpha=1e-5, choose from 1GbE, 25GbE, 400Gb, or write name:"),
  (["--algorithm=spardl:teams=3"], "error: teams=3 does not divide the 8 workers"),
]


def test_bad_flags(subtests):
  commands.check_refusals("benchmarks.scale", BAD_FLAGS, subtests)
