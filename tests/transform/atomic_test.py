"""A step is kept whole or undone whole, in a `shard_map` of one's own and in the step of `js.make_train_step`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import _compat
from jaxsparse.transform.atomic import atomic, commit_early
from jaxsparse.transform.state import ReduceState
from tests.cases import AS_USERS, averaged, bits, mesh_of, normals, quick_of

N = 40


@pytest.fixture(autouse=True)
def standard_promotion():
  """Adam needs it."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def sim(workers=2):
  return js.SimComm("workers", members=workers)


def linear(params, batch):
  return jnp.vdot(params, batch[0])


def updater(tx, state):
  """The update of all workers: gradients [P, N], state and parameters to updates and the next state."""
  spec = js.specs(state, "workers")
  worker = lambda grads, state, params: tx.update(grads[0], state, params)
  return jax.jit(_compat.shard_map(worker, mesh_of(2), (P("workers"), spec, P()), (P(), spec)))


def test_momentum_decay_and_schedule_of_a_skipped_step_in_a_step_of_ones_own():
  """A plain chain moves on with zeros, as optax does; under `js.atomic` nothing has happened."""
  rate = optax.linear_schedule(1.0, 0.0, 10)
  plain = optax.chain(js.topka_transform("workers", k=4), optax.adamw(rate, weight_decay=0.1))
  params, clean, bad = jnp.ones(N), normals(0, 2, N), normals(1, 2, N)
  bad[1, 3] = np.inf
  moved = {}
  for name, tx in (("plain", plain), ("atomic", js.atomic(plain))):
    state = js.init(tx, params, mesh_of(2))
    update = updater(tx, state)
    _, before = update(clean, state, params)
    updates, after = update(bad, before, params)
    moved[name] = np.any(np.asarray(updates))
    same = lambda a, b: np.testing.assert_array_equal(bits(a), bits(b))
    if name == "atomic":
      jax.tree.map(same, (after[0].carried, after[1:]), (before[0].carried, before[1:]))
    assert int(js.metrics(after).skipped_steps) == 1
  assert moved == {"plain": True, "atomic": False}


def test_several_transforms_skip_together():
  labels = {"a": "sparse", "b": "dense"}
  kinds = {"sparse": js.topka_transform(sim(), k=4), "dense": js.dense_transform(sim())}
  tx = optax.chain(optax.multi_transform(kinds, labels), optax.sgd(1.0, momentum=0.9))
  params = {"a": jnp.zeros(N), "b": jnp.zeros(3)}
  step = js.make_train_step(
    lambda p, x: jnp.vdot(p["a"], x[0, :N]) + jnp.vdot(p["b"], x[0, N:]), tx, sim(), donate=False
  )
  params, state, _ = step(params, js.init(tx, params, sim()), normals(0, 2, N + 3))
  bad = normals(1, 2, N + 3)
  bad[1, -1] = np.nan
  after, skipped, metrics = step(params, state, bad)
  assert metrics.skipped
  jax.tree.map(np.testing.assert_array_equal, after, params)
  carried = lambda state: [node.carried for node in jax.tree.leaves(state, is_leaf=is_node) if is_node(node)]
  is_node = lambda node: isinstance(node, ReduceState)
  jax.tree.map(np.testing.assert_array_equal, (carried(skipped), skipped[1]), (carried(state), state[1]))
  found = js.metrics(skipped)
  assert [bool(part.skipped) for part in dict(found.parts).values()] == [True, True]
  assert [int(part.skipped_steps) for part in dict(found.parts).values()] == [1, 1]


# Local steps.


def test_an_update_that_overflows_is_not_stored():
  """A finite gradient, an infinite update of one worker; Adam, whose second moment overflows without a sign of it."""
  for inner, huge in ((optax.sgd(1e30), 1e25), (optax.adam(0.1), 1e25)):
    tx = js.local_steps(inner, averaged(sim()), every=None)
    step = js.make_train_step(linear, tx, sim(), donate=False)
    params = jnp.zeros(N)
    state = js.init(tx, params, sim())
    grads = np.full((2, N), 1e-30, np.float32)
    params, state, _ = step(params, state, grads)
    bad = np.where(np.arange(2 * N).reshape(2, N) == N + 5, np.float32(huge), grads)
    _, after, metrics = step(params, state, bad)
    assert metrics.skipped
    np.testing.assert_array_equal(after.moved, state.moved)
    params, after = step.synchronize(params, after)
    assert np.isfinite(params).all()
    assert np.any(params)


def test_a_synchronization_that_is_skipped_keeps_what_was_moved():
  """The sum of what two workers have moved overflows."""
  tx = js.local_steps(optax.sgd(1.0), averaged(sim()), every=None)
  step = js.make_train_step(linear, tx, sim(), donate=False)
  params = jnp.zeros(N)
  params, state, _ = step(params, js.init(tx, params, sim()), np.full((2, N), 3e38, np.float32))
  after, skipped = step.synchronize(params, state)
  np.testing.assert_array_equal(after, params)
  np.testing.assert_array_equal(skipped.moved, state.moved)
  found = js.metrics(skipped)
  assert bool(found.skipped)
  assert int(found.since_exchange) == 1


def test_synchronizing_twice_changes_nothing_the_second_time():
  """Nesterov's momentum would move the anchor again and again."""
  step = js.make_train_step(linear, js.diloco(optax.sgd(1.0), sim(), every=4), sim(), donate=False)
  params = jnp.zeros(N)
  params, state, _ = step(params, js.init(js.diloco(optax.sgd(1.0), sim(), every=4), params, sim()), normals(0, 2, N))
  first = step.synchronize(params, state)
  second = step.synchronize(*first)
  jax.tree.map(np.testing.assert_array_equal, second, first)
  assert np.any(first[0] != params)


