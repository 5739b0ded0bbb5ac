"""Numbers of which most are 0 come back, their index set is a Rice code, and sizes near the entropy."""

import itertools
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxsparse.sparse import fields, packing


def there_and_back(array):
  """The array that is unpacked, and the words."""
  indices = np.flatnonzero(array)
  words = np.concatenate(packing.pack(indices, array[indices]))
  behind = np.arange(3, dtype=np.uint32)
  got, numbers, rest = packing.unpack(np.concatenate([words, behind]))
  np.testing.assert_array_equal(rest, behind)
  back = np.zeros_like(array)
  back[got] = numbers
  return back, words


@hypothesis.given(
  length=st.integers(0, 400),
  share=st.sampled_from([0, 0.003, 0.1, 0.5, 1]),
  bits=st.integers(1, 32),
  seed=st.integers(0, 2**16),
)
@hypothesis.example(length=1, share=1, bits=32, seed=0)
def test_numbers_come_back(length, share, bits, seed):
  random = np.random.default_rng(seed)
  numbers = random.integers(0, 2**bits, length, dtype=np.uint32)
  numbers[:1] = 2**32 - 1
  # Geometric in the number of bits: some numbers are far larger than others.
  numbers >>= random.integers(0, bits, length, dtype=np.uint32)
  array = np.where(random.random(length) < share, numbers, np.uint32(0))
  np.testing.assert_array_equal(there_and_back(array)[0], array)


@pytest.mark.parametrize(("count", "length"), [(1, 100), (3, 3000), (40, 80)])
def test_the_index_set_is_the_rice_code_of_its_gaps(count, length):
  """Of each gap, q = gap >> b is q zeros and a one; the low b bits are apart."""
  random = np.random.default_rng(count)
  indices = np.sort(random.choice(length, count, replace=False))
  first, head, lows, rest, *_ = packing.pack(indices, np.ones(count, np.uint32))
  assert first == count << 5
  size, low = divmod(int(head[0]), 32)
  gaps = [
    after - before - 1 for before, after in itertools.pairwise([-1, *indices.tolist()])
  ]
  unary = "".join("0" * (gap >> low) + "1" for gap in gaps)
  words = [int(unary[at : at + 32][::-1], 2) for at in range(0, len(unary), 32)]
  assert rest.tolist() == words
  assert size == len(words)
  np.testing.assert_array_equal(
    fields.unpack(lows[None], low, count)[0], [gap & ((1 << low) - 1) for gap in gaps]
  )
  sizes = [count * bits + sum(gap >> bits for gap in gaps) for bits in range(20)]
  assert sizes[low] <= min(sizes) + 0.1 * count


@pytest.mark.parametrize(
  ("share", "least", "most"),
  [(0.001, 11.41, 11.6), (0.01, 8.08, 8.2), (0.1, 4.69, 4.76), (0.5, 2, 2.01)],
)
def test_bits_of_an_index(share, least, most):
  """Between the entropy and the goal, of an index of 1,000,000."""
  array = (np.random.default_rng(0).random(1_000_000) < share).astype(np.uint32)
  back, words = there_and_back(array)
  np.testing.assert_array_equal(back, array)
  assert least * 0.99 < 32 * len(words) / array.sum() < most


def test_few_large_numbers_do_not_widen_the_others():
  """Differences of -1 and 1, one in twenty of them -2 or 2, one in 1,000 any of 15 bits."""
  random = np.random.default_rng(0)
  numbers = random.integers(1, 3, 100_000, dtype=np.uint32)
  numbers[::20] += 2
  numbers[::1000] = random.integers(1, 2**15, 100, dtype=np.uint32)
  back, words = there_and_back(numbers)
  np.testing.assert_array_equal(back, numbers)
  # One bit for all that change, one for the sign.
  assert 32 * len(words) / len(numbers) < 2.5


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_bits_of_small_differences(dtype):
  """Patterns of any bits come back, and those that change by 1 take the index and a bit."""
  random = np.random.default_rng(0)
  old = random.integers(0, np.iinfo(dtype).max, 100_000, dtype=dtype, endpoint=True)
  new = old.copy()
  new[::50] += random.choice(np.array([-1, 1]).astype(dtype), 2000)
  for one in (new, old[::-1].copy(), old):
    words = packing.difference([old, old[:0]], [one, old[:0]])
    got, none = packing.after([old, old[:0]], words)
    assert none.size == 0
    np.testing.assert_array_equal(got, one)
    if one is new:
      assert 32 * len(words) / 2000 < 8.4


def test_large_arrays_are_packed_in_pieces_by_threads(monkeypatch):
  monkeypatch.setattr(packing, "_PIECE", 1000)
  random = np.random.default_rng(0)
  old = [random.integers(0, 99, size, np.uint16) for size in (2500, 1000, 0, 300)]
  new = [array + (random.random(array.size) < 0.1).astype(np.uint16) for array in old]
  threads = set()

  def size_of(piece):
    threads.add(threading.current_thread())
    return piece.size

  assert packing.each_piece(size_of, old) == [1000, 1000, 500, 1000, 300]
  assert threading.main_thread() not in threads
  got = packing.after(old, packing.difference(old, new))
  for array, wanted in zip(got, new, strict=True):
    np.testing.assert_array_equal(array, wanted)


@hypothesis.given(st.integers(1, 20_000), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_words_are_compressed_in_the_shortest_of_three_forms(length, values, seed):
  """A bit for each word where a block has two values; the indices where most are 0; else they are as they are."""
  random = np.random.default_rng(seed)
  kinds = random.integers(1, 2**32, values, np.uint32)
  words = kinds[random.integers(0, values, length)]
  packed = packing.compress(words)
  np.testing.assert_array_equal(packing.expand(packed, length), words)
  blocks = -(-length // 4096)
  if values <= 2:
    assert packed.size == 1 + min(length, blocks * (2 + 4096 // 32))
  sparse = np.where(random.random(length) < 0.01, words, np.uint32(0))
  packed = packing.compress(sparse)
  np.testing.assert_array_equal(packing.expand(packed, length), sparse)
  assert packed.size <= 1 + np.count_nonzero(sparse) * 2 + 60


@pytest.mark.parametrize(
  "words",
  [
    [1 << 5, 2**20 << 5, 0, 0],  # a set of more words than there are
    [2**26 << 5, 1 << 5, 1, 0],  # more numbers than indices
    [1 << 5, 1 << 5, 7, 0],  # more indices than numbers
  ],
)
def test_few_words_ask_for_little_memory(words):
  with pytest.raises(ValueError, match="no set of"):
    packing.unpack(np.array(words, np.uint32))


def test_words_of_no_form_are_refused():
  with pytest.raises(ValueError, match="4 words are no form of 4"):
    packing.expand(np.array([0, 1, 2, 3], np.uint32), 4)
  with pytest.raises(ValueError, match="no form"):
    packing.expand(np.array([7, 1, 2, 3, 4], np.uint32), 4)
