"""`js.race`: its trainings are those of `make_train_step`, rates are tried fairly, and it goes on from its file."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.racing import tuning
from jaxsparse.racing.batching import batches_of, join
from jaxsparse.racing.result import Race, Row
from jaxsparse.racing.training import Program
from jaxsparse.train.agreement import Agreement
from jaxsparse.types import Link
from tests.cases import mesh_of, normals, sim

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam needs it

SWEEPS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "sweeps"
P, N, STEPS = 2, 24, 20
TARGET = normals(0, N)
RACE = {"workers": P, "steps": STEPS, "rate": 0.05, "rates": (1.0,), "seeds": 1}


def batches(step):
  """Rows of noise for each worker, and what they are to give."""
  x = normals(step + 1, 4 * P, N)
  return x, x @ TARGET


def loss_fn(params, batch):
  x, y = batch
  return jnp.mean((x @ params - y) ** 2)


HELD_OUT = batches(10**6)


def evaluate(params):
  return loss_fn(params, HELD_OUT)


def methods(*names, optimizer="adam"):
  every = js.recipes(optimizer, workers=P)
  return {name: every[name] for name in names}


def by_steps(method, rate, grid, first=0, params=None, loss=loss_fn, **named):
  """The losses at the steps of `grid` of a loop over `make_train_step` in the simulator, and its state."""
  tx = method("workers", rate)
  params = jnp.zeros(N) if params is None else params
  state = js.init(tx, params, sim(P))
  step = js.make_train_step(loss, tx, sim(P), donate=False)
  losses = []
  for number in range(grid[-1]):
    given = {name: make(number) for name, make in named.items()}
    params, state, _ = step(params, state, batches(first + number), **given)
    if number + 1 in grid:
      losses.append(float(evaluate(params)))
  return losses, state


def race_of(chosen, **changed):
  given = {"loss_fn": loss_fn, "params": jnp.zeros(N), "batches": batches}
  given |= {"evaluate": evaluate, "methods": chosen} | RACE | changed
  return js.race(**given)


@pytest.mark.parametrize("name", ["signs, every 4", "4 bits"])
def test_a_training_is_that_of_the_step(name):
  chosen = methods("dense", name)
  dense, row = race_of(chosen).rows
  for found in dense, row:
    expected, state = by_steps(chosen[found.method], 0.05, found.steps)
    np.testing.assert_allclose(found.losses[0], expected, rtol=1e-5)
    exchanges = found.steps[-1] // found.every
    words = float(js.metrics(state).total_words) / exchanges / found.every
    assert found.words == pytest.approx(words)
  assert row.every == (4 if name == "signs, every 4" else 1)


@pytest.mark.parametrize(
  ("label", "options", "steps"),
  [
    ("gaussiank:density=0.25", {"every": 4}, 10),
    ("dense", {"every": 4}, 6),
    ("dense", {"every": 4}, 11),
    ("dense", {"every": 4, "delay": 2}, 10),
    ("dense", {"every": 6, "fragments": 2}, 10),
    ("dense", {"every": 50}, 10),
  ],
)
def test_steps_between_exchanges_are_counted(label, options, steps):
  """Also where words vary, and where H does not divide the steps or is above them."""
  outer = lambda axis: optax.chain(js.make_transform(label, axis), optax.sgd(1.0))
  local = lambda axis, rate: js.local_steps(optax.sgd(rate), outer(axis), **options)
  pair = [jnp.zeros(N // 2), jnp.zeros(N // 2)]
  joined = lambda function: (
    lambda params, *more: function(jnp.concatenate(params), *more)
  )
  given = {"params": pair, "loss_fn": joined(loss_fn), "evaluate": joined(evaluate)}
  race = race_of(methods("dense") | {"local": local}, steps=steps, **given)
  _, row = race.rows
  every = options["every"] if options["every"] < steps else 0
  cost = js.costs.count_update(local("workers", 0.1), pair, workers=P)
  assert row.every == every
  assert len(race.evidence) == bool(every and row.collective)
  share = 1 / every if every else 0
  assert row.messages == pytest.approx(share * (cost.messages + cost.agreements))
  if label == "dense":
    assert row.words == pytest.approx(share * cost.words)


def test_messages_of_transforms_that_exchange_in_different_steps():
  """Momentum every 2 steps, parameters every 5: 7 of the 20 exchanges that 10 steps with both would have."""

  def chain(axis, rate):
    inner = js.average_momentum(optax.sgd(rate, momentum=0.9), axis, every=2)
    outer = optax.chain(js.dense_transform(axis), optax.sgd(1.0))
    return js.local_steps(inner, outer, every=5)

  _, row = race_of(methods("dense") | {"both": chain}, steps=10).rows
  cost = js.costs.count_update(chain("workers", 0.1), jnp.zeros(N), workers=P)
  assert row.messages == pytest.approx(7 / 20 * cost.messages, rel=0.2)


def test_messages_that_vary_in_size_are_exchanged_in_every_step():
  """Ok-Topk sends fewer words than its messages may have."""
  exchange = lambda axis, rate: optax.chain(
    js.make_transform("oktopk:density=0.25", axis), optax.sgd(rate)
  )
  chosen = methods("dense") | {"oktopk": exchange}
  _, row = race_of(chosen, steps=4).rows
  cost = js.costs.count("oktopk:density=0.25", n=N, workers=P)
  assert row.words < 0.7 * cost.words
  assert (row.every, row.messages) == (1, cost.messages + cost.agreements)


def test_a_last_block_of_fewer_steps_needs_no_other_program(monkeypatch):
  programs = []

  class Kept(Program):
    def __init__(self, *given):
      super().__init__(*given)
      programs.append(self)

  monkeypatch.setattr(tuning, "Program", Kept)
  chosen = methods("dense", "signs, every 4")
  for row in race_of(chosen, steps=23).rows:
    assert row.steps[:8] == [3, 6, 9, 12, 15, 18, 21, 23]
    expected, state = by_steps(chosen[row.method], 0.05, row.steps)
    np.testing.assert_allclose(row.losses[0], expected, rtol=1e-5)
    exchanges = row.steps[-1] // row.every
    words = float(js.metrics(state).total_words) / exchanges / row.every
    assert row.words == pytest.approx(words)
  assert [program.run._cache_size() for program in programs] == [1, 1]


def test_workers_of_a_mesh_train_as_simulated_ones():
  chosen = methods("dense", "4 bits", optimizer="sgd")
  on_mesh = race_of(chosen, workers=mesh_of(P)).rows
  for row, simulated in zip(on_mesh, race_of(chosen).rows, strict=True):
    np.testing.assert_allclose(row.losses, simulated.losses, rtol=1e-5)
    assert (row.words, row.state_bytes) == (simulated.words, simulated.state_bytes)


def test_each_seed_has_batches_keys_and_parameters_of_its_own():
  def noisy(params, batch, rng):
    return loss_fn(params + 0.1 * jax.random.normal(rng, params.shape), batch)

  chosen = methods("dense", optimizer="sgd")
  key = jax.random.key(3)
  start_of = lambda seed: jnp.full(N, float(seed))
  (row,) = race_of(
    chosen, loss_fn=noisy, params=start_of, rng=key, seeds=2, rate=0.01
  ).rows
  most = STEPS + 5 * (STEPS // 10)
  for seed in range(2):
    own = jax.random.fold_in(key, seed)
    rng = lambda number, own=own: jax.random.fold_in(own, number)
    expected, _ = by_steps(
      chosen["dense"], 0.01, row.steps, seed * most, start_of(seed), noisy, rng=rng
    )
    np.testing.assert_allclose(row.losses[seed], expected, rtol=1e-5)


def test_the_worse_half_of_the_rates_ends_early_and_the_best_one_stays():
  chosen = methods("dense", optimizer="sgd")
  multiples = (0.1, 3.0, 1.0, 30.0)
  race = race_of(chosen, rate=0.02, rates=multiples)
  (row,) = race.rows
  grid = list(range(2, STEPS + 1, 2))
  losses = {m: by_steps(chosen["dense"], 0.02 * m, grid)[0] for m in multiples}
  early = sorted(multiples, key=lambda m: losses[m][1])
  late = sorted(early[:2], key=lambda m: losses[m][4])
  ends = {early[2]: 1, early[3]: 1, late[1]: 4, late[0]: 9}
  assert row.multiple == late[0]
  assert row.rate == pytest.approx(0.02 * late[0])
  assert [multiple for multiple, _ in row.tried] == sorted(multiples)
  for multiple, loss in row.tried:
    expected = losses[multiple][ends[multiple]]
    assert loss == pytest.approx(expected if math.isfinite(expected) else math.inf)


def test_a_method_above_dense_goes_on_until_its_loss():
  slower = lambda axis, rate: optax.chain(
    js.dense_transform(axis), optax.sgd(0.8 * rate)
  )
  never = lambda axis, _: optax.chain(js.dense_transform(axis), optax.sgd(0.0))
  sgd = methods("dense", optimizer="sgd")
  race = race_of(sgd | {"slower": slower, "never": never}, rate=0.01)
  dense, slow, none = race.rows
  assert dense.steps[-1] == STEPS
  assert STEPS < slow.steps[-1] < none.steps[-1] == STEPS + 10
  assert race.losses(slow) == [slow.losses[0][slow.steps.index(STEPS)]]
  steps = race.steps_to_dense(slow)
  at = np.interp(steps, slow.steps, slow.losses[0])
  np.testing.assert_allclose(at, race.losses(dense), rtol=1e-5)
  assert math.isnan(race.steps_to_dense(none)[0])
  assert "never" in str(race)
  assert [row.steps is None for row in race.evidence] == [False, True]


def test_an_interrupted_race_goes_on_from_its_file(tmp_path):
  chosen = methods("dense", "4 bits", "signs", optimizer="sgd")
  whole = race_of(chosen, seeds=2)
  file = tmp_path / "race.json"
  begun = []

  def interrupt(line):
    begun.append(line)
    if line.startswith("4 bits"):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    race_of(chosen, seeds=2, file=file, progress=interrupt)
  lines = []
  found = race_of(chosen, seeds=2, file=file, progress=lines.append)
  assert not any(line.startswith("dense") for line in lines)
  assert [row._replace(seconds=0.0) for row in found.rows] == [
    row._replace(seconds=0.0) for row in whole.rows
  ]
  assert found.agreements == whole.agreements
  again = race_of(chosen, seeds=2, file=file)
  assert again == found
  with pytest.raises(ValueError, match=r"race.json.*seeds=2, this one has 1"):
    race_of(chosen, file=file)


def test_a_file_is_checked_before_anything_is_trained_and_takes_all_numbers(tmp_path):
  missing = {"file": tmp_path / "missing" / "race.json", "progress": pytest.fail}
  with pytest.raises(ValueError, match=r"missing/race.json': the folder is missing"):
    race_of(methods("dense"), **missing)
  given = {"steps": np.int64(4), "rate": np.float32(0.05), "seeds": np.int32(1)}
  given |= {"rates": jnp.array([1.0]), "file": tmp_path / "race.json"}
  race = race_of(methods("dense"), **given)
  assert race_of(methods("dense"), **given, progress=pytest.fail).rows == race.rows


def test_without_time_dense_alone_is_tried():
  profile = js.costs.Profile(workers=P, alpha=1e-3, beta=2e-8)
  chosen = methods("dense", "signs", optimizer="sgd")
  race = race_of(chosen, budget=0.0, links=("100mbit",), profile=profile)
  assert race.links["100mbit"].beta == pytest.approx(8e-8)
  assert race.links["profile"][:2] == (1e-3, 2e-8)
  assert [row.method for row in race.rows] == ["dense"]
  assert race.left_out == ["signs"]
  assert "no time was left for signs" in str(race)


def test_losses_over_the_axis_aux_and_model_states():
  def counted(params, batch, model_state):
    total = jax.lax.psum(batch[0].shape[0], "workers")
    loss = loss_fn(params, batch) * P * 4 / total
    return loss, model_state + 1.0, {"rows": jnp.int32(4)}

  seen = []
  race = race_of(
    methods("dense"),
    loss_fn=counted,
    has_aux=True,
    model_state=jnp.zeros(()),
    evaluate=lambda params, state: seen.append(float(state)) or evaluate(params),
  )
  plain = race_of(methods("dense"))
  np.testing.assert_allclose(race.rows[0].losses, plain.rows[0].losses, rtol=1e-5)
  assert seen == list(range(2, STEPS + 1, 2))


def test_workers_with_data_of_their_own_are_named():
  def apart(step):
    x = np.zeros((4 * P, N), np.float32)
    x[:4, :12] = normals(step, 4, 12)
    x[4:, 12:] = normals(step, 4, 12)
    return x, x @ TARGET

  chosen = methods("dense", optimizer="sgd")
  found = race_of(chosen, batches=apart)
  assert "the workers' data differ" in str(found)
  assert len(found.agreements) == 3
  assert "differ" not in str(race_of(chosen))


def test_batches_of_an_iterable_begin_again_and_seeds_begin_apart():
  rows = [np.full(4, float(i)) for i in range(5)]
  first = lambda seed, given, count: [
    int(x[0]) for _, x in zip(range(count), batches_of(given, seed, 2, 4), strict=False)
  ]
  assert first(0, rows, 7) == [0, 1, 2, 3, 4, 0, 1]
  assert first(1, rows, 4) == [2, 3, 4, 0]

  class Endless:
    def __iter__(self):
      return iter(rows)

  assert first(1, Endless(), 3) == [4, 0, 1]
  assert first(1, lambda step: np.full(4, float(step)), 2) == [4, 5]
  with_short_last = [*rows, np.zeros(2)]  # as from a loader
  assert first(0, with_short_last, 7) == [0, 1, 2, 3, 4, 0, 1]

  class OnePass:
    def __init__(self):
      self.left = iter(rows)

    def __iter__(self):
      return self.left

  with pytest.raises(
    ValueError, match="OnePass.* has no batch of 4 rows when it begins again"
  ):
    first(0, OnePass(), 7)
  joined = join(np.arange(12).reshape(3, 4), 2)  # three steps of two rows a worker
  assert joined.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize(
  ("changed", "error"),
  [
    ({"workers": 1}, "workers=1, choose a whole number from 2"),
    ({"steps": 1}, "steps=1, choose a whole number from 2"),
    ({"seeds": 0}, "seeds=0"),
    ({"rate": 0.0}, "rate=.*0.0.*positive"),
    ({"rates": ()}, "rates=.*one or several"),
    ({"rates": (1.0, 1.0)}, "rates=.*each once"),
    ({"batches": iter([batches(0)])}, "cannot begin again"),
    ({"batches": []}, "has no batch"),
    ({"batches": [batches(0)], "seeds": 2}, "has 1 for seeds=2: give one at least"),
    ({"methods": {}}, "one has to be 'dense'"),
    ({"links": ("1 gb",)}, "'1 gb', write 10gbit"),
    ({"links": ("0gbit",)}, "'0gbit', write 10gbit"),
    ({"links": ()}, "links is empty"),
  ],
)
def test_bad_input_is_refused(changed, error):
  with pytest.raises(ValueError, match=error):
    race_of(methods("dense"), **changed)


def made(method, losses, **changed):
  """A row of a method whose seeds end with these losses, after others twice as high."""
  curves = [[2 * loss, loss] for loss in losses]
  tried = [[0.5, 9.0], [1.0, 1.0], [2.0, 9.0]]
  row = Row(
    method=method,
    rate=0.1,
    multiple=1.0,
    tried=tried,
    steps=[10, 20],
    losses=curves,
    words=100.0,
    messages=4.0,
    state_bytes=8.0,
    seconds=0.01,
    collective="onebit",
    every=1,
  )
  return row._replace(**changed)


def race_with(*rows):
  """A race of two seeds, 4 workers and 1,600 parameters."""
  links = {"fast": Link(0.0, 0.0, 1.0), "slow": Link(1e-3, 1e-5, 1.0)}
  dense = made("dense", [1.0, 2.0], words=3200.0)
  return Race([dense, *rows], 20, 4, 1600, 0.1, links, [Agreement(0.5, 0.5)], [])


def test_the_best_method_is_the_fastest_near_dense():
  race = race_with(
    made("near", [1.01, 2.02], seconds=0.02),
    made("far", [1.1, 2.2], words=1.0),
    made("unsure", [0.97, 2.08], words=0.5),  # 0.5 ± 3.5 % above dense
  )
  assert race.best().method == "dense"
  assert race.best("slow").method == "near"
  assert race.best("slow", within=20.0).method == "unsure"
  assert race.best("slow", within=7.6).method == "unsure"
  assert race.best("slow", within=7.4).method == "near"
  dense, near, *_ = race.rows
  slow = race.links["slow"]
  assert dense.step_seconds(slow) == pytest.approx(0.01 + 4 * 1e-3 + 3200 * 4e-5)
  assert near.step_seconds(race.links["fast"]) == 0.02
  with pytest.raises(ValueError, match="link='medium', choose one of 'fast', 'slow'"):
    race.best("medium")
  with pytest.raises(ValueError, match="within=-1.0, choose 0 or more"):
    race.best(within=-1.0)
  diverged = made("dense", [1.0, np.inf])
  diverges = pytest.raises(ValueError, match="at which dense does not diverge")
  with np.errstate(invalid="ignore"), diverges:
    dataclasses.replace(race, rows=[diverged, near]).best()


def test_losses_of_zero_are_equal():
  race = race_with(made("also", [0.0, 2.0]))
  race.rows[0] = made("dense", [0.0, 2.0], words=3200.0)
  assert race.above(race.rows[1]).tolist() == [0.0, 0.0]
  assert race.best("slow").method == "also"


def race_so_far(path, evaluation):
  """What `js.race` knows after some evaluations of a sweep's trainings, on a link where words alone count."""
  rates = {}
  for one in json.loads(path.read_text())["curves"]:
    of_method = rates.setdefault(one["method"], {})
    of_method.setdefault(one["optimizer"], {})[one["seed"]] = one
  rows = []
  for method, of_rates in rates.items():
    losses = [[one[seed]["loss"] for seed in sorted(one)] for one in of_rates.values()]
    best = min(losses, key=lambda one: np.mean(one, axis=0)[evaluation])
    steps, words = next((one[0]["steps"], one[0]["words"]) for one in of_rates.values())
    kept = {"losses": best, "steps": steps, "words": words}
    rows.append(made(method, [], seconds=0.0, messages=0.0)._replace(**kept))
  link = {"wire": Link(0.0, 1.0, 1.0)}
  return Race(rows, rows[0].steps[evaluation], 4, 1, 0.1, link, [], [])


