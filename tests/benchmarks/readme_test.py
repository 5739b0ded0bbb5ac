"""The tables of benchmarks/README.md have the numbers of the kept results."""

import pathlib
import re

import pytest

import benchmarks
from benchmarks.race import report
from benchmarks.race.results import Results
from benchmarks.race.standings import DENSE, Spread, Target, loss_after, standings

FOLDER = pathlib.Path(benchmarks.__file__).parent
README = (FOLDER / "README.md").read_text().replace("**", "")
RESULTS = FOLDER / "results"
ROW = r"^\| `(?P<method>\S+)` \| `(?P<optimizer>\S+)` \| (?P<loss>[\d.± ]+) \| (?P<words>[\d,]+) \|$"


RACES = {"race_lm": Target(300), "race_resnet20": Target(300), "spardl_fig6c": Target(300, loss=0.2)}


@pytest.mark.parametrize("name", RACES)
def test_rows_of_the_races_are_those_of_the_results(name):
  results = Results(RESULTS / f"{name}.json", None)
  for rate in dict.fromkeys(pace.rate for pace in results.rows["paces"]):
    for one in standings(results, rate, RACES[name]):
      gain = "1" if one.method == DENSE else report.spread_text(one.speed_up, 2)
      spreads = report.spread_text(one.seconds, 1), gain, report.spread_text(one.steps, 0)
      row = f"| {' | '.join(spreads)} | {report.milliseconds(one.pace)} | {one.words:,.0f} |"
      assert row in README, f"{rate}, {one.method}"


def test_gains_with_less_momentum_are_those_of_its_curves_and_the_paces_of_the_race():
  results = Results(RESULTS / "momentum_lm.json", None)
  results.rows["paces"] = Results(RESULTS / "race_lm.json", None).rows["paces"]
  ranked = [
    {one.method: one for one in standings(results, rate, Target(300))} for rate in ("1gbit", "100mbit", "10mbit")
  ]
  for name in ranked[0].keys() - {DENSE}:
    gains = " | ".join(report.spread_text(of[name].speed_up, 2) for of in ranked)
    assert f" | {report.spread_text(ranked[0][name].more_steps, 2)} | {gains} |" in README


def test_losses_at_equal_steps_are_those_of_the_results():
  kept = {}
  for path in RESULTS.glob("thousand_*.json"):
    for one in standings(Results(path, None), "", Target(1000)):
      kept[one.method, one.optimizer, f"{one.words:,.0f}"] = one.loss._replace(
        missing=0
      )  # the text says how many seeds
  rows = [match.groupdict() for match in re.finditer(ROW, README, re.M)]
  assert len(rows) > 15
  for row in rows:
    assert row["loss"] == report.spread_text(kept[row["method"], row["optimizer"], row["words"]], 3), row


def test_losses_after_100_200_and_300_steps_are_those_of_the_results():
  results, kept = Results(RESULTS / "local_lm_medium.json", None), set()
  for one in standings(results, "", Target(300)):
    curves = results.find("curves", method=one.method, optimizer=one.optimizer)
    spreads = [Spread.of([loss_after(curve, steps) for curve in curves]) for steps in (100, 200, 300)]
    kept.add(
      f"{' | '.join(report.spread_text(spread, 3) for spread in spreads)} | {one.words:,.0f} | {one.drift:.3g} |"
    )
  rows = re.findall(r"^\| \d+ \| [^|]* \| ([\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \| .*)$", README, re.M)
  assert len(rows) > 10
  assert set(rows) <= kept


@pytest.mark.parametrize("name", ["a2sgd_fnn3", "a2sgd_adam"])
def test_columns_of_a2sgd_are_those_of_the_results(name):
  columns = standings(Results(RESULTS / f"{name}.json", None), "", Target(300))
  assert len(columns) == 5
  assert f"| held-out loss | {' | '.join(report.spread_text(one.loss, 3) for one in columns)} |" in README
  assert f"| words a step | {' | '.join(f'{one.words:,.0f}' for one in columns)} |" in README
