"""What is decoded is what was encoded, up to the rounding of its values, and takes as many words as were promised."""

import dataclasses
import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import comm, sparse
from jaxsparse.sparse import codec
from jaxsparse.sparse.codec import codec_of, low_bits
from jaxsparse.types import Sparse
from tests.cases import bits, quick_of, row
from tests.sparse.entries_test import rows_of_entries

# (rows, capacity, length): full blocks, and blocks with fewer entries than slots
SHAPES = [(1, 1, 1), (1, 20, 3), (3, 9, 33), (2, 5, 3000), (3, 3, 1_000_000)]
PACKED = ["f32", "bf16", "int8", "int4"]
ROUNDED = ["bf16", "int8"]
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
  """Ascending entries, empty slots last, and noise."""
  indices, _ = draw(rows_of_entries(rows, capacity, length))
  indices = np.sort(np.minimum(indices, length), axis=1)
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
    [np.sort(random.choice(length, capacity, replace=False)) for _ in range(rows)]
  )
  values = random.standard_normal((rows, capacity))
  entries = Sparse(jnp.array(indices, jnp.int32), jnp.array(values, jnp.float32))
  return entries, jnp.array(random.random((rows, capacity)), jnp.float32)


@pytest.mark.parametrize("wire_", PACKED)
@pytest.mark.parametrize("shape", [row(shape, quick=shape[0] == 3) for shape in SHAPES])
@hypothesis.given(data=st.data())
def test_entries_come_back(shape, wire_, data):
  length = shape[2]
  entries, noise = data.draw(messages(*shape, st.floats(**normal)))
  got = there_and_back(entries, length, wire_, noise)
  indices = np.minimum(entries.indices, length)
  np.testing.assert_array_equal(got.indices, indices)
  assert (np.asarray(got.values)[indices == length] == 0).all()
  if wire_ == "f32":
    np.testing.assert_array_equal(bits(got.values), bits(entries.values))
  else:
    check_rounding(np.asarray(entries.values), np.asarray(got.values), wire_)


def check_rounding(values, got, wire_):
  """The errors of rounded rows are within the bounds that the docstrings of formats give."""
  exact = np.clip(values, -LARGEST, LARGEST).astype(np.float64)
  if wire_ == "bf16":
    rounded = exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got, rounded)
    assert (np.abs(rounded - exact) <= 2.0**-8 * np.abs(exact)).all()
  elif wire_ == "int8":
    # A level of rows with nothing above 1.5e-36 is too small to be told from 0.
    size = np.abs(exact).max(1, keepdims=True) / 127 * (1 + 2.0**-16) + 1.5e-36
    assert (np.abs(got - exact) <= size).all()
  else:
    assert wire_ == "int4"
    check_bins(values.astype(np.float64), got.astype(np.float64))


def check_bins(values, got):
  """A value and the mean that it is decoded to are in one of 7 bins, equally wide in the bits of a float."""
  keys_of = lambda x: np.abs(x).astype(np.float32).view(np.int32).astype(np.int64)
  for sent, decoded in zip(values, got, strict=True):
    assert (decoded[sent == 0] == 0).all()
    keys = keys_of(sent[sent != 0])
    if not keys.size:
      continue
    width = (keys.max() - keys.min()) // 7 + 1
    # A magnitude below 2⁻¹²⁰ of the largest of its row may become 0.
    is_seen = np.abs(sent) > 2.0**-120 * np.abs(sent).max()
    assert (np.sign(decoded) == np.sign(sent))[is_seen].all()
    # A mean is rounded, by two units of the last place at most for so few values.
    error = np.abs(keys_of(decoded) - keys_of(sent))[is_seen]
    assert (error <= width + 2).all()
    assert len(np.unique(np.abs(decoded[is_seen]))) <= 7


@pytest.mark.parametrize("heavy", [False, True])
def test_four_bits_keep_the_energy_of_the_largest_entries(heavy):
  """Of the 1 % largest of a normal or Student-t (3) sample; sums of magnitudes and signs are kept."""
  random = np.random.default_rng(0)
  sample = (
    random.standard_t(3, 1_000_000) if heavy else random.standard_normal(1_000_000)
  )
  largest = np.sort(np.argsort(-np.abs(sample))[:10_000])
  values = sample[largest].astype(np.float32)[None]
  entries = Sparse(jnp.array(largest[None], jnp.int32), jnp.array(values))
  got = np.asarray(there_and_back(entries, 1_000_000, "int4", None).values)
  lost = ((got - values) ** 2).sum() / (values**2).sum()
  assert lost < (2e-2 if heavy else 8e-4)
  np.testing.assert_allclose(np.abs(got).sum(), np.abs(values).sum(), rtol=1e-5)


@pytest.mark.parametrize("wire_", ["coo", *PACKED, "2bit"])
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


@pytest.mark.parametrize("wire_", PACKED)
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


@pytest.mark.parametrize("wire_", ROUNDED)
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


