"""Wrappers of optax around a transform: those that change leaves, and those that belong elsewhere."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.transform.state import ReduceState, reduce_states
from tests.cases import averaged, normals, quick_of, sim, start
from tests.compositions_test import COMPOSITIONS, SHAPES

# of dtypes, which the wrappers need
pytestmark = pytest.mark.usefixtures("standard_promotion")
WORKERS = 3
SPARSE, DENSE = (
  js.make_transform("topka", "workers", k=3),
  js.dense_transform("workers"),
)
PARAMS = {
  "b": np.float32([0.5, -1]),
  "w": (normals(0, 2, 3) + 1j * normals(1, 2, 3)).astype(np.complex64),
}
REAL = {"b": PARAMS["b"], "w": normals(2, 2, 3)}


def loss_fn(params, batch):
  """Of a complex kernel, or a real one; `batch` is [rows, 2]."""
  return jnp.mean(jnp.abs(batch @ params["w"] - jnp.float32(1) + 1j) ** 2) + jnp.mean(
    (batch - params["b"][None]) ** 2
  )


def conjugated(tx):
  conjugate = optax.stateless(lambda updates, _: jax.tree.map(jnp.conj, updates))
  return optax.chain(conjugate, optax.contrib.split_real_and_imaginary(tx))


PAIRS = {"b": PARAMS["b"], "w": (PARAMS["w"].real, PARAMS["w"].imag)}
of_pairs = lambda params: {"b": params["b"], "w": jax.lax.complex(*params["w"])}
WRAPPED = {
  # The wrapper, its parameters, the same ones as a transform alone sees them, and a
  # function back.
  "flatten": (optax.flatten, REAL, REAL, lambda params: params),
  "split": (conjugated, PARAMS, PAIRS, of_pairs),
  "split, flatten": (lambda tx: conjugated(optax.flatten(tx)), PARAMS, PAIRS, of_pairs),
}
CHAINS = {
  "plain": lambda transform: optax.chain(transform, optax.sgd(0.1, momentum=0.5)),
  "local": lambda transform: js.local_steps(
    optax.sgd(0.1), optax.chain(transform, optax.sgd(1.0)), every=4
  ),
}


def close(found, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
  )


def mean_residual(state, workers):
  return [
    np.asarray(node.carried.residual[0]).reshape(workers, -1).mean(0)
    for node in reduce_states(state)
  ]


@pytest.mark.parametrize(
  ("wrapper", "chain"),
  quick_of(itertools.product(WRAPPED, CHAINS), quick=[("split", "local")]),
)
def test_a_wrapper_that_changes_leaves_gives_what_the_transform_gives_without_it(
  wrapper, chain
):
  """Steps, an exchange, what is owed at the end, and the residuals of other workers."""
  (wrap, given, same, back), tx, where = (
    WRAPPED[wrapper],
    CHAINS[chain](SPARSE),
    sim(WORKERS),
  )
  step, params, state = start(wrap(tx), where, given, loss_fn)
  plain, params2, state2 = start(
    tx, where, same, lambda params, batch: loss_fn(back(params), batch)
  )
  for number in range(6):
    batch = normals(number, 2 * WORKERS, 2)
    params, state, metrics = step(params, state, batch)
    params2, state2, metrics2 = plain(params2, state2, batch)
  close((params, metrics.loss), (back(params2), metrics2.loss))
  close(js.flush(state, params, where)[0], back(js.flush(state2, params2, where)[0]))
  synchronized, after = step.synchronize(params, state)
  close(synchronized, back(plain.synchronize(params2, state2)[0]))
  assert np.any(synchronized["b"] != params["b"]) == (chain == "local")
  # workers of local steps go on from their mean
  with warnings.catch_warnings(action="ignore"):
    resized = js.resize(after, synchronized, sim(2))
  close(mean_residual(resized, 2), mean_residual(after, WORKERS))
  assert np.any(mean_residual(after, WORKERS)[0])


@pytest.mark.long
def test_lookahead_takes_gradients_at_the_fast_parameters():
  chain = CHAINS["plain"](SPARSE)
  tx, fast = optax.lookahead(chain, sync_period=3, slow_step_size=0.25), REAL
  step, params, state = start(
    tx, sim(WORKERS), optax.LookaheadParams.init_synced(REAL), loss_fn
  )
  plain, _, state2 = start(chain, sim(WORKERS), REAL, loss_fn)
  for number in range(4):
    batch = normals(number, 2 * WORKERS, 2)
    params, state, _ = step(params, state, batch)
    fast, state2, _ = plain(fast, state2, batch)
    if number == 2:
      fast = slow = jax.tree.map(
        lambda slow, fast: slow + 0.25 * (fast - slow), REAL, fast
      )
  close(params, optax.LookaheadParams(fast=fast, slow=slow))
  step.check(params, state)
  update, _ = js.flush(state, params, sim(WORKERS))
  close(update.fast, js.flush(state2, fast, sim(WORKERS))[0])
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(update.slow))


def test_complex_parameters_train():
  tx = conjugated(optax.chain(DENSE, optax.sgd(0.1)))
  step, params, state = start(
    tx, sim(WORKERS), PARAMS, lambda params, _: jnp.sum(jnp.abs(params["w"] - 1j) ** 2)
  )
  for _ in range(40):
    params, state, _ = step(params, state, np.zeros((WORKERS, 1), np.float32))
  step.check(params, state)
  np.testing.assert_allclose(params["w"], np.full((2, 3), 1j), atol=1e-3)


SAM = functools.partial(
  optax.contrib.sam,
  adv_optimizer=optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
)
SGD, REAL_LOSS = (
  optax.sgd(0.1),
  lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
)


@pytest.mark.parametrize(
  ("tx", "params", "message"),
  [
    (
      CHAINS["plain"](DENSE),
      PARAMS,
      r"\['w'\] has dtype complex64: put optax.contrib.split_real_and_imaginary around",
    ),
    (
      CHAINS["local"](conjugated(DENSE)),
      PARAMS,
      r"\['w'\] is complex: put .* around js.local_steps",
    ),
    (
      SAM(CHAINS["plain"](DENSE)),
      REAL,
      r"optax.contrib.sam around .* put it after, optax.chain\(js.spardl",
    ),
    (
      optax.contrib.mechanize(CHAINS["plain"](DENSE)),
      REAL,
      r"put it after, optax.chain\(js.spardl_.* optax.contrib.mech",
    ),
    (
      optax.lookahead(CHAINS["local"](DENSE), 2, 0.5),
      REAL,
      "optax.lookahead around js.local_steps: leave it out",
    ),
    (
      optax.chain(DENSE, optax.lookahead(SGD, 2, 0.5)),
      REAL,
      r"optax.lookahead goes around the chain",
    ),
    (
      optax.lookahead(CHAINS["plain"](DENSE), 2, 0.5, reset_state=True),
      REAL,
      r"lookahead\(reset_state=True\) does",
    ),
    (
      optax.chain(DENSE, optax.lbfgs()),
      REAL,
      r"a line search .* optax.lbfgs\(rate, linesearch=None\)",
    ),
    (
      optax.multi_transform(
        {"flat": optax.flatten(DENSE), "other": DENSE}, {"b": "other", "w": "flat"}
      ),
      REAL,
      r"made for parameters of shape \(6,\), here .* put it after, optax.chain\(transform, wrapper\(optimizer\)\)",
    ),
  ],
)
def test_a_wrapper_that_cannot_work_is_refused_with_the_order_that_works(
  tx, params, message
):
  params = (
    optax.LookaheadParams.init_synced(params) if "lookahead" in message else params
  )
  with pytest.raises((ValueError, TypeError), match=message):  # noqa: PT012 some at once, some in a step
    state = js.init(tx, params, sim(WORKERS))
    js.make_train_step(REAL_LOSS, tx, sim(WORKERS))(
      params, state, normals(0, WORKERS, 2)
    )


def test_convert_keeps_wrappers():
  """A flat residual belongs to no leaf; another collective under the same wrapper takes it over."""
  tx = optax.chain(SPARSE, SGD)
  step, params, state = start(optax.flatten(tx), sim(WORKERS), REAL, REAL_LOSS)
  params, state, _ = step(params, state, normals(0, WORKERS, 2))
  with pytest.raises(
    ValueError,
    match=r"parameters and the new one \['b'\], \['w'\]: js.convert keeps the w",
  ):
    js.convert(state, tx, params, sim(WORKERS))
  other = optax.flatten(optax.chain(js.make_transform("randomk", "workers", k=2), SGD))
  close(
    mean_residual(js.convert(state, other, params, sim(WORKERS)), WORKERS),
    mean_residual(state, WORKERS),
  )


@pytest.mark.parametrize("inner", ["after", "local"])
def test_what_takes_no_extra_arguments_is_given_no_value(inner):
  """As `optax.contrib.sam`; what the user gives is given to all."""
  tx = (
    optax.chain(DENSE, SAM(SGD))
    if inner == "after"
    else js.local_steps(SAM(SGD), averaged(), every=2)
  )
  step, params, state = start(tx, sim(WORKERS), REAL, REAL_LOSS)
  after, state, _ = step(params, state, normals(0, WORKERS, 2))
  assert np.any(after["w"] != params["w"]) == (inner == "after")
  with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
    step(params, state, normals(0, WORKERS, 2), value=jnp.float32(0))


@pytest.mark.parametrize("rows", [False, True])
def test_multi_steps_around_stacked_is_refused(rows):
  tx = js.stacked(CHAINS["plain"](DENSE), sim(WORKERS))
  params = (
    jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), REAL)
    if rows
    else REAL
  )
  grads, multi = (
    jax.tree.map(lambda x: jnp.ones((WORKERS, *x.shape)), REAL),
    optax.MultiSteps(tx, 2),
  )
  with pytest.raises(
    ValueError,
    match="MultiSteps goes into the chain, after the transform, not around js.stacked",
  ):
    multi.update(grads, multi.init(params), params)


@pytest.mark.long
def test_stacked_of_a_wrapped_chain():
  """Replicas in rows, of complex parameters that are one vector inside."""
  tx, where = conjugated(optax.flatten(CHAINS["local"](SPARSE))), sim(WORKERS)
  step, params, state = start(tx, where, PARAMS, loss_fn)
  stacked = js.stacked(tx, where)
  rows, batch = (
    jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), PARAMS),
    normals(0, 2 * WORKERS, 2),
  )
  _, grads = stacked.value_and_grad(loss_fn)(rows, state, batch)
  updates, after = stacked.update(grads, state, rows)
  assert not np.any(updates["w"])
  updates, _ = stacked.update(grads, after, rows, synchronize=True)
  _, state, _ = step(params, state, batch)
  expected, _ = step.synchronize(params, state)
  close(jax.tree.map(lambda x, u: (x + u)[1], rows, updates), expected)


MAPPED = ["special", "multi_transform", "local 4", "local averaged", "streaming"]


@pytest.mark.parametrize("name", [*MAPPED, "stacked"])
def test_tree_map_params_maps_the_copies_of_parameters_and_keeps_the_rest(name):
  """The state of a transform, which has none, is one leaf for it."""
  params, where = {leaf: jnp.ones(shape) for leaf, shape in SHAPES.items()}, sim(2)
  tx = COMPOSITIONS["adamw" if name == "stacked" else name](SPARSE)
  tx = js.stacked(tx, where) if name == "stacked" else tx
  state = tx.init(params) if name == "stacked" else js.init(tx, params, where)
  found = optax.tree_map_params(
    tx, lambda _: "copy", state, transform_non_params=lambda x: x
  )
  is_copy = lambda x: any(x.shape[-len(shape) :] == shape for shape in SHAPES.values())
  one = lambda node: isinstance(node, ReduceState)
  expected = jax.tree.map(
    lambda x: "copy" if not one(x) and is_copy(x) else x, state, is_leaf=one
  )
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert all(
    a is b
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  )
  assert ("copy" in jax.tree.leaves(found)) == (name != "special")
