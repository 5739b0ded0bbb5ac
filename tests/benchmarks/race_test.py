"""The race: who is first follows from the rows, rows outlive an interruption, and a small race runs in the lab."""

import json
import math
import os
import pathlib
import shutil

import numpy as np
import optax
import pytest

from benchmarks import methods, papers, race, recipes
from benchmarks.race import figures, measuring, presets, report
from benchmarks.race.results import Advised, Curve, Pace, Results, Whole
from benchmarks.race.standings import Spread, Target, baselines, crossing, loss_after, standings
from benchmarks.tasks import registry
from tests.benchmarks import commands

COMMAND = pathlib.Path(race.__file__).with_name("__main__.py").read_text()
SETTING = {"task": "none"}
STEPS = [10, 20, 30, 40]


def curve(method, seed, losses, optimizer="adam:0.001", words=100.0):
  return Curve(method, optimizer, seed, STEPS[: len(losses)], list(losses), [0.0] * len(losses), words)


def pace(method, seconds, rate="10mbit"):
  return Pace(method, rate, 30, seconds, compute=0.4, rest=0.1, bytes=1e6)


@pytest.fixture
def results(tmp_path):
  found = Results(tmp_path / "new" / "race.json", SETTING)
  for row in (
    curve("dense", 0, [4, 3, 2]),
    curve("dense", 1, [4, 3, 1]),
    curve("fast", 0, [4.0, 3.5, 3.0, 1.0]),
    curve("fast", 1, [4, 3, 2, 1]),
    curve("never", 0, [4, 4, 4, 4]),
    curve("never", 1, [4, 3, 1, 1]),
    curve("unpaced", 0, [4, 3, 1]),
    pace("dense", 2.0),
    pace("fast", 0.5),
    pace("never", 0.5),
  ):
    found.add(row)
  return found


def test_a_crossing_lies_between_two_evaluations():
  one = curve("dense", 0, [3, 2, 2.5, 1])
  assert crossing(one, 2.25) == 17.5
  assert crossing(one, 2) == 20
  assert crossing(one, 3) == 10
  assert crossing(one, 0.5) is None
  assert loss_after(one, 25) == 2.25
  assert loss_after(one, 5) is loss_after(one, 50) is None


def test_seconds_to_the_loss_are_steps_times_pace(results):
  dense = {seed: one.loss[-1] for seed, one in baselines(results, 30).items()}
  assert dense == {0: 2, 1: 1}
  fast, second, *others = standings(results, "10mbit", Target(30))
  assert (fast.method, second.method, {one.method for one in others}) == ("fast", "dense", {"never", "unpaced"})
  assert fast.steps == Spread(37.5, pytest.approx(math.sqrt(12.5)))  # 35 and 40
  assert fast.seconds.mean == 0.5 * 37.5
  assert fast.speed_up.mean == pytest.approx((60 / 17.5 + 60 / 20) / 2)
  assert second.speed_up == Spread(1.0, 0.0)
  assert second.loss_in_time is None  # 18.75 s are 9.375 steps of dense, before its first evaluation
  assert fast.loss_in_time.mean == pytest.approx((3.0 - 2 * 0.75 + 2 - 0.75) / 2)
  never = next(one for one in others if one.method == "never")
  assert never.steps == Spread(30, 0.0, missing=1)
  assert fast.more_steps == Spread(pytest.approx(37.5 / 30), pytest.approx(math.sqrt(12.5) / 30))


def test_a_target_of_its_own_counts_instead_of_denses_loss(results):
  fast, dense, *_ = standings(results, "10mbit", Target(30, loss=3.0))
  assert (fast.method, dense.method) == ("fast", "dense")
  assert fast.steps.mean == 25  # 30 and 20
  assert fast.speed_up.mean == pytest.approx((40 / 15 + 40 / 10) / 2)
  assert str(Target(30, loss=3.0)) in report.table(results, "10mbit", Target(30, loss=3.0)).title
  assert Target(30).of_seed(results, 7) is None


def test_dense_races_with_its_best_optimizer(results):
  for seed in (0, 1):
    results.add(curve("dense", seed, [4, 2, 0.5], optimizer="adam:0.003"))
  assert {one.optimizer for one in baselines(results, 30).values()} == {"adam:0.003"}
  results.add(curve("dense", 0, [1, 0.2, 0.1], optimizer="adam 1"))  # one seed alone does not count
  assert {one.optimizer for one in baselines(results, 30).values()} == {"adam:0.003"}
  assert baselines(results, 50) == {}
  assert standings(results, "10mbit", Target(50)) == []


