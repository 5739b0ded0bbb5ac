"""The training step: trains, places, compiles once, and says what is wrong before it changes anything."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import mesh_of, normals, quadratic, start

TARGET = np.linspace(-1, 1, 20).astype(np.float32)


def batch_of(step, workers):
  return TARGET + 0.1 * normals(step, 2 * workers, 20)


SPARSE = js.spardl_transform("workers", density=0.2)


def make(workers=6, tx=None, params=None, loss=quadratic):
  """(step, params, state)."""
  tx, params = tx or optax.chain(SPARSE, optax.sgd(0.1, momentum=0.5)), params or {"w": jnp.zeros(20)}
  return start(tx, mesh_of(workers), params, loss, donate=True)


def test_it_learns():
  step, params, state = make(workers := 4)
  for i in range(150):
    params, state, metrics = step(params, state, batch_of(i, workers))
  params, state = step.synchronize(params, state)
  assert float(metrics.loss) < 0.3
  assert np.abs(params["w"] - TARGET).max() < 0.2


def test_it_compiles_once_and_keeps_where_state_and_parameters_lie():
  compiled = []
  listen = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
  step, params, state = make()
  assert state[0].carried.residual.shape == (6 * 20,)
  batches = [jnp.asarray(batch_of(i, 6)) for i in range(4)]
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    counts = []
    for batch in batches:
      spec = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
      assert (spec[0].carried.residual, spec[1][0].trace["w"]) == (jax.P("workers"), jax.P())
      params, state, _ = step(params, state, batch)
      assert params["w"].sharding.is_fully_replicated
      counts.append(len(compiled))
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert counts[0] >= 1
  assert counts[-1] == counts[0]


@pytest.mark.parametrize("wrap", ["masked", "multisteps"])
def test_wrapped_by_optax(wrap):
  """Leaves that stay dense, and several batches a step."""
  sparse, sgd = js.topka_transform("workers", density=0.2), optax.sgd(0.1)
  tx = {
    "masked": optax.chain(
      optax.masked(sparse, {"w": True, "b": False}),
      optax.masked(js.dense_transform("workers"), {"w": False, "b": True}),
      sgd,
    ),
    "multisteps": optax.chain(sparse, optax.MultiSteps(sgd, 2).gradient_transformation()),
  }[wrap]
  loss = lambda p, batch: quadratic({"w": p["w"]}, batch) + (p["b"] - 1.0) ** 2
  step, params, state = make(4, tx, {"w": jnp.zeros(20), "b": jnp.zeros(())}, loss)
  for i in range(200):
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
      params, state, metrics = step(params, state, batch_of(i, 4))
  assert float(metrics.loss) < 0.3
  assert float(params["b"]) == pytest.approx(1, abs=0.1)


# Bad input.


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: js.init(SPARSE, jnp.zeros(3), mesh_of(2), axis="data"), "axis 'data' is not an axis of the mesh, choose"),
    (lambda: js.make_train_step(quadratic, SPARSE, mesh_of(2), axis="data"), r"choose from \('workers',\)"),
    (lambda: make(3, optax.sgd(0.1))[0](*make(3, optax.sgd(0.1))[1:], batch_of(0, 3)), "no jaxsparse transform, so"),
  ],
)
def test_bad_axis_or_chain(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_what_is_wrong_is_said_before_anything_is_donated():
  step, params, state = make()
  model = start(optax.chain(SPARSE, optax.sgd(0.1, momentum=0.5)), mesh_of(6), params, lambda p, _: jnp.sum(p["w"]))[0]
  for use, given, message in (
    (step, (params, state, np.zeros((7, 20))), r"batch has shape \(7, 20\): its leading axis must divide among the 6"),
    (step, (params, state, {"label": np.float32(1)}), r"batch\['label'\] has shape \(\)"),
    (step, (params, make(3)[2], batch_of(0, 6)), "made for 3 workers, the axis has 6"),
    (model, ({"w": jnp.zeros(21)}, state, batch_of(0, 6)), r"\['w'\] of shape \(20,\), here it has shape \(21,\)"),
  ):
    with pytest.raises(ValueError, match=message):
      use(*given)
    assert not params["w"].is_deleted()
    assert not state[0].carried.residual.is_deleted()
