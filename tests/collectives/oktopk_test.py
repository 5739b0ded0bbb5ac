"""Ok-Topk against the paper, written out in numpy, and what its thresholds and balancing are for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.oktopk.balance import consensus_bounds, floor_mean
from jaxsparse.comm import SimComm, SoloComm
from tests.cases import normals, quick_of, row
from tests.reference.oktopk import OkTopk


def skewed(seed, workers, n):
  """Gradients most of whose large entries lie at the front, as in a network with few large layers."""
  return normals(seed, workers, n) * np.linspace(3, 0.1, n, dtype=np.float32) ** 2


@pytest.mark.parametrize(
  ("n", "k", "regions", "periods", "nudge", "workers"),
  [
    row(*options, workers, quick=workers in quick)
    for options, quick in (
      ((3, 1, "balanced", (32, 64), "search"), []),
      ((90, 20, "balanced", (3, 2), "fixed"), [3]),
      ((90, 20, "balanced", (32, 3), "search"), []),
      ((90, 20, "even", (2, 64), "search"), []),
      ((90, 20, "balanced", (3, 64), "none"), []),
    )
    for workers in (1, 3, 6, 8)
  ],
)
def test_equals_the_paper_in_numpy(n, k, regions, periods, nudge, workers):
  options = {
    "k": k,
    "regions": regions,
    "nudge": nudge,
    "threshold_period": periods[0],
    "region_period": periods[1],
  }
  sizes = js.make_collective("oktopk", **options).sizes(n, workers)
  expected, state = (
    OkTopk(workers, n, k, sizes, *periods, regions == "balanced", nudge),
    None,
  )
  for step in range(12):
    grads = (normals if step < 6 else skewed)(step, workers, n)
    if step < 2:
      grads[:, 5:] = 0  # fewer than k entries
      # a sum of 0, which their senders keep
      grads[1:2, 0], grads[2:, 0] = (
        -grads[0, 0],
        0,
      )
    total = expected.reduce(grads)
    out = js.simulate("oktopk", grads, state=state, **options)
    state = out.state
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, expected.residuals)
    np.testing.assert_array_equal(state.carried.shared[0].bounds[0], expected.bounds)
    np.testing.assert_allclose(
      state.carried.shared[0].threshold, [expected.threshold] * workers, rtol=1e-6
    )
    np.testing.assert_allclose(state.carried.worker[0][:, 0], expected.local, rtol=1e-6)


def owning(owned, k, **options):
  """A first step after which owner r has owned[r] selected sums, each of the entry of one worker, and the oracle."""
  workers, length = len(owned), 2 * k
  grads = np.zeros((workers, workers * length), np.float32)
  for owner, count in enumerate(owned):
    slot = np.arange(count)
    grads[slot % workers, owner * length + slot] = (
      1  # equal magnitudes reach any threshold together
    )
  options |= {"k": k, "regions": "even"}
  sizes = js.make_collective("oktopk", **options).sizes(grads.shape[1], workers)
  oracle = OkTopk(workers, grads.shape[1], k, sizes, balanced_regions=False)
  oracle.balance = options.get("balance", True)
  out, total = js.simulate("oktopk", grads, **options), oracle.reduce(grads)
  np.testing.assert_array_equal(out.total, total)
  np.testing.assert_array_equal(out.residuals, oracle.residuals)
  return out, oracle


@pytest.mark.parametrize(
  ("owned", "k", "words"),
  [
    row(
      (7, 6), 8, 10 + 14
    ),  # imbalance 1.08: by balancing 8 of 13 were delivered, in 22 words
    row((19, 18), 24, 2 * (13 + 21)),
    row((10, 9, 9), 18, 4 * (5 + 11)),
    row(
      (20, 20, 0, 0, 0, 0, 0, 0), 40, 14 * (3 + 20)
    ),  # the largest is 4 times the mean, and not more
    row((10, 10, 0, 0, 0), 20, 8 * (2 + 11), quick=True),
    row(
      (7, 0, 0, 0, 0), 20, 8 * (2 + 7), quick=True
    ),  # 5 times the mean: by balancing 8 * (2 + 8)
  ],
)
def test_owners_that_are_not_unbalanced_deliver_all_they_selected(owned, k, words):
  """In blocks of the smallest sufficient capacity."""
  out, oracle = owning(owned, k)
  assert not oracle.was_balanced
  assert int(out.metrics.delivered) == sum(owned)
  assert int(out.metrics.overflow) == 0
  assert int(out.metrics.words_sent) == words
  assert (
    float(out.metrics.balanced)
    == float(out.metrics.imbalance)
    == np.float32(max(owned) / np.mean(owned))
  )


@pytest.mark.parametrize("workers", quick_of([5, 8, 13], quick=[5]))
def test_owners_with_more_than_four_times_the_mean_are_balanced(workers):
  """Any k entries, of which one owner has so many, are delivered in blocks of one size; without balancing 4 k/P."""
  each, random = 4, np.random.default_rng(workers)
  k = each * workers
  for largest in (k, *random.integers(4 * each + 1, k, 3)):
    others = random.multinomial(k - largest, np.full(workers - 1, 1 / (workers - 1)))
    out, oracle = owning(random.permutation([largest, *others]), k)
    assert oracle.was_balanced
    assert int(out.metrics.delivered) == k
    assert float(out.metrics.balanced) == 1
    assert int(out.metrics.words_sent) <= 2 * (workers - 1) * (6 + 2 * each)


@pytest.mark.long
def test_balancing_can_be_switched_off():
  """The largest owner then sends a block of 4 k/P entries, and the others stay in the residuals of their senders."""
  out, _ = owning((20, 0, 0, 0, 0), 20, balance=False)
  assert float(out.metrics.balanced) == 5
  assert int(out.metrics.delivered) == 16
  assert int(out.metrics.overflow) == np.count_nonzero(out.residuals) == 4
  assert int(out.metrics.words_sent) == 2 * 4 * (5 + 16)


@pytest.mark.long
def test_balanced_regions_hold_equally_many_entries():
  grads = skewed(0, 3, 1200)
  even, balanced = (
    js.simulate("oktopk", grads, k=120, regions=kind) for kind in ("even", "balanced")
  )
  assert float(balanced.metrics.imbalance) < 1.4 < float(even.metrics.imbalance)
  assert int(balanced.metrics.overflow) < int(even.metrics.overflow)


def test_bounds_do_not_overflow():
  """Sums of places of six workers are beyond int32; the mean is not."""
  n, far = 40, 2**30
  chosen = jnp.tile(jnp.arange(n - 6, n), (6, 1))
  bounds = jax.vmap(
    lambda indices: consensus_bounds(SimComm("w"), indices, n), axis_name="w"
  )(chosen)
  np.testing.assert_array_equal(bounds[0], [0, 35, 36, 37, 38, 39, 40])
  parts = np.array([far + worker for worker in range(6)])
  means = jax.vmap(lambda x: floor_mean(SimComm("w"), x), axis_name="w")(
    parts.astype(np.int32)
  )
  np.testing.assert_array_equal(means, np.full(6, parts.sum() // 6))
  assert (parts // 6).sum() + (parts % 6).sum() // 6 == parts.sum() // 6


@pytest.mark.long
def test_counts_stay_near_k_while_thresholds_are_reused():
  """Residuals grow fast in the first steps and slowly later, where nudging keeps up."""
  state, selected, delivered = None, [], []
  for step in range(96):
    out = js.simulate("oktopk", normals(step, 4, 2000), state=state, k=100)
    state = out.state
    selected.append(float(out.metrics.selected))
    delivered.append(int(out.metrics.delivered))
    assert int(out.metrics.threshold_age) == step % 32
  assert abs(np.mean(selected[64:]) / 100 - 1) < 0.3
  assert abs(np.mean(delivered[64:]) / 100 - 1) < 0.3


@pytest.mark.long
def test_a_worker_alone_does_the_work_of_one_among_others():
  """Its arithmetic is timed for `js.costs.fit`: it selects as many entries, and no owner's surplus is moved."""
  k, grads = 400, jnp.asarray(normals(0, 3, 6_000))
  tx, together = js.oktopk_transform(SoloComm(3), k=k), None
  update, alone = jax.jit(tx.update), tx.init(grads[0])
  for _ in range(12):
    _, alone = update(grads[0], alone)
    out = js.simulate("oktopk", grads, state=together, k=k)
    together, counters = out.state, alone.counters
    np.testing.assert_allclose(counters.selected[0], out.metrics.selected, rtol=0.15)
    assert 0.9 * k < int(counters.delivered[0]) < 1.1 * k
    assert float(counters.imbalance[0]) == 1


