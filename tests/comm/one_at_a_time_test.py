"""Programs of forced CPU devices start when those before have finished; else XLA aborts in the end."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from jaxsparse.comm.one_at_a_time import dispatch
from jaxsparse.train.engine import engine_of
from tests.cases import mesh_of

SPARSE = optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1))


def _slow(x):
  wait = lambda x: (time.sleep(0.3), x)[1]
  return jax.lax.stop_gradient(jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


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


def test_what_runs_between_steps_has_finished_when_it_returns():
  tx = js.local_steps(optax.sgd(0.1), SPARSE, every=4)
  mesh, params = mesh_of(3), jnp.zeros(20)
  step = js.make_train_step(lambda p, x: jnp.mean((p[None] - x) ** 2) + 0 * _slow(x[0, 0]), tx, mesh)
  state = js.init(tx, params, mesh)
  read, flush = lambda _, state: js.metrics(state), lambda params, state: js.flush(state, params, mesh)
  for use in (read, step.synchronize, flush):
    params, state, metrics = step(params, state, np.ones((3, 20), np.float32))
    assert not _ready(metrics.loss)
    found = use(params, state)
    assert _ready((metrics.loss, found))
