"""What is decoded is what was encoded, up to the rounding of its values, and takes as many words as were promised."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import comm, sparse
from jaxsparse.sparse import codec as codecs
from jaxsparse.sparse.codec import codec_of
from jaxsparse.types import Sparse
from tests.cases import bits, quick_of, row
from tests.sparse.entries_test import rows_of_entries

# (rows, capacity, length), of low parts of 4, 8 and 16 bits; full blocks, and blocks
# with fewer entries than slots
SHAPES = [(1, 1, 1), (1, 20, 3), (3, 9, 33), (2, 5, 3000), (3, 3, 1_000_000)]
SHORT = ["bf16", "int8"]
LARGEST = float(jnp.finfo(jnp.bfloat16).max)
normal = {
  "width": 32,
  "allow_nan": False,
  "allow_infinity": False,
  "allow_subnormal": False,
}


@functools.partial(jax.jit, static_argnames=("length", "wire_"))
def there_and_back(entries, length, wire_, noise):
  codec = codec_of(wire_, length)
  return codec.decode(codec.encode(entries, noise)[0])


@st.composite
def messages(draw, rows, capacity, length, elements):
  """Entries with empty slots anywhere, in any order, and noise."""
  indices, _ = draw(rows_of_entries(rows, capacity, length))
  values = draw(
    hypothesis.extra.numpy.arrays(np.float32, indices.shape, elements=elements)
  )
  random = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random
  noise = draw(
    st.sampled_from([np.zeros, lambda shape: np.full(shape, 1 - 2.0**-24), random])
  )(indices.shape)
  values = np.where(indices < length, values, 0)
  return Sparse(jnp.array(indices, jnp.int32), jnp.array(values)), jnp.array(
    noise, jnp.float32
  )


def some_entries(rows, capacity, length, seed=0):
  random = np.random.default_rng(seed)
  indices = np.stack(
    [random.choice(length, capacity, replace=False) for _ in range(rows)]
  )
  values = random.standard_normal((rows, capacity))
  entries = Sparse(jnp.array(indices, jnp.int32), jnp.array(values, jnp.float32))
  return entries, jnp.array(random.random((rows, capacity)), jnp.float32)


@pytest.mark.parametrize("wire_", SHORT)
@pytest.mark.parametrize("shape", [row(shape, quick=shape[0] == 3) for shape in SHAPES])
@hypothesis.given(data=st.data())
def test_entries_come_back_in_the_order_of_their_high_parts(shape, wire_, data):
  _, capacity, length = shape
  entries, noise = data.draw(messages(*shape, st.floats(**normal)))
  got = there_and_back(entries, length, wire_, noise)

  indices = np.minimum(entries.indices, length)
  high = np.where(
    indices < length, indices >> codecs.low_bits(capacity, length), length + 1
  )
  order = np.argsort(high, axis=1, kind="stable")
  np.testing.assert_array_equal(got.indices, np.take_along_axis(indices, order, 1))

  sent = np.clip(
    np.take_along_axis(np.asarray(entries.values), order, 1), -LARGEST, LARGEST
  )
  if wire_ == "bf16":
    rounded = sent.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got.values, rounded)
    assert (np.abs(rounded - sent.astype(np.float64)) <= 2.0**-8 * np.abs(sent)).all()
  else:
    # A level of rows with nothing above 1.5e-36 is too small to be told from 0.
    size = (
      np.abs(sent.astype(np.float64)).max(1, keepdims=True) / 127 * (1 + 2.0**-16)
      + 1.5e-36
    )
    assert (np.abs(got.values - sent.astype(np.float64)) <= size).all()
  assert (np.asarray(got.values)[np.asarray(got.indices) == length] == 0).all()


@pytest.mark.parametrize("wire_", ["f32", *SHORT])
def test_words_are_those_of_the_packed_message(wire_):
  for rows, capacity, length in [
    *SHAPES,
    (3, 5, 8),
    (5, 31, 10_000),
    (6, 24_548, 2_454_711),
    (2, 70_000, 2**30),
  ]:
    entries = (
      jax.ShapeDtypeStruct((rows, capacity), jnp.int32),
      jax.ShapeDtypeStruct((rows, capacity), jnp.float32),
    )
    for by_chunk in (False, True):
      codec = codec_of(wire_, length, by_chunk=by_chunk)
      packed = lambda entries, noise, codec=codec: comm.pack(
        codec.encode(entries, noise)[0]
      )
      assert (
        codec.words(rows, capacity)
        == jax.eval_shape(packed, Sparse(*entries), entries[1]).size
      )


def test_levels_are_unbiased():
  values = jnp.array([[1.0, -0.3, 0.123, -1e-4, 0.0, -1.0, 0.999]])
  entries = Sparse(jnp.arange(7, dtype=jnp.int32)[None], values)
  times = 4096
  noise = jnp.array(
    (np.arange(times)[:, None, None] + np.random.default_rng(0).random((1, 1, 7)))
    / times,
    jnp.float32,
  )
  got = jax.vmap(lambda noise: there_and_back(entries, 7, "int8", noise))(noise).values
  # A grid of noise gives the mean up to one step of it.
  np.testing.assert_allclose(
    np.asarray(got, np.float64).mean(0), values, atol=1.01 / 127 / times, rtol=1e-6
  )
  assert (np.abs(got - values[None]) <= 1.001 / 127).all()
  assert (got[..., 4] == 0).all()


def test_noise_belongs_to_the_slots_of_the_entries():
  indices = jnp.array([[900, 20, 999, 300]])  # the third is empty
  entries = Sparse(indices, jnp.array([[127.0, 0.5, 0.0, 0.5]]))
  noise = jnp.array([[0.0, 0.0, 0.9, 0.9]])
  got = there_and_back(entries, 999, "int8", noise)
  assert got.indices.tolist() == [[20, 300, 900, 999]]
  np.testing.assert_allclose(got.values, [[0.0, 1.0, 127.0, 0.0]], rtol=2e-5)


@pytest.mark.parametrize("wire_", ["f32", *SHORT])
@pytest.mark.parametrize("by_chunk", [False, True])
@pytest.mark.parametrize("capacity", [20, 20_000])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(wire_, by_chunk, capacity):
  """XLA's maximum of thousands of values drops a NaN on CPU."""
  codec = codec_of(wire_, 2 * capacity, by_chunk=by_chunk)
  decoded = jax.jit(
    lambda entries, noise: codec.decode(codec.encode(entries, noise)[0]).values
  )
  values = np.random.default_rng(0).standard_normal((3, capacity)).astype(np.float32)
  indices, noise = (
    jnp.arange(3 * capacity, dtype=jnp.int32).reshape(3, -1) % capacity,
    jnp.full(values.shape, 0.5),
  )
  for slots in (0, capacity // 2 + 1, capacity - 1, slice(None)):
    for bad in (np.nan, np.inf, -np.inf):
      broken = values.copy()
      broken[1, slots] = bad
      got = decoded(Sparse(indices, jnp.array(broken)), noise)
      assert np.isfinite(got).all(axis=1).tolist() == [True, False, True], (slots, bad)


@pytest.mark.parametrize("wire_", SHORT)
def test_the_largest_are_finite_and_the_smallest_are_numbers(wire_):
  largest, least = np.finfo(np.float32).max, np.finfo(np.float32).tiny
  values = np.array(
    [[largest, -largest], [least, -least], [0.0, -0.0], [1e-45, largest]], np.float32
  )
  entries = Sparse(jnp.array([[0, 1]] * 4, jnp.int32), jnp.array(values))
  got = there_and_back(entries, 2, wire_, jnp.full((4, 2), 0.9999)).values
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got, values, rtol=2.0**-7, atol=1e-37)
  assert (got[2] == 0).all()


