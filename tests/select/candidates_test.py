"""Candidates: of every block all entries that reach a key, more than k of them, or a sign that this is not so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.select import exact, top_k
from jaxsparse.select.accumulator import TopKAccumulator
from jaxsparse.select.blocks import Blocks, LazySum
from jaxsparse.types import Sparse
from tests.cases import normals, row
from tests.select.gradients import GRADIENTS, N, keys_in_numpy

K = 300


def found_and_reached(parts, order, length, low=None):
  """The candidates for blocks of the sum of `parts`, and for each row the indices of the entries that reach its key.

  Checks that candidates ascend, are members, and are all of these where they fit, and
  that each other candidate shares a word of 32 with another block.
  """
  x = sum(parts)
  find = jax.jit(
    lambda *parts: exact.find_candidates(
      Blocks(LazySum(parts), jnp.array(order), length, K), low
    )
  )
  found = find(*parts)
  members = set(
    np.flatnonzero(
      np.unpackbits(np.asarray(found.members).view(np.uint8), bitorder="little")
    ).tolist()
  )
  reached = []
  for number, block in enumerate(order):
    start = block * length
    keys = keys_in_numpy(x[start : start + length])
    indices = np.asarray(found.indices)[number]
    known = indices[indices < length]
    assert (indices[len(known) :] == length).all()
    assert members.issuperset((start + known).tolist())
    reached.append(np.flatnonzero(keys >= int(found.low[number])))
    if found.fits[number]:
      assert (np.diff(known) > 0).all()
      others = np.setdiff1d(known, reached[-1]) + start
      assert set(others // 32) <= {start // 32, (start + length - 1) // 32}
      assert np.isin(reached[-1], known).all()
      assert len(known) == sum(start <= member < start + length for member in members)
  return found, reached


SMALL = GRADIENTS["normal"] * 1e-3


@pytest.mark.parametrize(
  ("parts", "order"),
  [
    ((GRADIENTS["normal"], GRADIENTS["heavy tail"]), [2, 0, 1]),
    # Whether or not blocks reach beyond n, and n fills its last word.
    *(row((normals(n, n),), [0, 1, 2]) for n in (2**17, 2**17 - 1, 2**17 + 1)),
    # A word of 32 entries that belongs to two blocks is compared with the lower of
    # their keys.
    ((np.concatenate([SMALL, GRADIENTS["normal"], SMALL]),), [1, 2, 0]),
  ],
)
def test_candidates_hold_the_largest_of_every_block(parts, order):
  found, reached = found_and_reached(
    parts, np.array(order, np.int32), -(-len(parts[0]) // 3)
  )
  assert found.fits.all()
  assert min(map(len, reached)) >= K


def test_known_keys_take_the_place_of_a_sample():
  order, low = (
    np.array([1, 2, 0], np.int32),
    keys_in_numpy(np.array([3.0, 9.0, 2.0], np.float32)),
  )
  found, reached = found_and_reached((GRADIENTS["normal"],), order, -(-N // 3), low=low)
  np.testing.assert_array_equal(found.low, low)
  # of the last more reach their key than there are slots
  assert found.fits.tolist() == [
    True,
    True,
    False,
  ]
  assert 0 < len(reached[0]) < K
  assert len(reached[1]) == 0


def test_candidates_say_where_they_are_too_many_or_too_few():
  x = np.concatenate([GRADIENTS["normal"], GRADIENTS["zeros"], GRADIENTS["equal"]])
  found, reached = found_and_reached((x,), np.arange(3, dtype=np.int32), N)
  assert found.fits.tolist() == [True, True, False]
  assert len(reached[0]) >= K
  assert len(reached[1]) == 0  # no key of 0, which every entry would reach
  found, _ = found_and_reached((x[::-1],), np.arange(3, dtype=np.int32), N)
  assert not found.fits.any()  # those of the first block fill all slots


def test_a_large_entry_in_a_word_of_two_blocks_is_found():
  """The first entries of a block lie in the word of 32 with the last ones of the block before it."""
  x = normals(0, 2, 50_001)
  x[1] *= 1e-3
  x[1, 3] = 0.5
  select = jax.jit(lambda x: top_k(x, 300, method="bracket").indices)
  assert 3 in np.asarray(select(x)[1])


def test_received_entries_are_among_the_largest_in_the_order_of_indices():
  """Messages have ascending indices; candidates that were received come after those of the worker."""
  grads = normals(0, 1, 1, 40_000)[0, 0]
  x = LazySum((jnp.array(grads), jnp.zeros(40_000)))
  acc = TopKAccumulator.start(Blocks(x, jnp.array([1, 0]), 20_000, K))
  assert acc.candidates is not None
  received = Sparse(jnp.array([[3, 19_998]]), jnp.array([[1e3, -1e3]]))
  found = acc.add(received).largest(0, 1)
  indices = np.asarray(found.indices[0])
  assert (np.diff(indices) > 0).all()
  assert {3, 19_998} <= set(indices.tolist())
  current = grads[20_000:].copy()
  current[[3, 19_998]] += np.array([1e3, -1e3], np.float32)
  np.testing.assert_array_equal(found.values[0], current[indices])
