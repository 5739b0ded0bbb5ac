"""The race: who is first follows from the rows, rows outlive an interruption, and a small race runs in the lab."""

import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from benchmarks import methods, papers, recipes, report
from benchmarks.race import measuring, presets
from benchmarks.race.results import Curve, Pace, Results, Whole
from benchmarks.race.standings import (
  Target,
  baselines,
  crossing,
  loss_after,
  points,
  standings,
)
from benchmarks.report import Spread
from benchmarks.tasks import registry
from tests.benchmarks import commands
from tests.cases import normals

SETTING = {"task": "lm", "hosts": 4, "batch_size": 4, "recipe": "constant rate"}
STEPS = [10, 20, 30, 40]


def curve(method, seed, losses, optimizer="adam:0.001"):
  return Curve(
    method,
    optimizer,
    seed,
    STEPS[: len(losses)],
    list(losses),
    [0.0] * len(losses),
    100.0,
  )


def pace(method, seconds, rate="10mbit", **more):
  return Pace(method, rate, 30, seconds, compute=0.4, rest=0.1, bytes=1e6, **more)


@pytest.fixture
def results(tmp_path):
  found = Results(tmp_path / "new" / "race.json", SETTING)
  curves = {
    "dense": ([4, 3, 2], [4, 3, 1]),
    "fast": ([4.0, 3.5, 3.0, 1.0], [4, 3, 2, 1]),
  }
  curves |= {"never": ([4, 4, 4, 4], [4, 3, 1, 1]), "unpaced": ([4, 3, 1],)}
  trained = [
    curve(method, seed, losses)
    for method, own in curves.items()
    for seed, losses in enumerate(own)
  ]
  for row in (*trained, pace("dense", 2.0), pace("fast", 0.5), pace("never", 0.5)):
    found.add(row)
  return found


def ranked(results, steps=30, **target):
  return {
    one.method: one for one in standings(results, "10mbit", Target(steps, **target))
  }


def test_a_crossing_lies_between_two_evaluations():
  one = curve("dense", 0, [3, 2, 2.5, 1])
  assert [crossing(one, loss) for loss in (2.25, 2, 3, 0.5)] == [17.5, 20, 10, None]
  assert [loss_after(one, steps) for steps in (25, 5, 50)] == [2.25, None, None]


def test_seconds_to_the_loss_are_steps_times_pace(results):
  assert {seed: one.loss[-1] for seed, one in baselines(results, 30).items()} == {
    0: 2,
    1: 1,
  }
  found = ranked(results)
  assert list(found)[:2] == ["fast", "dense"]
  fast = found["fast"]
  assert fast.steps == Spread(37.5, pytest.approx(math.sqrt(12.5)))  # 35 and 40
  assert (fast.seconds.mean, fast.speed_up.mean) == (
    0.5 * 37.5,
    pytest.approx((60 / 17.5 + 60 / 20) / 2),
  )
  assert fast.more_steps == Spread(
    pytest.approx(37.5 / 30), pytest.approx(math.sqrt(12.5) / 30)
  )
  assert found["dense"].speed_up == Spread(1.0, 0.0)
  # behind the others, though faster from its one seed
  assert found["never"].steps == Spread(30, 0.0, missing=1)
  assert f"{found['never'].seconds:.1f}" == "15.0 (1 missing)"
  # a target of its own counts instead of dense's loss
  own = ranked(results, loss=3.0)["fast"]
  # 30 and 20 steps
  assert (own.steps.mean, own.speed_up.mean) == (
    25,
    pytest.approx((40 / 15 + 40 / 10) / 2),
  )


def test_dense_races_with_its_best_optimizer(results):
  for seed in (0, 1):
    results.add(curve("dense", seed, [4, 2, 0.5], optimizer="adam:0.003"))
  # one seed alone does not count
  results.add(curve("dense", 0, [1, 0.2, 0.1], optimizer="adam 1"))
  assert {one.optimizer for one in baselines(results, 30).values()} == {"adam:0.003"}
  assert baselines(results, 50) == ranked(results, 50) == {}


