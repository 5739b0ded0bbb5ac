"""The largest entry of each chunk of a block."""

import jax
import numpy as np
import pytest

from jaxsparse.select import per_chunk
from jaxsparse.select.blocks import Blocks, LazySum


@pytest.mark.parametrize(
  ("n", "workers", "k"),
  [(1, 1, 1), (30, 3, 4), (5, 4, 1), (103, 5, 3), (10_000, 3, 7), (30_000, 2, 3000)],
)
def test_largest_of_chunks(n, workers, k):
  """Small whole numbers, whose last bits are zeros and of which some tie; with a NaN, and blocks short or empty."""
  random, length = np.random.default_rng(n), -(-n // workers)
  parts = random.integers(-9, 10, (2, n)).astype(np.float32)
  parts[1, n // 2] = np.nan
  order = random.permutation(workers).astype(np.int32)
  blocks = lambda order, *parts: Blocks(LazySum(parts), order, length, k)
  best = jax.jit(lambda *args: per_chunk.largest_of_chunks(blocks(*args)))(
    order, *parts
  )
  at_once = jax.jit(lambda *args: per_chunk.largest_of_chunks_at_once(blocks(*args)))(
    order, *parts
  )
  np.testing.assert_array_equal(at_once, best)
  for block, indices in zip(order, np.asarray(best), strict=True):
    values = np.nan_to_num(
      np.abs(parts.sum(0)[block * length : (block + 1) * length]), nan=np.inf
    )
    of_chunks = [values[chunk::k] for chunk in range(k)]
    expected = [
      chunk + k * np.argmax(x) if x.size else length
      for chunk, x in enumerate(of_chunks)
    ]
    assert indices.tolist() == expected
