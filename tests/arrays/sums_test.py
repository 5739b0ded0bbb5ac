"""Sums that are the same bits in every program."""

import re

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.arrays.sums import fold_rows, largest_magnitude, ordered_sum
from tests.cases import bits, normals


@pytest.mark.parametrize("n", [1, 255, 256, 257, 100_003, 300_003])
def test_the_same_bits_alone_and_under_vmap(n):
  x = normals(n, 3, n)
  alone = np.array([jax.jit(ordered_sum)(row) for row in x])
  np.testing.assert_array_equal(bits(alone), bits(jax.jit(jax.vmap(ordered_sum))(x)))
  np.testing.assert_allclose(alone, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-3)


def test_on_cpu_no_loop_over_entries_computes_the_largest_of_all_anew():
  """The scale of QSGD took 42 s for 14.7 M entries: the maximum of the last 450 for each of them."""

  def scale(x):
    largest = largest_magnitude(x)
    return ordered_sum(x, term=lambda entries: (entries / largest) ** 2)

  with js.traced_for("cpu"):
    lowered = jax.jit(scale).lower(jax.ShapeDtypeStruct((32 * 450,), np.float32))
  computations = re.split(r"^}", lowered.compile().as_text(), flags=re.MULTILINE)
  dividing = [text for text in computations if " divide(" in text]
  assert dividing
  assert not [text for text in dividing if " maximum(" in text]


@pytest.mark.parametrize("rows", [range(16), range(16, 32)])
def test_rows_are_folded_one_by_one_and_all_together_to_the_same_bits(rows):
  x = normals(0, 3, 32, 5)
  # exact, so that no compiler fuses it with a sum
  term = lambda x, row: x * (2.0 ** (row % 4)).astype(np.float32)
  one_by_one, together = (
    jax.jit(lambda x, way=way: fold_rows(x, rows, term, jax.numpy.add, way))(x)
    for way in (True, False)
  )
  np.testing.assert_array_equal(bits(one_by_one), bits(together))
  weights = 2.0 ** (np.array(rows) % 4)
  np.testing.assert_allclose(
    together, np.einsum("brc,r->bc", x[:, rows], weights), rtol=1e-5, atol=1e-3
  )