@pytest.mark.parametrize("regions", quick_of(["balanced", "even"], quick=["even"]))
def test_entries_that_overflow_a_message_are_the_smallest(regions):
  """The second step reuses the threshold of the first, which all entries reach."""
  workers, n, k = 3, 300, 30
  options = {"k": k, "nudge": "none", "regions": regions}
  sizes = js.make_collective("oktopk", **options).sizes(n, workers)
  oracle = OkTopk(workers, n, k, sizes, balanced_regions=regions == "balanced")
  first, grads = 1e-3 * normals(0, workers, n), normals(1, workers, n)
  oracle.reduce(first)
  total, first = oracle.reduce(grads), js.simulate("oktopk", first, **options)
  out = js.simulate("oktopk", grads, state=first.state, **options)
  bounds, most = np.asarray(out.state.carried.shared[0].bounds[0]), sizes.most
  assert int(out.metrics.overflow) > 0
  # of up to 3 times 15 selected sums
  assert np.add.reduceat(total != 0, bounds[:-1]).max() == sizes.direct
  np.testing.assert_array_equal(out.total, total)
  np.testing.assert_array_equal(out.residuals, oracle.residuals)
  for own, left in zip(
    grads + np.asarray(first.residuals), np.asarray(out.residuals), strict=True
  ):
    two_k = np.argsort(-np.abs(own), kind="stable")[: 2 * k]
    for start, end in itertools.pairwise(bounds):
      inside = [i for i in two_k if start <= i < end]
      assert {i for i in range(start, end) if left[i] != own[i]} <= set(inside[:most])
