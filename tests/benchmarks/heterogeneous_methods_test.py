"""Virtual time against times worked out by hand, and models against plain numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.heterogeneous.lab import Lab, shared_paces
from benchmarks.heterogeneous.methods import make_method
from benchmarks.heterogeneous.virtual import rho
from jaxsparse.partial.controller import Group

RATE = 0.25


def loss(params, batch):
  """Its gradient is params − batch."""
  return 0.5 * jnp.sum((params["w"] - batch) ** 2)


def targets(worker):
  """Worker w wants 10^w."""
  return itertools.repeat(jnp.full(2, 10.0**worker))


def steady(*seconds):
  return [lambda _, s=s: s for s in seconds]


def run(method, paces, seconds, *, batches=targets, start=0.0, rate=RATE, network=(), looks=(), **options):
  lab = Lab(loss, {"w": jnp.full(2, start)}, batches, paces, optax.sgd(rate), **dict(network))
  return lab.run(make_method(method, lab, **options), seconds, **dict(looks))


def test_all_reduce_waits_for_the_slowest():
  found = run("allreduce", steady(1, 2, 4), 9.25, network={"alpha": 0.125})
  took = 4 + 2 * 2 * 0.125  # ⌈log₂3⌉ messages each way
  assert (found.updates, found.gradients) == (2, 6)  # the third round of gradients is not all there at 9.25
  model = 0.0
  for _ in range(2):
    model -= RATE * np.mean([model - 1, model - 10, model - 100])
  np.testing.assert_allclose(found.params["w"], model, rtol=1e-6)
  first = [(span.activity, span.start, span.end) for span in found.timeline if span.worker == 0][:3]
  assert first == [("work", 0, 1), ("wait", 1, 4), ("average", 4, took)]


def test_backup_workers_drop_the_late_and_eager_reduce_keeps_them():
  backup = run("backup", steady(1, 1, 3.5), 4.25, backups=1)
  model = 0.0
  for _ in range(4):
    model -= RATE * np.mean([model - 1, model - 10])
  np.testing.assert_allclose(backup.params["w"], model, rtol=1e-6)
  eager = run("eager", steady(1, 1, 3.5), 4.25)
  model, first = 0.0, 0.0
  for step in range(4):
    gradients = [model - 1, model - 10] + [first - 100] * (step == 3)  # of the model the slow one began with
    model -= RATE * sum(gradients) / 3
  np.testing.assert_allclose(eager.params["w"], model, rtol=1e-6)


@pytest.mark.parametrize("method", ["asp", "hete"])
def test_a_server_that_does_not_wait(method):
  found = run(method, steady(1, 2.5), 3)
  model, read, stale = 0.0, [0.0, 0.0], [0, 0]
  for steps, worker in enumerate((0, 0, 1)):  # at 1, 2 and 2.5; the one at 3 comes after the end
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
  mine, other, late = model - RATE * (model - 1), model - RATE * (model - 10), RATE * 100
  # ranks 1 and 4; 2 goes to 1 and 3 to 4: (8 + 4)/15 and (2 + 1)/15
  share = 0.5 if method == "constant" else 12 / 15
  together = share * mine + (1 - share) * late
  np.testing.assert_allclose(found.params["w"], np.mean([together, other, together]), rtol=1e-5)
  assert found.groups[-1].iteration == 4
  initial = run("dynamic", steady(1, 1, 3.5), 4.25, start=7.0, rate=0.0, group_size=2, missing="initial")
  assert initial.groups[-1].initial == pytest.approx(6 / 15)
  np.testing.assert_allclose(initial.params["w"], 7.0, rtol=1e-6)


def test_the_same_seed_gives_the_same_bits():
  runs = [run("dynamic", shared_paces(4, 2), 12, group_size=2, network={"seed": seed}) for seed in (0, 0, 1)]
  bits = [np.asarray(found.params["w"]).tobytes() for found in runs]
  assert runs[0].timeline == runs[1].timeline != runs[2].timeline
  assert bits[0] == bits[1] != bits[2]
  for worker in range(4):  # nobody does two things at once, or nothing
    spans = [span for span in runs[0].timeline if span.worker == worker]
    assert all(before.end == pytest.approx(after.start) for before, after in itertools.pairwise(spans))


def test_a_target_ends_it():
  looks = {"evaluate": lambda params: params["w"][0], "every": 0.5, "target": 4.0}
  found = run("allreduce", steady(1, 1), 50, looks=looks)
  assert found.reached
  assert found.curve[-1][:2] == (found.seconds, found.updates)
  assert found.curve[-1][2] >= 4.0 > found.curve[-2][2]
  assert isinstance(found.params["w"], jax.Array)


def test_a_message_takes_as_long_as_the_slowest_link_of_its_ends():
  link = 2 * 2 * 0.125  # ⌈log₂3⌉ messages each way
  averages = lambda found: {span.end - span.start for span in found.timeline if span.activity == "average"}
  setting = {"network": {"alpha": 0.125, "links": [1, 1, 4]}}
  assert averages(run("allreduce", steady(1, 1, 1), 20, **setting)) == {4 * link}
  assert averages(run("eager", steady(1, 1, 9), 20, **setting)) == {4 * link}  # the late one takes part
  assert averages(run("asp", steady(1, 1, 1), 20, **setting)) == {0.125, 4 * 0.125}
  own, signal = 2 * 0.125, 2 * 0.125  # of two members, and to the controller and back
  assert averages(run("constant", steady(1, 1, 1), 20, group_size=2, **setting)) == {own + signal, 4 * (own + signal)}
  gossip = run("adpsgd", steady(1, 1, 1), 20, **setting).timeline
  assert {span.end - span.start for span in gossip if span.activity == "average" and span.worker == 2} == {0.5}
  fast = {span.end - span.start for span in gossip if span.activity == "average" and span.worker == 0}
  assert fast == {0.125, 0.5}  # with worker 1, and with worker 2


@pytest.mark.parametrize("method", ["allreduce", "eager", "bsp", "asp", "hete", "backup"])
def test_one_worker_descends_alone(method):
  found = run(method, steady(1), 3.5)
  model = 0.0
  for _ in range(3):
    model -= RATE * (model - 1)
  np.testing.assert_allclose(found.params["w"], model, rtol=1e-6)


def test_a_shared_accelerator_slows_its_part_of_a_step():
  alone, *_, shared = shared_paces(4, 3, jitter=0, occupancy=0.25)
  assert (alone(np.random.default_rng(0)), shared(np.random.default_rng(0))) == (1, 1.5)


def test_rho_is_that_of_figure_4():
  for groups, expected in (
    ([(0, 1), (1, 2), (0, 2)], 0.5),
    ([(0, 1)] * 2 + [(1, 2), (0, 2)], 0.625),
    ([(0, 1, 2)], 0),
    ([(0, 1)], 1),
  ):
    found = [Group(members, (1 / len(members),) * len(members), 1) for members in groups]
    assert rho(found, 3) == pytest.approx(expected, abs=1e-9)
