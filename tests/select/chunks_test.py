"""The k largest entries of each chunk: the programs of all platforms against a stable sort in numpy."""

import jax
import numpy as np
import pytest

from jaxsparse.select import chunks
from jaxsparse.select.blocks import LazySum
from tests.cases import normals, quick_of

ROWS, LENGTH = 3, 1024
METHODS = (chunks._by_threshold, chunks._by_groups, chunks._by_sorting)


def hard_vectors():
  """Gradient and residual of one vector, by what is hard about it."""
  n = ROWS * LENGTH
  plain, zeros = normals(0, 2, n), np.zeros((2, n), np.float32)
  few = zeros.copy()
  few[0, [5, 700, 1025, 1024 + 1000]] = [1, -2, 1e-30, 3]
  bad = plain.copy()
  bad[0, [3, 4, 5, 1500]] = [np.nan, -np.nan, np.inf, np.nan]
  clustered = plain.copy()
  clustered[:, np.arange(n) % 128 < 2] *= 100
  ties = np.round(plain)
  # alike in the upper 16 bits
  near = np.stack([(1 + normals(1, n) * 1e-6).astype(np.float32), zeros[0]])
  signs = np.stack([np.sign(plain[0]), zeros[0]])
  return {
    "normal": plain,
    "zeros": zeros,
    "few": few,
    "bad": bad,
    "clustered": clustered,
    "ties": ties,
    "near": near,
    "signs": signs,
  }


@pytest.mark.parametrize("k", quick_of([1, 7, 41], quick=[7]))
@pytest.mark.parametrize(
  "n",
  quick_of(
    [ROWS * LENGTH, ROWS * LENGTH - 1000, ROWS * LENGTH - 5], [ROWS * LENGTH - 5]
  ),
)
def test_every_method_finds_what_a_stable_sort_finds(n, k):
  values_of = jax.jit(
    lambda *parts: chunks.top_k_of_chunks(LazySum(parts), LENGTH, k).values
  )
  for case, parts in hard_vectors().items():
    parts = parts[:, :n]
    keys = np.minimum(np.abs(parts.sum(0)).view(np.int32), 0x7F80_0001)
    keys = np.pad(keys, (0, -n % LENGTH)).reshape(-1, LENGTH)
    expected = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, :k], axis=1)
    for method in METHODS:
      for pieces in (1, ROWS):  # all chunks at once, or one at a time
        found = jax.jit(_found, static_argnums=(0, 1, 2))(method, k, pieces, *parts)
        np.testing.assert_array_equal(
          found, expected, err_msg=f"{case}, {method.__name__}"
        )
    flat = np.pad(parts.sum(0), (0, -n % LENGTH)).reshape(-1, LENGTH)
    np.testing.assert_array_equal(
      values_of(*parts), np.take_along_axis(flat, expected, axis=1)
    )


def _found(method, k, rows, *parts):
  return chunks._in_pieces(method, LazySum(parts), LENGTH, k, rows)


@pytest.mark.parametrize(
  ("length", "k"), [(1, 1), (5, 5), (64, 9), (256, 200), (2304, 100)]
)
def test_chunks_that_are_short_sent_nearly_whole_or_of_odd_lengths(length, k):
  x = np.round(4 * normals(2, 700))
  flat = np.pad(np.abs(x), (0, -700 % length)).reshape(-1, length)
  expected = np.sort(np.argsort(-flat, axis=1, kind="stable")[:, :k], axis=1)
  select = jax.jit(lambda x: chunks.top_k_of_chunks(LazySum((x,)), length, k).indices)
  np.testing.assert_array_equal(select(x), expected)
