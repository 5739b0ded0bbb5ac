"""gTopk against the tree written out in numpy."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from tests.cases import WORKERS, normals, quick_of
from tests.reference.gtopk import gtopk


@pytest.mark.parametrize(
  ("n", "k", "workers"),
  quick_of(
    [(*sizes, workers) for sizes in ((1, 1), (50, 9)) for workers in WORKERS],
    quick=[(1, 1, 3), (50, 9, 1), (50, 9, 3), (50, 9, 8)],
  ),
)
def test_equals_the_tree_in_numpy(n, k, workers):
  left, state = np.zeros((workers, n), np.float32), None
  for step in range(3):
    grads = normals(step, workers, n)
    total, left = gtopk(grads, left, k)
    out = js.simulate("gtopk", grads, state=state, k=k)
    state = out.state
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, left)


@hypothesis.given(sizes=st.sampled_from([(3, 2), (7, 6)]), seed=st.integers(0, 2**32 - 1))
def test_equals_the_tree_with_ties_and_cancellation(sizes, seed):
  """Few distinct values: sums cancel, and what is selected depends on the rule for ties."""
  workers, k = sizes
  grads = np.random.default_rng(seed).integers(-2, 3, (workers, 12)).astype(np.float32)
  total, left = gtopk(grads, np.zeros_like(grads), k)
  out = js.simulate("gtopk", grads, k=k)
  np.testing.assert_array_equal(out.total, total)
  np.testing.assert_array_equal(out.residuals, left)
