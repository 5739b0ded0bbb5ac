"""Exact top-k: every method gives the same bits, ties to the lowest index, NaN first."""

import functools
import itertools
import re
from unittest import mock

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.select import blocks, exact, top_k
from jaxsparse.select.blocks import Blocks, LazySum
from jaxsparse.sparse import bitset
from jaxsparse.train import simulation
from jaxsparse.types import Sparse
from tests.cases import assert_same_bits, bits, quick_of
from tests.reference import largest
from tests.select.gradients import GRADIENTS, simple
from tests.sparse.entries_test import rows_of_entries

METHODS = ["bracket", "bisect", "sort"]
floats = st.sampled_from(
  [0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 1e-42, 3e38]
) | st.floats(width=32)

jitted_top_k = jax.jit(top_k, static_argnums=1, static_argnames="method")


@pytest.mark.parametrize(
  ("method", "n", "k"),
  [
    ("sort", 40, 1),
    ("sort", 40, 5),
    ("bisect", 40, 5),
    ("bracket", 600, 5),
    ("bracket", 600, 600),  # without candidates
  ],
)
@hypothesis.given(data=st.data())
def test_equals_a_sort_by_magnitude(method, n, k, data):
  x = data.draw(hypothesis.extra.numpy.arrays(np.float32, (2, n), elements=floats))
  with mock.patch.object(exact, "SHORT", 0):  # candidates of rows of any length
    chosen = jitted_top_k(x, k, method=method)
  for entries, indices, values in zip(
    x, np.asarray(chosen.indices), np.asarray(chosen.values), strict=True
  ):
    assert sorted(largest(dict(enumerate(entries)), k)) == indices.tolist()
    np.testing.assert_array_equal(values, entries[indices])


ON_ACCELERATORS = [("bracket", False, "cuda"), ("bracket", False, "tpu")]


@pytest.mark.parametrize(
  ("method", "lazy", "platform"),
  quick_of(
    [*itertools.product(METHODS, (False, True), ["cpu"]), *ON_ACCELERATORS],
    quick=[
      ("bisect", True, "cpu"),
      ("bracket", False, "cpu"),
      ("bracket", False, "cuda"),
    ],
  ),
)
def test_methods_agree_on_long_rows(method, lazy, platform):
  """A lazy sum is selected from as its sum. GPUs sort few keys."""
  select = jax.jit(
    lambda *parts: top_k(LazySum(parts) if lazy else parts[0], 700, method=method)
  )
  added = jax.jit(jnp.add)
  for (name, x), y in zip(GRADIENTS.items(), [*GRADIENTS.values()][::-1], strict=True):
    whole = np.asarray(added(x, y)) if lazy else x
    with js.traced_for(platform):
      chosen = select(x, y)
    np.testing.assert_array_equal(chosen.indices, simple(whole, 700), err_msg=name)
    np.testing.assert_array_equal(
      bits(chosen.values), bits(whole[np.asarray(chosen.indices)]), err_msg=name
    )


ROUNDS = {
  "normal": lambda random, shape: random.standard_normal(shape),
  "ties": lambda random, shape: np.round(2 * random.standard_normal(shape)),
  "few non-zeros": lambda random, shape: np.where(
    random.random(shape) < 0.01, random.standard_normal(shape), -0.0
  ),
  "spikes": lambda random, shape: random.standard_t(1, shape),
  # The others cancel what worker 0 has: too few candidates are left, and whole blocks
  # are searched.
  "cancelling": lambda random, shape: np.outer(
    [shape[0] - 1] + (shape[0] - 1) * [-1], random.standard_normal(shape[1])
  ),
}


@pytest.mark.long
@pytest.mark.parametrize(
  ("workers", "selector"),
  [(1, "exact"), (2, "reuse"), *itertools.product((3, 8), ("exact", "reuse"))],
)
def test_rounds_give_the_same_bits_as_on_accelerators(workers, selector, monkeypatch):
  """Totals and residuals of SparDL, of values that random rounding draws by slot, so that the order counts, too."""
  monkeypatch.setattr(exact, "SHORT", 0)
  inputs = {
    name: draw(np.random.default_rng(0), (workers, 8_000)).astype(np.float32)
    for name, draw in ROUNDS.items()
  }

  collective = js.make_collective("spardl", k=160, selector=selector, wire="int8")
  start = simulation.initial(collective, workers, 8_000)

  def run(platform):
    with js.traced_for(platform):
      return {
        name: simulation.reduce_all(collective, x, start) for name, x in inputs.items()
      }

  jax.clear_caches()
  expected = run("cpu")
  for platform in ("cuda", "tpu"):
    assert_same_bits(run(platform), expected)
  jax.clear_caches()


def lowered(platform, function, *args):
  with js.traced_for(platform):
    return (
      jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    )


