"""Selection by a given threshold: of too many entries the largest, of every region its own."""

import functools
import itertools

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.select import threshold
from jaxsparse.select.blocks import LazySum
from jaxsparse.sparse import bitset
from tests.reference import largest


@functools.partial(jax.jit, static_argnums=(2, 3))
def _in_regions(values, bounds, most, capacity):
  x = LazySum(tuple(values))
  _, members, _ = threshold.choose_reaching(
    x, jnp.float32(1), jnp.bool_(False), 1, most
  )
  entries = threshold.read_first(x, members, most)
  return threshold.read_regions(
    entries, threshold.region_starts(entries.indices, bounds), capacity, x.size
  )


@hypothesis.given(
  values=hypothesis.extra.numpy.arrays(
    np.float32, (2, 300), elements=st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5])
  ),
  cuts=st.lists(st.integers(0, 300), min_size=3, max_size=3),
)
def test_regions_hold_their_largest_in_the_order_of_their_indices(values, cuts):
  bounds, most, capacity = np.array([0, *sorted(cuts), 300]), 150, 20
  reach = {i: value for i, value in enumerate(values.sum(0)) if abs(value) >= 1}
  chosen = largest(reach, most)
  rows = _in_regions(jnp.array(values), jnp.array(bounds, jnp.int32), most, capacity)
  for (start, end), row, at in zip(
    itertools.pairwise(bounds), *map(np.asarray, rows), strict=True
  ):
    expected = sorted(
      largest({i: value for i, value in chosen.items() if start <= i < end}, capacity)
    )
    empty = capacity - len(expected)
    assert row.tolist() == expected + [300] * empty
    assert at.tolist() == [chosen[i] for i in expected] + [0] * empty


@pytest.mark.parametrize("most", [2, 40_000])
def test_a_threshold_selects_every_nan_and_infinity(most):
  values = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
  values[[7, 20_003]] = np.nan, -np.inf

  @jax.jit
  def selects(limit):
    _, members, _ = threshold.choose_reaching(
      LazySum((jnp.array(values),)), limit, jnp.bool_(False), 1, most
    )
    return bitset.contains(members, jnp.array([7, 20_003]))

  for limit in (0.0, 3.0, 1e30):
    assert selects(jnp.float32(limit)).all()
