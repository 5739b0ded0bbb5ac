"""Gaussian-k: the threshold of a normal distribution, and its limits."""

import statistics

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.baselines.gaussiank import correct_threshold, fit_threshold
from jaxsparse.select import top_k
from jaxsparse.select.blocks import LazySum
from tests.cases import normals, quick_of


def threshold_in_numpy(x, k, correction):
  threshold = (
    abs(x.mean()) + abs(statistics.NormalDist().inv_cdf(k / len(x) / 2)) * x.std()
  )
  reached = lambda: np.sum(np.abs(x) >= threshold)
  for _ in range(20 if correction else 0):
    threshold *= (
      1 / 1.02 if reached() < 0.75 * k else 1.02 if reached() > 1.25 * k else 1
    )
  while correction and reached() < 0.75 * k:
    threshold /= 1.02
  return threshold


@pytest.mark.parametrize("k", quick_of([1, 20, 1999], quick=[20]))
@pytest.mark.parametrize("power", [1, 3, 9])
def test_the_threshold_of_the_paper_and_its_correction(k, power):
  x = normals(k, 2000) ** power
  home = LazySum((jnp.asarray(x),))
  fitted = fit_threshold(home, k)
  np.testing.assert_allclose(fitted, threshold_in_numpy(x, k, False), rtol=1e-4)
  corrected = correct_threshold(fitted, top_k(home, min(5 * k // 4 + 1, 2000)), k, 2000)
  np.testing.assert_allclose(corrected, threshold_in_numpy(x, k, True), rtol=1e-4)


@pytest.mark.long
def test_without_correction_heavy_tails_are_underestimated():
  grads = normals(0, 3, 6_000) ** 3
  selected = lambda grads, on: float(
    js.simulate("gaussiank", grads, k=600, correction=on).metrics.selected
  )
  assert 0.75 * 600 <= selected(normals(0, 3, 6_000), False) <= 1.25 * 600
  assert selected(grads, False) < 0.75 * 600 <= selected(grads, True)


def test_of_more_entries_than_there_is_room_for_the_largest_are_sent():
  rising = np.where(np.arange(4000) % 2, 1, -1) * np.linspace(10, 11, 4000)
  out = js.simulate("gaussiank", np.tile(rising, (2, 1)).astype(np.float32), k=3000)
  assert (int(out.metrics.overflow), int(out.metrics.delivered)) == (2 * 250, 3750)
  np.testing.assert_array_equal(np.flatnonzero(out.total), np.arange(250, 4000))