@pytest.mark.parametrize("wire_", quick_of(PACKED, quick=["int8"]))
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
    exact = np.asarray(message.values, np.float64) * np.asarray(
      message.beside, np.float64
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


@pytest.mark.parametrize("wire_", PACKED)
@pytest.mark.parametrize("by_chunk", [False, True])
def test_what_was_rounded_off_is_known_to_the_sender(wire_, by_chunk):
  length, chunks = 1000, 30
  random = np.random.default_rng(0)
  slots = np.arange(chunks)[None]
  # Chunks have a position or none; a set ascends.
  indices = np.where(
    random.random((3, chunks)) < 0.7,
    random.integers(0, 33, (3, chunks)) * chunks + slots,
    1000,
  )
  if not by_chunk:
    indices = np.sort(indices, axis=1)
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
  error = 1 / 2 if wire_ == "int4" else 1 / 100
  assert (np.abs(rounded - entries.values) <= error * np.abs(values).max()).all()
  if by_chunk:
    np.testing.assert_array_equal(got.indices, indices)


@functools.cache
def message_of(wire_, by_chunk, capacity, length):
  """The codec's decoder, entries of three rows, their message, and what it decodes to."""
  entries, noise = some_entries(3, capacity, length)
  if by_chunk:
    slots = jnp.arange(capacity, dtype=jnp.int32)[None]
    entries = entries._replace(indices=entries.indices // capacity * capacity + slots)
    entries = sparse.where(entries.indices < length, entries, length)
  codec = codec_of(wire_, length, by_chunk=by_chunk)
  message, rounded = jax.jit(codec.encode)(entries, noise)
  return jax.jit(codec.decode), message, Sparse(entries.indices, rounded)


@pytest.mark.parametrize("wire_", quick_of(PACKED, quick=["int4"]))
@pytest.mark.parametrize("by_chunk", [False, True])
@pytest.mark.parametrize(("capacity", "length"), [(9, 3000), (1, 7), (3, 2**31 - 300)])
@hypothesis.given(data=st.data())
def test_rows_that_nobody_wrote_are_entries_or_empty(
  wire_, by_chunk, capacity, length, data
):
  """Any bits of a row: indices stay in 0 … length, and the other rows keep their entries.

  A row of an index set whose high parts have too many bits or too few is empty; with as
  many bits as slots, indices ascend.
  """
  decode, message, sent = message_of(wire_, by_chunk, capacity, length)
  forged = lambda x: np.frombuffer(
    data.draw(st.binary(min_size=x[1].nbytes, max_size=x[1].nbytes)), x.dtype
  )
  parts = {
    name: forged(part)
    for name, part in vars(message).items()
    if isinstance(part, jax.Array)
  }
  if not by_chunk:
    places = st.integers(0, 32 * message.high.shape[1] - 1)
    near = st.sets(places, min_size=capacity - 1, max_size=capacity + 1)
    flags = np.zeros(32 * message.high.shape[1], bool)
    flags[list(data.draw(st.one_of(st.sets(places), near)))] = True
    parts["high"] = np.packbits(flags, bitorder="little").view(np.uint32)
  changed = {
    name: getattr(message, name).at[1].set(part) for name, part in parts.items()
  }
  got = decode(dataclasses.replace(message, **changed))
  assert (got.indices >= 0).all()
  assert (got.indices <= length).all()
  others = np.array([0, 2])
  np.testing.assert_array_equal(got.indices[others], sent.indices[others])
  np.testing.assert_array_equal(bits(got.values[others]), bits(sent.values[others]))
  if not by_chunk and flags.sum() != capacity:
    assert (got.indices[1] == length).all()
    assert (got.values[1] == 0).all()


# Bits of an entry of 14,728,266 at 1 %, six workers, and of SparseLoCo's chunks; goal
# and, without the words beside the values, the entropy of the indices and bits of a
# value.
DENSITY = [
  ("f32", False, 40.8),
  ("bf16", False, 24.8),
  ("int8", False, 16.9),
  ("int4", False, 13.0),
  ("int4", True, 11.5),
  ("coo", True, 40),
]


@pytest.mark.parametrize(("wire_", "by_chunk", "goal"), DENSITY)
def test_bits_of_an_entry(wire_, by_chunk, goal):
  length = -(-14_728_266 // 6)
  capacity = -(-length // 100)
  words = codec_of(wire_, length, by_chunk=by_chunk).words(1, capacity)
  assert 32 * words / capacity <= goal


def test_low_parts_are_as_wide_as_is_shortest():
  assert [low_bits(c, n) for c, n in ((500, 1000), (10, 1000), (10_000, 10**6))] == [
    0,
    6,
    6,
  ]


def test_bits_of_an_entry_of_a_chunk():
  """Index 8, value 2, and 2 of the table of four values, float32."""
  assert 32 * codec_of("2bit", 4096).words(100, 64) / 6400 == 12


def test_rows_are_decoded_some_at_a_time_where_their_bits_have_no_numbers(monkeypatch):
  entries, _ = some_entries(7, 40, 1000)
  message, _ = codec_of("f32", 1000).encode(entries)
  decoded = codec_of("f32", 1000).decode(message)
  two_rows = 2 * 32 * message.high.shape[1]
  monkeypatch.setattr(codec, "_MOST_BITS", two_rows)
  jax.clear_caches()
  by_pairs = codec_of("f32", 1000).decode(message)
  np.testing.assert_array_equal(decoded.indices, by_pairs.indices)
  np.testing.assert_array_equal(bits(decoded.values), bits(by_pairs.values))
  with pytest.raises(ValueError, match="messages of 7 rows .* choose wire='coo'"):
    codec_of("f32", 1000).encode(entries)
