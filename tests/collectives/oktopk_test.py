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
      ((3, 1, "balanced", (32, 64), "search"), [6]),
      ((90, 20, "balanced", (3, 2), "fixed"), [3]),
      ((90, 20, "balanced", (32, 3), "search"), [3]),
      ((90, 20, "even", (2, 64), "search"), []),
      ((90, 20, "balanced", (3, 64), "none"), []),
    )
    for workers in (1, 3, 6, 8)
  ],
)
def test_equals_the_paper_in_numpy(n, k, regions, periods, nudge, workers):
  options = {"k": k, "regions": regions, "nudge": nudge, "threshold_period": periods[0], "region_period": periods[1]}
  sizes = js.make_collective("oktopk", **options).sizes(n, workers)
  expected, state = OkTopk(workers, n, k, sizes, *periods, regions == "balanced", nudge), None
  for step in range(12):
    grads = (normals if step < 6 else skewed)(step, workers, n)
    if step < 2:
      grads[:, 5:] = 0  # fewer than k entries
      grads[1:2, 0], grads[2:, 0] = -grads[0, 0], 0  # a sum of 0, which their senders keep
    total = expected.reduce(grads)
    out = js.simulate("oktopk", grads, state=state, **options)
    state = out.state
    np.testing.assert_array_equal(out.total, total)
    np.testing.assert_array_equal(out.residuals, expected.residuals)
    np.testing.assert_array_equal(state.carried.shared.bounds[0], expected.bounds)
    np.testing.assert_allclose(state.carried.shared.threshold, [expected.threshold] * workers, rtol=1e-6)
    np.testing.assert_allclose(state.carried.worker[:, 0], expected.local, rtol=1e-6)


@pytest.mark.long
def test_one_owner_of_everything_is_balanced():
  """All entries in one region: its owner sends equal shares away, and every block of the all-gather is the same."""
  grads = np.zeros((8, 160), np.float32)
  grads[:, :20] = 1 + np.arange(20)
  expected = OkTopk(8, 160, 16, js.make_collective("oktopk", k=16).sizes(160, 8), balanced_regions=False)
  total = expected.reduce(grads)
  assert expected.was_balanced
  out = js.simulate("oktopk", grads, k=16, regions="even")
  np.testing.assert_array_equal(out.total, total)
  assert float(out.metrics.imbalance) == 8
  assert float(out.metrics.balanced) < 3  # one entry here and none there, of three that came


@pytest.mark.long
def test_balanced_regions_hold_equally_many_entries():
  grads = skewed(0, 3, 1200)
  even, balanced = (js.simulate("oktopk", grads, k=120, regions=kind) for kind in ("even", "balanced"))
  assert float(balanced.metrics.imbalance) < 1.4 < float(even.metrics.imbalance)
  assert int(balanced.metrics.overflow) < int(even.metrics.overflow)


def test_bounds_do_not_overflow():
  """Sums of places of six workers are beyond int32; the mean is not."""
  n, far = 40, 2**30
  chosen = jnp.tile(jnp.arange(n - 6, n), (6, 1))
  bounds = jax.vmap(lambda indices: consensus_bounds(SimComm("w"), indices, n), axis_name="w")(chosen)
  np.testing.assert_array_equal(bounds[0], [0, 35, 36, 37, 38, 39, 40])
  parts = np.array([far + worker for worker in range(6)])
  means = jax.vmap(lambda x: floor_mean(SimComm("w"), x), axis_name="w")(parts.astype(np.int32))
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
  first = js.simulate("oktopk", 1e-3 * normals(0, workers, n), **options)
  grads = normals(1, workers, n)
  out = js.simulate("oktopk", grads, state=first.state, **options)
  bounds, most = (
    np.asarray(out.state.carried.shared.bounds[0]),
    js.make_collective("oktopk", k=k).sizes(n, workers).most,
  )
  assert int(out.metrics.overflow) > 0
  for own, left in zip(grads + np.asarray(first.residuals), np.asarray(out.residuals), strict=True):
    two_k = np.argsort(-np.abs(own), kind="stable")[: 2 * k]
    for start, end in itertools.pairwise(bounds):
      inside = [i for i in two_k if start <= i < end]
      assert {i for i in range(start, end) if left[i] != own[i]} <= set(inside[:most])