@pytest.mark.parametrize("wire_", quick_of(SHORT, quick=["int8"]))
def test_the_same_bits_in_every_program(wire_):
  entries, noise = some_entries(6, 40, 4000)
  codec = codec_of(wire_, 4000)
  there, back = lambda entries, noise: codec.encode(entries, noise)[0], codec.decode
  message = jax.jit(there)(entries, noise)
  got = jax.jit(back)(message)

  split = lambda tree: jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), tree)
  of_two = jax.jit(jax.vmap(there))(split(entries), split(noise))
  jax.tree.map(np.testing.assert_array_equal, split(message), of_two)
  jax.tree.map(
    np.testing.assert_array_equal, split(got), jax.jit(jax.vmap(back))(of_two)
  )

  sent = comm.unpack(comm.pack(message), message)
  for other in (
    jax.jit(back)(sent),
    jax.jit(lambda *x: back(there(*x)))(entries, noise),
  ):
    np.testing.assert_array_equal(got.indices, other.indices)
    np.testing.assert_array_equal(bits(got.values), bits(other.values))
  # products are exact, so that sums are the same with fused multiply-add and without
  if wire_ == "int8":
    exact = (
      np.asarray(message.values, np.float64)
      * np.asarray(message.scale, np.float64)[:, None]
    )
    np.testing.assert_array_equal(np.asarray(got.values, np.float64), exact)


