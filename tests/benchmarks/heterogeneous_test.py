"""The benchmark of heterogeneous workers: virtual time and models worked out by hand, and as a user runs it."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import report
from benchmarks.heterogeneous import report as tables
from benchmarks.heterogeneous import virtual
from benchmarks.heterogeneous.lab import Lab, shared_paces
from benchmarks.heterogeneous.methods import make_method
from jaxsparse.partial.net.messages import WorkerGroup
from tests.benchmarks.commands import result_of

RATE = 0.25


def loss(params, batch):
  """Its gradient is params − batch."""
  return 0.5 * jnp.sum((params["w"] - batch) ** 2)


def targets(worker):
  """Worker w wants 10^w."""
  return itertools.repeat(jnp.full(2, 10.0**worker))


def steady(*seconds):
  return [lambda _, s=s: s for s in seconds]


def run(
  method, paces, seconds, *, start=0.0, rate=RATE, network=(), looks=(), **options
):
  lab = Lab(
    loss, {"w": jnp.full(2, start)}, targets, paces, optax.sgd(rate), **dict(network)
  )
  return lab.run(make_method(method, lab, **options), seconds, **dict(looks))


def update_times(*arguments, **options):
  """When the number of updates rose, in seconds; everything takes a multiple of 1/8."""
  looks = {"evaluate": lambda _: 0.0, "every": 1 / 16}
  curve = run(
    *arguments, looks=looks, network={"alpha": 0.125, "links": [1, 1, 4]}, **options
  ).curve
  return [
    after[0] for before, after in itertools.pairwise(curve) if after[1] > before[1]
  ]


def test_all_reduce_waits_for_the_slowest():
  # rounds of 4.5 s
  found = run("allreduce", steady(1, 2, 4), 9.25, network={"alpha": 0.125})
  # the third round of gradients is not all there at 9.25
  assert (found.updates, found.gradients) == (
    2,
    6,
  )
  model = 0.0
  for _ in range(2):
    model -= RATE * np.mean([model - 1, model - 10, model - 100])
  np.testing.assert_allclose(found.params["w"], model, rtol=1e-6)


def test_backup_workers_drop_the_late_and_eager_reduce_keeps_them():
  backup = run("backup", steady(1, 1, 3.5), 4.25, backups=1)
  model = 0.0
  for _ in range(4):
    model -= RATE * np.mean([model - 1, model - 10])
  np.testing.assert_allclose(backup.params["w"], model, rtol=1e-6)
  eager = run("eager", steady(1, 1, 3.5), 4.25)
  model, first = 0.0, 0.0
  for step in range(4):
    # of the model the slow one began with
    gradients = [model - 1, model - 10] + [first - 100] * (step == 3)
    model -= RATE * sum(gradients) / 3
  np.testing.assert_allclose(eager.params["w"], model, rtol=1e-6)


@pytest.mark.parametrize("method", ["asp", "hete"])
def test_a_server_that_does_not_wait(method):
  found = run(method, steady(1, 2.5), 3)
  model, read, stale = 0.0, [0.0, 0.0], [0, 0]
  # at 1, 2 and 2.5; the one at 3 comes after the end
  for steps, worker in enumerate((0, 0, 1)):
    share = steps - stale[worker] + 1 if method == "hete" else 2
    model -= RATE * (read[worker] - 10.0**worker) / share
    read[worker], stale[worker] = model, steps + 1
  np.testing.assert_allclose(found.params["w"], model, rtol=1e-6)
  assert found.updates == 3


def test_gossip_averages_first_and_steps_with_the_old_gradient():
  found = run("adpsgd", steady(1, 10), 2.5)  # of two workers, the other one is chosen
  models = [0.0, 0.0]
  for _ in range(2):
    gradient, mean = models[0] - 1, sum(models) / 2
    models = [mean - RATE * gradient, mean]
  np.testing.assert_allclose(found.params["w"], np.mean(models), rtol=1e-6)


@pytest.mark.parametrize("method", ["constant", "dynamic"])
def test_partial_reduce(method):
  """Workers 0 and 1 meet at 1, 2 and 3; at 3.5 worker 2 comes, and at 4 meets worker 0, three iterations ahead."""
  found = run(method, steady(1, 1, 3.5), 4.25, group_size=2)
  assert [group.members for group in found.groups] == [(0, 1), (0, 1), (0, 1), (0, 2)]
  model = 0.0
  for _ in range(3):
    model = np.mean([model - RATE * (model - 1), model - RATE * (model - 10)])
  mine, other, late = (
    model - RATE * (model - 1),
    model - RATE * (model - 10),
    RATE * 100,
  )
  # ranks 1 and 4; 2 goes to 1 and 3 to 4: (8 + 4)/15 and (2 + 1)/15
  share = 0.5 if method == "constant" else 12 / 15
  together = share * mine + (1 - share) * late
  np.testing.assert_allclose(
    found.params["w"], np.mean([together, other, together]), rtol=1e-5
  )
  assert found.groups[-1].iteration == 4
  initial = run(
    "dynamic",
    steady(1, 1, 3.5),
    4.25,
    start=7.0,
    rate=0.0,
    group_size=2,
    missing="initial",
  )
  assert initial.groups[-1].initial == pytest.approx(6 / 15)
  np.testing.assert_allclose(initial.params["w"], 7.0, rtol=1e-6)


def test_the_same_seed_gives_the_same_bits():
  runs = [
    run("dynamic", shared_paces(4, 2), 12, group_size=2, network={"seed": seed})
    for seed in (0, 0, 1)
  ]
  bits = [np.asarray(found.params["w"]).tobytes() for found in runs]
  assert bits[0] == bits[1] != bits[2]


def test_a_target_ends_it():
  looks = {"evaluate": lambda params: params["w"][0], "every": 0.5, "target": 4.0}
  found = run("allreduce", steady(1, 1), 50, looks=looks)
  assert found.reached
  assert found.curve[-1][:2] == (found.seconds, found.updates)
  assert found.curve[-1][2] >= 4.0 > found.curve[-2][2]
  assert isinstance(found.params["w"], jax.Array)


def test_a_message_takes_as_long_as_the_slowest_link_of_its_ends():
  """One that takes 1/8 s elsewhere takes 1/2 s there."""
  even = steady(1, 1, 1)
  assert update_times("allreduce", even, 7) == [3, 6]  # ⌈log₂3⌉ messages each way
  assert update_times("eager", steady(1, 1, 9), 7) == [3, 6]  # the late one takes part
  assert update_times("asp", even, 3.6) == [1.125, 1.5, 2.375, 3.5]
  # two each way, with those to the controller
  assert update_times("constant", even, 4.6, group_size=2) == [
    1.5,
    4.5,
  ]
  assert update_times("adpsgd", even, 2) == [1.125, 1.5]


def test_workers_that_exchange_nothing_are_the_control():
  found = run("alone", steady(1, 2), 4.5, network={"alpha": 9.0})
  models = [0.0, 0.0]
  for worker in (0, 0, 1, 0, 1, 0):
    models[worker] -= RATE * (models[worker] - 10.0**worker)
  np.testing.assert_allclose(found.params["w"], np.mean(models), rtol=1e-6)
  assert (found.updates, found.gradients, found.groups) == (6, 6, [])


def test_workers_have_images_of_their_own():
  batches = virtual.Bench(SETTINGS)._batches(workers=4, seed=0, fold=0)
  seen = []
  for worker in range(4):
    images = itertools.islice(batches(worker), 200)
    seen.append({image.tobytes() for batch in images for image in batch["input"]})
  together = set().union(*seen)
  assert sum(map(len, seen)) < len(together) + 30  # some digits are there twice
  assert max(map(len, seen)) < 1.1 * min(map(len, seen))


def test_figure_4_with_the_library_s_controller():
  found = tables.figure_4()
  assert found == pytest.approx(
    {"homogeneous": 0.5, "one twice as slow": 0.625}, abs=1e-3
  )


def test_the_condition_of_theorem_1():
  """The numbers worked out by hand: N = 8, P = 3, γ = 0.02, ρ̄ = 488.06 at ρ = 0.879."""
  one = row("levels", "constant:3", 10.0)._replace(rho=0.879)
  one = one._replace(settings=SETTINGS._replace(rate=0.02))
  assert virtual.theorem_1(one) == pytest.approx(3.1236, abs=1e-4)
  # twice as many workers have twice the rate
  twice = one._replace(environment=virtual.Environment(16))
  assert virtual.theorem_1(twice) == pytest.approx(8 * 3.1236, abs=1e-3)
  assert virtual.theorem_1(one._replace(label="allreduce")) is None


def test_rho_is_that_of_figure_4():
  pairs = [(0, 1), (1, 2), (0, 2)]
  for groups, expected in (
    (pairs, 0.5),
    ([(0, 1), *pairs], 0.625),
    ([(0, 1, 2)], 0),
    ([(0, 1)], 1),
  ):
    found = [
      WorkerGroup(members, (1 / len(members),) * len(members), 1) for members in groups
    ]
    assert virtual.rho(found, 3) == pytest.approx(expected, abs=1e-9)


@pytest.mark.long
def test_tables_and_goals():
  methods = "--methods=allreduce,initial:2"
  small = (
    "--workers=4",
    "--levels=1,3",
    "--sweep=2",
    "--seed=0",
    "--target=0.8",
    "--learning_rate=0.1",
    "--limit=60",
  )
  result = result_of("heterogeneous", methods, *small)
  rows = {
    (row["label"], row["environment"]["level"]): row
    for row in result["rows"]
    if row["part"] == "levels"
  }
  assert list(rows) == [
    ("allreduce", 1),
    ("initial:2", 1),
    ("allreduce", 3),
    ("initial:2", 3),
  ]
  assert all(
    row["reached"] == 1 for row in rows.values() if row["label"] == "allreduce"
  )
  assert (
    rows["allreduce", 3]["per_update"] > 2.5 * rows["allreduce", 1]["per_update"] > 2.5
  )
  assert 0 < rows["initial:2", 3]["rho"] < 1
  assert rows["allreduce", 3]["rho"] is None
  assert [row["label"] for row in result["rows"] if row["part"] == "sweep"] == [
    "constant:2"
  ]
  assert result["figure_4"]["one twice as slow"] == pytest.approx(0.625)
  assert result["goals"][0]["measured"] is None


SETTINGS = virtual.Settings(8, 0.1, 0.8, 60.0)


@pytest.mark.long
def test_an_all_reduce_takes_what_its_environment_says():
  """A step of a worker that shares a half-busy accelerator with two others, then an average over a slow link."""
  where = virtual.Environment(4, level=3, jitter=0.0, slow_links=1, occupancy=0.5)
  messages, models = 4, 2 * 3 / 4  # reduce-scatter and all-gather
  took = 2 + 10 * (messages * 0.2 / 100 + models * 0.2)
  for limit, updates in ((took - 0.01, 0), (took + 0.01, 1)):
    bench = virtual.Bench(SETTINGS._replace(folds=3, wire=0.2, limit=limit))
    assert (
      bench.simulate(
        virtual.parse_method("allreduce", 4), where, seed=0, fold=2
      ).updates
      == updates
    )


def row(part, label, seconds, **where):
  size = where.pop("workers", 8)
  found = virtual.Row(
    part,
    label,
    virtual.Environment(size, **where),
    SETTINGS,
    1,
    1,
    seconds,
    0.0,
    1,
    1,
    2.0,
    None,
  )
  return found if label != "allreduce" else found._replace(per_update=8.0)


def test_the_noise_of_a_ratio_and_a_control_that_does_not_reach_the_target():
  rows = [
    row("levels", label, seconds)._replace(runs=4, deviation=deviation)
    for label, seconds, deviation in (
      ("alone", None, 0.0),
      ("allreduce", 20.0, 6.0),
      ("dynamic:3", 10.0, 4.0),
    )
  ]
  found = tables.paper_cells(rows)["all-reduce, HL = 1"]
  assert found == tables.Ratio(2.0, pytest.approx(0.25), float("inf"))


def test_rows_outlive_json_and_give_the_papers_cells():
  levels = (
    ("allreduce", 20.0, 1.0),
    ("dynamic:3", 10.0, 1.0),
    ("allreduce", 15.0, 0.5),
    ("dynamic:3", None, 0.5),
  )
  rows = [
    row("levels", label, seconds, level=3, occupancy=occupancy)
    for label, seconds, occupancy in levels
  ]
  rows += [
    row("tail", label, seconds, workers=16, jitter=0.5)
    for label, seconds in (("alone", 40.0), ("allreduce", 30.0), ("dynamic:4", 10.0))
  ]
  rows += [row("scale", "allreduce", 90.0, workers=1)]
  rows += [
    row("scale", label, seconds, workers=32)
    for label, seconds in (("allreduce", 30.0), ("constant:4", 6.0))
  ]
  assert virtual.from_json(json.loads(json.dumps(report.plain(rows)))) == rows
  found = tables.paper_cells(rows)
  assert {name: one.ratio for name, one in found.items()} == {
    "all-reduce, HL = 3": 2.0,
    "updates, all-reduce, HL = 3": 1.0,
    "all-reduce / dynamic, P = 3, HL = 3": 4.0,
    "run time, jitter 0.5": 3.0,
    "seconds an update, jitter 0.5": 4.0,
    "P = 4 / all-reduce": 5.0,
  }
  # 40 seconds without an exchange / 10 of the fastest
  assert found["run time, jitter 0.5"].control == 4.0
  assert found["all-reduce, HL = 3"].control is None
  assert tables.speed_ups(rows) == {
    "allreduce": {1: 1.0, 32: 3.0},
    "constant:4": {1: 1.0, 32: 15.0},
  }
  assert tables.goals(rows)[0].measured == 2.0


@pytest.mark.long
def test_every_part_is_kept_and_made_again_from_the_file(tmp_path):
  small = (
    "--workers=4",
    "--levels=1",
    "--seed=0",
    "--limit=3",
    "--scale=1,4",
    "--tail_workers=4",
    "--decays=0.5",
  )
  kept = f"--results={tmp_path / 'rows.json'}"
  result_of("heterogeneous", "--parts=tail,scale,decay,links", *small, kept)
  rows = result_of("heterogeneous", "--parts=none", kept)["rows"]
  assert rows == json.loads((tmp_path / "rows.json").read_text())["rows"]
  assert {one["part"] for one in rows} == {"tail", "scale", "decay", "links"}
