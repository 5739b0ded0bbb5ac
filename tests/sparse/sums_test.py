"""Sums that are the same bits in every program."""

import jax
import numpy as np
import pytest

from jaxsparse.sparse.sums import ordered_sum
from tests.cases import bits, normals


@pytest.mark.parametrize("n", [1, 255, 256, 257, 100_003, 300_003])
def test_the_same_bits_alone_and_under_vmap(n):
  x = normals(n, 3, n)
  alone = np.array([jax.jit(ordered_sum)(row) for row in x])
  np.testing.assert_array_equal(bits(alone), bits(jax.jit(jax.vmap(ordered_sum))(x)))
  np.testing.assert_allclose(alone, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-3)
