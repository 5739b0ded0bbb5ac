"""ChunkTopk against numpy: the compressor of SparseLoCo, and its exchange over several workers and steps."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.sparse.tables import quantize
from jaxsparse.train import simulation
from tests.cases import bits, normals, quick_of

FLUSHED = 2.0**-126  # smaller numbers are 0 on this hardware
quantized_rows = jax.jit(quantize)


def in_two_bits(values):
  """Decoded values of one chunk: bins of 1.5 σ around the mean, each read as the mean of its values."""
  values = values.astype(np.float64)
  mean, spread = values.mean(), values.std(ddof=1) if values.size > 1 else 0.0
  codes = np.clip(
    np.round((values - mean) / (1.5 * spread if spread > 0 else 1) + 2), 0, 3
  )
  return np.array([values[codes == code].mean() for code in codes])


def compressed(home, length, k, two_bit):
  """What one worker sends of `home`, f64[n], the k largest of each chunk."""
  sent = np.zeros(home.size)
  for start in range(0, home.size, length):
    chunk = home[start : start + length]
    chosen = np.argsort(-np.abs(chunk), kind="stable")[:k]
    sent[start + chosen] = in_two_bits(chunk[chosen]) if two_bit else chunk[chosen]
  return sent


def test_bins_of_values_that_are_equal_endless_or_the_largest():
  same, table = quantized_rows(jnp.full((1, 8), 3.0))  # no spread
  np.testing.assert_array_equal(np.asarray(table)[0][same[0]], [3] * 8)
  assert np.isnan(quantized_rows(jnp.array([[1.0] * 7 + [np.inf]]))[1]).all()
  largest = np.finfo(np.float32).max
  values = np.array(
    [[largest] * 7, [-largest] * 7, [largest, -largest] * 3 + [0]], np.float32
  )
  assert np.isfinite(quantized_rows(values)[1]).all()


@hypothesis.given(st.floats(-38, 37), st.integers(0, 2**32 - 1))
def test_bins_of_any_scale_are_those_of_float64(exponent, seed):
  values = (10.0**exponent * normals(seed, 4, 24).astype(np.float64)).astype(np.float32)
  values[np.abs(values) < FLUSHED] = 0
  hypothesis.assume(values.any(axis=1).all())  # rows of zeros have no bins
  codes, table = map(np.asarray, quantized_rows(values))
  for row, code, means in zip(values.astype(np.float64), codes, table, strict=True):
    position = (row - row.mean()) / (1.5 * row.std(ddof=1)) + 2
    # not on the border of two bins
    decided = np.abs(position - np.floor(position) - 0.5) > 1e-4
    np.testing.assert_array_equal(
      code[decided], np.clip(np.round(position), 0, 3)[decided]
    )
    expected = np.array([row[code == one].mean() for one in code])
    np.testing.assert_allclose(
      means[code], expected, atol=2e-6 * np.abs(row).max() + FLUSHED, rtol=0
    )


@hypothesis.given(st.integers(-100, 100), st.integers(0, 2**32 - 1))
def test_a_power_of_two_changes_no_mantissa_of_the_bins(exponent, seed):
  values = normals(seed, 4, 24)
  (codes, table), (same, scaled) = (
    quantized_rows(values),
    quantized_rows(values * np.float32(2.0**exponent)),
  )
  np.testing.assert_array_equal(codes, same)
  np.testing.assert_array_equal(bits(table * np.float32(2.0**exponent)), bits(scaled))


@pytest.mark.parametrize("scale", [1e-30, 1e18, 1e37])
def test_no_step_is_skipped_and_nothing_is_lost_at_any_scale(scale):
  # at 1e37 the sum of a chunk would overflow
  grads = np.abs(normals(0, 3, 640)) * np.float32(scale)
  out = js.simulate("chunktopk", grads, density=0.25, chunk=640, wire="2bit")
  assert not out.metrics.skipped
  left = np.asarray(out.total, np.float64) + np.asarray(out.residuals, np.float64).sum(
    0
  )
  np.testing.assert_allclose(left, grads.astype(np.float64).sum(0), atol=1e-5 * scale)


@pytest.mark.parametrize(
  "bad", quick_of([np.nan, np.inf, -np.inf], quick=[np.inf, -np.inf])
)
@pytest.mark.parametrize("scale", quick_of([1e-30, 1.0, 1e37], quick=[1e37]))
def test_what_is_not_finite_is_in_the_total_of_every_worker(bad, scale):
  grads = normals(0, 3, 20_000) * np.float32(scale)
  grads[1, 17_000] = bad
  collective = js.make_collective("chunktopk", density=0.5, chunk=16_384, wire="2bit")
  worker = lambda grads, state: (
    collective.reduce(js.SimComm("w"), grads, state).total.values
  )
  rows = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (3, *x.shape)), collective.init(20_000, 3)
  )
  values = jax.jit(jax.vmap(worker, axis_name="w"))(grads, rows)
  assert (~np.isfinite(values)).any(axis=1).all()


@pytest.mark.parametrize("wire", quick_of(["f32", "2bit"], quick=["2bit"]))
def test_three_workers_and_steps_in_numpy(wire):
  """SparseLoCo's exchange: home = β r + Δ; 60 entries in chunks of 16, the last of which has 12."""
  workers, n, length, k, decay = 3, 60, 16, 6, 0.95
  collective = js.make_collective(
    "chunktopk", k=n * k // length, chunk=length, wire=wire, decay=decay
  )
  state, kept = simulation.initial(collective, workers, n), np.zeros((workers, n))
  for step in range(4):
    grads = normals(step, workers, n)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    home = grads.astype(np.float64) + kept
    sent = np.array([compressed(row, length, k, wire == "2bit") for row in home])
    kept = decay * (home - sent)
    np.testing.assert_allclose(totals[0], sent.sum(0), atol=1e-5)
    np.testing.assert_allclose(state.carried.residual[0], kept, atol=1e-5)
    np.testing.assert_array_equal(
      bits(totals), bits(np.broadcast_to(totals[0], totals.shape))
    )


def test_the_mean_over_contributors_is_larger_where_few_send():
  """P = 4, one worker sends 8: the sum is 8, and P times the mean over contributors 32."""
  grads = np.zeros((4, 8), np.float32)
  grads[0, 2], grads[:, 5] = 8, 1
  total = js.simulate("chunktopk", grads, k=2, combine="contributors").total
  assert (total[2], total[5]) == (32, 4)


@pytest.mark.long
def test_sparseloco_and_diloco_are_local_steps():
  sim, params = js.SimComm("workers", members=3), {"w": jnp.zeros((10, 10))}
  loss = lambda p, batch: jnp.mean((p["w"] - batch[0]) ** 2) * 50
  sparse = js.chunktopk_transform(
    sim, density=1 / 64, decay=0.95, wire="2bit", chunk=64
  )
  nesterov = optax.chain(
    js.dense_transform(sim), optax.sgd(0.7, momentum=0.9, nesterov=True)
  )
  for named, outer in (
    (
      js.sparseloco(optax.sgd(0.1), sim, every=3, chunk=64),
      optax.chain(sparse, optax.sgd(1.0)),
    ),
    (js.diloco(optax.sgd(0.1), sim, every=3), nesterov),
  ):
    programs = []
    for tx in (named, js.local_steps(optax.sgd(0.1), outer, every=3)):
      step, state = (
        js.make_train_step(loss, tx, sim),
        js.abstract_state(tx, params, sim),
      )
      programs.append(step.lower(params, state, normals(0, 3, 10, 10)).as_text())
    assert programs[0] == programs[1]
