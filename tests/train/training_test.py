"""The training step: trains, places, paces itself, and says what is wrong before it changes anything."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import jaxsparse as js
from tests.cases import CASES, bits, chained, each_case, mesh_of, normals

TARGET = np.linspace(-1, 1, 20).astype(np.float32)


def loss_fn(params, batch):
  return jnp.mean((batch - params["w"][None]) ** 2) * 10


def batch_of(step, workers):
  return TARGET + 0.1 * normals(step, 2 * workers, 20)


def make(case=None, workers=6, tx=None):
  if tx is None:
    tx = optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1, momentum=0.5))
  if case is not None:
    tx = chained(case, optax.sgd(0.1), density=0.2)
  mesh, params = mesh_of(workers), {"w": jnp.zeros(20)}
  return js.make_train_step(loss_fn, tx, mesh), params, js.init(tx, params, mesh), (tx, mesh)


@each_case(CASES, ["a2sgd", "oktopk", "spardl"])
def test_it_learns(case):
  workers = case.workers([6, 8, 5])[0]
  step, params, state, _ = make(case, workers)
  for i in range(150):
    params, state, metrics = step(params, state, batch_of(i, workers))
  params, state = step.synchronize(params, state)
  assert float(metrics.loss) < 0.3
  assert np.abs(params["w"] - TARGET).max() < 0.2


def test_state_and_parameters_lie_where_they_should():
  step, params, state, _ = make()
  assert state[0].carried.residual.shape == (6 * 20,)
  for _ in range(2):
    spec = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    assert spec[0].carried.residual == jax.P("workers")
    assert spec[1][0].trace["w"] == jax.P()
    params, state, _ = step(params, state, batch_of(0, 6))
    assert params["w"].sharding.is_fully_replicated


def test_it_compiles_once():
  compiled = []
  listen = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
  step, params, state, _ = make()
  batches = [jnp.asarray(batch_of(i, 6)) for i in range(4)]
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    counts = []
    for batch in batches:
      params, state, _ = step(params, state, batch)
      counts.append(len(compiled))
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert counts[0] >= 1
  assert counts[-1] == counts[0]


def test_the_hlo_holds_the_messages_of_the_paper():
  step, params, state, _ = make()
  text = step.lower(params, state, batch_of(0, 6)).compile().as_text()
  assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == 2 * 3
  assert text.count(" all-reduce(") == 1  # the mean loss


@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
  step, params, state, (tx, mesh) = make()
  for i in range(3):
    params, state, _ = step(params, state, batch_of(i, 6))
  with orbax.checkpoint.StandardCheckpointer() as saver:
    saver.save(tmp_path / "checkpoint", (params, state))
  like = params, js.abstract_state(tx, params, mesh)
  with orbax.checkpoint.StandardCheckpointer() as saver:
    params2, state2 = saver.restore(tmp_path / "checkpoint", like)
  for i in range(3, 6):
    params, state, _ = step(params, state, batch_of(i, 6))
    params2, state2, _ = step(params2, state2, batch_of(i, 6))
  np.testing.assert_array_equal(bits(params["w"]), bits(params2["w"]))
  np.testing.assert_array_equal(bits(state[0].carried.residual), bits(state2[0].carried.residual))


@pytest.mark.parametrize("wrap", ["masked", "multisteps", "multi_transform"])
def test_wrapped_by_optax(wrap):
  """Leaves that stay dense, several batches a step, and both kinds side by side."""
  sparse, sgd = js.spardl_transform("workers", density=0.2), optax.sgd(0.1)
  labels = {"w": "sparse", "b": "dense"}
  tx = {
    "masked": optax.chain(
      optax.masked(sparse, {"w": True, "b": False}),
      optax.masked(js.dense_transform("workers"), {"w": False, "b": True}),
      sgd,
    ),
    "multisteps": optax.chain(sparse, optax.MultiSteps(sgd, 2).gradient_transformation()),
    "multi_transform": optax.chain(
      optax.multi_transform({"sparse": sparse, "dense": js.dense_transform("workers")}, labels), sgd
    ),
  }[wrap]
  params, mesh = {"w": jnp.zeros(20), "b": jnp.zeros(())}, mesh_of(6)
  state = js.init(tx, params, mesh)
  step = js.make_train_step(lambda p, batch: loss_fn(p, batch) + (p["b"] - 1.0) ** 2, tx, mesh)
  for i in range(200):
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
      params, state, metrics = step(params, state, batch_of(i, 6))
  assert float(metrics.loss) < 0.3
  assert float(params["b"]) == pytest.approx(1, abs=0.1)


def test_a_chain_that_averages_nothing():
  tx, params = optax.sgd(0.1), {"w": jnp.zeros(20)}
  step = js.make_train_step(loss_fn, tx, mesh_of(3))
  with pytest.raises(ValueError, match="no jaxsparse transform, so nothing would average"):
    step(params, js.init(tx, params, mesh_of(3)), batch_of(0, 3))


def test_unknown_axis_names_the_choices():
  tx = js.spardl_transform("workers", density=0.5)
  for call in (
    lambda: js.init(tx, jnp.zeros(3), mesh_of(2), axis="data"),
    lambda: js.make_train_step(loss_fn, tx, mesh_of(2), axis="data"),
  ):
    with pytest.raises(ValueError, match=r"axis 'data' is not an axis of the mesh, choose from \('workers',\)"):
      call()


def test_a_batch_that_does_not_divide():
  step, params, state, _ = make()
  with pytest.raises(ValueError, match=r"batch has shape \(7, 20\): its leading axis must divide among the 6 workers"):
    step(params, state, np.zeros((7, 20), np.float32))
  with pytest.raises(ValueError, match=r"batch\['label'\] has shape \(\)"):
    step(params, state, {"label": np.float32(1)})
  assert not state[0].carried.residual.is_deleted()


def test_state_of_another_mesh_or_model():
  step, params, state, _ = make(workers=6)
  *_, other = make(workers=3)[:3]
  with pytest.raises(ValueError, match="made for 3 workers, the axis has 6"):
    step(params, other, batch_of(0, 6))
  any_size = js.make_train_step(lambda p, batch: jnp.sum(p["w"]) * jnp.mean(batch), *make()[3])
  with pytest.raises(ValueError, match=r"made for parameters\['w'\] of shape \(20,\), here it has shape \(21,\)"):
    any_size({"w": jnp.zeros(21)}, state, batch_of(0, 6))
  assert not params["w"].is_deleted()
  assert not state[0].carried.residual.is_deleted()


LOOP = """
import jax
jax.config.update("jax_num_cpu_devices", 6)
import jax.numpy as jnp, optax, jaxsparse as js
mesh = jax.make_mesh((6,), ("workers",))
tx = optax.chain(js.spardl_transform("workers", density=0.01), optax.sgd(0.1))
params = {"w": jnp.zeros((100, 100))}
state = js.init(tx, params, mesh)
step = js.make_train_step(lambda p, b: jnp.mean((b @ p["w"] - 1.0) ** 2), tx, mesh)
batch = jnp.ones((12, 100))
for _ in range(3000):
  params, state, metrics = step(params, state, batch)
print("loss", float(metrics.loss))
"""


@pytest.mark.timeout(240)
def test_a_loop_that_never_waits_does_not_dead_lock():
  """3000 steps on 6 forced devices, without looking at any of them, in a process of its own."""
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", LOOP], env=environment, cwd=root, capture_output=True, text=True, timeout=200, check=False
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.startswith("loss")