def test_a_pace_is_that_of_an_optimizer_with_the_same_options(results):
  for seconds, optimizer in ((3.0, "adam:0.1"), (4.0, "adam:0.1:b1=0.8")):
    results.add(pace("fast", seconds, optimizer=optimizer))
  of = lambda optimizer: (
    results.pace_of(curve("fast", 0, [1], optimizer), "10mbit").seconds
  )
  assert [of("adam:0.001"), of("adam:0.2:b1=0.8"), of("sgd:0.1")] == [3.0, 4.0, 0.5]
  assert ranked(results)["fast"].pace.seconds == 3.0
  assert results.pace_of(curve("unpaced", 0, [1]), "10mbit") is None


def test_losses_after_equal_steps_stand_over_bits(results):
  """Beside dense's from the same seed; of what has one seed only the best rate, and nothing that is not as far."""
  for rate, last in (("adam:0.001", 2.0), ("adam:0.003", 2.5)):
    results.add(curve("signs", 0, [4, 3, last], optimizer=rate)._replace(words=1.0))
  results.add(curve("short", 0, [4, 3]))
  found = {one.method: one for one in points(results, 20, 30)}
  assert list(found) == ["unpaced", "dense", "signs", "fast", "never"]
  dense, signs, never = (found[name] for name in ("dense", "signs", "never"))
  # 2 · 3/4 · 32
  assert (dense.bits, dense.loss, dense.above) == (
    48,
    1.5,
    Spread(0.0, 0.0),
  )
  assert (signs.bits, signs.optimizer, signs.above.mean) == (
    pytest.approx(0.48),
    "adam:0.001",
    0.0,
  )
  assert never.above == Spread(50.0, pytest.approx(math.sqrt(5000)))
  assert [loss.mean for loss in never.losses] == [3.5, never.loss]


def test_a_training_that_diverges_has_no_number_and_is_not_the_target(results):
  for seed, last in ((0, math.inf), (1, 0.1)):
    results.add(curve("dense", seed, [4, 2, last], optimizer="adam:9"))
  diverged = curve("bad", 0, [4, math.inf])
  results.add(diverged)
  assert {one.optimizer for one in baselines(results, 30).values()} == {"adam:0.001"}
  assert "null" in results.path.read_text()
  assert Results(results.path, SETTING).find("curves", method="bad") == [diverged]
  assert [loss_after(diverged, steps) for steps in (5, 10, 15, 20, 30)] == [
    None,
    4,
    *[math.inf] * 3,
  ]
  bad = ranked(results)["bad"]
  assert (bad.steps, bad.loss, bad.seconds) == (None, None, None)
  json.dumps(report.plain(results.rows | ranked(results)), allow_nan=False)


def test_rows_are_kept_by_all_that_share_a_file_and_the_longer_training_stays(results):
  other = Results(results.path, SETTING)
  results.add(curve("mine", 0, [4, 3]))
  other.add(curve("other", 0, [4, 3]))
  for losses, kept in (((4, 3, 2), 3), ((5, 5), 3), ((5, 5, 5, 5), 4)):
    other.add(
      Whole(
        "fast",
        "adam:0.001",
        0,
        "10mbit",
        STEPS[: len(losses)],
        list(losses),
        list(losses),
      )
    )
    assert len(other.find("wholes", method="fast")[0].steps) == kept
  again = Results(results.path, None)
  assert again.rows == other.rows
  assert [one.method for one in again.rows["curves"]][-2:] == ["mine", "other"]


def test_what_is_not_the_file_of_this_race_is_refused(results, tmp_path):
  path, torn = (
    tmp_path / "race.json",
    curve("dense", 0, [2, 1])._replace(loss=[1])._asdict(),
  )
  texts = [
    "",
    "[]",
    '{"setting": {}}',
    '{"setting": {"task": "lm"}, "paces": [{"x": 1}]}',
  ]
  for text in [*texts, json.dumps({"setting": SETTING, "curves": [torn]})]:
    path.write_text(text)
    with pytest.raises(
      ValueError, match=r"race.json is not the file of a race, choose another"
    ):
      Results(path, SETTING)
  with pytest.raises(
    ValueError, match=r"race.json has task='lm', this race 'bert': choose another file"
  ):
    Results(results.path, SETTING | {"task": "bert"})


