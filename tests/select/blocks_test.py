"""The k-th largest key of a row, by halves and by digits."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.select import blocks

SLOTS = 256


@functools.partial(jax.jit, static_argnames="way")
def chosen_by(way, keys, indices, k, low):
  if way == "digits":
    selects = lambda cuts: cuts.selects(keys[:, None], indices[:, None])
    return blocks.search_by_digits(selects, k[:, None]).selects(keys, indices)
  return blocks.kth_largest(keys, indices, k, low).selects(keys, indices)


@st.composite
def rows_of_keys(draw):
  """(keys, indices, k, low) of a row: few distinct keys or many, -1 in empty slots, which lie anywhere."""
  key = st.integers(0, 3) | st.integers(0, blocks.TOP - 1) | st.just(blocks.TOP - 1)
  few = draw(st.lists(key, min_size=1, max_size=60))
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  all_filled = draw(st.booleans())
  some = (
    np.resize(few, SLOTS)
    if all_filled
    else np.pad(few, (0, SLOTS - len(few)), constant_values=-1)
  )
  count = SLOTS if all_filled else len(few)
  k = draw(st.just(count) | st.integers(1, count))
  kth = sorted(some)[-k]
  low = draw(st.sampled_from([0, kth, kth // 2]))
  keys, indices = (
    random.permutation(some),
    random.permutation(draw(st.sampled_from([1, 1000])) * np.arange(SLOTS)),
  )
  return keys.astype(np.int32), indices.astype(np.int32), k, low


@pytest.mark.parametrize("way", ["halves", "digits"])
@hypothesis.given(rows=st.lists(rows_of_keys(), min_size=3, max_size=3))
def test_the_cut_selects_the_k_largest_with_ties_to_the_lowest_index(way, rows):
  keys, indices, k, low = (np.stack(part) for part in zip(*rows, strict=True))
  chosen = np.asarray(
    chosen_by(way, keys, indices, k.astype(np.int32), low.astype(np.int32))
  )
  for row, count in enumerate(k):
    expected = np.lexsort((indices[row], -keys[row]))[:count]
    np.testing.assert_array_equal(np.flatnonzero(chosen[row]), np.sort(expected))
