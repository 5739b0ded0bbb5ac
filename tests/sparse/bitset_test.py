"""Sets of indices as bits behave as sets."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.sparse import bitset
from tests.cases import quick_of

LENGTHS = [1, 31, 32, 255, 256, 257, 600]


@st.composite
def flags_of(draw, n, rows=()):
  """Flags bool[..., n], few of them set or most."""
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  return random.random((*rows, n)) < draw(st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))


@jax.jit
def read(flags):
  """What functions of the set of flags return, for all indices and a few more."""
  words, n = bitset.pack(flags), flags.size
  every = jnp.arange(bitset.BITS * words.size + 40, dtype=jnp.int32)
  return {
    "count": bitset.count(words),
    "contains": bitset.contains(words, every),
    "rank": bitset.rank(words, every.reshape(2, -1)).reshape(-1),
    "nonzero": bitset.nonzero(words, n + 2),
    "first": bitset.nonzero(words, 1),
    "nonzero as on GPU": bitset._nonzero_by_index(words, n + 2),
    "nonzero as on TPU": bitset._nonzero_by_slot(words, n + 2, group=1),
  }


@pytest.mark.parametrize(
  "n", quick_of([*LENGTHS, 4095, 4097, 9000], quick=[31, 256, 4097])
)
def test_all_platforms_pack_the_same_words(n):
  flags = np.random.default_rng(n).random(n) < 0.5
  by_product = jax.jit(bitset._pack_by_product)(flags)
  np.testing.assert_array_equal(by_product, bitset.pack(flags))


@pytest.mark.parametrize("n", quick_of(LENGTHS, quick=[31, 256, 600]))
@hypothesis.given(data=st.data())
def test_bitsets_are_sets(n, data):
  flags = data.draw(flags_of(n))
  members, beyond = np.flatnonzero(flags), bitset.BITS * bitset.empty(n).size
  got = read(flags)
  assert got["count"] == len(members)
  np.testing.assert_array_equal(np.flatnonzero(got["contains"]), members)
  smaller = np.concatenate(
    [np.cumsum(flags) - flags, np.full(len(got["rank"]) - n, flags.sum())]
  )
  np.testing.assert_array_equal(got["rank"], smaller)
  nonzero = np.pad(members, (0, n + 2 - len(members)), constant_values=beyond)
  np.testing.assert_array_equal(got["nonzero"], nonzero)
  np.testing.assert_array_equal(got["first"], nonzero[:1])
  np.testing.assert_array_equal(got["nonzero as on GPU"], nonzero)
  np.testing.assert_array_equal(got["nonzero as on TPU"], nonzero)


pack = jax.jit(bitset.pack)
joined = jax.jit(
  lambda before, new: bitset.insert(bitset.pack(before), new, before.size)
)


@pytest.mark.parametrize("n", quick_of(LENGTHS, quick=[31, 256, 600]))
@hypothesis.given(data=st.data())
def test_inserted_members_join_those_before_and_beyond_the_end_none_do(n, data):
  before, more = data.draw(flags_of(n)), data.draw(flags_of(n))
  new = np.random.default_rng(n).permutation(
    np.where(more & ~before, np.arange(n), n + np.arange(n) % 300)
  )
  np.testing.assert_array_equal(
    joined(before, new.astype(np.int32)), pack(before | more)
  )


@hypothesis.given(flags=flags_of(512, rows=(3,)))
def test_rows_are_packed_as_one_by_one(flags):
  words = pack(flags)
  assert words.shape == (3, 16)
  np.testing.assert_array_equal(words, [pack(row) for row in flags])
  np.testing.assert_array_equal(bitset.count(words), flags.sum(axis=1))