def test_synchronize_says_which_extra_argument_a_transformation_needs():
  outer = optax.chain(js.dense_transform(sim()), optax.sgd(1.0), optax.contrib.reduce_on_plateau())
  tx = js.local_steps(optax.sgd(1.0), outer, every=4)
  step = js.make_train_step(linear, tx, sim(), donate=False)
  params, state, metrics = step(jnp.zeros(N), js.init(tx, jnp.zeros(N), sim()), normals(0, 2, N))
  with pytest.raises(TypeError, match="step.synchronize: .* argument: 'value'"):
    step.synchronize(params, state)
  assert np.any(step.synchronize(params, state, value=metrics.loss)[0])


def test_synchronize_moves_no_leaf_without_local_steps():
  kinds = {"plain": optax.chain(js.topka_transform(sim(), k=1), optax.adamw(0.1)), "local": None}
  kinds["local"] = js.local_steps(optax.sgd(1.0), averaged(sim()), every=4)
  tx = optax.multi_transform(kinds, {"a": "plain", "b": "local"})
  params = {"a": jnp.ones(4), "b": jnp.ones(4)}
  step = js.make_train_step(lambda p, x: jnp.vdot(p["a"], x[0]) + jnp.vdot(p["b"], x[0]), tx, sim(), donate=False)
  params, state, _ = step(params, js.init(tx, params, sim()), normals(0, 2, 4))
  after, synchronized = step.synchronize(params, state)
  np.testing.assert_array_equal(after["a"], params["a"])
  assert np.any(after["b"] != params["b"])
  plain = lambda state: state.inner_states["plain"]
  jax.tree.map(np.testing.assert_array_equal, plain(synchronized), plain(state))


def test_a_wrapper_that_hides_extra_arguments_from_the_transform_is_refused():
  sparse = js.topka_transform(sim(), k=4)
  hiding = optax.GradientTransformation(sparse.init, lambda g, s, p=None: sparse.update(g, s, p))
  tx = js.local_steps(optax.sgd(1.0), optax.chain(hiding, optax.sgd(1.0)), every=4)
  step = js.make_train_step(linear, tx, sim())
  with pytest.raises(ValueError, match="local_steps: a wrapper .* does not pass on extra arguments"):
    step(jnp.zeros(N), js.init(tx, jnp.zeros(N), sim()), normals(0, 2, N))


# The program.


def keeps_parameters():
  """Remembers the parameters, as L-BFGS does, and moves by a tenth."""
  init = lambda params: (jnp.zeros_like(params), jnp.zeros_like(params), jnp.int32(0), 1.0)
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
  "lookbehind": lambda: optax.chain(optax.trace(0.9, nesterov=True), optax.ema(0.9), optax.scale(-0.1)),
}


@pytest.mark.parametrize("name", quick_of(OPTIMIZERS, quick=["keeps parameters", "optimistic", "dog"]))
def test_the_step_of_any_optimizer_is_that_of_its_chain(name):
  """The program that is reordered has the bits of the chain as it is written, and a skipped step changes none."""
  tx = optax.chain(js.dense_transform(sim()), OPTIMIZERS[name]())
  step = js.make_train_step(lambda p, x: jnp.sum((p - x[0]) ** 2), tx, sim(), donate=False)
  params = jnp.asarray(normals(0, 5, 8))
  state = plain = js.init(tx, params, sim())
  expected = params
  for number in range(4):
    batch = normals(number, 2, 5, 8)
    if number == 2:
      batch[1, 0, 0] = np.nan
    before = params, state[1]
    params, state, metrics = step(params, state, batch)
    assert bool(metrics.skipped) == (number == 2)
    if metrics.skipped:
      jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), (params, state[1]), before)
    else:
      mean = (2 * (expected[None] - batch)).mean(0)
      updates, plain = optax.with_extra_args_support(OPTIMIZERS[name]()).update(
        jnp.asarray(mean), plain if number else plain[1], expected
      )
      expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-5)


def test_choosing_early_changes_no_bit_and_costs_no_memory():
  """Adam behind a dense exchange: no copy of a moment, and the bits of the program as it is written."""
  n, comm = 1_000_000, sim(1)
  tx = atomic(optax.chain(js.dense_transform(comm), optax.adam(0.1)))
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)

  def written(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def reordered(*arguments):
    closed, out = jax.make_jaxpr(written, return_shape=True)(*arguments)
    leaves = jax.extend.core.jaxpr_as_fun(commit_early(closed))(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)

  over = lambda f: jax.jit(jax.vmap(f, axis_name="workers", axis_size=1), donate_argnums=(0, 1))
  rows = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
  state = jax.vmap(lambda _: tx.init(jnp.zeros(n)), axis_name="workers")(jnp.zeros(1))
  arguments = shapes((rows(jnp.zeros(n)), state, rows(jnp.zeros(n))))
  programs = [over(f).lower(*arguments).compile(AS_USERS) for f in (written, reordered)]
  copies = [len(re.findall(rf"f32\[1,{n}\]\S* copy\(", program.as_text())) for program in programs]
  temps = [program.memory_analysis().temp_size_in_bytes / (4 * n) for program in programs]
  assert copies[1] == 0
  assert temps[1] < temps[0] - 0.9
  found = []
  for program in programs:
    params, state = rows(jnp.ones(n)), jax.vmap(lambda _: tx.init(jnp.zeros(n)), axis_name="workers")(jnp.zeros(1))
    for number in range(3):
      grads = normals(number, 1, n)
      grads[0, 7] = np.nan if number == 1 else 1.0
      params, state = program(params, state, jnp.asarray(grads))
    found.append((params, state[1]))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), *found)
