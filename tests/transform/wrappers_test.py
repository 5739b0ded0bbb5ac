"""Wrappers around collectives: Deep Gradient Compression in numpy, and what holds for any collective."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.collectives._wrapped import Corrected, WarmedUp
from jaxsparse.train import simulation
from tests import cases
from tests.cases import (
  assert_same_bits,
  integers,
  mesh_of,
  normals,
  quick_of,
  sim,
  start,
)

N = 30
EXACT = [
  case
  for case in cases.CONSERVING
  if case.is_sparse and case.exact and case.rounding < 2**-10
]


def corrected(collective, momentum=0.5, nesterov=False, masking=True):
  return Corrected(
    collective=collective, momentum=momentum, nesterov=nesterov, masking=masking
  )


@pytest.mark.parametrize(
  ("nesterov", "masking"),
  quick_of([(False, True), (True, True), (False, False)], quick=[(True, True)]),
)
def test_deep_gradient_compression_in_numpy(nesterov, masking):
  """Lin et al., Algorithm 1 with momentum correction, over TopkA."""
  workers, k, m = 3, 6, 0.9
  collective = corrected(js.make_collective("topka", k=k), m, nesterov, masking)
  state = simulation.initial(collective, workers, N)
  momenta = residuals = np.zeros((workers, N))
  for step in range(5):
    grads = normals(step, workers, N)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    momenta = m * (momenta + grads) if nesterov else m * momenta + grads
    residuals = residuals + (momenta + grads if nesterov else momenta)
    total = np.zeros(N)
    for u, v in zip(momenta, residuals, strict=True):
      sent = np.argsort(-np.abs(v), kind="stable")[:k]
      total[sent] += v[sent]
      v[sent] = 0
      if masking:
        u[sent] = 0
    np.testing.assert_allclose(totals[0], total, atol=1e-5)
    np.testing.assert_allclose(state.carried.worker[0].momentum, momenta, atol=1e-5)
    np.testing.assert_allclose(state.carried.residual[0], residuals, atol=1e-5)


@cases.each_case(EXACT, ["spardl"])
def test_momentum_is_zero_where_mass_has_left(case):
  """What enters is u, dyadic here; entries that came back to the residual keep their momentum."""
  workers = case.workers([4, 6, 8, 5])[0]
  collective = corrected(case.make(density=0.2))
  state = simulation.initial(collective, workers, N)
  for step in range(4):
    grads = 16 * integers(step, workers, N)
    momentum = np.asarray(state.carried.worker[0].momentum, np.float64) / 2 + grads
    home = momentum + np.asarray(state.carried.residual[0], np.float64)
    _, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    expected = np.where(
      np.asarray(state.carried.residual[0], np.float64) == home, momentum, 0
    )
    np.testing.assert_array_equal(state.carried.worker[0].momentum, expected)


@pytest.mark.parametrize(
  "name", cases.quick_of(["dense", "spardl", "ladder"], quick=["dense"])
)
def test_everything_delivered_is_momentum_after_the_mean(name):
  """Nothing is masked; the mean of each worker's momentum is the momentum of the mean."""
  workers, trace = 4, np.zeros(N)
  made = {
    "dense": js.make_collective("dense"),
    "spardl": js.make_collective("spardl", density=1.0),
    "ladder": WarmedUp(
      collective=js.make_collective("spardl", density=0.1), steps=(3,), densities=(1.0,)
    ),
  }
  collective = corrected(made[name], 0.9)
  state = simulation.initial(collective, workers, N)
  for step in range(3):
    grads = normals(step, workers, N)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    trace = 0.9 * trace + grads.astype(np.float64).sum(0)
    np.testing.assert_allclose(totals[0], trace, atol=1e-4)


