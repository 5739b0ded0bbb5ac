"""Partial reduce between devices of one process."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.partial.controller import Rejected


def run(workers, train):
  """Each worker in a thread; raises what a thread raised."""
  errors = []

  def body(number):
    try:
      with workers.worker(number) as worker:
        train(worker)
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(workers.devices))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  if errors:
    raise errors[0]


def test_groups_average_on_their_devices_and_keep_the_sum():
  workers = js.partial.Devices(js.partial.Controller(4, 2), jax.devices()[:4], {"w": jnp.zeros((2, 3))})
  assert workers.warm_up() == 6
  found, together = {}, {}

  def train(worker):
    params, iteration = {"w": worker.params["w"] + float(worker.number)}, 0
    for _ in range(15):
      params, iteration = worker.reduce(params, iteration + 1)
      assert params["w"].devices() == {worker.device}
    found[worker.number] = np.asarray(params["w"])
    together[worker.number] = np.asarray(worker.synchronize(params, iteration)[0]["w"])
    worker.leave()  # and once more at the end of `with`

  run(workers, train)
  np.testing.assert_allclose(sum(found.values()), 6.0, rtol=1e-5)
  assert np.ptp([model.max() for model in found.values()]) < 2
  assert len({model.tobytes() for model in together.values()}) == 1
  np.testing.assert_allclose(together[0], 1.5, rtol=1e-5)


def test_a_worker_that_pauses_holds_the_others_up_for_one_step():
  workers = js.partial.Devices(js.partial.Controller(3, 2, history=3), jax.devices()[:3], jnp.zeros(2))
  workers.warm_up()
  waits, back = [], threading.Event()

  def train(worker):
    params, iteration = worker.params, 0
    while not back.is_set():
      if worker.number == 2 and iteration >= 5:
        time.sleep(3)
        back.set()
      began = time.monotonic()
      params, iteration = worker.reduce(params, iteration + 1)
      waits.append(time.monotonic() - began)
      time.sleep(0.01)

  run(workers, train)
  assert max(waits) < 1.5


def test_dynamic_weights_and_the_initial_model():
  """Two workers whose first iterations are 1 and 3: ranks 3 and 1, and rank 2 is the initial model's."""
  controller = js.partial.Controller(2, 2, "dynamic", missing="initial")
  workers = js.partial.Devices(controller, jax.devices()[:2], jnp.full(3, 70.0))
  found = {}

  def train(worker):
    found[worker.number] = worker.reduce(jnp.full(3, 7.0 * worker.number), (1, 3)[worker.number])

  run(workers, train)
  for params, iteration in found.values():
    assert iteration == 3
    np.testing.assert_allclose(params, (4 * 7 + 2 * 70 + 1 * 0) / 7, rtol=1e-6)


def test_bad_arguments():
  controller = js.partial.Controller(4, 2)
  with pytest.raises(ValueError, match="4 workers on 3 different devices"):
    js.partial.Devices(controller, jax.devices()[:3], jnp.zeros(2))
  workers = js.partial.Devices(controller, jax.devices()[:4], jnp.zeros(2))
  with pytest.raises(ValueError, match="worker 4, choose 0 … 3"):
    workers.worker(4)
  with pytest.raises(ValueError, match="params have 3 entries, the initial ones have 2"):
    workers.worker(0).reduce(jnp.zeros(3), 1)
  with pytest.raises(Rejected, match="iteration -1 of worker 0 is malformed"):
    workers.worker(0).reduce(jnp.zeros(2), -1)
