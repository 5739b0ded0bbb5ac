"""A2SGD: the paper's arithmetic, parameters that differ, and their synchronization."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.train import simulation
from tests.cases import averaged, mesh_of, normals, quick_of
from tests.reference.rounding import a2sgd


def own_updates(grads, **config):
  collective = js.make_collective("a2sgd", **config)
  totals, state = simulation.reduce_all(
    collective, jnp.asarray(grads), simulation.initial(collective, *grads.shape)
  )
  return np.asarray(totals) / len(grads), state


@pytest.mark.parametrize("workers", quick_of([1, 2, 3, 6], quick=[1, 3]))
def test_equals_the_paper_in_numpy(workers):
  for grads in (
    normals(0, workers, 40),
    np.abs(normals(1, workers, 40)),
    -np.abs(normals(2, workers, 1)),
  ):
    updates, _ = own_updates(grads)
    np.testing.assert_allclose(updates, a2sgd(grads), atol=1e-5)


@pytest.mark.parametrize("means", ["leaf", "vector"])
def test_means_of_the_vector_and_of_each_leaf(means):
  grads = {"a": jnp.asarray(normals(0, 3, 5)), "b": jnp.asarray(10 * normals(1, 3, 7))}
  tx = js.a2sgd_transform(js.SimComm("w"), means=means)
  updates = jax.jit(
    jax.vmap(lambda grads: tx.update(grads, tx.init(grads))[0], axis_name="w")
  )(grads)
  parts = [["a"], ["b"]] if means == "leaf" else [["a", "b"]]
  for names in parts:
    joined = [
      np.concatenate([np.asarray(tree[name]) for name in names], axis=1)
      for tree in (updates, grads)
    ]
    np.testing.assert_allclose(joined[0], a2sgd(joined[1]), atol=1e-5)
  assert js.costs.count("a2sgd", n=10**6, workers=6).words == 2


TARGET = np.linspace(-1, 1, 12).astype(np.float32).reshape(3, 4)


def loss_fn(params, batch):
  return jnp.mean((batch - params["w"][None]) ** 2) * 6


@pytest.mark.parametrize("every", quick_of([1, 3, None], quick=[3]))
def test_training_is_each_workers_own_until_it_is_synchronized(every):
  """The step against a plain loop over the workers in numpy."""
  workers, rate, params = 4, 0.1, {"w": jnp.zeros((3, 4))}
  tx = js.local_steps(
    optax.chain(js.a2sgd_transform("workers"), optax.sgd(rate)), averaged(), every=every
  )
  state, step = (
    js.init(tx, params, mesh_of(workers)),
    js.make_train_step(loss_fn, tx, mesh_of(workers)),
  )
  own = np.zeros((workers, 12), np.float64)
  for i in range(1, 8):
    batch = TARGET + 0.3 * normals(i, 2 * workers, 3, 4)
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


def test_a_state_that_would_lose_what_is_each_workers_own_is_refused():
  tx = optax.chain(js.a2sgd_transform(js.SimComm("w")), optax.adam(0.1))
  state = jax.vmap(lambda p: tx.init(p), axis_name="w")(jnp.zeros((2, 3)))
  with pytest.raises(
    ValueError, match="a2sgd: its totals differ between workers.* js.local_steps"
  ):
    js.specs(state, "w")
