"""Random-k: the same places everywhere, all of them in turn."""

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.baselines.randomk import draw_indices
from tests.cases import quick_of


@pytest.mark.parametrize(
  ("n", "k"),
  quick_of([(1, 1), (10, 3), (17, 16), (1000, 7)], quick=[(10, 3), (17, 16)]),
)
def test_places_are_different_and_uniform_within_their_stratum(n, k):
  drawn = np.asarray(
    jax.vmap(lambda key: draw_indices(key, n, k))(
      jax.random.split(jax.random.key(0), 2000)
    )
  )
  assert np.all(np.diff(drawn, axis=1) > 0)
  assert drawn.min() >= 0
  assert drawn.max() < n
  often = np.bincount(drawn.ravel(), minlength=n) / 2000
  longest = -(-n // k)
  expected = 1 / np.where(np.arange(n) < (n % k) * longest, longest, n // k)
  assert np.all(np.abs(often - expected) < 6 * np.sqrt(expected / 2000) + 1e-9)


def test_everything_is_delivered_in_the_end():
  grads, state, total = np.ones((2, 50), np.float32), None, 0
  for _ in range(200):
    out = js.simulate("randomk", grads, state=state, k=10)
    state, total = out.state, total + np.asarray(out.total)
  assert np.all(total + np.asarray(out.residuals).sum(0) == 400)
  assert np.all(total > 300)