def test_the_parts_of_a_step_add_up():
  one = pace("fast", 0.7)
  assert one.parts == pytest.approx((0.4, 0.1, 0.2))
  assert one._replace(seconds=0.45).parts == pytest.approx((0.4, 0.05, 0))
  assert one._replace(seconds=0.3).parts == pytest.approx((0.3, 0, 0))
  assert report.milliseconds(one._replace(seconds=0.45)) == "450 = 400 + 50 + 0"


def test_rows_are_kept_and_replaced(results):
  results.add(curve("fast", 1, [5, 4, 3, 2]))
  results.add(pace("fast", 0.7))
  results.add(Whole("fast", "adam:0.001", 0, "10mbit", [10], [5.0], [4.0]))
  again = Results(results.path, SETTING)
  assert again.rows == results.rows
  assert [one.loss for one in again.find("curves", method="fast", seed=1)] == [[5, 4, 3, 2]]
  assert [one.seconds for one in again.find("paces", method="fast")] == [0.7]
  assert not list(results.path.parent.glob("*.new"))


def test_a_training_that_starts_anew_takes_nothing_away_until_it_is_as_far(results):
  longer = lambda *losses: Whole("fast", "adam:0.001", 0, "10mbit", STEPS[: len(losses)], list(losses), list(losses))
  for make, kind in ((lambda *losses: curve("fast", 0, losses), "curves"), (longer, "wholes")):
    for losses, kept in (((4, 3, 2), 3), ((5, 5), 3), ((5, 5, 5), 3), ((5, 5, 5, 5), 4)):
      if kind == "curves" and kept == 3:
        kept = 4  # which the fixture has
      results.add(make(*losses))
      (found,) = results.find(kind, method="fast", seed=0)
      assert len(found.steps) == kept
    assert found.loss == [5, 5, 5, 5]


def test_races_that_share_a_file_keep_each_others_rows(results):
  other = Results(results.path, SETTING)
  results.add(curve("mine", 0, [4, 3]))
  other.add(curve("other", 0, [4, 3]))
  results.refresh()
  assert [one.method for one in results.rows["curves"]][-2:] == ["mine", "other"]
  assert Results(results.path, SETTING).rows == results.rows == other.rows


BROKEN = [
  "",
  "{",
  "[]",
  '{"rows": 1}',
  '{"setting": {}}',
  '{"setting": {"task": "none"}, "paces": [{"x": 1}]}',
  *(
    json.dumps({"setting": SETTING, "curves": [curve("dense", 0, [2, 1])._replace(**change)._asdict()]})
    for change in ({"steps": []}, {"loss": [1]}, {"loss": "1"}, {"loss": ["1", "2"]}, {"accuracy": [[1], 2]})
  ),
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_not_the_file_of_a_race_is_refused(tmp_path, text):
  path = tmp_path / "race.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=r"race.json is not the file of a race, choose another"):
    Results(path, SETTING)
  assert path.read_text() == text


def test_a_training_that_diverges_has_no_number_and_is_not_the_target(results):
  for seed, last in ((0, math.inf), (1, 0.1)):
    results.add(curve("dense", seed, [4, 2, last], optimizer="adam:9"))
  assert {one.optimizer for one in baselines(results, 30).values()} == {"adam:0.001"}
  diverged = curve("bad", 0, [4, math.inf])
  results.add(diverged)
  assert "null" in results.path.read_text()
  assert Results(results.path, SETTING).find("curves", method="bad") == [diverged]
  assert [loss_after(diverged, steps) for steps in (5, 10, 15, 20, 30)] == [None, 4, *[math.inf] * 3]
  bad = next(one for one in standings(results, "10mbit", Target(30)) if one.method == "bad")
  assert (bad.steps, bad.loss, bad.seconds) == (None, None, None)
  assert crossing(curve("bad", 0, [math.inf, 1]), 2.0) == 20
  assert measuring.Length(steps=30, most=40, every=10).is_done(20, [4.0, math.inf])
  results.add(curve("far", 0, [4, 3, 2])._replace(drift=math.inf))
  plain = report.as_json(results, [], Target(30))
  assert [one["method"] for one in plain["standings"][""]][-2:] == ["bad", "far"]
  json.dumps(plain, allow_nan=False)
  for optimizer in ("adam:0.001", "adam:9"):
    for seed in (0, 1):
      results.add(curve("dense", seed, [math.inf] * 4, optimizer=optimizer))
  assert Target(30).of_seeds(results) == {}


def test_a_method_without_all_seeds_is_behind_those_that_have_them(results):
  results.add(curve("quick", 0, [1, 1, 1]))
  results.add(pace("quick", 0.1))
  quick = next(one for one in standings(results, "10mbit", Target(30)) if one.method == "quick")
  assert quick.seconds == Spread(1.0, 0.0, missing=1)
  assert standings(results, "10mbit", Target(30))[0].method == "fast"
  assert report.spread_text(quick.seconds, 1) == "1.0 (1 missing)"


def test_equal_seconds_are_those_that_all_curves_have_which_reach_the_target(results):
  results.add(curve("early", 0, [3, 1]))  # 10 s to the first seed's target and its end, 20 s to that of the second
  results.add(curve("early", 1, [4, 3, 2, 1]))
  results.add(pace("early", 0.4))
  first, *others = standings(results, "10mbit", Target(30))
  assert first.method == "early"
  assert first.seconds.mean == pytest.approx(0.4 * (15 + 40) / 2)
  assert first.loss_in_time == Spread(pytest.approx((1 + 3) / 2), pytest.approx(math.sqrt(2)))  # after 8 s
  fast = next(one for one in others if one.method == "fast")
  assert fast.loss_in_time.mean == pytest.approx((4 - 0.5 * 0.6 + 4 - 0.6) / 2)


@pytest.mark.usefixtures("results")
def test_a_file_of_another_setting_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"race.json has task='none', this race 'lm': choose another file"):
    Results(tmp_path / "new" / "race.json", {"task": "lm"})
  with pytest.raises(ValueError, match=r"has clip=None, this race 1"):
    Results(tmp_path / "new" / "race.json", {**SETTING, "clip": 1})


