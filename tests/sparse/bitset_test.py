"""Sets of indices as bits behave as sets."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.sparse import bitset

LENGTHS = [1, 31, 32, 255, 256, 257, 600]


@st.composite
def flags_of(draw, n, rows=()):
  """Flags bool[..., n], few of them set or most."""
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  return random.random((*rows, n)) < draw(st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))


@pytest.mark.parametrize("n", LENGTHS)
@hypothesis.given(data=st.data())
def test_bitsets_are_sets(n, data):
  flags = data.draw(flags_of(n))
  members = np.flatnonzero(flags).tolist()
  words = bitset.pack(jnp.array(flags))
  assert words.shape == bitset.empty(n).shape
  assert not bitset.empty(n).any()
  assert bitset.count(words) == len(members)
  assert (bitset.contains(words, jnp.arange(n)) == flags).all()
  assert not bitset.contains(words, jnp.arange(n, bitset.BITS * words.size + 40)).any()

  beyond = bitset.BITS * words.size
  assert bitset.nonzero(words, n + 2).tolist() == members + [beyond] * (n + 2 - len(members))
  assert bitset.nonzero(words, 1).tolist() == (members or [beyond])[:1]
  for select in (bitset.select, bitset.select_by_sums):
    for ordinal in (0, len(members) // 2, len(members) - 1):
      if members:
        assert select(words, jnp.int32(ordinal)) == members[ordinal]
    assert select(words, jnp.int32(len(members))) == beyond - 1


@pytest.mark.parametrize("n", LENGTHS)
@hypothesis.given(data=st.data())
def test_ranks_are_numbers_of_smaller_members(n, data):
  flags = data.draw(flags_of(n))
  words = bitset.pack(jnp.array(flags))
  below = np.cumsum(flags) - flags
  every = np.arange(bitset.BITS * words.size)
  expected = np.concatenate([below, np.full(every.size - n, flags.sum())])
  order = np.random.default_rng(n).permutation(every)
  np.testing.assert_array_equal(bitset.rank(words, jnp.array(order.reshape(2, -1))).reshape(-1), expected[order])
  bound = data.draw(st.integers(0, n))
  assert bitset.count_below(words, jnp.int32(bound)) == flags[:bound].sum()


@pytest.mark.parametrize("n", LENGTHS)
@hypothesis.given(data=st.data())
def test_inserted_members_join_those_before_and_beyond_the_end_none_do(n, data):
  before, more = data.draw(flags_of(n)), data.draw(flags_of(n))
  new = np.random.default_rng(n).permutation(np.where(more & ~before, np.arange(n), n + np.arange(n) % 300))
  words = bitset.insert(bitset.pack(jnp.array(before)), jnp.array(new, jnp.int32), n)
  np.testing.assert_array_equal(words, bitset.pack(jnp.array(before | more)))


@hypothesis.given(flags=flags_of(512, rows=(3,)))
def test_rows_are_packed_as_one_by_one(flags):
  words = bitset.pack(jnp.array(flags))
  assert words.shape == (3, 16)
  np.testing.assert_array_equal(words, [bitset.pack(jnp.array(row)) for row in flags])
  np.testing.assert_array_equal(bitset.count(words), flags.sum(axis=1))


@pytest.mark.parametrize("n", LENGTHS)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_keys_are_compared_with_the_bound_of_their_word(n, seed):
  random = np.random.default_rng(seed)
  keys, bounds = random.integers(0, 5, n), random.integers(0, 6, -(-n // 32))
  words = jax.jit(bitset.pack_reaching)(keys.astype(np.int32), bounds.astype(np.int32))
  np.testing.assert_array_equal(words, bitset.pack(jnp.array(keys >= np.repeat(bounds, 32)[:n])))
