"""SparDL against the paper, written out in numpy, and against what the authors' implementation gives."""

import pathlib

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from tests.cases import WORKERS, bits, normals
from tests.reference import spardl as reference

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "spardl_golden.npz")


def test_equals_the_authors_results_bit_for_bit():
  state = None
  for step, grads in enumerate(GOLDEN["gradients"]):
    out = js.simulate("spardl", grads, state=state, k=96)
    state = out.state
    np.testing.assert_array_equal(bits(np.asarray(out.total) / np.float32(6)), bits(GOLDEN["result"][step]))
    np.testing.assert_array_equal(bits(out.residuals), bits(GOLDEN["residual"][step]))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("residual", ["global", "partial", "local"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (50, 9), (50, 50)])
def test_equals_the_paper_in_numpy(workers, residual, n, k):
  left, state = np.zeros((workers, n), np.float32), None
  for step in range(3):
    grads = normals(step, workers, n)
    totals, left = reference.spardl(grads, left, k, residual)
    out = js.simulate("spardl", grads, state=state, k=k, residual=residual)
    state = out.state
    np.testing.assert_array_equal(out.total, totals[0])
    np.testing.assert_array_equal(out.residuals, left)


@hypothesis.given(
  workers=st.integers(1, 9), n=st.integers(1, 30), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1)
)
def test_equals_the_paper_with_ties(workers, n, share, seed):
  """Few distinct values: what is selected depends on the rule for ties, everywhere."""
  grads = np.random.default_rng(seed).integers(-2, 3, (workers, n)).astype(np.float32)
  k = max(1, round(share * n))
  totals, left = reference.spardl(grads, np.zeros_like(grads), k)
  out = js.simulate("spardl", grads, k=k)
  np.testing.assert_array_equal(out.total, totals[0])
  np.testing.assert_array_equal(out.residuals, left)


def test_delivers_the_largest_entries_where_workers_agree():
  grads = np.tile(np.arange(12, dtype=np.float32) - 20, (3, 1))  # blocks of 4: the first entry of each is the largest
  out = js.simulate("spardl", grads, k=3)
  expected = np.zeros(12)
  expected[[0, 4, 8]] = 3 * grads[0, [0, 4, 8]]
  np.testing.assert_array_equal(out.total, expected)


def test_metrics_are_the_papers_words():
  out = js.simulate("spardl", normals(0, 6, 600), density=0.01)
  assert int(out.metrics.words_sent) == 4 * 1 * 5  # ⌈6 / 6⌉ entries a block, five blocks away, there and back
  assert float(out.metrics.density) == pytest.approx(6 / 600)
  assert float(out.metrics.residual_norm) == pytest.approx(float(np.linalg.norm(out.residuals)), rel=1e-5)


def test_the_schedule_compiles_as_fast_for_many_workers():
  """A round is a few operations on rows, whatever the number of rows: the program grows with log P."""
  size = {}
  for workers in (16, 256):
    jaxpr = js.costs.schedule(js.make_collective("spardl", density=0.01), 10_000, workers)
    size[workers] = len(str(jaxpr.eqns[0].params["jaxpr"]).split(" = "))
  assert size[256] < 2.5 * size[16]


def test_padding_never_reaches_total_or_residual():
  out = js.simulate("spardl", np.zeros((4, 5), np.float32), np.full((4, 5), 1.0), k=5)
  np.testing.assert_array_equal(out.total, np.full(5, 4.0))
  assert out.residuals.shape == (4, 5)
  assert not jax.numpy.any(out.residuals)
