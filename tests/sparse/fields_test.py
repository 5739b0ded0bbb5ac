"""Packed numbers come back, and take the words that are promised."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.sparse import fields


@hypothesis.given(
  width=st.integers(0, 31), count=st.integers(0, 70), seed=st.integers(0, 9)
)
@hypothesis.settings(max_examples=30)
def test_numbers_come_back(width, count, seed):
  random = np.random.default_rng(seed)
  numbers = random.integers(0, 2**width, (3, count), dtype=np.uint32)
  packed = fields.pack(jnp.array(numbers), width)
  assert packed.shape == (3, fields.words(width, count))
  np.testing.assert_array_equal(fields.unpack(packed, width, count), numbers)


def test_higher_bits_do_not_reach_other_numbers():
  packed = fields.pack(jnp.array([[0xFFFF_FFF0, 1]], jnp.uint32), 4)
  assert fields.unpack(packed, 4, 2).tolist() == [[0, 1]]


def test_words_are_those_of_whole_parts():
  """A number of 6 bits is one of 4 and one of 2."""
  assert [fields.words(6, count) for count in (0, 1, 8, 9, 16, 17)] == [
    0,
    2,
    2,
    3,
    3,
    5,
  ]
  shape = jax.eval_shape(
    lambda x: fields.pack(x, 7), jax.ShapeDtypeStruct((2, 64), jnp.int32)
  )
  assert shape.shape == (2, 8 + 4 + 2)
