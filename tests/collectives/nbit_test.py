"""All-reduces of b bits an entry against numpy: what is delivered and kept, and that padding holds nothing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from benchmarks.tasks import data, images
from benchmarks.tasks.base import model_of
from jaxsparse.arrays import flatten
from jaxsparse.train import simulation
from tests.cases import assert_same_bits, mesh_of, normals, quick_of
from tests.reference.rounding import nbit


@pytest.mark.parametrize(
  ("bits", "workers", "n"),
  quick_of(
    [
      (1, 3, 4507),
      (1, 4, 90),
      (1, 2, 16 * 4096 + 5),
      (1, 3, 8 * 4096 + 10),
      (1, 8, 4096),
      (2, 4, 8 * 4096),
      (4, 2, 16 * 4096 + 5),
      (8, 4, 90),
    ],
    quick=[(1, 3, 4507), (4, 2, 16 * 4096 + 5), (8, 4, 90)],
  ),
)
def test_equals_the_formulas_in_numpy(bits, workers, n):
  """Five steps on a mesh; of eight blocks or more some are taken together, and some may be left."""
  mesh = mesh_of(workers)
  tx = optax.chain(js.nbit_transform("workers", bits=bits), optax.sgd(1.0))
  params = jnp.zeros(n)
  state = js.init(tx, params, mesh)
  step = js.make_train_step(lambda p, x: jnp.vdot(p, x[0]), tx, mesh)
  residual = np.zeros((workers, n))
  for number in range(5):
    grads = normals(number, workers, n)
    entered = grads.astype(np.float64) + residual
    expected, kept = nbit(entered, bits)
    before = np.asarray(params, np.float64)
    params, state, _ = step(params, state, jnp.asarray(grads))
    total = workers * (before - np.asarray(params, np.float64))
    residual = np.asarray(state[0].carried.residual[0], np.float64).reshape(workers, n)
    np.testing.assert_allclose(total + residual.sum(0), entered.sum(0), atol=5e-5)
    # An entry on the boundary of two steps may go either way, and so what its sum is
    # rounded to.
    most = 0 if bits == 1 else 2e-3
    assert np.mean(np.abs(total - expected) > 2e-5) <= most
    assert np.mean(np.abs(residual - kept) > 2e-5) <= most


@pytest.mark.parametrize(
  ("workers", "n"),
  quick_of(
    [(1, 7000), (2, 31), (3, 33), (3, 1025), (6, 1), (6, 7000), (20, 300)],
    quick=[(3, 1025)],
  ),
)
def test_one_magnitude_arrives_whole(workers, n):
  """For any number of entries: padding is in no mean, and takes nothing."""
  signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0).astype(np.float32)
  grads = np.broadcast_to(0.375 * signs, (workers, n))
  collective = js.make_collective("onebit")
  totals, state = simulation.reduce_all(
    collective, jnp.asarray(grads), simulation.initial(collective, workers, n)
  )
  np.testing.assert_allclose(
    totals, np.broadcast_to(workers * grads[0], totals.shape), rtol=2e-7
  )
  np.testing.assert_allclose(
    state.carried.residual[0], np.zeros((workers, n)), atol=1e-6
  )


@pytest.mark.long
@pytest.mark.parametrize("constant", [True, False])
def test_residuals_stay_as_small_as_gradients(constant):
  """The same gradient in each step, which would take a smaller scale ever longer, and independent ones."""
  workers, n, steps = 4, 3000, 600
  collective = js.make_collective("onebit")
  first = jnp.asarray(normals(0, workers, n))

  def step(state, key):
    grads = first if constant else jax.random.normal(key, first.shape)
    totals, state = simulation.reduce_all(collective, grads, state)
    return state, totals[0]

  keys = jax.random.split(jax.random.key(0), steps)
  state, totals = jax.lax.scan(step, simulation.initial(collective, workers, n), keys)
  assert np.linalg.norm(state.carried.residual[0]) < 6 * np.linalg.norm(first)
  if constant:
    sums = np.asarray(first, np.float64).sum(0)
    assert np.linalg.norm(
      np.asarray(totals, np.float64).mean(0) - sums
    ) < 0.05 * np.linalg.norm(sums)


def test_zero_counts_as_positive_and_one_bit_is_sent_of_an_entry():
  out = js.simulate("onebit", jnp.array([[0.0, -0.0, 4.0, -4.0]]))
  np.testing.assert_allclose(out.total, np.sqrt(8) * np.array([1, 1, 1, -1]), rtol=1e-6)
  np.testing.assert_array_equal(
    js.simulate("onebit", jnp.zeros((3, 50))).total, np.zeros(50)
  )
  cost = js.costs.predict("onebit", n=4 * 1024 * 100, workers=4)
  assert cost == js.Cost(messages=3 + 2, words=2 * 3 * 25 * (4096 // 32 + 1))


# From 16 * 4,096 entries on rows are folded one by one, on every platform. 17 workers
# have regions beyond the vector.
@pytest.mark.parametrize(
  ("bits", "workers", "n"),
  quick_of(
    [
      (1, 3, 100),
      (4, 17, 100),
      *itertools.product((1, 4), [2], (15 * 4096 + 5, 16 * 4096 + 5)),
    ],
    quick=[(4, 17, 100)],
  ),
)
def test_all_blocks_at_once_as_on_a_gpu_give_the_bits_of_a_few_at_a_time(
  bits, workers, n
):
  collective, grads = (
    js.make_collective("nbit", bits=bits, decay=0.5),
    jnp.asarray(normals(0, workers, n)),
  )
  grads = grads.at[0, : n // 3].multiply(2.0**90).at[1, n // 2 :].multiply(2.0**-90)
  start = simulation.initial(collective, workers, n)
  expected = simulation.reduce_all(collective, grads, start)
  with js.traced_for("cuda"):
    assert_same_bits(simulation.reduce_all(collective, grads, start), expected)


@pytest.mark.parametrize("exponent", [-120, -60, 60, 120])
def test_scales_neither_over_nor_underflow(exponent):
  signs = np.where(np.arange(5000) % 3 == 0, -1.5, 1.5)[None].astype(np.float32)
  out = js.simulate("onebit", signs * np.float32(2.0**exponent))
  np.testing.assert_allclose(np.asarray(out.total) / 2.0**exponent, signs[0], rtol=2e-7)
  exponent = max(exponent, -118)  # steps are no subnormal numbers
  in_bytes = js.simulate("nbit", signs * np.float32(2.0**exponent), bits=8)
  np.testing.assert_allclose(
    np.asarray(in_bytes.total) / 2.0**exponent, signs[0], rtol=0.01
  )


def lost(x, bits):
  """The share of the energy of f32[n] that one worker's rounding leaves in the residual."""
  residual = js.simulate("nbit", jnp.asarray(x)[None], bits=bits).residuals
  return float(
    np.sum(np.square(residual, dtype=np.float64))
    / np.sum(np.square(x, dtype=np.float64))
  )


