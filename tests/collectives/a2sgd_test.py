"""A2SGD: the paper's arithmetic, parameters that differ, and their synchronization."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.train import simulation
from tests.cases import averaged, mesh_of, normals, row
from tests.reference.rounding import a2sgd


def own_updates(grads, **config):
  collective = js.make_collective("a2sgd", **config)
  totals, state = simulation.reduce_all(collective, jnp.asarray(grads), simulation.initial(collective, *grads.shape))
  return np.asarray(totals) / len(grads), state


def test_the_example_of_the_paper():
  updates, _ = own_updates(np.array([[1, 2, -1], [-1, -2, 3]], np.float32))
  np.testing.assert_array_equal(updates, [[1, 2.75, -1.25], [-1, -1.75, 2.25]])


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
def test_equals_the_paper_in_numpy(workers):
  for grads in (normals(0, workers, 40), np.abs(normals(1, workers, 40)), -np.abs(normals(2, workers, 1))):
    updates, _ = own_updates(grads)
    np.testing.assert_allclose(updates, a2sgd(grads), atol=1e-5)


@pytest.mark.parametrize("means", ["leaf", "vector"])
def test_means_of_the_vector_and_of_each_leaf(means):
  grads = {"a": jnp.asarray(normals(0, 3, 5)), "b": jnp.asarray(10 * normals(1, 3, 7))}
  tx = js.a2sgd_transform(js.SimComm("w"), means=means)
  updates = jax.vmap(lambda grads: tx.update(grads, tx.init(grads))[0], axis_name="w")(grads)
  parts = [["a"], ["b"]] if means == "leaf" else [["a", "b"]]
  for names in parts:
    joined = [np.concatenate([np.asarray(tree[name]) for name in names], axis=1) for tree in (updates, grads)]
    np.testing.assert_allclose(joined[0], a2sgd(joined[1]), atol=1e-5)
  assert js.costs.count("a2sgd", n=10**6, workers=6).words == 2


TARGET = np.linspace(-1, 1, 12).astype(np.float32).reshape(3, 4)


def loss_fn(params, batch):
  return jnp.mean((batch - params["w"][None]) ** 2) * 6


def batch_of(step, workers):
  return TARGET + 0.3 * normals(step, 2 * workers, 3, 4)


def start(after, workers=4, every=100, params=None, **config):
  tx = js.local_steps(optax.chain(js.a2sgd_transform("workers", **config), after), averaged(), every=every)
  mesh, params = mesh_of(workers), {"w": jnp.zeros((3, 4)) if params is None else params}
  return params, js.init(tx, params, mesh), js.make_train_step(loss_fn, tx, mesh)


@pytest.mark.parametrize("every", [1, 3, None])
def test_training_is_each_workers_own_until_it_is_synchronized(every):
  """The step against a plain loop over the workers in numpy."""
  workers, rate = 4, 0.1
  params, state, step = start(optax.sgd(rate), workers, every)
  own = np.zeros((workers, 12), np.float64)
  for i in range(1, 8):
    batch = batch_of(i, workers)
    params, state, _ = step(params, state, batch)
    parts = batch.reshape(workers, 2, 12)
    own = own - rate * a2sgd((own[:, None] - parts).mean(1))
    if every and i % every == 0:
      own[:] = own.mean(0)
    moved = np.asarray(state.moved["w"]).reshape(workers, 12) if every != 1 else 0
    here = np.asarray(params["w"]).reshape(1, 12) - moved
    np.testing.assert_allclose(np.broadcast_to(here, own.shape), own, atol=1e-5)
    apart = np.sqrt(((own - own.mean(0)) ** 2).sum() / workers)
    assert float(js.metrics(state).drift) == pytest.approx(apart, abs=1e-5)
  params, state = step.synchronize(params, state)
  np.testing.assert_allclose(params["w"].reshape(12), own.mean(0), atol=1e-5)
  assert float(js.metrics(state).drift) == 0
  assert params["w"].sharding.is_fully_replicated


@pytest.mark.parametrize(
  ("after", "means"),
  [
    row(optax.sgd(0.1), "vector", quick=True, id="sgd"),
    row(optax.sgd(0.05, momentum=0.9), "leaf", id="momentum"),
    row(optax.adam(0.02), "vector", quick=True, id="adam"),
  ],
)
def test_it_learns_with_sgd_and_with_adam(after, means):
  params, state, step = start(after, every=20, means=means)
  for i in range(200):
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
      params, state, _ = step(params, state, batch_of(i, 4))
  params, state = step.synchronize(params, state)
  assert np.abs(params["w"] - TARGET).max() < 0.15


def test_the_state_is_a_fixed_point_with_a_row_for_every_worker():
  params, state, step = start(optax.adam(0.1))
  spec = js.specs(state, "workers")
  own = jax.tree.leaves((spec.inner, spec.moved), is_leaf=lambda x: isinstance(x, jax.P))
  assert all(part == jax.P("workers") for part in own)
  with jax.numpy_dtype_promotion("standard"):
    _, after, _ = step(params, jax.tree.map(jnp.copy, state), batch_of(0, 4))
  chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
  assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves((after.inner, after.moved)))


def test_others_have_nothing_to_synchronize():
  tx, mesh, params = js.dense_transform("workers"), mesh_of(2), {"w": jnp.zeros((3, 4))}
  state, step = js.init(tx, params, mesh), js.make_train_step(loss_fn, tx, mesh)
  assert step.synchronize(params, state) == (params, state)


def test_parameters_in_bfloat16_keep_what_they_moved_in_float32():
  params, state, step = start(optax.sgd(1e-3), workers=2, params=jnp.ones((3, 4), jnp.bfloat16))
  for i in range(5):
    params, state, _ = step(params, state, batch_of(i, 2).astype(jnp.bfloat16))
  assert params["w"].dtype == jnp.bfloat16
  assert state.moved["w"].dtype == jnp.float32
  assert np.any(np.asarray(state.moved["w"]) != 0)  # bfloat16 parameters of 1 would have moved by 1/256 or not at all


def test_bad_means():
  with pytest.raises(ValueError, match="means='layer', choose one of 'vector', 'leaf'"):
    js.a2sgd_transform("workers", means="layer")


def test_a_poisoned_batch_moves_nobody():
  params, state, step = start(optax.sgd(0.1))
  params, state, _ = step(params, state, batch_of(0, 4))
  before, bad = np.asarray(state.moved["w"]), batch_of(1, 4)
  bad[-1, -1] = np.nan  # at one worker
  params, state, metrics = step(params, state, bad)
  assert bool(metrics.skipped)
  np.testing.assert_array_equal(state.moved["w"], before)
  params, state, metrics = step(params, state, batch_of(2, 4))
  assert not bool(metrics.skipped)
  assert np.all(np.any(np.asarray(state.moved["w"]) != before, axis=(1, 2)))


def test_a_state_that_would_lose_what_is_each_workers_own_is_refused():
  tx = optax.chain(js.a2sgd_transform(js.SimComm("w")), optax.adam(0.1))
  state = jax.vmap(lambda p: tx.init(p), axis_name="w")(jnp.zeros((2, 3)))
  with pytest.raises(ValueError, match="a2sgd: its totals differ between workers.* js.local_steps"):
    js.specs(state, "w")