def test_a_race_ends_at_the_target_or_when_it_gives_up_or_diverges():
  length = measuring.Length(steps=20, most=40, every=10, target=1.0)
  ends = [
    (10, [0.5], False),
    (20, [2.0, 0.5], True),
    (30, [2.0, 2.0], False),
    (40, [2.0], True),
  ]
  ends.append((20, [4.0, math.inf], True))
  assert [length.is_done(steps, losses) for steps, losses, _ in ends] == [
    end for *_, end in ends
  ]
  assert length._replace(target=None).is_done(20, [2.0])


@pytest.mark.long
def test_the_command_reports_what_the_file_has(results, tmp_path):
  results.add(
    Whole("fast", "adam:0.001", 0, "10mbit", [10, 40], [5.0, 21.0], [4.0, 1.0])
  )
  flags = (
    "--parts=none",
    f"--results={results.path}",
    f"--report_dir={tmp_path}",
    "--json",
  )
  done = commands.run("benchmarks.race", *flags)
  assert done.returncode == 0, done.stderr[-2000:]
  assert [one["method"] for one in json.loads(done.stdout)["standings"]["10mbit"]][
    :2
  ] == ["fast", "dense"]
  assert (
    "10mbit links: seconds to dense's loss after 30 steps, from seeds 0, 1"
    in done.stderr
  )
  for name in ("race.png", "seconds.png", "frontier.png"):
    assert (tmp_path / name).stat().st_size > 10_000


def test_methods_and_optimizers_are_parsed():
  one, other = methods.parse(
    "method",
    ["gradients/spardl:density=0.1:teams=2", "dense,dense"],
    4,
    density=0.5,
    teams=1,
  )
  assert (one.way, one.spec.config, one.every) == (
    "gradients",
    {"density": 0.1, "teams": 2},
    1,
  )
  # which has none of the shared options
  assert (other.label, other.spec.config) == (
    "dense",
    {},
  )
  labels = ["local/dense", "local:every=3:momentum=0.9/dense", "updates/dense", "a2sgd"]
  assert [one.every for one in methods.parse("method", labels, 4)] == [
    10,
    3,
    1,
    methods.AVERAGED_EVERY,
  ]
  found = recipes.parse_optimizers(
    ["adamw:0.003,sgd", "window_adam:window=8", "sgd"], 0.1
  )
  assert list(map(str, found)) == ["adamw:0.003", "sgd:0.1", "window_adam:0.1:window=8"]