def test_a_race_ends_at_the_target_or_when_it_gives_up():
  length = measuring.Length(steps=20, most=40, every=10, target=1.0)
  assert not length.is_done(10, [0.5])
  assert length.is_done(20, [2.0, 0.5])
  assert not length.is_done(30, [2.0, 2.0])
  assert length.is_done(40, [2.0])
  assert length._replace(target=None).is_done(20, [2.0])
  assert length._replace(seconds=5.0).is_done(10, [2.0], seconds=5.0)
  assert not length._replace(seconds=5.0).is_done(10, [2.0], seconds=4.9)
  assert [step for step in range(1, 50) if length._replace(steps=25).is_evaluated(step)] == [10, 20, 25, 30, 40]


def test_the_tables_and_the_figure_are_made_of_the_rows(results, tmp_path):
  rows = [row for rows in results.rows.values() for row in rows]
  results = Results(tmp_path / "race.json", {"task": "lm", "hosts": 4, "batch_size": 4, "recipe": "constant rate"})
  for row in rows:
    results.add(row)
  results.add(Whole("fast", "adam:0.001", 0, "10mbit", [10, 40], [5.0, 21.0], [4.0, 1.0]))
  found = report.table(results, "10mbit", Target(30))
  assert found.row_count == 4
  assert next(iter(found.columns[5].cells)) == "500 = 400 + 100 + 0"
  assert list(report.wholes(results).columns[6].cells) == ["19.5"]
  assert list(report.paces(results).columns[3].cells) == ["1.00", "4.00", "4.00"]
  figures.curves(results, ["10mbit"], Target(30), tmp_path / "race.png")
  figures.bars(results, ["10mbit"], Target(30), tmp_path / "seconds.png")
  for name in ("race.png", "seconds.png"):
    assert (tmp_path / name).stat().st_size > 10_000
  assert Results(results.path, None).rows == results.rows
  met, missing = {goal.what[:10]: goal for goal in report.goals(results, Target(30))}.values()
  assert missing.measured == pytest.approx((60 / 17.5 + 60 / 20) / 2)
  assert (met.measured, missing.met) == (None, False)
  results.add(Advised("1gbit", "fast", {"fast": 0.1, "dense": 0.2}, "fast is fast"))
  for method, seconds in (("dense", 0.2), ("fast", 0.22)):
    results.add(pace(method, seconds, rate="1gbit"))
  *_, advice = report.goals(results, Target(30))
  assert (advice.measured, advice.met) == (pytest.approx(1 / np.mean([6 / 7.7, 6 / 8.8])), False)
  plain = json.loads(json.dumps(report.as_json(results, ["10mbit"], Target(30))))
  assert [one["method"] for one in plain["standings"]["10mbit"]][:2] == ["fast", "dense"]


