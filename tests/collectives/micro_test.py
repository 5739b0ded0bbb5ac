"""MiCRO against the paper's step in numpy, with exact selection in place of a threshold."""

import numpy as np
import pytest

import jaxsparse as js
from tests.cases import quick_of


def reduce_in_numpy(acc, step, k):
  """The total and the residuals of f32[P, n]: worker w selects ⌈k/P⌉ entries of part (step + w) mod P."""
  workers, n = acc.shape
  length, each, indices = -(-n // workers), -(-k // workers), []
  for worker, own in enumerate(acc):
    first = (step + worker) % workers * length
    part = np.arange(n)[first : first + length]
    indices.extend(part[np.argsort(-np.abs(own[part]), kind="stable")[:each]])
  assert len(set(indices)) == len(indices)
  is_chosen = np.isin(np.arange(n), indices)
  return np.where(is_chosen, acc.sum(0), 0), np.where(is_chosen, 0, acc)


@pytest.mark.parametrize(
  ("workers", "n", "k"),
  quick_of(
    [(1, 10, 3), (2, 4, 1), (3, 10, 4), (4, 9, 9), (5, 3, 2), (4, 40_001, 400)],
    [(3, 10, 4), (5, 3, 2)],
  ),
)
def test_steps_in_sequence_deliver_the_entries_of_all_workers(workers, n, k):
  """Whole numbers, so that no sum rounds; parts that are shorter, or empty, too."""
  random, state, residuals = (
    np.random.default_rng(n),
    None,
    np.zeros((workers, n), np.float32),
  )
  for step in range(2 * workers + 1):
    grads = random.integers(-1000, 1000, (workers, n)).astype(np.float32)
    out = js.simulate("micro", grads, state=state, k=k)
    state = out.state
    total, residuals = reduce_in_numpy(grads + residuals, step, k)
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, residuals)


def test_a_sum_that_overflows_where_nobody_selects_skips_the_step():
  """Two gradients of 3e38 of worker 1 at index 0, where worker 0 or 2 selects, and finds only zeros there."""
  grads = np.zeros((3, 6), np.float32)
  grads[1, 0], grads[[0, 2], 1], grads[1, 2] = 3e38, 5, 1
  first = js.simulate("micro", grads, k=3)
  second = js.simulate("micro", grads, state=first.state, k=3)
  assert (bool(first.metrics.skipped), bool(second.metrics.skipped)) == (False, True)
  np.testing.assert_array_equal(second.residuals, first.residuals)
