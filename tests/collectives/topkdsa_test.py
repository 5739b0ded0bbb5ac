"""TopkDSA against owners and messages written out in numpy."""

import numpy as np
import pytest

import jaxsparse as js
from tests.cases import normals, quick_of
from tests.reference.topkdsa import topkdsa


@pytest.mark.parametrize(
  ("n", "k", "workers"),
  quick_of(
    [(*sizes, workers) for sizes in ((1, 1), (50, 9), (50, 50), (2000, 20)) for workers in (1, 3, 6, 8)],
    quick=[(1, 1, 8), (50, 9, 3), (2000, 20, 8)],
  ),
)
def test_equals_owners_in_numpy(n, k, workers):
  slots = js.make_collective("topkdsa", k=k).capacities(n, workers)[-1]
  left, state = np.zeros((workers, n), np.float32), None
  for step in range(3):
    grads = normals(step, workers, n)
    total, left = topkdsa(grads, left, k, slots)
    out = js.simulate("topkdsa", grads, state=state, k=k)
    state = out.state
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, left)


def test_it_is_topka_where_everything_has_room():
  grads = normals(0, 6, 3000)
  split, gathered = (js.simulate(name, grads, density=0.01) for name in ("topkdsa", "topka"))
  np.testing.assert_array_equal(split.total, gathered.total)
  np.testing.assert_array_equal(split.residuals, gathered.residuals)
  assert int(split.metrics.overflow) == 0


def test_entries_that_crowd_into_one_region_wait_in_the_residual():
  grads = np.zeros((4, 40), np.float32)
  grads[:, :10] = np.arange(10, 0, -1)  # all in region 0
  out = js.simulate("topkdsa", grads, k=10)
  slots = js.make_collective("topkdsa", k=10).capacities(40, 4)[-1]
  assert slots == 3
  assert int(out.metrics.overflow) == 4 * (10 - slots)
  np.testing.assert_array_equal(out.total[:10], 4 * np.where(np.arange(10) < slots, grads[0, :10], 0))


def test_the_gather_is_dense_where_that_is_fewer_words():
  """All workers select different entries: the union is most of the gradient."""
  grads = np.zeros((4, 80), np.float32)
  for worker in range(4):
    grads[worker, worker::4] = 1 + np.arange(20)
  few, many = (js.simulate("topkdsa", grads, k=k).metrics for k in (2, 20))
  assert int(few.words_sent) < int(many.words_sent) == 2 * 5 * 3 + 20 * 3
