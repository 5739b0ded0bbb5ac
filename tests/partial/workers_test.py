"""Workers as users run them, in processes over TCP (here: threads of this one) and on the devices of one process."""

import contextlib
import functools
import re
import threading
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js

START = {"b": jnp.zeros(2), "w": jnp.zeros(3)}
BAD = {"b": jnp.ones(2), "w": jnp.array([1, jnp.nan, 1.0])}
NAMED = "worker 2: params['w'] of iteration"


@contextlib.contextmanager
def over_tcp(controller, start, keys=None):
  with js.partial.Server(controller, keys=keys) as server:
    yield lambda number: js.partial.Worker(
      server.address, number, start, keys=keys, timeout=20
    )


@contextlib.contextmanager
def on_devices(controller, start):
  host = js.partial.Devices(controller, jax.devices()[: controller.workers], start)
  host.warm_up()
  yield host.worker


def run(where, train, controller, start=START):
  """What `train(worker, number)` returned or raised, each worker in a thread."""

  def body(make, number):
    with make(number) as worker:
      try:
        return train(worker, number)
      except Exception as error:
        return error

  with (
    where(controller, start) as make,
    futures.ThreadPoolExecutor(controller.workers) as threads,
  ):
    found = [threads.submit(body, make, number) for number in range(controller.workers)]
    return [future.result(60) for future in found]


def entries(params):
  return np.asarray(jax.flatten_util.ravel_pytree(params)[0])


everywhere = pytest.mark.parametrize("where", [over_tcp, on_devices])


@pytest.mark.parametrize(
  "where",
  [over_tcp, functools.partial(over_tcp, keys=js.partial.Keys.make()), on_devices],
)
def test_groups_keep_the_sum_and_all_end_with_one_model(where):
  """Constant weights keep the sum of all models, since W is doubly stochastic."""

  def train(worker, number):
    # not `worker.params`, which may be another worker's
    params, iteration = (
      {"w": jnp.full((2, 3), float(number))},
      0,
    )
    for _ in range(10):
      params, iteration = worker.reduce(params, iteration + 1)
      assert where is not on_devices or params["w"].devices() == {worker.device}
    return entries(params), entries(worker.synchronize(params, iteration)[0])

  found = run(where, train, js.partial.Controller(4, 2), {"w": jnp.zeros((2, 3))})
  alone, together = zip(*found, strict=True)
  np.testing.assert_allclose(sum(alone), 6.0, rtol=1e-5)
  assert np.ptp([model.max() for model in alone]) < 3
  assert len({model.tobytes() for model in together}) == 1
  np.testing.assert_allclose(together[0], 1.5, rtol=1e-5)


def test_a_worker_that_leaves_right_after_an_average_spoils_it_for_no_other():
  """Its last pieces may be in transit when it closes its connections."""
  train = lambda worker, number: worker.reduce(
    jnp.full(300_000, number, jnp.float32), 1
  )[0]
  for _ in range(5):
    for model in run(over_tcp, train, js.partial.Controller(3, 3), jnp.zeros(300_000)):
      np.testing.assert_allclose(model, 1, rtol=1e-6)


@everywhere
def test_dynamic_weights_and_the_initial_model(where):
  """Two workers whose first iterations are 1 and 3: ranks 3 and 1, and rank 2 is the initial model's."""
  train = lambda worker, number: worker.reduce(
    jnp.full(3, 7.0 * number), (1, 3)[number]
  )
  controller = js.partial.Controller(2, 2, "dynamic", missing="initial")
  for params, iteration in run(where, train, controller, jnp.full(3, 70.0)):
    assert iteration == 3
    np.testing.assert_allclose(params, (4 * 7 + 2 * 70 + 1 * 0) / 7, rtol=1e-6)


@everywhere
def test_a_worker_that_pauses_holds_nobody_up(where):
  """Its training loop calls nothing until the others have done 20 steps more; the group filter waits soon."""
  steps, on = [0, 0, 0], threading.Event()

  def train(worker, number):
    params, iteration = worker.params, worker.iteration
    while min(steps) < 5 or not on.is_set():
      if number == 2 and steps[2] == 5:
        assert on.wait(20)
      params, iteration = worker.reduce(params, iteration + 1)
      steps[number] += 1
      if min(steps[:2]) > 30:
        on.set()

  assert run(where, train, js.partial.Controller(3, 2, history=2)) == [None] * 3


