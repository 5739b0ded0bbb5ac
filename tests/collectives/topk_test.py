"""TopkA, TopkDSA and gTopk against numpy, and what selectors and wire formats change in collectives that have them."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.collectives._messages import Writer
from jaxsparse.sparse.codec import codec_of
from tests.cases import WORKERS, check_steps, integers, normals, quick_of
from tests.reference import spardl_options, topk

SIZES = [
  *(("gtopk", *sizes, workers) for sizes in ((1, 1), (50, 9)) for workers in WORKERS),
  *(
    ("topkdsa", *sizes, workers)
    for sizes in ((1, 1), (50, 9), (50, 50), (2000, 20))
    for workers in (1, 3, 6, 8)
  ),
  *(("topka", 50, 9, workers) for workers in (3, 6)),
]
QUICK = [
  *(("gtopk", 50, 9, 3), ("gtopk", 50, 9, 8)),
  *(("topkdsa", 50, 9, 3), ("topka", 50, 9, 3)),
]


@pytest.mark.parametrize(("name", "n", "k", "workers"), quick_of(SIZES, quick=QUICK))
def test_equals_numpy(name, n, k, workers):
  slots = (
    [js.make_collective(name, k=k).capacities(n, workers)[-1]]
    if name == "topkdsa"
    else []
  )
  reference = lambda grads, left: getattr(topk, name)(grads, left, k, *slots)
  check_steps(name, normals(0, 3, workers, n), reference, k=k)


@pytest.mark.long
@hypothesis.given(
  sizes=st.sampled_from([(3, 2), (7, 6)]), seed=st.integers(0, 2**32 - 1)
)
def test_the_tree_with_ties_and_cancellation(sizes, seed):
  """Few distinct values: sums cancel, and what is selected depends on the rule for ties."""
  workers, k = sizes
  grads = (
    np.random.default_rng(seed).integers(-2, 3, (1, workers, 12)).astype(np.float32)
  )
  check_steps("gtopk", grads, lambda grads, left: topk.gtopk(grads, left, k), k=k)


@pytest.mark.parametrize("selector", quick_of(["exact", "chunked"], quick=["chunked"]))
def test_topka_rounds_what_it_sends(selector):
  """The total is the sum of rounded entries in rank order, and rounding errors stay in residuals."""
  k = 12

  def choose(values):
    return spardl_options.Chunked(k, values[None], 1).choose(0, 0, values)

  def reference(grads, left):
    rounded = lambda value: value.astype(jnp.bfloat16).astype(np.float32)
    return topk.topka(
      grads, left, k, choose if selector == "chunked" else None, rounded
    )

  check_steps(
    "topka", normals(0, 3, 4, 60), reference, k=k, selector=selector, wire="bf16"
  )


def test_entries_that_crowd_into_one_region_wait_in_the_residual():
  grads = np.zeros((4, 40), np.float32)
  grads[:, :10] = np.arange(10, 0, -1)  # all in region 0
  out = js.simulate("topkdsa", grads, k=10)
  slots = js.make_collective("topkdsa", k=10).capacities(40, 4)[-1]
  assert slots == 3
  assert int(out.metrics.overflow) == 4 * (10 - slots)
  np.testing.assert_array_equal(
    out.total[:10], 4 * np.where(np.arange(10) < slots, grads[0, :10], 0)
  )


def test_the_gather_is_dense_where_that_is_fewer_words():
  """All workers select different entries: the union is most of the gradient."""
  grads = np.zeros((4, 40), np.float32)
  for worker in range(4):
    grads[worker, worker::4] = 1 + np.arange(10)
  found = js.simulate("topkdsa", grads, k=10).metrics
  assert (int(found.words_sent), int(found.delivered)) == (2 * 3 * 3 + 10 * 3, 40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gaussiank", "gtopk", "oktopk", "topka", "topkdsa"])
def test_shorter_messages_change_nothing_that_they_can_say(name):
  """Whole numbers survive bf16 on every way they take: totals and residuals are those of f32, in fewer words."""
  plain, short = None, None
  for step in range(3):
    grads = integers(step, 4, 3000)
    plain = js.simulate(name, grads, state=plain and plain.state, k=300)
    short = js.simulate(name, grads, state=short and short.state, k=300, wire="bf16")
    np.testing.assert_array_equal(short.total, plain.total)
    np.testing.assert_array_equal(short.residuals, plain.residuals)
  assert int(short.metrics.words_sent) < (0.75 if name == "topkdsa" else 0.5) * int(
    plain.metrics.words_sent
  )


def test_rounding_errors_of_sums_over_teams_stay_in_residuals():
  """Each team rounds these sums alike and keeps its share of the errors."""
  grads = normals(0, 1, 12) * np.array([[1.0], [1.1]], np.float32)
  out = js.simulate("spardl", grads, k=2, wire="bf16", teams=2)
  np.testing.assert_allclose(out.total + out.residuals.sum(0), grads.sum(0), atol=1e-5)


def test_noise_differs_between_workers_and_steps():
  grads, half_a_level = (
    np.tile(normals(0, 1, 12), (2, 1)),
    np.abs(normals(0, 1, 12)).max() / 256,
  )
  first = js.simulate("topka", grads, k=12, wire="int8")
  second = js.simulate(
    "topka", grads - first.residuals, state=first.state, k=12, wire="int8"
  )
  assert np.abs(first.residuals[0] - first.residuals[1]).max() > half_a_level
  assert np.abs(first.residuals - second.residuals).max() > half_a_level


def test_words_used_of_two_words_an_entry_are_exact():
  """Also where float32 holds no odd numbers, and at most as many as u32 holds."""
  writer = Writer(codec_of("coo", 2**31 - 1))
  for entries, words in ((2**24 + 1, 2**25 + 2), (2**31 - 1, 2**32 - 2)):
    assert int(writer.words_used(jnp.int32(entries), capacity=2**20)) == words


@pytest.mark.parametrize(
  ("label", "selected", "slots"),
  [
    ("spardl:selector=chunked", [5] * 8, 8),
    ("spardl", [5] * 8, 8),
    ("micro", [2, 2, 1], 2),  # of a part each
    ("chunktopk:chunk=4", [5, 5], 8),
  ],
)
def test_padding_is_neither_selected_nor_used(label, selected, slots):
  """Of 5 entries in blocks that reach beyond them; at a density of 1 all slots are sent."""
  out = js.simulate(f"{label}:density=1.0", normals(0, len(selected), 5))
  sent, used, chosen = map(np.asarray, out.state.counters[:3])
  assert chosen.ravel().tolist() == selected
  np.testing.assert_allclose(used, sent * chosen / slots, atol=1)


def test_words_used_are_at_most_those_sent_where_rows_share_words():
  """The rows of several workers in a message of an all-gather are packed together."""
  out = js.simulate("topka:wire=int8:k=1", normals(0, 8, 9))
  sent, used, *_ = out.state.counters
  np.testing.assert_array_equal(used, sent)