def test_methods_are_parsed_and_refused():
  (one,) = methods.parse("method", ["gradients/spardl:density=0.1:teams=2"], 4)
  assert (one.way, one.spec.config, one.every) == ("gradients", {"density": 0.1, "teams": 2}, 1)
  labels = ["local/dense", "local:every=3:momentum=0.9/dense", "updates/dense", "a2sgd"]
  assert [one.every for one in methods.parse("method", labels, 4)] == [10, 3, 1, methods.AVERAGED_EVERY]
  for wrong, message in {
    "often/dense": "unknown way 'often', choose one of gradients, updates, local",
    "local:steps=2/dense": "local has no option 'steps', choose from every, rate, momentum",
    "warmed_up/often/dense": "unknown change 'often', choose one of corrected, warmed_up, leaves",
    "updates/leaves:name=bias/spardl:density=0.1": "leaves has no option 'name', choose from names, density",
    "warmed_up:steps=0/spardl:density=0.1": "step=0, choose a whole number from 1 up",
    "updates/a2sgd": "by a2sgd, whose totals differ between them",
    "gradients:every=2/dense": "gradients has no option 'every', choose from none",
    "spars:density=1": "unknown collective 'spars'",
    "spardl:density=2": "density=2, choose a number in",
  }.items():
    with pytest.raises(ValueError, match=message):
      methods.parse("method", [wrong], 4)


def test_schedules_end_where_the_papers_say():
  rate = lambda schedule, step, **more: float(
    recipes.Recipe(recipes.Optimizer("sgd", 0.1), schedule, steps=90, **more).schedule_of()(step)
  )
  assert [rate("step", step) for step in (0, 59, 61)] == pytest.approx([0.1, 0.1, 0.01])
  assert rate("early_step", 31) == pytest.approx(0.01)
  assert rate("polynomial", 45) == pytest.approx(0.025)
  assert rate("polynomial", 90) == pytest.approx(0, abs=1e-9)
  assert [rate("constant", step, warm_up=4) for step in (0, 2, 4, 80)] == pytest.approx([0, 0.05, 0.1, 0.1])


def test_clipping_comes_before_the_optimizer():
  tx = recipes.Recipe(recipes.Optimizer("sgd", 0.5), clip=1.0).make()
  updates, _ = tx.update(np.float32([3, 4]), tx.init(np.float32([0, 0])))
  np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)
  assert isinstance(tx, optax.GradientTransformation)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_races_that_can_start(name):
  preset = presets.PRESETS[name].flags
  hosts = preset["hosts"]
  assert methods.parse("method", preset["method"], hosts)[0].label == "dense"
  recipes.parse_optimizers(preset["optimizer"], rate=1.0)
  assert preset["task"] in registry.TEXTS | registry.IMAGES
  assert preset["schedule"] in recipes.SCHEDULES
  assert all(f'"{flag}"' in COMMAND for flag in preset)
  assert presets.PRESETS[name].paper_steps > 300  # what a race takes by default
  known = {cell.name for cell in papers.of("race")}
  assert set(presets.PRESETS[name].cells) <= known
  assert all({cell.above, cell.below} <= set(preset["method"]) for cell in presets.PRESETS[name].cells.values())


def test_a_preset_measures_the_papers_cells_where_every_seed_has_a_number(results):
  cells = {
    "later": presets.Ratio("dense", "fast", "seconds"),
    "worse": presets.Ratio("fast", "dense", "loss"),
    "never there": presets.Ratio("never", "dense", "seconds"),
    "not raced": presets.Ratio("dense", "other", "loss"),
    "slower": presets.Ratio("dense", "never", "pace"),
  }
  given = {"task": "none", "hosts": None, "rate": ["10mbit"], "optimizer": ["adam:0.001"]}
  for seed in (0, 1):  # another optimizer does not count
    results.add(curve("fast", seed, [9, 8, 1, 0.5], optimizer="adam:1"))
  measured = lambda **own: presets.Preset("A paper", given | own, 1, cells).measured(results, Target(30))
  assert measured(task="lm") == measured(hosts=3) == {}
  found = measured()
  assert found == {"later": pytest.approx(60 / 18.75), "worse": pytest.approx(2.5 / 1.5), "slower": 4.0}


