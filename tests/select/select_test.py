"""Selection: every method gives the same bits, ties to the lowest index, NaN first; sets of places are sets."""

import functools
import re

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxsparse.select import candidates, exact, threshold, top_k
from jaxsparse.select import kth_largest as order
from jaxsparse.select import per_chunk as chunks
from jaxsparse.sparse import bitset
from tests.reference import largest

floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-42, 3e38]) | st.floats(width=32)


jitted_top_k = jax.jit(top_k, static_argnums=1, static_argnames="method")


def simple(x, k):
  """The indices by a stable sort, in their order."""
  magnitude = np.where(np.isnan(x), np.inf, np.abs(x))
  return np.sort(np.lexsort((np.arange(x.size), -magnitude, ~np.isnan(x)))[:k])


@hypothesis.given(x=hypothesis.extra.numpy.arrays(np.float32, st.tuples(st.just(2), st.just(40)), elements=floats))
@pytest.mark.parametrize(("method", "k"), [("sort", 1), ("sort", 5), ("bisect", 5), ("bracket", 5), ("bracket", 40)])
def test_equals_a_sort_by_magnitude(method, k, x):
  chosen = jitted_top_k(x, k, method=method)
  for row, indices, values in zip(x, np.asarray(chosen.indices), np.asarray(chosen.values), strict=True):
    assert sorted(largest(dict(enumerate(row)), k)) == indices.tolist()
    np.testing.assert_array_equal(values, row[indices])


N = 70_001
normal = np.random.default_rng(0).standard_normal(N).astype(np.float32)
GRADIENTS = {
  "normal": normal,
  "heavy tail": np.random.default_rng(1).standard_t(1.5, N).astype(np.float32),
  "sorted": np.sort(normal),
  "falling": -np.sort(-np.abs(normal)),
  "equal": np.full(N, -2.0, np.float32),
  "zeros": np.zeros(N, np.float32),
  "few values": np.round(normal),
  "mostly zeros": np.where(normal > 3, normal, 0).astype(np.float32),
  "one giant": np.where(np.arange(N) == 777, 1e30, normal).astype(np.float32),
  "periodic": np.where(np.arange(N) % 64 == 0, 5.0, normal).astype(np.float32),
  "a crowd at the end": np.where(np.arange(N) >= N - 900, 9.0, normal).astype(np.float32),
  "not finite": np.where(np.arange(N) % 5000 == 1, np.nan, np.where(np.arange(N) % 7000 == 1, -np.inf, normal)),
  "denormal": (normal * 1e-40).astype(np.float32),
}


@pytest.mark.parametrize("method", ["bracket", "bisect"])
def test_methods_agree_on_long_rows(method):
  select = jax.jit(lambda x: top_k(x, 700, method=method))
  for name, x in GRADIENTS.items():
    chosen = select(x.astype(np.float32))
    np.testing.assert_array_equal(chosen.indices, simple(x, 700), err_msg=name)
    np.testing.assert_array_equal(chosen.values, x[np.asarray(chosen.indices)], err_msg=name)


@pytest.fixture
def as_on_gpu(monkeypatch):
  """Few keys are sorted, and sums tell places, as there."""
  monkeypatch.setattr(order, "by_counting", order.by_sorting)
  monkeypatch.setattr(bitset, "_place_by_halves", bitset.place_by_sums)


@pytest.mark.usefixtures("as_on_gpu")
def test_methods_agree_on_long_rows_as_on_gpu():
  test_methods_agree_on_long_rows("bracket")