@pytest.mark.long
def test_clipping_is_of_all_leaves_together_and_each_group_has_its_momentum():
  params = {"b": jnp.zeros(4), "w": jnp.zeros((6, 6))}
  transform = js.spardl_transform(sim(4), special={"b": "dense"}, density=0.2)
  tx = optax.chain(js.momentum_corrected(transform, 0.9, clip_norm=2.0), optax.sgd(0.5))
  step, params, state = start(tx, sim(4), params)
  grad = 10 * normals(0, 40)
  params, state, _ = step(params, state, np.tile(grad, (4, 1)))
  np.testing.assert_allclose(
    params["b"], -0.5 * 2 / np.sqrt(4) * grad[:4] / np.linalg.norm(grad), rtol=1e-5
  )
  assert [one.momentum.shape for one in state[0][1].carried.worker] == [(16,), (144,)]


def ladder(name="spardl", **config):
  return WarmedUp(
    collective=js.make_collective(name, density=0.1, **config),
    steps=(2, 3),
    densities=(0.5, 0.2),
  )


@pytest.mark.long
@pytest.mark.parametrize(
  "collective",
  [ladder("topka"), ladder("spardl", selector="reuse", teams=2)],
  ids=["topka", "reuse"],
)
def test_a_ladder_of_densities_keeps_the_laws_and_is_each_of_them_in_turn(collective):
  workers = 4
  plain = [
    *[js.make_collective("topka", density=d) for d in (0.5, 0.5, 0.2)],
    collective.collective,
  ]
  state = simulation.initial(collective, workers, N)
  for step in range(5):
    grads, before = integers(step, workers, N), np.asarray(state.carried.residual[0])
    same = simulation.initial(one := plain[min(step, 3)], workers, N)
    same = same._replace(carried=same.carried._replace(residual=state.carried.residual))
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    np.testing.assert_array_equal(
      totals[0] + np.asarray(state.carried.residual[0]).sum(0),
      grads.sum(0) + before.sum(0),
      err_msg=str(step),
    )
    assert_same_bits(totals, np.broadcast_to(totals[0], totals.shape))
    assert np.all(state.carried.shared[0].step == step + 1)
    if collective.collective.name == "topka":  # whose choice depends on residuals alone
      expected, _ = simulation.reduce_all(one, jnp.asarray(grads), same)
      np.testing.assert_array_equal(totals, expected)


SPARDL, DCT = (
  js.spardl_transform("workers", density=0.2),
  js.make_transform("dcttopk", "workers", density=0.1),
)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (
      lambda: js.momentum_corrected(optax.sgd(0.1)),
      TypeError,
      "corrected: .* is no jaxsparse transform: give js.",
    ),
    (
      lambda: js.momentum_corrected(SPARDL, 1.5),
      ValueError,
      r"momentum=1.5, choose a number in \(0, 1\]",
    ),
    (
      lambda: js.momentum_corrected(SPARDL, clip_norm=0),
      ValueError,
      "clip_norm=0, choose a number above 0, or None",
    ),
    (
      lambda: js.momentum_corrected(DCT),
      ValueError,
      "masking=True with dcttopk, which delivers a part of every",
    ),
    (
      lambda: js.momentum_corrected(js.momentum_corrected(SPARDL)),
      ValueError,
      ".* has a momentum already",
    ),
    (
      lambda: js.warmed_up(SPARDL, {3: 0.1, 2: 0.2}),
      ValueError,
      "densities={3: 0.1, 2: 0.2}, give .* by ascend",
    ),
    (
      lambda: js.warmed_up(SPARDL, {0: 0.1}),
      ValueError,
      "warmed_up: step=0, choose a whole number from 1 to 2147483647",
    ),
    (
      lambda: js.warmed_up(SPARDL, {2: 1.5}),
      ValueError,
      r"before step 2: density=1.5, choose a number in \(0, 1\]",
    ),
    (
      lambda: js.warmed_up(js.momentum_corrected(SPARDL), {2: 0.5}),
      ValueError,
      "warm up first",
    ),
    (
      lambda: js.warmed_up(js.make_transform("qsgd", "workers"), {2: 0.5}),
      ValueError,
      "warmed_up: qsgd has no density, choose one with density= or k=",
    ),
  ],
)
def test_what_is_refused(call, error, message):
  with pytest.raises(error, match=message):
    js.init(call(), jnp.zeros(N), mesh_of(2))


def test_without_masking_any_collective_has_a_momentum():
  js.init(js.momentum_corrected(DCT, masking=False), jnp.zeros(N), mesh_of(2))