BAD_FLAGS = [
  (["--method=daily/dense"], "unknown way 'daily', choose one of gradients"),
  (["--optimizer=adam:fast"], "--optimizer=adam:fast, choose a positive learning rate"),
  (["--method="], "unknown collective ''"),
  (["--optimizer="], "--optimizer=, choose one of sgd"),
  (["--seed="], "--seed=, give whole numbers from 0"),
  (["--seed=0", "--seed=-1"], "--seed=-1, give whole numbers from 0"),
  (["--parts=curve"], "--parts=curve, choose from curves, paces, wholes, advice, or none alone"),
  (["--parts=curves,none"], "--parts=none, choose from curves, paces, wholes, advice, or none alone"),
  (["--rate=foo"], "rate='foo', choose from 1kbit to 100gbit"),
  (["--hosts=300"], "hosts=300, choose from 1 to 250"),
  (["--clip=nan"], "--clip=nan, choose at least 0"),
  (["--target=0"], "--target=0, choose more than 0"),
  (["--target=nan"], "--target=nan, choose more than 0"),
  (["--warm_up=301"], "--warm_up=301, choose at most --steps=300"),
  (["--results=/tmp"], "--results=/tmp is a folder, give a file"),
  (["--preset=spardl-fig6c", "--task=lm"], "--task=lm: --preset=spardl-fig6c trains resnet20"),
  ([f"--results={__file__}/race.json"], "race_test.py is not a folder"),
  (["--steps=20", "--most=10"], "--most=10, choose at least --steps=20"),
  (["--seconds=0"], "--seconds=0, choose more than 0"),
  (["--parts=none"], "No such file or directory"),
  (["--seed=first"], "--seed=first, give whole numbers"),
  (["--task=fnn3", "--data_dir=/nowhere"], "/nowhere has no data_batch_1"),
]


def test_bad_flags(subtests, tmp_path):
  rows = [([*given, f"--report_dir={tmp_path / 'none'}"], message) for given, message in BAD_FLAGS]
  rows.append(([f"--report_dir={__file__}"], f"--report_dir={__file__}: {__file__} is not a folder"))
  commands.check_refusals("benchmarks.race", rows, subtests)
  assert not (tmp_path / "none").exists()


SMALL = (
  "--task=fnn3",
  "--hosts=2",
  "--steps=20",
  "--every=5",
  "--method=dense,updates/spardl:density=0.1",
)


@pytest.mark.long
def test_curves_go_on_where_they_were(tmp_path):
  run = lambda *more: commands.run("benchmarks.race", *SMALL, "--parts=curves", f"--report_dir={tmp_path}", *more)
  done = run("--seed=0", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  before = json.loads(done.stdout)["curves"]
  assert [(one["method"], one["seed"]) for one in before] == [("dense", 0), ("updates/spardl:density=0.1", 0)]
  assert before[0]["steps"] == [5, 10, 15, 20]
  assert min(before[1]["loss"]) <= before[0]["loss"][-1] or before[1]["steps"][-1] == 40
  assert before[0]["words"] == 199_210
  again = run("--seed=0", "--seed=1", "--json")
  after = json.loads(again.stdout)["curves"]
  assert after[:2] == before
  assert [(one["method"], one["seed"]) for one in after[2:]] == [("dense", 1), ("updates/spardl:density=0.1", 1)]
  assert "dense, adam:0.001, seed 0" not in again.stderr  # it was not trained once more


@pytest.mark.long
def test_dense_comes_first_and_a_target_of_its_own_holds_for_dense_too(tmp_path):
  more = "--optimizer=sgd:0.05,adam:0.001", "--seed=0,1", "--target=0.01", "--most=30", "--parts=curves", "--json"
  done = commands.run("benchmarks.race", *SMALL, *more, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  curves = json.loads(done.stdout)["curves"]
  assert [one["method"] for one in curves] == ["dense"] * 4 + ["updates/spardl:density=0.1"] * 4
  assert {one["steps"][-1] for one in curves} == {30}  # nobody gets there


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2")
def test_a_small_race_in_the_lab(tmp_path):
  done = commands.run(
    "benchmarks.race",
    *SMALL,
    "--seed=0",
    "--parts=curves,paces,wholes,advice",
    "--rate=100mbit",
    "--timed_steps=6",
    "--json",
    f"--report_dir={tmp_path}",
    f"--cache_dir={tmp_path / 'cache'}",
  )
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout)
  (advised,) = found["advice"]
  assert advised["method"] in advised["seconds"].keys() == {"dense", "spardl:density=0.1"}
  dense, sparse = found["paces"]
  assert dense["bytes"] > 4 * 199_210 > sparse["bytes"] > 0
  assert dense["seconds"] > sparse["seconds"] > 0
  for whole, loss in zip(found["wholes"], found["curves"], strict=True):
    assert whole["loss"][-1] == pytest.approx(
      loss["loss"][whole["steps"][-1] // 5 - 1], rel=0.1
    )  # rounding decides ties
    assert whole["seconds"] == sorted(whole["seconds"])
  assert (tmp_path / "race.png").stat().st_size > 10_000