def test_on_gpu_only_few_are_sorted_and_no_loop_waits_for_the_host():
  """In the program as it is lowered for a GPU, which takes none."""
  n = 3 << 20
  x, share = jax.ShapeDtypeStruct((n,), jnp.float32), n // 100
  find = jax.jit(lambda x: candidates.candidates([x], -(-n // 2), share // 2, jnp.array([1, 0])))
  text = {platform: find.trace(x).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")}
  loops = {platform: program.count("stablehlo.while") for platform, program in text.items()}
  assert loops == {"cuda": 1, "cpu": 2}  # a search of a fixed number of rounds
  assert "stablehlo.sort" not in text["cpu"]
  whole = jax.jit(lambda x: top_k(x, share)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
  some = jax.ShapeDtypeStruct((2, share), jnp.int32)
  each = jax.ShapeDtypeStruct((2,), jnp.int32)
  among = jax.jit(functools.partial(order.largest_of, k=9)).trace(some, some, low=each, reach_low=each)
  assert "stablehlo.while" not in among.lower(lowering_platforms=("cuda",)).as_text()
  for program in (text["cuda"], whole):
    rows = re.findall(r"}\) : \(tensor<(?:\d+x)?(\d+)xi32>\) -> ", program)
    assert rows
    assert max(map(int, rows)) < n // 20


def test_rows_that_miss_do_not_spoil_others():
  rows = np.stack([GRADIENTS["normal"], GRADIENTS["equal"], GRADIENTS["heavy tail"]])
  chosen = top_k(rows, 500, method="bracket")
  for row, indices in zip(rows, chosen.indices, strict=True):
    np.testing.assert_array_equal(indices, simple(row, 500))


def test_few_entries_and_no_rows():
  assert top_k(jnp.arange(5.0), 2, method="bracket").indices.tolist() == [3, 4]
  assert top_k(jnp.zeros((0, 20_000)), 5).indices.shape == (0, 5)


def test_under_vmap():
  rows = np.stack([GRADIENTS["normal"], GRADIENTS["few values"]])
  chosen = jax.vmap(lambda row: top_k(row, 300, method="bracket"))(rows)
  for row, indices in zip(rows, chosen.indices, strict=True):
    np.testing.assert_array_equal(indices, simple(row, 300))


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_row(k):
  with pytest.raises(ValueError, match=f"k={k}, choose a number of entries from 1 to the 4"):
    top_k(np.zeros(4, np.float32), k)


def test_an_unknown_method():
  with pytest.raises(ValueError, match="method='heap', choose one of 'bracket', 'bisect', 'sort'"):
    top_k(np.zeros(4, np.float32), 1, method="heap")


def test_the_choice_is_the_fastest_that_is_right():
  assert exact.method_for(14_728_266, 147_283) == "bracket"
  assert exact.method_for(14_728_266, 14_000_000) == "bisect"
  assert exact.method_for(1000, 10) == "sort"


@hypothesis.given(flags=st.lists(st.booleans(), min_size=1, max_size=600), data=st.data())
def test_packed_sets_are_sets(flags, data):
  places = [i for i, flag in enumerate(flags) if flag]
  bound = data.draw(st.integers(0, len(flags)))
  words = bitset.pack(jnp.array(flags))
  assert bitset.count(words) == len(places)
  assert bitset.before(words, jnp.int32(bound)) == sum(p < bound for p in places)
  found = bitset.places(words, len(places) + 2).tolist()
  assert found[: len(places)] == places
  assert min(found[len(places) :]) >= len(flags)
  assert bitset.places(words, 1).tolist() == found[:1]
  for place in (bitset.place, bitset.place_by_sums):
    for ordinal, at in enumerate(places[:3]):
      assert place(words, jnp.int32(ordinal)) == at
    assert place(words, jnp.int32(len(places))) == bitset.BITS * words.size - 1


@hypothesis.given(
  keys=st.lists(st.integers(0, 9) | st.integers(0, order.TOP - 1), min_size=1, max_size=60), data=st.data()
)
def test_a_bound_is_reached_by_k_keys_or_is_the_kth(keys, data):
  k = data.draw(st.integers(1, len(keys)))
  row = jnp.array(keys, jnp.int32)
  assert not (row >= order.by_sorting(row, jnp.int32(0))).any()
  for bound in map(int, (order.bound_of(row, k), order.by_sorting(row, jnp.int32(k)))):
    assert sum(key >= bound for key in keys) == k or bound == sorted(keys)[-k]


def test_candidates_hold_the_largest_of_every_block():
  gradient, residual, share = GRADIENTS["normal"], GRADIENTS["heavy tail"], 300
  length, blocks = -(-N // 3), np.array([2, 0, 1], np.int32)
  found = jax.jit(lambda g, r: candidates.candidates([g, r], length, share, blocks))(gradient, residual)
  assert found.hit.all()
  padded = np.pad(gradient + residual, (0, 3 * length - N)).reshape(3, length)
  for block, indices, low in zip(blocks, np.asarray(found.indices), np.asarray(found.low), strict=True):
    reached = np.flatnonzero(np.abs(padded[block]).view(np.int32) >= low)
    assert indices[indices < length].tolist() == reached.tolist()
    assert len(reached) >= share


def test_known_bounds_take_the_place_of_a_sample():
  gradient, length = GRADIENTS["normal"], -(-N // 3)
  blocks, bounds = np.array([1, 2, 0], np.int32), np.array([3.0, 9.0, 2.0], np.float32)
  known = jnp.array(bounds).view(jnp.int32)
  found = candidates.candidates([gradient], length, 300, blocks, known)
  assert found.hit.tolist() == [True, True, False]  # the last are more than there is room for
  for block, bound, indices in zip(blocks[:2], bounds[:2], np.asarray(found.indices)[:2], strict=True):
    block = gradient[block * length : (block + 1) * length]
    assert indices[indices < length].tolist() == np.flatnonzero(np.abs(block) >= bound).tolist()


@pytest.mark.parametrize(
  ("n", "workers", "count"), [(1, 1, 1), (30, 3, 4), (5, 4, 1), (103, 5, 3), (10_000, 3, 7), (30_000, 2, 3000)]
)
def test_champions_of_chunks(n, workers, count):
  """Small whole numbers, whose last bits are zeros and of which some tie; with a NaN, and blocks short or empty."""
  random, length = np.random.default_rng(n), -(-n // workers)
  parts = random.integers(-9, 10, (2, n)).astype(np.float32)
  parts[1, n // 2] = np.nan
  blocks = random.permutation(workers).astype(np.int32)
  best = jax.jit(lambda *parts: chunks.champions(parts, length, count, blocks))(*parts)
  for block, indices in zip(blocks, np.asarray(best), strict=True):
    values = np.nan_to_num(np.abs(parts.sum(0)[block * length : (block + 1) * length]), nan=np.inf)
    of_chunks = [values[chunk::count] for chunk in range(count)]
    expected = [chunk + count * np.argmax(x) if x.size else length for chunk, x in enumerate(of_chunks)]
    assert indices.tolist() == expected


@pytest.mark.parametrize("n", [2**17, 2**17 - 1, 2**17 + 1])
def test_candidates_of_the_last_block_are_found(n):
  """Whether or not blocks reach beyond n, and n fills its last word."""
  x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
  assert candidates.candidates([x], -(-n // 3), 300, jnp.arange(3, dtype=jnp.int32)).hit.all()


def test_candidates_say_where_they_miss():
  x = np.concatenate([GRADIENTS["normal"], GRADIENTS["zeros"], GRADIENTS["equal"]])
  found = candidates.candidates([x], N, 300, jnp.arange(3, dtype=jnp.int32))
  assert found.hit.tolist() == [True, False, False]


def test_a_full_region_keeps_its_largest_and_takes_no_slot_of_another():
  x = jnp.array([3.0, 4.0, 0.0, -4.0, 2.0, 1.0])
  words = threshold.selected(x, jnp.float32(1))
  rows = threshold.in_regions(x, words, jnp.array([0, 4, 6]), 2, most=5)
  np.testing.assert_array_equal(rows.indices, [[1, 3], [4, 5]])


@hypothesis.given(
  x=hypothesis.extra.numpy.arrays(np.float32, 300, elements=st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0, 0.5])),
  cuts=st.lists(st.integers(0, 300), min_size=3, max_size=3),
)
def test_regions_hold_their_largest_in_the_order_of_their_indices(x, cuts):
  bounds, most = np.array([0, *sorted(cuts), 300]), 150
  words = threshold.at_most(jnp.array(x), threshold.selected(jnp.array(x), jnp.float32(1)), most)
  reach = {i: value for i, value in enumerate(x) if abs(value) >= 1}
  chosen = largest(reach, most)
  rows = threshold.in_regions(jnp.array(x), words, jnp.array(bounds, jnp.int32), 20, most)
  for row, start, end in zip(np.asarray(rows.indices), bounds[:-1], bounds[1:], strict=True):
    expected = sorted(largest({i: value for i, value in chosen.items() if start <= i < end}, 20))
    assert row.tolist() == expected + [300] * (20 - len(expected))


@pytest.mark.parametrize("most", [2, 40_000])
def test_a_threshold_selects_every_nan_and_infinity(most):
  x = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
  x[[7, 20_003]] = np.nan, -np.inf
  for level in (0.0, 3.0, 1e30):
    words = threshold.at_most(jnp.array(x), threshold.selected(jnp.array(x), jnp.float32(level)), most)
    assert bitset.contains(words, jnp.array([7, 20_003])).all()
