"""How far the gradients of workers agree, in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from tests.cases import mesh_of, normals, quadratic, sim

N, ROWS = 40, 8


def numpy_agreement(grads):
  return np.sum(grads.mean(0) ** 2) / np.mean(np.sum(grads**2, 1))


def batch_of(workers, apart):
  """Rows around a mean that all workers have, and one of their own that is `apart` times as large."""
  common, own = normals(0, 1, N), apart * normals(1, workers, N)
  rows = np.repeat(common + own, ROWS, axis=0) + 0.5 * normals(2, workers * ROWS, N)
  return rows.astype(np.float32)


@pytest.mark.parametrize("apart", [0.0, 2.0])
@pytest.mark.parametrize("where", [mesh_of(3), sim(4)])
def test_in_numpy(where, apart):
  workers = where.members if isinstance(where, js.SimComm) else where.size
  batch, params = batch_of(workers, apart), {"a": jnp.zeros((4, 5)), "b": jnp.ones(20)}
  start = np.concatenate([np.zeros(20), np.ones(20)])
  found = js.agreement(quadratic, params, batch, where)
  own = start - batch.reshape(workers, ROWS, N).mean(1)
  order = np.asarray(jax.random.permutation(jax.random.key(0), len(batch))).reshape(
    workers, ROWS
  )
  shuffled = start - np.stack([batch[rows].mean(0) for rows in order])
  np.testing.assert_allclose(
    found, [numpy_agreement(own), numpy_agreement(shuffled)], rtol=1e-5
  )
  assert (found.own < 0.6 * found.shuffled) == (apart > 0)


@pytest.mark.long
def test_of_workers_of_several_devices_with_a_model_state_and_integers():
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("workers", "model"))
  params = jax.device_put(
    {"w": jnp.asarray(normals(3, 6, 4))},
    NamedSharding(mesh, PartitionSpec(None, "model")),
  )
  batch = {
    "x": jnp.asarray(normals(4, 8, 6)),
    "label": jnp.arange(8, dtype=jnp.int32) % 4,
  }

  def loss(params, batch, model_state, scale):
    scores = batch["x"] @ params["w"] * scale
    hot = jax.nn.one_hot(batch["label"], 4)
    return jnp.mean(jnp.sum((scores - hot) ** 2, 1)), model_state

  found = js.agreement(
    loss, params, batch, mesh, model_state={"mean": jnp.zeros(3)}, scale=jnp.float32(2)
  )
  alone = js.agreement(
    loss,
    params,
    batch,
    sim(2),
    model_state={"mean": jnp.zeros(3)},
    scale=jnp.float32(2),
  )
  np.testing.assert_allclose(found, alone, rtol=1e-5)
  one = js.agreement(
    loss,
    params,
    batch,
    sim(1),
    model_state={"mean": jnp.zeros(3)},
    scale=jnp.float32(2),
  )
  np.testing.assert_allclose(one, 1, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_complex_parameters_and_extreme_gradients(scale):
  batch = np.repeat(np.array([1 + 5j, 1 - 5j], np.complex64), 4)[:, None] * np.float32(
    scale
  )
  loss = lambda x, batch: jnp.sum(jnp.real(jnp.conj(batch) * x[None]))
  assert js.agreement(
    loss, jnp.zeros(1, jnp.complex64), batch, sim(2)
  ).own == pytest.approx(1 / 26, rel=1e-4)


def test_workers_with_the_same_rows_agree_however_these_alternate():
  """Rows that alternate are not dealt out by their kind; of the noise of a key the shuffled gradients have as much."""
  batch = np.tile(np.array([1.0, -1.0], np.float32), 64)
  found = js.agreement(quadratic, jnp.full(1, 0.5), batch[:, None], sim(4))
  assert found.own == pytest.approx(1, rel=1e-5)
  assert found.shuffled > 0.7
  noisy = lambda x, batch, rng: jnp.vdot(
    x, jax.random.normal(rng, x.shape) + 0 * batch.sum()
  )
  found = js.agreement(noisy, jnp.zeros(500), batch, sim(4), rng=jax.random.key(3))
  np.testing.assert_allclose(found, 1 / 4, atol=0.08)


def test_batches_with_keys_and_gradients_of_zero():
  batch = {
    "key": jax.random.split(jax.random.key(1), 8),
    "x": np.ones((8, 5), np.float32),
  }
  loss = lambda x, batch: jnp.vdot(
    x, jax.vmap(lambda key: jax.random.normal(key, (5,)))(batch["key"]).mean(0)
  )
  assert 0 < js.agreement(loss, jnp.zeros(5), batch, mesh_of(2)).own < 1
  assert js.agreement(
    lambda x, batch: 0 * jnp.vdot(x, batch["x"][0]), jnp.zeros(5), batch, mesh_of(2)
  ) == (1, 1)
  with pytest.raises(ValueError, match="js.agreement: called under a trace"):
    jax.jit(lambda x: js.agreement(quadratic, x, np.ones((4, 3), np.float32), sim(2)))(
      jnp.zeros(3)
    )


def test_a_batch_that_does_not_divide():
  with pytest.raises(
    ValueError,
    match=r"batch has shape \(7, 40\): its leading axis must divide among the 3 workers",
  ):
    js.agreement(quadratic, jnp.zeros(N), np.zeros((7, N), np.float32), mesh_of(3))


def test_a_leaf_of_the_batch_without_entries():
  batch = np.ones((6, 2), np.float32), np.ones((6, 0), np.float32)
  found = js.agreement(
    lambda p, b: jnp.sum(p * b[0].mean()), jnp.ones(2), batch, sim(3)
  )
  assert found.own == found.shuffled == 1


def test_under_a_trace_it_is_refused():
  batch = np.zeros((6, N), np.float32)
  under_a_trace = jax.jit(lambda x: js.agreement(quadratic, x, batch, mesh_of(3)))
  with pytest.raises(ValueError, match=r"js.agreement: called under a trace"):
    under_a_trace(jnp.zeros(N))


def test_parameters_without_entries_are_refused():
  batch = jnp.zeros((4, 3))
  for params in ({}, {"w": jnp.zeros((0, 3))}):
    with pytest.raises(ValueError, match="params have no entries that are trained"):
      js.agreement(lambda *_: jnp.float32(0), params, batch, sim(2))