@pytest.mark.parametrize(
  ("bits", "normal", "heavy", "recorded"),
  [(2, 0.125, 0.25, 0.35), (4, 0.012, 0.04, 0.016)],
)
def test_what_is_lost_is_little_whatever_the_tail(bits, normal, heavy, recorded):
  """Normal entries, Student's t with 3 degrees of freedom, and a gradient, a third of which are zeros."""
  random, gradient = np.random.default_rng(0), gradient_of_digits()
  assert lost(random.standard_normal(gradient.size, np.float32), bits) <= normal
  assert lost(random.standard_t(3, gradient.size).astype(np.float32), bits) <= heavy
  assert np.mean(gradient == 0) > 0.2
  assert lost(gradient, bits) <= recorded
  assert bits == 2 or np.all(
    js.simulate("nbit", gradient[None], bits=bits).total[gradient == 0] == 0
  )


@functools.cache
@jax.numpy_dtype_promotion("standard")  # as in the benchmarks
def gradient_of_digits():
  """A gradient of the convolutional network for digits, f32[n], after 20 steps of Adam."""
  task = images.make_small("cnn", data.load("digits"))
  model = model_of(task, seed=0)
  optimizer, params = optax.adam(0.002), model.params

  @jax.jit
  def step(params, state, batch):
    grads = jax.grad(model.plain_loss)(params, batch)
    updates, state = optimizer.update(grads, state)
    return grads, optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for batch in itertools.islice(task.stream(0, 1, 16), 21):
    grads, params, state = step(params, state, batch)
  return np.asarray(flatten.flatten(grads)[0])


@pytest.mark.long
def test_one_bit_is_that_of_signs_and_eight_lose_next_to_nothing():
  x = normals(0, 1, 2**14)
  assert lost(x[0], 8) <= 1e-4
  np.testing.assert_allclose(lost(x[0], 1), 0.4042, rtol=0.1)
  assert (
    js.simulate("nbit", x, bits=1).total.tolist()
    == js.simulate("onebit", x).total.tolist()
  )


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_messages_have_few_more_bits_than_entries(workers):
  """Steps and padding, however entries divide into regions and blocks."""
  for bits in (2, 4, 8):
    for n in (
      1,
      31,
      90,
      4507,
      9001,
      33_000,
      99_999,
      100_000,
      150_001,
      1_000_003,
      14_728_266,
    ):
      words = js.costs.predict(
        js.make_collective("nbit", bits=bits), n=n, workers=workers
      ).words
      ideal = 2 * (workers - 1) / workers * n * bits / 32
      least = 2 * (workers - 1) * (bits + 2)  # a column and its step, of each region
      assert words <= 1.25 * ideal + max(64, least)
      if n >= 100_000:
        assert words <= (1.07 if bits == 2 else 1.06) * ideal


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_large_gradients_have_the_codes_of_small_ones(bits):
  """The sum of the maxima of a block is beyond float32."""
  grads = normals(0, 2, 2 * 4096)
  small = js.simulate("nbit", grads, bits=bits)
  factor = 2.0**121
  large = js.simulate("nbit", grads * np.float32(factor), bits=bits)
  assert not large.metrics.skipped
  assert_same_bits(large.total / factor, small.total)
  assert_same_bits(large.residuals / factor, small.residuals)


def test_sums_too_large_for_a_step_are_skipped():
  tx = js.nbit_transform(js.SimComm("workers", members=2), bits=8)
  step = js.make_train_step(
    lambda p, x: jnp.vdot(p, x[0]), tx, js.SimComm("workers", members=2), donate=False
  )
  params = jnp.zeros(64)
  state = js.init(tx, params, js.SimComm("workers", members=2))
  after, _, metrics = step(params, state, jnp.full((2, 64), 3e38))
  assert bool(metrics.skipped)
  assert_same_bits(after, params)


def test_a_number_of_bits_is_whole():
  assert repr(js.make_collective("nbit", bits=4.0)) == "NBit(bits=4, decay=1.0)"