@everywhere
def test_bad_arguments(where):
  with where(js.partial.Controller(3, 2), jnp.zeros(2)) as start, start(0) as worker:
    # told even if they are not finite
    for params, shape in (
      (jnp.zeros(3), "[3]"),
      (jnp.zeros((2, 1)), "[2, 1]"),
      (jnp.array([jnp.nan]), "[1]"),
    ):
      message = f"reduce: params of {shape}, where training started from params of [2]"
      with pytest.raises(ValueError, match=re.escape(message)):
        worker.reduce(params, 1)
    assert worker.refused == 0
    for iteration in (-1, 1.5, 2**63):
      with pytest.raises(ValueError, match=f"reduce: iteration={iteration}, choose a"):
        worker.reduce(jnp.zeros(2), iteration)
    for number in (-1, 0.5, 2**16):
      with pytest.raises(ValueError, match=f"{number}, choose"):
        start(number)
    with pytest.raises(ValueError, match=r"worker 5, (choose|there are) 0 … 2"):
      start(5)
  with pytest.raises(
    ValueError,
    match=r"params\['w'\] is not finite: training has to start from finite parameters",
  ):
    run(where, None, js.partial.Controller(3, 2), BAD)


@everywhere
@pytest.mark.parametrize(("bad", "value"), [(5, np.nan), (1, -np.inf)])
def test_a_model_that_is_not_finite_is_in_no_average_and_training_goes_on(
  where, bad, value, caplog
):
  """Worker 2's model is not finite after one of its steps, maybe the first, when nobody has a model, and in the end."""

  def train(worker, number):
    params, iteration, refused = worker.params, worker.iteration, []
    for step in range(1, 11):
      params = jax.tree.map(lambda leaf: leaf + 0.1 * (1 - leaf), params)
      if number == 2 and step == bad:
        params = {**params, "w": params["w"].at[1].set(value)}
      params, iteration = worker.reduce(params, iteration + 1)
      refused.append(worker.refused)
      assert np.isfinite(entries(params)).all()
      assert iteration >= 1
    params, iteration = worker.synchronize(BAD if number == 2 else params, iteration)
    return entries(params), iteration, sum(refused)

  found = run(where, train, js.partial.Controller(3, 2))
  assert (
    len({iteration for _, iteration, _ in found})
    == len({model.tobytes() for model, _, _ in found})
    == 1
  )
  assert 0.3 < found[0][0].min() == found[0][0].max() <= 1
  assert [refused for _, _, refused in found] == [0, 0, 1]
  assert len([record for record in caplog.records if NAMED in record.getMessage()]) == 2


@everywhere
@pytest.mark.parametrize("leaves", [False, True])
def test_if_nobody_has_a_finite_model_all_are_told(where, leaves):
  """Also if the last one that may have one leaves."""
  train = lambda worker, number: (
    time.sleep(0.2) if leaves and number == 2 else worker.reduce(BAD, 1)
  )
  for number, found in enumerate(
    run(where, train, js.partial.Controller(3, 2))[: 2 if leaves else 3]
  ):
    assert isinstance(found, FloatingPointError)
    assert str(found).startswith(
      f"worker {number}: params['w'] of iteration 1 is not finite, and no other worker"
    )


@everywhere
def test_a_worker_that_is_never_finite_ends_and_the_others_go_on(where):
  """As when the state of its optimizer has a NaN in it: it would hold up the others for ever."""
  ended = threading.Event()

  def train(worker, number):
    params, iteration, step = worker.params, worker.iteration, 0
    try:
      while not ended.is_set() or step < 50:
        assert worker.refused == (step if number == 2 else 0) < 10
        params, iteration = worker.reduce(BAD if number == 2 else params, iteration + 1)
        step += 1
    finally:
      if number == 2:
        ended.set()
    return iteration

  *others, found = run(where, train, js.partial.Controller(3, 2))
  assert isinstance(found, FloatingPointError)
  assert str(found).startswith(NAMED)
  assert "10 times in succession" in str(found)
  assert min(others) >= 50