def test_a_message_of_zeros_holds_nothing():
  for capacity, length in ((9, 33), (5, 3000), (3, 1_000_000)):
    codec = codec_of("int8", length)
    message, _ = jax.eval_shape(codec.encode, *some_entries(3, capacity, length))
    got = jax.jit(codec.decode)(
      jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), message)
    )
    assert (got.indices == length).all()
    assert (got.values == 0).all()


@pytest.mark.parametrize("wire_", ["f32", *SHORT])
@pytest.mark.parametrize("by_chunk", [False, True])
def test_what_was_rounded_off_is_known_to_the_sender(wire_, by_chunk):
  length, chunks = 1000, 30
  random = np.random.default_rng(0)
  slots = np.arange(chunks)[None]
  indices = np.where(
    random.random((3, chunks)) < 0.7,
    random.integers(0, 33, (3, chunks)) * chunks + slots,
    1000,
  )
  values = np.where(indices < 1000, random.standard_normal(indices.shape), 0)
  entries, noise = (
    Sparse(jnp.array(indices), jnp.array(values, jnp.float32)),
    jnp.array(random.random(indices.shape)),
  )
  codec = codec_of(wire_, length, by_chunk=by_chunk)
  message, rounded = jax.jit(codec.encode)(entries, noise.astype(jnp.float32))
  got = jax.jit(codec.decode)(message)
  dense = lambda entries: np.asarray(
    jax.vmap(lambda row: sparse.put(jnp.zeros(length), *row))(entries)
  )
  np.testing.assert_array_equal(
    bits(dense(got)), bits(dense(Sparse(entries.indices, rounded)))
  )
  assert (np.abs(rounded - entries.values) <= np.abs(values).max() / 100).all()
  if by_chunk:
    np.testing.assert_array_equal(got.indices, indices)


def test_positions_in_chunks_take_the_fewest_bytes_that_can_also_say_none():
  for length, dtype in (
    (4 * 255, "uint8"),
    (4 * 255 + 1, "uint16"),
    (4 * 65_536, "uint32"),
  ):
    entries = Sparse(jnp.array([[0, 1, length, 3]]), jnp.array([[1.0, 2.0, 0.0, 3.0]]))
    message, _ = jax.eval_shape(codec_of("f32", length, by_chunk=True).encode, entries)
    assert message.low.dtype == dtype


@pytest.mark.parametrize("last", [1, 200, 2**20, 2**31 - 2])
def test_order_is_that_of_a_stable_sort(last):
  random = np.random.default_rng(last)
  few = random.integers(0, last, 9, endpoint=True)
  buckets = np.concatenate(
    [
      random.integers(0, last, 1000, endpoint=True),
      random.choice([*few, 0, last], 1500),
    ]
  )
  buckets = random.permutation(buckets).astype(np.int32)
  got = jax.jit(codecs.order_of, static_argnums=1)(jnp.array(buckets), last)
  np.testing.assert_array_equal(got, np.argsort(buckets, kind="stable"))
