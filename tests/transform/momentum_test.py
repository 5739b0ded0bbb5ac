"""Momentum before a sparse exchange: Deep Gradient Compression in numpy, and what holds for any collective."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.collectives._wrapped import Corrected, WarmedUp
from jaxsparse.train import simulation
from tests.cases import CONSERVING, REPLICATING, bits, each_case, integers, mesh_of, normals, quick_of, row

N = 30
SPARSE = [case for case in CONSERVING if case.is_sparse and case.exact]


def corrected(collective, momentum=0.5, nesterov=False, masking=True):
  return Corrected(collective=collective, momentum=momentum, nesterov=nesterov, masking=masking)


def dgc_in_numpy(grads, momenta, residuals, k, m, nesterov, masking):
  """One step of Lin et al., Algorithm 1 with momentum correction, over TopkA: (total, momenta, residuals)."""
  momenta = m * (momenta + grads) if nesterov else m * momenta + grads
  residuals = residuals + (momenta + grads if nesterov else momenta)
  total = np.zeros(grads.shape[1])
  for u, v in zip(momenta, residuals, strict=True):
    sent = np.argsort(-np.abs(v), kind="stable")[:k]
    total[sent] += v[sent]
    v[sent] = 0
    if masking:
      u[sent] = 0
  return total, momenta, residuals


@pytest.mark.parametrize(
  ("nesterov", "masking"), quick_of([(False, True), (True, True), (False, False)], quick=[(True, True)])
)
def test_deep_gradient_compression_in_numpy(nesterov, masking):
  workers, k = 3, 6
  collective = corrected(js.make_collective("topka", k=k), 0.9, nesterov, masking)
  state = simulation.initial(collective, workers, N)
  momenta = residuals = np.zeros((workers, N))
  for step in range(5):
    grads = normals(step, workers, N)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    total, momenta, residuals = dgc_in_numpy(grads.astype(np.float64), momenta, residuals, k, 0.9, nesterov, masking)
    np.testing.assert_allclose(totals[0], total, atol=1e-5)
    np.testing.assert_allclose(state.carried.worker.momentum, momenta, atol=1e-5)
    np.testing.assert_allclose(state.carried.residual, residuals, atol=1e-5)


@each_case(SPARSE, ["spardl"])
def test_law_c_of_momentum_and_zeros_where_mass_has_left(case):
  """What enters is u, dyadic here; entries that came back to the residual keep their momentum, NaN changes nothing."""
  workers = case.workers([4, 6, 8, 5])[0]
  collective = corrected(case.make(density=0.2))
  state = simulation.initial(collective, workers, N)
  for step in range(4):
    grads = 16 * integers(step, workers, N)
    momentum = np.asarray(state.carried.worker.momentum, np.float64) / 2 + grads
    home = momentum + np.asarray(state.carried.residual, np.float64)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    after = np.asarray(state.carried.residual, np.float64)
    scale = np.abs(home).sum(0).max()
    np.testing.assert_allclose(totals[0] + after.sum(0), home.sum(0), atol=case.rounding * scale * workers)
    exact = case.rounding < 2**-10
    expected = np.where(after == home, momentum, 0) if exact else np.asarray(state.carried.worker.momentum)
    np.testing.assert_array_equal(state.carried.worker.momentum, expected)
    np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))
  bad = grads.copy()
  bad[0, 0] = np.nan
  totals, after = simulation.reduce_all(collective, jnp.asarray(bad), state)
  jax.tree.map(np.testing.assert_array_equal, after.carried, state.carried)


@each_case(REPLICATING, ["dense", "spardl"])
def test_everything_delivered_is_momentum_after_the_mean(case):
  """Nothing is masked; the mean of each worker's momentum is the momentum of the mean."""
  options = dict(case.options)
  if not case.exact or case.rounding > 2**-10 or "wire" in options:
    pytest.skip("it rounds")
  if case.name == "oktopk" or options.get("selector") == "reuse":
    pytest.skip("the threshold of an earlier step is above some entries")
  workers = case.workers([4, 6, 8, 5])[0]
  collective, trace = corrected(case.make(density=1.0), 0.9), np.zeros(N)
  state = simulation.initial(collective, workers, N)
  for step in range(3):
    grads = normals(step, workers, N)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    trace = 0.9 * trace + grads.astype(np.float64).sum(0)
    if case.name != "randomk":  # draws a part of the vector whatever its density
      np.testing.assert_allclose(totals[0], trace, atol=1e-4)


def test_in_a_training_step_with_groups_and_clipping():
  """On a mesh: special= gives each group its momentum, and clipping is of all leaves together."""
  params = {"b": jnp.zeros(4), "w": jnp.zeros((6, 6))}
  transform = js.spardl_transform("workers", special={"b": "dense"}, density=0.2)
  tx = optax.chain(js.momentum_corrected(transform, 0.9, clip_norm=2.0), optax.sgd(0.02))
  target = normals(0, 40)

  def loss(params, batch):
    flat = jax.flatten_util.ravel_pytree(params)[0]
    return jnp.sum((flat - target) ** 2) + 0 * batch.sum()

  step, state = js.make_train_step(loss, tx, mesh_of(4)), js.init(tx, params, mesh_of(4))
  for number in range(120):
    params, state, metrics = step(params, state, np.zeros((4, 1), np.float32))
    if number == 0:  # ‖gradient‖ = 2 / √4, the same at every worker: the dense leaf moves by its share of that
      norm = 2 * np.linalg.norm(target)
      np.testing.assert_allclose(params["b"], 0.02 * 2 * target[:4] / norm, rtol=1e-5)
  step.check(params, state)
  assert float(metrics.loss) < 0.05 * np.sum(target**2)
  assert [one.momentum.shape for one in state[0][1].carried.worker] == [(16,), (144,)]


