"""Gaussian-k: the threshold of a normal distribution, and its limits."""

import statistics

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.gaussiank import fitted_threshold
from tests.cases import normals


def threshold_in_numpy(x, k):
  threshold = abs(x.mean()) + abs(statistics.NormalDist().inv_cdf(k / len(x) / 2)) * x.std()
  for _ in range(20):
    reached = np.sum(np.abs(x) >= threshold)
    threshold *= 1 / 1.02 if reached < 0.75 * k else 1.02 if reached > 1.25 * k else 1
  return threshold


@pytest.mark.parametrize("k", [1, 20, 1999])
@pytest.mark.parametrize("power", [1, 3])
def test_the_threshold_of_the_paper(k, power):
  x = normals(k, 2000) ** power
  np.testing.assert_allclose(fitted_threshold(jnp.asarray(x), k), threshold_in_numpy(x, k), rtol=1e-4)


def test_normal_gradients_give_k_and_heavy_tails_do_not():
  near = js.simulate("gaussiank", normals(0, 3, 20_000), density=0.01).metrics
  assert 0.75 * 200 <= float(near.selected) <= 1.25 * 200
  heavy = js.simulate("gaussiank", normals(0, 3, 20_000) ** 9, density=0.01).metrics
  assert float(heavy.selected) < 0.75 * 200


def test_what_is_selected_beyond_the_capacity_stays_and_is_counted():
  grads = np.where(np.arange(4000) % 2, 1, -1).astype(np.float32)[None] * np.ones((2, 1), np.float32)
  out = js.simulate("gaussiank", grads, k=3000)
  assert int(out.metrics.overflow) == 2 * (4000 - 3750)
  assert int(out.metrics.delivered) == 3750
