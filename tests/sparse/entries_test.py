"""Arithmetic on rows of entries equals arithmetic on dictionaries, in the order of the rows, bit for bit."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse import sparse
from jaxsparse.types import Sparse
from tests.cases import bits, quick_of
from tests.reference import added, dense

# Their sums depend on the order of addition; −0 alone is −0.
VALUES = [0.0, -0.0, 1.0, -1.0, 1 / 3, -1e8, 1e8, 1e-8, 3e7]


@st.composite
def rows_of_entries(draw, rows, slots, end):
  """Each index at most once in a row, in any order; empty slots anywhere, of `end` or beyond."""
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  filled = random.random((rows, slots)) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
  most = min(end, slots)
  filled &= np.argsort(random.random((rows, slots)), axis=1) < most
  indices = end + random.integers(0, 300, (rows, slots))
  for row, here in zip(indices, filled, strict=True):
    row[here] = random.choice(end, here.sum(), replace=False)
  values = np.where(filled, random.choice(VALUES, (rows, slots)), 0)
  return indices.astype(np.int32), values.astype(np.float32)


def dictionaries(indices, values, end):
  """The entries of each row."""
  return [
    {int(i): value for i, value in zip(*row, strict=True) if i < end}
    for row in zip(indices, values, strict=True)
  ]


merge, add_rows = (
  jax.jit(function, static_argnums=1) for function in (sparse.merge, sparse.add_rows)
)
compressed = jax.jit(sparse.compress, static_argnames=("slots", "end"))


@pytest.mark.parametrize(
  ("rows", "slots", "end"),
  quick_of(
    [(1, 1, 1), (1, 9, 20), (3, 5, 4), (4, 7, 40), (3, 100, 300)],
    quick=[(3, 5, 4), (4, 7, 40)],
  ),
)
@hypothesis.given(data=st.data())
def test_rows_are_added_in_their_order(rows, slots, end, data):
  indices, values = data.draw(rows_of_entries(rows, slots, end))
  total = added({}, *dictionaries(indices, values, end))
  merged = merge(Sparse(indices, values), end)
  expected, empty = sorted(total), min(rows * slots, end) - len(total)
  assert merged.indices.tolist() == expected + [end] * empty
  in_order = np.array([total[i] for i in expected] + [0] * empty, np.float32)
  np.testing.assert_array_equal(bits(merged.values), bits(in_order))
  # Dense sums begin with 0, and whether 0 + −0 is 0 depends on the compiler.
  summed = add_rows(Sparse(indices, values), end) + np.float32(0)
  np.testing.assert_array_equal(bits(summed), bits(dense(total, end) + np.float32(0)))


@pytest.mark.parametrize("slots", [0, 3, 9, 12])
@hypothesis.given(data=st.data())
def test_compressed_entries_keep_their_order(slots, data):
  end = 20
  indices, values = (x[0] for x in data.draw(rows_of_entries(1, 9, end)))
  keep = (indices < end) & np.array(
    data.draw(st.lists(st.booleans(), min_size=9, max_size=9))
  )
  got = compressed(Sparse(indices, values), keep, slots=slots, end=end)
  empty = max(0, slots - keep.sum())
  np.testing.assert_array_equal(
    got.indices, np.pad(indices[keep], (0, empty), constant_values=end)[:slots]
  )
  np.testing.assert_array_equal(
    bits(got.values), bits(np.pad(values[keep], (0, empty))[:slots])
  )
