"""Programs of forced CPU devices start when those before have finished; else XLA aborts in the end."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.train.engine import engine_of
from tests.cases import mesh_of

SPARSE = optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1))


def _slow(x):
  wait = lambda x: (time.sleep(0.3), x)[1]
  return jax.lax.stop_gradient(
    jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
  )


def _ready(tree):
  return all(x.is_ready() for x in jax.tree.leaves(tree))


def test_a_program_starts_when_the_one_before_has_finished():
  engine, same = engine_of(mesh_of(3), "workers"), jax.sharding.PartitionSpec()
  x, slow = engine.place(jnp.ones(3), same), engine.jit(_slow, (same,), same)
  jax.block_until_ready(slow(x))  # compiled
  before = dispatch(slow, x, follow=lambda result: result)
  assert not _ready(before)

  def next_one(x):
    assert _ready((before, x))
    return slow(x)

  assert _ready(dispatch(next_one, x))
  pending = slow(x)  # of a program that the library does not know
  assert not _ready(pending)
  assert _ready(dispatch(next_one, pending))


@pytest.mark.long
def test_what_runs_between_steps_has_finished_when_it_returns():
  tx = js.local_steps(optax.sgd(0.1), SPARSE, every=4)
  mesh, params = mesh_of(3), jnp.zeros(20)
  step = js.make_train_step(
    lambda p, x: jnp.mean((p[None] - x) ** 2) + 0 * _slow(x[0, 0]), tx, mesh
  )
  state = js.init(tx, params, mesh)
  read, flush = (
    lambda _, state: js.metrics(state),
    lambda params, state: js.flush(state, params, mesh),
  )
  for use in (read, step.synchronize, flush):
    params, state, metrics = step(params, state, np.ones((3, 20), np.float32))
    assert not _ready(metrics.loss)
    found = use(params, state)
    assert _ready((metrics.loss, found))


FAILING = """
import jax, jax.numpy as jnp, numpy as np, optax
import jaxsparse as js

jax.config.update("jax_num_cpu_devices", 3)
broken = [True]


def fail(x):
  if broken:
    raise ValueError("a bad batch")
  return x


def loss(params, batch):
  checked = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), batch[0, 0])
  return jnp.mean((params[None] - batch) ** 2) + 0 * jax.lax.stop_gradient(checked)


mesh, params, batch = jax.make_mesh((3,), ("workers",)), jnp.zeros(20), np.ones((3, 20), np.float32)
tx = optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1))
step, state = js.make_train_step(loss, tx, mesh, donate=False), js.init(tx, params, mesh)
try:
  jax.block_until_ready(step(params, state, batch))
except jax.errors.JaxRuntimeError as error:
  assert "a bad batch" in str(error)
else:
  raise AssertionError
broken.clear()
assert not js.metrics(js.init(tx, params, mesh)).skipped
moved, state, _ = step(params, state, batch)
assert np.any(moved) and not js.metrics(state).skipped
print("goes on")
"""


@pytest.mark.long
def test_a_step_that_fails_fails_no_other_one():
  """A callback of a loss that raises. In a process of its own: JAX reports the error at the end again."""
  done = subprocess.run(
    [sys.executable, "-c", FAILING],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert "goes on" in done.stdout, done.stderr[-2000:]