def test_on_gpu_only_few_are_sorted_and_no_loop_waits_for_the_host():
  """In the program as it is lowered for a GPU, which takes none."""
  n, k = 3 << 20, (3 << 20) // 100
  x, some = (
    jax.ShapeDtypeStruct((n,), jnp.float32),
    jax.ShapeDtypeStruct((2, bitset.align(k)), jnp.int32),
  )
  find = lambda x: exact.find_candidates(
    Blocks(LazySum((x,)), jnp.array([1, 0]), -(-n // 2), k // 2)
  )
  on_cpu, on_gpu = (lowered(platform, find, x) for platform in ("cpu", "cuda"))
  # the search for the threshold by halves is one
  assert [text.count("stablehlo.while") for text in (on_cpu, on_gpu)] == [1, 0]
  assert "stablehlo.sort" not in on_cpu
  cut = lowered("cuda", functools.partial(blocks.kth_largest, k=9), some, some)
  assert cut.count("stablehlo.while") == 1
  for program in (on_gpu, lowered("cuda", functools.partial(top_k, k=k), x), cut):
    sorts = program.split('"stablehlo.sort"')[1:]
    rows = [
      re.search(r"\}\) : \(tensor<(?:\d+x)?(\d+)xi32>", sort)[1] for sort in sorts
    ]
    assert all(int(row) < n // 20 for row in rows)


@pytest.mark.parametrize("batched", quick_of([False, True], quick=[True]))
def test_rows_without_enough_candidates_do_not_spoil_others(batched):
  rows = np.stack(
    [
      GRADIENTS["normal"],
      GRADIENTS["equal"],
      GRADIENTS["heavy tail"],
      GRADIENTS["few values"],
    ]
  )
  select = functools.partial(top_k, k=500, method="bracket")
  chosen = jax.jit(jax.vmap(select) if batched else select)(rows)
  np.testing.assert_array_equal(chosen.indices, [simple(row, 500) for row in rows])


def test_rows_of_few_entries_are_filled_with_their_first_zeros():
  """All non-zero entries are candidates then, so no row is searched as a whole."""
  rows, k = (
    np.stack([GRADIENTS[name] for name in ("mostly zeros", "normal", "zeros")]),
    500,
  )
  rows[0, 3] = -0.0

  def search(x):
    blocks = Blocks(LazySum((x,)), jnp.arange(3), rows.shape[1], k)
    read = lambda indices: blocks.x.read_at(blocks.flat_indices(indices))
    return exact.search_among(
      exact.find_candidates(blocks), read, blocks, lambda: jnp.full((3, k), -1)
    )

  np.testing.assert_array_equal(
    jax.jit(search)(rows.reshape(-1)), [simple(row, k) for row in rows]
  )


def test_too_few_candidates_that_reach_their_key_are_no_proof():
  """Of values that became smaller after the candidates were found."""
  x = LazySum((jnp.asarray(GRADIENTS["normal"]),))
  blocks = Blocks(x, jnp.zeros(1, jnp.int32), x.size, 500)

  @jax.jit
  def search(factor):
    read = lambda indices: factor * blocks.x.read_at(blocks.flat_indices(indices))
    return exact.search_among(
      exact.find_candidates(blocks), read, blocks, lambda: jnp.full((1, 500), -1)
    )

  np.testing.assert_array_equal(search(1.0), [simple(GRADIENTS["normal"], 500)])
  assert (search(0.5) == -1).all()


def test_no_rows_and_bad_arguments():
  assert top_k(jnp.zeros((0, 20_000)), 5).indices.shape == (0, 5)
  for k in (0, 5, 1.5, 2.0):
    with pytest.raises(
      ValueError, match=f"top_k: k={k}, choose a whole number from 1 to 4"
    ):
      top_k(np.zeros(4, np.float32), k)
  with pytest.raises(
    ValueError, match="method='heap', choose one of 'bracket', 'bisect', 'sort'"
  ):
    top_k(np.zeros(4, np.float32), 1, method="heap")


@pytest.mark.parametrize(
  "dtype",
  [
    "int32",
    "uint32",
    "int8",
    "bool",
    "complex64",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
  ],
)
def test_numbers_that_are_not_float32_are_refused(dtype):
  """Their bits do not order as magnitudes do: of i32 the largest would be a small negative number."""
  numbers = jnp.array([100, -3, 2, 0]).astype(dtype)
  whole = LazySum((jnp.ones(4), numbers))
  for x in (numbers, np.asarray(numbers), jnp.stack([numbers, numbers]), whole):
    for method in ("bracket", "bisect", "sort", None):
      with pytest.raises(
        TypeError, match=f"top_k: entries are {dtype}, choose float32"
      ):
        top_k(x, 1, method=method)
  entries = Sparse(jnp.arange(4, dtype=jnp.int32), numbers)
  with pytest.raises(TypeError, match=f"entries are {dtype}"):
    exact.top_k_of_entries(entries, 1, 2, 4)


SLOTS, END = 12, 30
top_k_of_entries = jax.jit(exact.top_k_of_entries, static_argnums=(2, 3))


@pytest.mark.parametrize("slots", [5, SLOTS])
@hypothesis.given(data=st.data())
def test_the_largest_of_entries_and_the_rest(slots, data):
  """Ties, empty slots anywhere, and k from 0 to more than there are entries."""
  indices, values = (x[0] for x in data.draw(rows_of_entries(1, SLOTS, END)))
  filled, k = indices < END, data.draw(st.integers(0, slots))
  kept, rest = top_k_of_entries(Sparse(indices, values), k, slots, END)

  chosen = largest(dict(zip(indices[filled].tolist(), values[filled], strict=True)), k)
  in_kept = np.isin(indices, list(chosen))
  empty = slots - in_kept.sum()
  np.testing.assert_array_equal(
    kept.indices, np.pad(indices[in_kept], (0, empty), constant_values=END)
  )
  np.testing.assert_array_equal(
    bits(kept.values), bits(np.pad(values[in_kept], (0, empty)))
  )
  np.testing.assert_array_equal(
    np.minimum(rest.indices, END), np.where(filled & ~in_kept, indices, END)
  )
  np.testing.assert_array_equal(
    bits(rest.values), bits(np.where(in_kept, np.float32(0), values))
  )
