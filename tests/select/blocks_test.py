"""The k-th largest key of a row, by counting and by sorting."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.select import blocks
from tests.select.gradients import GRADIENTS, keys_in_numpy

SLOTS = 256
WAYS = {way.__name__: jax.jit(way) for way in (blocks.by_counting, blocks.by_sorting, blocks.kth_largest)}


@st.composite
def rows_of_keys(draw):
  """(keys, indices, k, low) of a row: few distinct keys or many, -1 in empty slots, which lie anywhere."""
  key = st.integers(0, 3) | st.integers(0, blocks.TOP - 1) | st.just(blocks.TOP - 1)
  few = draw(st.lists(key, min_size=1, max_size=60))
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  all_filled = draw(st.booleans())
  some = np.resize(few, SLOTS) if all_filled else np.pad(few, (0, SLOTS - len(few)), constant_values=-1)
  count = SLOTS if all_filled else len(few)
  k = draw(st.just(count) | st.integers(1, count))
  kth = sorted(some)[-k]
  low = draw(st.sampled_from([0, kth, kth // 2]))
  keys, indices = random.permutation(some), random.permutation(draw(st.sampled_from([1, 1000])) * np.arange(SLOTS))
  return keys.astype(np.int32), indices.astype(np.int32), k, low


@pytest.mark.parametrize("way", WAYS)
@hypothesis.given(rows=st.lists(rows_of_keys(), min_size=3, max_size=3))
def test_the_cut_selects_the_k_largest_with_ties_to_the_lowest_index(way, rows):
  keys, indices, k, low = (np.stack(part) for part in zip(*rows, strict=True))
  cut = WAYS[way](keys, indices, k.astype(np.int32), low.astype(np.int32))
  chosen = np.asarray(cut.selects(jnp.array(keys), jnp.array(indices)))
  for row, count in enumerate(k):
    expected = np.lexsort((indices[row], -keys[row]))[:count]
    np.testing.assert_array_equal(np.flatnonzero(chosen[row]), np.sort(expected))


def test_by_sorting_selects_none_for_k_of_0():
  keys, indices = jnp.array([[3, 1, 4]]), jnp.arange(3)[None]
  assert not blocks.by_sorting(keys, indices, jnp.array([0]), jnp.array([0])).selects(keys, indices).any()


@pytest.mark.parametrize("k", [1, 700, 70_001])
def test_bisection_ends_where_exactly_k_entries_are_selected(k):
  find = jax.jit(
    lambda keys: blocks.bisect(
      lambda cut: jnp.sum(
        (keys > cut.key) | ((keys == cut.key) & (jnp.arange(keys.size) <= cut.last)), dtype=jnp.int32
      ),
      jnp.int32(k),
      jnp.int32(0),
      jnp.int32(blocks.TOP),
    )
  )
  for name, x in GRADIENTS.items():
    keys = keys_in_numpy(x)
    np.testing.assert_array_equal(blocks.keys_of(jnp.array(x)), keys, err_msg=name)
    cut = find(keys)
    chosen = np.flatnonzero((keys > cut.key) | ((keys == cut.key) & (np.arange(keys.size) <= cut.last)))
    np.testing.assert_array_equal(chosen, np.sort(np.argsort(-keys, kind="stable")[:k]), err_msg=name)
