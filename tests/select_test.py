"""Exact top-k: ties to the lowest index, NaN first."""

import hypothesis
import hypothesis.extra.numpy
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.select import top_k
from tests.reference import largest

floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-42, 3e38]) | st.floats(width=32)


@hypothesis.given(
  x=hypothesis.extra.numpy.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(12)), elements=floats)
)
@pytest.mark.parametrize("k", [1, 5, 12])
def test_equals_a_sort_by_magnitude(k, x):
  chosen = top_k(x, k)
  for row, indices, values in zip(x, np.asarray(chosen.indices), np.asarray(chosen.values), strict=True):
    nans = np.isnan(row[indices]).sum()
    assert nans == min(k, np.isnan(row).sum())
    assert sorted(indices[nans:]) == sorted(set(largest(dict(enumerate(row)), k)) - set(np.flatnonzero(np.isnan(row))))
    np.testing.assert_array_equal(values, row[indices])


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_row(k):
  with pytest.raises(ValueError, match=f"k={k}, choose a number of entries from 1 to the 4"):
    top_k(np.zeros(4, np.float32), k)
