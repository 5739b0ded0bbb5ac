"""QSGD: unbiased, packed, and bounded."""

import functools
import itertools

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.arrays import noise
from jaxsparse.collectives.baselines import qsgd
from tests.cases import normals, quick_of, row
from tests.reference import rounding


@functools.partial(jax.jit, static_argnums=2)
def noise_of(step, rank, n):
  """f32[n], the random numbers of the entries of a worker."""
  key = noise.fold(noise.fold(noise.key_of(0), step), rank)
  return noise.uniform(noise.bits(key, n))


@functools.partial(jax.jit, static_argnums=2)
def rounded(drawn, x, levels):
  """What receivers decode of x, and the scale."""
  scale = qsgd.scale_of(x, levels)
  return qsgd.quantize(drawn, x, scale, levels).astype(np.float32) * scale, scale


@pytest.mark.parametrize("levels", quick_of([1, 127], quick=[127]))
def test_equals_the_paper_in_numpy(levels):
  """Three steps of the same noise; a norm that is rounded up may move few entries to the next level."""
  workers, n, state = 3, 2000, None
  for step in range(3):
    grads = normals(step, workers, n)
    drawn = np.stack([noise_of(step, rank, n) for rank in range(workers)])
    out = js.simulate("qsgd", grads, state=state, levels=levels)
    state, sent = out.state, rounding.qsgd(grads.astype(np.float64), drawn, levels)
    same = np.abs(np.asarray(out.total) - sent.sum(0)) < 1e-3 * np.abs(sent).max()
    assert same.mean() > 0.98
    assert (
      np.abs(np.asarray(out.total) - sent.sum(0)).max()
      < 1.01 * np.linalg.norm(grads, axis=1).max() / levels
    )


@pytest.mark.parametrize("levels", quick_of([1, 4, 127], quick=[4]))
def test_the_mean_over_seeds_is_the_gradient(levels):
  grads, draws = normals(0, 1, 8)[0], 20_000
  drawn = jax.jit(jax.vmap(lambda draw: noise_of(levels, draw, 8)))(np.arange(draws))
  values = np.asarray(jax.vmap(lambda u: rounded(u, grads, levels)[0])(drawn))
  # The standard error of a mean of values that are at most one level from the entry,
  # five times over.
  tolerance = 5 * np.linalg.norm(grads) / levels / 2 / np.sqrt(draws)
  np.testing.assert_allclose(values.mean(0), grads, atol=tolerance)
  assert np.abs(values - grads).max() <= np.linalg.norm(grads) / levels * (1 + 2**-14)


@pytest.mark.parametrize("levels", [1, 3, 4, 127])
def test_a_scale_is_rounded_up_so_that_its_products_with_levels_are_exact(levels):
  for seed in range(4):
    x = normals(seed, 1, 50)[0]
    scale = np.asarray(qsgd.scale_of(x, levels))
    exact = np.linalg.norm(x.astype(np.float64)) / levels
    assert exact <= scale < exact * 1.001
    level = np.arange(levels + 1, dtype=np.float32)
    np.testing.assert_array_equal(scale * level, np.float64(scale) * level)


@pytest.mark.parametrize("n", [1, 3, 12])
def test_gradients_of_any_magnitude_keep_their_scale(n):
  """The reciprocal of the largest float32 numbers is subnormal."""
  grads = np.linspace(1.1, 1.0, n, dtype=np.float32)
  scale_of = jax.jit(jax.vmap(lambda x: qsgd.scale_of(x, 127)))
  factors = np.exp2([-100, 0, 120, 126]).astype(np.float32)
  scales = np.asarray(scale_of(grads * factors[:, None]))
  np.testing.assert_allclose(scales, scales[1] * factors, rtol=2e-4)


@pytest.mark.parametrize(
  "levels", quick_of([1, 2, 7, 127, 128, 40_000, 2**23], quick=[2**23])
)
def test_a_total_is_a_whole_number_of_scales_for_any_number_of_levels(levels):
  grads = np.random.default_rng(0).normal(size=(1, 101)).astype(np.float32)
  grads[0, :3] = 0, 10, -10
  total = np.asarray(js.simulate("qsgd", grads, levels=levels).total)
  scale = np.asarray(qsgd.scale_of(grads[0], levels))
  level = total.astype(np.float64) / scale
  np.testing.assert_array_equal(level, np.round(level))
  assert np.abs(level).max() <= levels
  assert np.abs(total - grads[0]).max() <= scale * (1 + 1e-6)
  assert total[0] == 0


def test_noise_is_uniform_and_differs_between_workers_and_steps():
  drawn = np.stack(
    [noise_of(step, rank, 50_000) for step in (0, 1) for rank in (0, 1, 2)]
  )
  assert (drawn >= 0).all()
  assert (drawn < 1).all()
  counts = np.stack([np.histogram(one, 100, (0, 1))[0] for one in drawn])
  assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
  neighbours = drawn[:, 1:].repeat(2, 1)[:, :50_000]
  apart = np.corrcoef(np.vstack([drawn, neighbours])) - np.eye(12)
  assert np.abs(apart).max() < 5 / np.sqrt(25_000)


# Two pieces less an entry, two, more; short pieces, the last one with padding.
@pytest.mark.parametrize(
  ("n", "levels", "long"),
  [
    *(
      row(n, levels, qsgd._LONG)
      for n, levels in itertools.product([262_143, 262_144, 700_003], [127, 130])
    ),
    row(1007, 127, 200, quick=True),
  ],
)
def test_long_gradients_are_sent_in_pieces_to_within_a_level(
  n, levels, long, monkeypatch
):
  monkeypatch.setattr(qsgd, "_LONG", long)
  workers, grads = 3, normals(0, 3, n)
  out = js.simulate("qsgd", grads, levels=levels)
  values, scales = map(
    np.stack,
    zip(
      *(rounded(noise_of(0, rank, n), grads[rank], levels) for rank in range(workers)),
      strict=True,
    ),
  )
  assert (np.abs(values - grads) <= scales[:, None]).all()
  np.testing.assert_array_equal(out.total, (values[0] + values[1]) + values[2])
  assert float(out.metrics.selected) == pytest.approx((values != 0).sum(axis=1).mean())
  cost = js.costs.count("qsgd", n=n, workers=workers, levels=levels)
  assert cost == js.costs.predict("qsgd", n=n, workers=workers, levels=levels)
  assert cost.messages == 2 * max(1, min(2 * workers, n // long))
