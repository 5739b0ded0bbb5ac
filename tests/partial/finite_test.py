"""Workers whose models are not finite: they are in no average, and go on from the model of another worker."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.partial.controller import Rejected

START = {"b": jnp.zeros(2), "w": jnp.zeros(3)}
BAD = {"b": jnp.ones(2), "w": jnp.array([1, jnp.nan, 1.0])}
NAMED = "worker 2: params['w'] of iteration"


def processes(train, workers=3, size=2):
  """Runs `train(worker)` of each `js.partial.Worker` in a thread; what each returned, or raised."""
  found = {}
  with js.partial.Server(js.partial.Controller(workers, size)) as server:
    start = lambda number: js.partial.Worker(server.address, number, START, timeout=20)
    _all(workers, lambda number: _one(start(number), number, train, found))
  return found


def devices(train, workers=3, size=2):
  """The same of `js.partial.Devices`."""
  found = {}
  host = js.partial.Devices(js.partial.Controller(workers, size), jax.devices()[:workers], START)
  _all(workers, lambda number: _one(host.worker(number), number, train, found))
  return found


def _one(worker, number, train, found):
  with worker:
    try:
      found[number] = train(worker, number)
    except Exception as error:
      found[number] = error


def _all(workers, body):
  threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(workers)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()


def entries(params):
  return np.concatenate([np.asarray(leaf) for leaf in jax.tree.leaves(params)])


runtimes = pytest.mark.parametrize("run", [processes, devices])


@runtimes
@pytest.mark.parametrize("bad", [(5,), (1,)])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_it_is_in_no_average_and_training_goes_on(run, bad, value, caplog):
  """Worker 2's model is not finite after some of its steps: by then it may be the first, when nobody has a model."""

  def train(worker, number):
    params, iteration, refused = worker.params, worker.iteration, []
    for step in range(1, 11):
      params = jax.tree.map(lambda leaf: leaf + 0.1 * (1 - leaf), params)
      if number == 2 and step in bad:
        params = {**params, "w": params["w"].at[1].set(value)}
      params, iteration = worker.reduce(params, iteration + 1)
      refused.append(worker.refused)
      assert np.isfinite(entries(params)).all()
      assert iteration >= 1
    return worker.synchronize(params, iteration), refused

  found = run(train)
  assert sorted(found) == [0, 1, 2]
  for (params, _), refused in found.values():
    assert np.isfinite(entries(params)).all()
    assert float(entries(params).min()) > 0.3
    assert len(set(entries(params).tolist())) == 1
    assert (sum(refused) == 1) == (refused is found[2][1])
  assert len([record for record in caplog.records if NAMED in record.getMessage()]) == 1


@runtimes
def test_the_average_of_all_is_made_with_the_model_of_another_worker(run):
  def train(worker, number):
    params, iteration = worker.reduce(jax.tree.map(lambda leaf: leaf + 1.0, START), worker.iteration + 1)
    return worker.synchronize(BAD if number == 2 else params, iteration)

  for params, iteration in run(train, size=3).values():
    np.testing.assert_allclose(entries(params), 1.0, rtol=1e-6)
    assert iteration == 1


@runtimes
def test_if_nobody_has_a_finite_model_all_are_told(run):
  found = run(lambda worker, _: worker.reduce(BAD, 1))
  for number in range(3):
    assert isinstance(found[number], FloatingPointError)
    assert str(found[number]).startswith(f"worker {number}: params['w'] of iteration 1 is not finite, and no other wor")


@runtimes
def test_a_worker_that_is_never_finite_ends_and_the_others_go_on(run):
  """As when the state of its optimizer has a NaN in it: it would hold up the others for ever."""

  def train(worker, number):
    params, iteration = worker.params, worker.iteration
    for _ in range(100):
      params, iteration = worker.reduce(BAD if number == 2 else params, iteration + 1)
    return iteration

  found = run(train)
  assert isinstance(found[2], FloatingPointError)
  assert f"{NAMED}" in str(found[2])
  assert "10 times in succession" in str(found[2])
  assert found[0] >= 50
  assert found[1] >= 50


@pytest.mark.parametrize(
  "begin",
  [
    lambda: js.partial.Worker("tcp://127.0.0.1:9", 0, BAD),
    lambda: js.partial.Devices(js.partial.Controller(3, 2), jax.devices()[:3], BAD),
  ],
  ids=["processes", "devices"],
)
def test_training_starts_from_finite_parameters(begin):
  with pytest.raises(ValueError, match=r"params\['w'\] is not finite: training has to start from finite parameters"):
    begin()


def test_parameters_of_another_size_are_told_even_if_they_are_not_finite():
  with js.partial.Server(js.partial.Controller(3, 2)) as server, js.partial.Worker(server.address, 0, START) as worker:
    with pytest.raises(ValueError, match="params have 1 entries, the initial ones have 5"):
      worker.reduce(jnp.array([jnp.nan]), 1)
    assert worker.refused == 0


def test_the_controller_takes_any_iteration_of_a_worker_with_another_ones_model():
  controller = js.partial.Controller(3, 2)
  controller.ready(0, 9)
  controller.ready(1, 7)
  controller.ready(2, 6)
  with pytest.raises(Rejected, match="duplicate: worker 2 is ready already, with iteration 6"):
    controller.replaced(2)
  controller.replaced(0)
  assert controller.ready(0, 3)[0].members == (0, 2)
