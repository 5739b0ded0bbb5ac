"""A step of `js.make_train_step` is kept whole or undone whole; `js.atomic` alone is tested by its example."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import (
  AS_USERS,
  assert_same_bits,
  averaged,
  normals,
  quick_of,
  sim,
  start,
)

N, COMM = 40, sim(2)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_an_update_that_overflows_is_not_stored():
  """A finite gradient, an infinite update of one worker; Adam, whose second moment overflows without a sign of it."""
  for inner in (optax.sgd(1e30), optax.adam(0.1)):
    step, params, state = start(
      js.local_steps(inner, averaged(COMM), every=None), COMM, jnp.zeros(N)
    )
    grads = np.full((2, N), 1e-30, np.float32)
    params, state, _ = step(params, state, grads)
    bad = np.where(np.arange(2 * N).reshape(2, N) == N + 5, np.float32(1e25), grads)
    _, after, metrics = step(params, state, bad)
    assert metrics.skipped
    np.testing.assert_array_equal(after.moved, state.moved)
    params, after = step.synchronize(params, after)
    assert np.isfinite(params).all()
    assert np.any(params)


def test_a_synchronization_that_is_skipped_keeps_what_was_moved():
  """The sum of what two workers have moved overflows."""
  step, params, state = start(
    js.local_steps(optax.sgd(1.0), averaged(COMM), every=None), COMM, jnp.zeros(N)
  )
  params, state, _ = step(params, state, np.full((2, N), 3e38, np.float32))
  after, skipped = step.synchronize(params, state)
  np.testing.assert_array_equal(after, params)
  np.testing.assert_array_equal(skipped.moved, state.moved)
  found = js.metrics(skipped)
  assert bool(found.skipped)
  assert int(found.since_exchange) == 1


def test_synchronizing_twice_changes_nothing_the_second_time():
  """Nesterov's momentum would move the anchor again and again."""
  step, params, state = start(
    js.diloco(optax.sgd(1.0), COMM, every=4), COMM, jnp.zeros(N)
  )
  params, state, _ = step(params, state, normals(0, 2, N))
  first = step.synchronize(params, state)
  second = step.synchronize(*first)
  jax.tree.map(np.testing.assert_array_equal, second, first)
  assert np.any(first[0] != params)


def test_synchronize_says_which_extra_argument_a_transformation_needs():
  outer = optax.chain(
    js.dense_transform(COMM), optax.sgd(1.0), optax.contrib.reduce_on_plateau()
  )
  step, params, state = start(
    js.local_steps(optax.sgd(1.0), outer, every=4), COMM, jnp.zeros(N)
  )
  params, state, metrics = step(params, state, normals(0, 2, N))
  with pytest.raises(TypeError, match="step.synchronize: .* argument: 'value'"):
    step.synchronize(params, state)
  assert np.any(step.synchronize(params, state, value=metrics.loss)[0])


def test_synchronize_moves_no_leaf_without_local_steps():
  kinds = {
    "plain": optax.chain(js.make_transform("topka", COMM, k=1), optax.adamw(0.1)),
    "local": js.local_steps(optax.sgd(1.0), averaged(COMM), every=4),
  }
  first = {"a": jnp.ones(4), "b": jnp.ones(4)}
  step, params, state = start(
    optax.multi_transform(kinds, {"a": "plain", "b": "local"}), COMM, first
  )
  params, state, _ = step(params, state, normals(0, 2, 8))
  assert np.any(params["a"] != first["a"])
  np.testing.assert_array_equal(params["b"], first["b"])
  after, synchronized = step.synchronize(params, state)
  np.testing.assert_array_equal(after["a"], params["a"])
  assert np.any(after["b"] != params["b"])
  plain = lambda state: state.inner_states["plain"]
  jax.tree.map(np.testing.assert_array_equal, plain(synchronized), plain(state))


def test_a_wrapper_that_hides_extra_arguments_from_the_transform_is_refused():
  sparse = js.make_transform("topka", COMM, k=4)
  hiding = optax.GradientTransformation(
    sparse.init, lambda g, s, p=None: sparse.update(g, s, p)
  )
  tx = js.local_steps(optax.sgd(1.0), optax.chain(hiding, optax.sgd(1.0)), every=4)
  step, params, state = start(tx, COMM, jnp.zeros(N))
  with pytest.raises(
    ValueError,
    match="a wrapper .*of `outer` in js.local_steps.* does not pass on extra arguments",
  ):
    step(params, state, normals(0, 2, N))


def keeps_parameters():
  """Remembers the parameters, as L-BFGS does, and moves by a tenth."""
  init = lambda params: (
    jnp.zeros_like(params),
    jnp.zeros_like(params),
    jnp.int32(0),
    1.0,
  )
  update = lambda g, _, params: (-0.1 * g, (params, g, jnp.int32(0), 2.0))
  return optax.GradientTransformation(init, update)


OPTIMIZERS = {
  "keeps parameters": keeps_parameters,
  "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
  "dog": lambda: optax.contrib.dog(0.1),
  "prodigy": lambda: optax.contrib.prodigy(0.1),
  "schedule-free": lambda: optax.contrib.schedule_free_sgd(0.1),
  "muon": lambda: optax.contrib.muon(0.1),
  "lamb": lambda: optax.lamb(0.1),
  "injected": lambda: optax.inject_hyperparams(optax.adamw)(0.1),
  "lookbehind": lambda: optax.chain(
    optax.trace(0.9, nesterov=True), optax.ema(0.9), optax.scale(-0.1)
  ),
}


@pytest.mark.parametrize(
  "name", quick_of(OPTIMIZERS, quick=["keeps parameters", "optimistic", "dog"])
)
def test_the_step_of_any_optimizer_is_that_of_its_chain(name):
  """The program that is reordered has the bits of the chain as it is written, and a skipped step changes none."""
  optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
  tx = optax.chain(js.dense_transform(COMM), optimizer)
  step, params, state = start(
    tx, COMM, jnp.asarray(normals(0, 5, 8)), lambda p, x: jnp.sum((p - x[0]) ** 2)
  )
  plain, expected = state[1], params
  for number in range(4):
    batch = normals(number, 2, 5, 8)
    if number == 2:
      batch[1, 0, 0] = np.nan
    before = params, state[1]
    params, state, metrics = step(params, state, batch)
    assert bool(metrics.skipped) == (number == 2)
    if metrics.skipped:
      assert_same_bits((params, state[1]), before)
    else:
      mean = jnp.asarray((2 * (expected[None] - batch)).mean(0))
      updates, plain = optimizer.update(mean, plain, expected)
      expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-5)


def test_keeping_or_undoing_a_step_costs_no_memory():
  """Adam behind a dense exchange: no copy of parameters or a moment."""
  n, comm = 1_000_000, sim(1)
  tx = optax.chain(js.dense_transform(comm), optax.adam(0.1))
  step, params, state = start(
    tx, comm, jnp.zeros(n), lambda p, x: jnp.sum((p - x[0]) ** 2), donate=True
  )
  program = step.lower(params, state, np.zeros((1, n), np.float32)).compile(AS_USERS)
  assert not re.findall(rf"f32\[(1,)?{n}\]\S* copy\(", program.as_text())
  assert program.memory_analysis().temp_size_in_bytes < 2.5 * 4 * n