def test_bad_arguments():
  sparse = js.spardl_transform("workers", density=0.2)
  with pytest.raises(TypeError, match="momentum_corrected: .* is no jaxsparse transform: give js.spardl_transform"):
    js.momentum_corrected(optax.chain(sparse, optax.sgd(0.1)))
  with pytest.raises(ValueError, match=r"momentum_corrected: momentum=1.5, choose a number in \(0, 1\]"):
    js.momentum_corrected(sparse, 1.5)
  with pytest.raises(ValueError, match="momentum_corrected: clip_norm=0, choose a number above 0, or None"):
    js.momentum_corrected(sparse, clip_norm=0)


# Warm-up.


def ladder(name="spardl", **config):
  return WarmedUp(collective=js.make_collective(name, density=0.1, **config), steps=(2, 3), densities=(0.5, 0.2))


@pytest.mark.parametrize(
  "collective",
  [
    row(ladder("topka"), quick=True, id="topka"),
    row(ladder(), id="spardl"),
    row(ladder("oktopk"), id="oktopk"),
    row(ladder("gtopk"), id="gtopk"),
    row(ladder("spardl", selector="reuse", teams=2), id="reuse"),
  ],
)
def test_a_ladder_of_densities_keeps_the_laws_and_is_each_of_them_in_turn(collective):
  workers = 4
  plain = [*[js.make_collective(collective.collective.name, density=d) for d in (0.5, 0.5, 0.2)], collective.collective]
  state = simulation.initial(collective, workers, N)
  for step in range(5):
    grads, before = integers(step, workers, N), np.asarray(state.carried.residual)
    same = simulation.initial(one := plain[min(step, 3)], workers, N)
    same = same._replace(carried=same.carried._replace(residual=state.carried.residual))
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    np.testing.assert_array_equal(
      totals[0] + np.asarray(state.carried.residual).sum(0), grads.sum(0) + before.sum(0), err_msg=str(step)
    )
    np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))
    assert np.all(state.carried.shared.step == step + 1)
    if collective.collective.name in ("gtopk", "topka"):  # whose choice depends on residuals alone
      expected, _ = simulation.reduce_all(one, jnp.asarray(grads), same)
      np.testing.assert_array_equal(totals, expected)


def test_while_the_density_is_1_momentum_is_that_of_a_dense_average():
  """Nothing is masked: all mass leaves in each step, and is no older than it."""
  sparse = js.warmed_up(js.topka_transform(js.SimComm("workers", members=3), k=2), {4: 1.0})
  tx = optax.chain(js.momentum_corrected(sparse, 0.5), optax.sgd(1.0))
  comm, params, momentum = js.SimComm("workers", members=3), jnp.zeros(N), np.zeros(N)
  step = js.make_train_step(lambda p, batch: jnp.vdot(p, batch[0]), tx, comm, donate=False)
  state = js.init(tx, params, comm)
  for number in range(4):
    grads = integers(number, 3, N)
    updates, state, _ = step(params, state, grads)
    momentum = 0.5 * momentum + grads.mean(0)
    np.testing.assert_allclose(updates, -momentum, atol=1e-5)


def test_what_momentum_correction_refuses_when_it_is_made():
  with pytest.raises(ValueError, match="momentum_corrected: masking=True with dcttopk, which delivers a part of every"):
    js.momentum_corrected(js.dcttopk_transform("workers", density=0.1))
  js.momentum_corrected(js.dcttopk_transform("workers", density=0.1), masking=False)
  with pytest.raises(ValueError, match="momentum_corrected: .* has a momentum already"):
    js.momentum_corrected(js.momentum_corrected(js.spardl_transform("workers", density=0.1)))


def test_bad_ladders():
  sparse = js.spardl_transform("workers", density=0.2)
  with pytest.raises(ValueError, match="warmed_up: densities={3: 0.1, 2: 0.2}, give at least one density, by ascend"):
    js.warmed_up(sparse, {3: 0.1, 2: 0.2})
  with pytest.raises(ValueError, match="warmed_up: step=0, choose a whole number from 1 up"):
    js.warmed_up(sparse, {0: 0.1})
  with pytest.raises(ValueError, match=r"warmed_up before step 2: density=1.5, choose a number in \(0, 1\]"):
    js.warmed_up(sparse, {2: 1.5})
  with pytest.raises(ValueError, match="warm up first"):
    js.init(js.warmed_up(js.momentum_corrected(sparse), {2: 0.5}), jnp.zeros(30), mesh_of(2))
  with pytest.raises(ValueError, match="warmed_up: qsgd has no density, give a transform of a sparse collective"):
    js.init(js.warmed_up(js.qsgd_transform("workers"), {2: 0.5}), jnp.zeros(30), mesh_of(2))