@pytest.mark.parametrize(
  ("evaluation", "near", "sparse"), [(0, 9, 10), (1, 11, 10), (2, 14, 12)]
)
def test_what_a_race_recommends_before_its_end(evaluation, near, sparse):
  """Counts, of 14 kept sweeps, those near dense at the end, and with at most 1.5 times the words of the sparsest."""
  found = []
  for path in (*SWEEPS.glob("*_adam.json"), *SWEEPS.glob("*_muon.json")):
    whole = race_so_far(path, -1)
    at_end = {row.method: row for row in whole.rows}
    near_dense = [row for row in whole.rows if whole.above(row).mean() <= 2.0]
    chosen = at_end[race_so_far(path, evaluation).best().method]
    least = min(row.words for row in near_dense)
    found.append((chosen in near_dense, chosen.words <= 1.5 * least))
  assert np.sum(found, axis=0).tolist() == [near, sparse]


def test_the_table_names_edges_and_noise():
  edge = made("edge", [1.1, 2.2], tried=[[0.5, 2.0], [1.0, 1.0]])
  race = race_with(edge, made("noisy", [1.1, 1.9]))
  assert race.is_at_edge(edge)
  assert not race.is_at_edge(race.rows[0])
  text = str(race)
  assert "edge of those tried, try more: edge\n" in text
  assert "within the noise of the seeds of dense: noisy" in text
  assert "+10.0 ± 0.0" in text
  assert "2.00" in text
  one = race_with(made("other", [1.0]))
  one.rows[0] = made("dense", [1.0])
  assert "one seed: nothing is known of the noise" in str(one)