def test_the_papers_ending_of_a2sgd_averages_and_takes_a_step_with_the_mean_gradient():
  (method,) = methods.parse("method", ["gradients:ending=3/a2sgd"], 2)
  comm, params, batch = (
    js.SimComm("workers", members=2),
    jnp.zeros(3),
    np.float32([[1, 2, -1], [-1, -2, 3]]),
  )
  tx = method.make("workers", optax.sgd(0.25))
  state = js.init(tx, params, comm)
  step = js.make_train_step(
    lambda params, batch: jnp.sum((params - batch[0]) ** 2) / 2, tx, comm
  )
  found = []
  for _ in range(3):
    params, state, _ = step(params, state, batch)
    found.append(np.asarray(params))
  assert not found[0].any()  # the first average is behind the second step
  assert found[1].any()
  np.testing.assert_allclose(
    found[2], found[1] - 0.25 * (found[1] - batch.mean(0)), rtol=1e-6
  )


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ("often/dense", "unknown way 'often', choose one of gradients, updates, local"),
    (
      "local:steps=2/dense",
      "local has no option 'steps', choose from every, rate, momentum",
    ),
    (
      "warmed_up/often/dense",
      "unknown change 'often', choose one of corrected, ef21, restored, warmed_up, leaves",
    ),
    ("updates/a2sgd", "by a2sgd, whose totals differ between them"),
    (
      "gradients:ending=9/dense",
      "ending is for collectives whose totals differ between workers, not dense",
    ),
    (
      "nadam",
      "--optimizer=nadam, choose one of sgd, momentum, adam, adamw, rmsprop, lars",
    ),
    (
      "sgd:fast",
      "--optimizer=sgd:fast: .*'fast'; write name:rate:option=value, as in window_adam:0.001:window=4",
    ),
    ("sgd:0", "--optimizer=sgd:0: learning rate 0, choose a positive one"),
    ("muon:rows=0.5", "--optimizer=muon:rows=0.5: "),
    ("muon:only=[", r"--optimizer=muon:only=\[: unterminated"),
    (
      "window_adam:window=0",
      "--optimizer=window_adam:window=0: .*window=0, choose a whole number from 1 to",
    ),
  ],
)
def test_methods_and_optimizers_are_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    recipes.parse_optimizers(
      [wrong], 0.1
    ) if "--optimizer" in message else methods.parse("method", [wrong], 4)


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
def test_muon_orthogonalizes_blocks_of_matrices_whose_names_match():
  """Rows or columns along the longer side; the same as without blocks where one is the whole of it; Adam for others."""
  params = {
    name: jnp.zeros(size)
    for name, size in {"blocks": (4, 12), "tall": (12, 4), "embed": (4, 6)}.items()
  }
  grads = {
    name: jnp.asarray(normals(number, *leaf.shape))
    for number, (name, leaf) in enumerate(params.items())
  }

  def updates(**options):
    tx = recipes.muon(1.0, only="blocks|tall", adam=0.5, **options)
    return tx.update(grads, tx.init(params), params)[0]

  found, whole = updates(rows=4), updates()
  np.testing.assert_array_equal(found["embed"], whole["embed"])
  assert np.ptp(abs(found["embed"])) < 1e-5  # the first step of Adam
  for blocks in (found["blocks"].T.reshape(3, 4, 4), found["tall"].reshape(3, 4, 4)):
    for block in blocks:
      values = np.linalg.svd(block, compute_uv=False)
      # as five steps of Newton-Schulz leave them
      assert values.max() / values.min() < 3
  np.testing.assert_allclose(
    updates(rows=12)["tall"], whole["tall"], rtol=1e-5, atol=1e-6
  )


def test_recipes_have_a_schedule_and_clip_before_the_optimizer():
  sgd = recipes.Optimizer("sgd", 0.1)
  rate = lambda schedule, step, **more: float(
    recipes.Recipe(sgd, schedule, steps=90, **more).schedule_of()(step)
  )
  assert [rate("step", 59), rate("step", 61), rate("early_step", 31)] == pytest.approx(
    [0.1, 0.01, 0.01]
  )
  assert [rate("constant", step, warm_up=4) for step in (0, 2, 4, 80)] == pytest.approx(
    [0, 0.05, 0.1, 0.1]
  )
  tx = recipes.Recipe(sgd, clip=1.0).make()
  updates, _ = tx.update(np.float32([3, 4]), tx.init(np.float32([0, 0])))
  np.testing.assert_allclose(updates, [-0.06, -0.08], rtol=1e-6)


def test_presets_are_races_that_can_start():
  for name, preset in presets.PRESETS.items():
    own = preset.flags
    assert methods.parse("method", own["method"], own["hosts"])[0].label == "dense", (
      name
    )
    recipes.parse_optimizers(own["optimizer"], rate=1.0)
    assert own["task"] in [*registry.TEXTS, *registry.IMAGES]
    assert own["schedule"] in recipes.SCHEDULES
    assert set(preset.cells) <= {cell.name for cell in papers.of("race")}
    assert all(set(pair) <= set(own["method"]) for *pair, _ in preset.cells.values())


def test_a_preset_measures_the_papers_cells_where_every_seed_has_a_number(results):
  cells = {"later": ("dense", "fast", "seconds"), "worse": ("fast", "dense", "loss")}
  cells |= {
    "slower": ("dense", "never", "pace"),
    "never there": ("never", "dense", "seconds"),
  }
  cells |= {"not raced": ("dense", "other", "loss")}
  given = {"task": "lm", "hosts": 4, "rate": ["10mbit"], "optimizer": ["adam:0.001"]}
  # another optimizer does not count
  results.add(curve("fast", 0, [9, 8, 1, 0.5], optimizer="adam:1"))
  measured = lambda **own: presets.Preset("A paper", given | own, 1, cells).measured(
    results, Target(30)
  )
  assert measured(task="bert") == measured(hosts=3) == {}
  assert measured() == {
    "later": pytest.approx(60 / 18.75),
    "worse": pytest.approx(2.5 / 1.5),
    "slower": 4.0,
  }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax's own
@pytest.mark.usefixtures("standard_promotion")
def test_a_curve_that_was_interrupted_goes_on_bit_for_bit(tmp_path):
  (method,) = methods.parse("method", ["local:every=4:apply_residual=True/onebit"], 2)
  recipe = recipes.Recipe(recipes.Optimizer("adam", 0.001), "cosine", steps=12)
  runner = measuring.Runner(method, recipe)
  program = measuring.Program(registry.make("fnn3"), runner.at(1.0), workers=2)
  kept = []

  def train(until):
    def keep(curve):
      kept.append(curve)
      if curve.steps[-1] == until:
        raise KeyboardInterrupt

    training = program.begin(0.001, 0, 4)
    length = measuring.Length(12, 12, 3)
    measuring.curve(training, runner.curve(0), length, keep, tmp_path / "curve")
    return kept[-1]

  whole = train(until=None)
  assert not (tmp_path / "curve").exists()
  with pytest.raises(KeyboardInterrupt):
    train(until=9)
  assert train(until=None) == whole
  # The second training was interrupted before step 9 was kept for the third.
  assert [one.steps[-1] for one in kept[4:]] == [3, 6, 9, 9, 12]


SMALL = (
  "--task=fnn3",
  "--hosts=2",
  "--steps=20",
  "--every=5",
  "--method=dense,updates/spardl:density=0.1",
  "--json",
)


@pytest.mark.long
def test_curves_go_on_where_they_were(tmp_path):
  run = lambda seeds: commands.run(
    "benchmarks.race", *SMALL, seeds, "--parts=curves", f"--report_dir={tmp_path}"
  )
  done, again = run("--seed=0"), run("--seed=0,1")
  before, after = (json.loads(one.stdout)["curves"] for one in (done, again))
  assert (before[0]["steps"], before[0]["words"]) == ([5, 10, 15, 20], 199_210)
  assert after[:2] == before
  assert [(one["method"], one["seed"]) for one in after[2:]] == [
    ("dense", 1),
    ("updates/spardl:density=0.1", 1),
  ]
  assert "dense, adam:0.001, seed 0" not in again.stderr  # it was not trained once more


@pytest.mark.long
@commands.needs_lab
def test_a_small_race_in_the_lab(tmp_path):
  more = "--parts=curves,paces,wholes", "--rate=20mbit", "--timed_steps=6", "--seed=0"
  done = commands.run(
    "benchmarks.race",
    *SMALL,
    *more,
    f"--report_dir={tmp_path}",
    f"--cache_dir={tmp_path / 'cache'}",
  )
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout)
  dense, sparse = found["paces"]
  assert dense["bytes"] > 4 * 199_210 > sparse["bytes"] > 0
  assert dense["seconds"] > sparse["seconds"] > 0
  for whole, loss in zip(found["wholes"], found["curves"], strict=True):
    expected = loss["loss"][whole["steps"][-1] // 5 - 1]
    # rounding decides ties
    assert whole["loss"][-1] == pytest.approx(expected, rel=0.1)
    assert whole["seconds"] == sorted(whole["seconds"])