def test_evidence_is_of_steps_to_dense_and_advises():
  row = made("signs", [0.5, 1.0])
  (found,) = race_with(row).evidence
  # dense falls from 2 to 1 in the second ten steps, signs are there after ten
  assert (found.steps, found.deviation, found.seeds) == (0.5, 0.0, 2)
  assert (found.method, found.collective, found.every) == ("signs", "onebit", 1)
  algorithm = js.costs.Algorithm(1e-9)
  profile = js.costs.Profile(
    4, 1e-4, 1e-8, algorithms={"dense": algorithm, "onebit": algorithm}
  )
  assert js.costs.advise(1600, profile, evidence=[found]).best.title == "signs"
  assert race_with(row._replace(collective="")).evidence == []


def test_a_seed_that_diverges_or_is_never_there_leaves_no_number():
  diverged = made("diverged", [math.inf, 1.0])
  race = race_with(diverged, made("late", [1.5, 1.5]))
  assert [row.steps for row in race.evidence] == [None, None]
  assert "inf" in str(race)
  assert "never" in str(race)
  assert not race.is_noise(diverged)
  assert race.best(within=1e9).method != "diverged"


@pytest.mark.parametrize("optimizer", ["muon", "sgd", lambda rate: optax.adamw(rate)])
def test_recipes_train(optimizer):
  chosen = js.recipes(optimizer, workers=P)
  assert list(chosen)[:3] == ["dense", "dense, 16 bits", "4 bits"]
  last = list(chosen)[-1]
  race = race_of({"dense": chosen["dense"], last: chosen[last]}, steps=4)
  assert all(math.isfinite(row.losses[0][-1]) for row in race.rows)
  assert race.rows[1].words < race.rows[0].words


def test_unknown_recipes_are_refused():
  with pytest.raises(ValueError, match="optimizer='lion', choose one of 'adam'"):
    js.recipes("lion", workers=2)
  with pytest.raises(ValueError, match="workers=0"):
    js.recipes("adam", workers=0)


def test_the_figure_has_a_line_for_each_method():
  pytest.importorskip("matplotlib").use("agg")
  figure = race_with(made("other", [1.0, 2.0])).plot("slow")
  assert [len(ax.lines) for ax in figure.axes] == [2, 2, 2]
