"""Updates of workers that are lengthened by what their mean loses: against numpy, with its laws, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.comm import all_reduce_cost
from jaxsparse.transform.state import restored_states
from tests.cases import (
  CONSERVING,
  REPLICATING,
  assert_same_bits,
  averaged,
  each_case,
  flat,
  mesh_of,
  normals,
  quadratic,
  quick_of,
  row,
  sim,
  start,
  update_program,
)

PARAMS = {2: jnp.zeros(6), 10: jnp.zeros((4, 5)), 11: jnp.zeros(9)}  # "[10]" < "[2]"
SIZES, N, K = (6, 20, 9), 35, 5
ENDS = np.cumsum(SIZES)[:-1]


class Oracle:
  """`js.norm_restored` in numpy, of the k largest entries of each worker, or of all."""

  def __init__(self, workers, k=N):
    self.residual, self.k, self.most = np.zeros((workers, N)), k, np.sqrt(workers)

  def exchange(self, updates):
    """The update f64[n] of updates f64[P, n]."""
    home = self.residual + updates
    largest = np.argsort(-np.abs(home), axis=1, kind="stable")[:, : self.k]
    sent = np.zeros_like(home)
    np.put_along_axis(sent, largest, np.take_along_axis(home, largest, 1), 1)
    mean = sent.mean(0)
    self.residual = home - sent
    by_leaf = lambda x: np.array([part.sum() for part in np.split(x, ENDS, axis=1)])
    shared, own = by_leaf(updates * mean), by_leaf(updates * sent)
    self.agreement = shared.sum() / own.sum()
    ratio = np.clip(shared / np.where(own > 0, own, 1), self.most**-2, 1)
    self.factors = np.where(own > 0, ratio**-0.5, 1)
    self.sends = by_leaf(sent**2) > 0  # elsewhere both sums are rounding errors
    return mean * np.repeat(self.factors, SIZES)


def restored(axis, k=N):
  return js.norm_restored(js.make_transform("topka", axis, k=k))


def updates_of(seed, workers):
  """Updates f32[P, n] that agree in part, less in each leaf than in the one before."""
  noise = np.repeat([0.2, 1.0, 5.0], SIZES).astype(np.float32)
  return normals(0, 1, N) + noise * normals(seed, workers, N)


def factors_of(state, workers):
  (node,) = restored_states(state)
  return np.asarray(node.factors(workers))


@pytest.mark.parametrize(
  ("where", "workers", "k"),
  [
    row(mesh_of(2), 2, N, quick=True),
    row(sim(3), 3, K, quick=True),
    row(mesh_of(4), 4, K, quick=True),
    row(mesh_of(6), 6, K),
    row(sim(8), 8, N),
    row(mesh_of(8), 8, K),
  ],
)
def test_against_numpy(where, workers, k):
  """The update, the factors, the agreement, and Law C of the total before it is lengthened."""
  axis = where if isinstance(where, js.SimComm) else "workers"
  oracle = Oracle(workers, k)
  tx = optax.chain(restored(axis, k), optax.sgd(1.0))
  step, params, state = start(tx, where, PARAMS)
  for number in range(1, 6):
    before = oracle.residual.sum(0)
    batch = updates_of(number, workers)
    after, state, _ = step(params, state, batch)
    update = oracle.exchange(batch)
    found = flat(params) - flat(after)
    params = after
    np.testing.assert_allclose(found, update, atol=2e-4)
    factors = np.where(oracle.sends, factors_of(state, workers), 1)
    np.testing.assert_allclose(factors, oracle.factors, rtol=1e-4)
    residual = np.asarray(jax.tree.leaves(state[0].exchange.carried.residual)[0])
    total = workers * found / np.repeat(factors, SIZES)
    np.testing.assert_allclose(
      total + residual.reshape(workers, N).sum(0), batch.sum(0) + before, atol=1e-3
    )
    found = js.metrics(state).agreement
    np.testing.assert_allclose(found, oracle.agreement, rtol=1e-4)
  if k == N:
    assert 1 < oracle.factors[0] < oracle.factors[1] < oracle.factors[2]


@pytest.mark.parametrize(
  ("every", "applied"), quick_of([(1, True), (3, True), (3, False)], quick=[(3, True)])
)
def test_in_local_steps(every, applied):
  """The mean of what was moved in H steps is lengthened; residuals, applied or not, are those of the transform."""
  workers, rate = 3, 0.25
  oracle = Oracle(workers, K)
  outer = optax.chain(restored(sim(workers), K), optax.sgd(1.0))
  tx = js.local_steps(optax.sgd(rate), outer, every=every, apply_residual=applied)
  step, params, state = start(tx, sim(workers), PARAMS, quadratic)
  anchor, own = np.zeros(N), np.zeros((workers, N))
  for number in range(1, 10):
    batch = updates_of(number, workers)
    params, state, _ = step(params, state, batch)
    start_of_period = anchor - (oracle.residual if applied else 0)
    own = own - rate * (own - batch)
    if number % every == 0:
      update = oracle.exchange(start_of_period - own)
      anchor = anchor - update
      own = anchor - (oracle.residual if applied else np.zeros_like(own))
    np.testing.assert_allclose(flat(params), anchor, atol=2e-5)


def test_the_agreement_of_an_exchange_within_the_inner_optimizer():
  """The state of the inner optimizer has a row for each worker, here of one leaf."""
  inner = optax.chain(js.norm_restored(js.dense_transform("workers")), optax.sgd(0.1))
  tx = js.local_steps(inner, averaged(), every=3)
  step, params, state = start(tx, mesh_of(2), jnp.zeros(2))
  _, state, _ = step(params, state, np.float32([[1, 1], [1, -1]]))
  of_worker = jax.shard_map(
    lambda state: js.metrics(state, "workers"),
    mesh=mesh_of(2),
    in_specs=(js.specs(state, "workers"),),
    out_specs=P(),
  )
  for found in (js.metrics(state), of_worker(state)):
    assert found.agreement == 0.5


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_mean_of_muons_updates_is_as_long_as_one_of_them(scale):
  """Signs of matrices stand for them: P independent ones have a mean of 1/√P of their length."""
  workers, shape = 8, (32, 32)
  update = jax.vmap(
    js.norm_restored(js.dense_transform(sim(workers))).update, axis_name="workers"
  )
  init = js.norm_restored(js.dense_transform(sim(workers))).init
  state = jax.vmap(lambda _: init(jnp.zeros(shape)), axis_name="workers")(
    jnp.zeros(workers)
  )
  for number in range(4):
    own = scale * np.sign(normals(number, workers, *shape))
    mean, state = update(jnp.asarray(own), state)
  length = np.linalg.norm(mean[0]) / np.linalg.norm(own[0])
  assert length == pytest.approx(1.0, abs=0.05)


@each_case(
  [case for case in CONSERVING if case in REPLICATING], ["dense", "onebit", "spardl"]
)
def test_equal_workers_keep_their_length(case):
  """Whatever a collective rounds or leaves out: both products have it."""
  (workers, *_) = case.workers([2, 3, 4, 5, 6, 8])
  tx = js.norm_restored(js.make_transform(case.name, "workers", **case.config(k=9)))
  state = js.init(tx, PARAMS, mesh_of(workers))
  program = update_program(tx, state, workers)
  for number in range(3):
    one = normals(number, N) + 2 * normals(9, N)
    leaves = [
      jnp.broadcast_to(part.reshape(leaf.shape), (workers, *leaf.shape))
      for part, leaf in zip(np.split(one, ENDS), PARAMS.values(), strict=True)
    ]
    mean, state = program(dict(zip(PARAMS, leaves, strict=True)), state)
    lossy = case.make(density=0.5).traits.scaled or "bfloat16" in str(case)
    # The factor of a leaf of which nothing is sent is one of a mean of 0.
    is_sent = [bool(jnp.any(mean[name] != 0)) for name in PARAMS]
    factors = np.asarray(factors_of(state, workers))[is_sent]
    np.testing.assert_allclose(factors, 1.0, atol=0.02 if lossy else 1e-5)


def test_one_worker_has_the_bits_of_the_plain_transform():
  results = []
  for wrap in (js.norm_restored, lambda transform: transform):
    tx = wrap(js.onebit_transform("workers"))
    state = js.init(tx, PARAMS, mesh_of(1))
    program = update_program(tx, state, 1)
    for number in range(3):
      grads = jax.tree.map(lambda p, n=number: normals(n, 1, *p.shape), PARAMS)
      updates, state = program(grads, state)
    results.append((updates, state))
  (updates, state), plain = results
  assert_same_bits((updates, state.exchange), plain)


@pytest.mark.parametrize(
  ("own", "factors"),
  [
    ([[1, 1], [-1, -1]], 2**0.5),  # nothing in common: the limit
    ([[0, 0], [0, 0]], 1.0),
    ([[1e-30, 0], [0, 1e-30]], 1.0),  # squares of 0 in float32
    ([[1e25, 0], [0, 1e25]], 1.0),  # and of Inf
    ([[3, 4], [3, 4]], 1.0),
  ],
)
def test_updates_without_an_agreement(own, factors):
  tx = js.norm_restored(js.dense_transform("workers"))
  state = js.init(tx, jnp.zeros(2), mesh_of(2))
  program = update_program(tx, state, 2)
  own = np.array(own, np.float32)
  updates, state = program(own, state)
  np.testing.assert_allclose(
    updates, [np.float32(factors) * own.mean(0)] * 2, rtol=1e-6
  )
  np.testing.assert_allclose(factors_of(state, 2), [factors], rtol=1e-6)


class Weighted(js.SimComm):
  """A comm whose workers give updates times their weight, so that totals are means, as in rounds."""

  divisor = 1


def test_updates_times_their_weight():
  own, results = updates_of(1, 4), []
  for kind, weight in ((js.SimComm, 1.0), (Weighted, 0.25)):
    tx = js.norm_restored(js.dense_transform(kind("workers", members=4)))
    state = jax.vmap(tx.init, axis_name="workers")(own)
    update, state = jax.vmap(tx.update, axis_name="workers")(weight * own, state)
    results.append((update[0], state.products[0, :, 0] / state.products[0, :, 1]))
  jax.tree.map(
    lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6), *results
  )
  assert results[0][1] < 0.9


@pytest.mark.parametrize("every", [1, 2])
def test_a_skipped_step_keeps_the_factors(every):
  outer = optax.chain(restored("workers", K), optax.sgd(1.0))
  tx = js.local_steps(optax.sgd(0.1), outer, every=every, apply_residual=True)
  step, params, state = start(tx, mesh_of(2), PARAMS, quadratic)
  for number in range(5):
    params, state, _ = step(params, state, updates_of(number, 2))
  assert (factors_of(state, 2) > 1).any()
  bad = updates_of(9, 2)
  bad[1, 3] = np.nan
  after, kept, metrics = step(params, state, bad)
  assert bool(metrics.skipped)
  assert_same_bits(
    (after, kept.outer[0][0].products), (params, state.outer[0][0].products)
  )
  plain = lambda state: state.outer[0][0].exchange.carried
  assert_same_bits(plain(kept), plain(state))


def test_updates_of_16_bits_are_multiplied_in_float32():
  """And keep their dtype; the residuals have what the mean's rounds off, not the product's."""
  workers, dtype = 2, jnp.bfloat16
  params = jnp.zeros(N, dtype)
  plain = js.make_transform("topka", "workers", k=K)
  states = [
    js.init(tx, params, mesh_of(workers)) for tx in (restored("workers", K), plain)
  ]
  programs = [
    update_program(tx, state, workers)
    for tx, state in zip((restored("workers", K), plain), states, strict=True)
  ]
  for number in range(3):
    own = jnp.asarray(updates_of(number, workers), dtype)
    (updates, state), (mean, expected) = (
      program(own, state) for program, state in zip(programs, states, strict=True)
    )
    states = [state, expected]
    assert_same_bits(state.exchange.carried, expected.carried)
    assert updates.dtype == dtype
    factor = factors_of(state, workers)[0]
    product = (np.asarray(mean, np.float32) * factor).astype(dtype)
    np.testing.assert_array_equal(updates, product)
  assert factor > 1.01


@pytest.mark.parametrize("workers", quick_of([2, 3, 8], quick=[3]))
def test_two_words_a_leaf_are_counted(workers):
  plain, tx = (
    wrap(js.onebit_transform("workers")) for wrap in (lambda t: t, js.norm_restored)
  )
  cost = js.costs.count_update(tx, PARAMS, workers=workers)
  before = js.costs.count_update(plain, PARAMS, workers=workers)
  more = all_reduce_cost(2 * len(SIZES), workers)
  assert cost.words - before.words == more.words
  assert cost.messages - before.messages == more.messages
  sent = []
  for transform in (tx, plain):
    state = js.init(transform, PARAMS, mesh_of(workers))
    grads = jax.tree.map(lambda p: normals(0, workers, *p.shape), PARAMS)
    program = update_program(transform, state, workers)
    _, state = program(grads, program(grads, state)[1])
    found = js.metrics(state)
    sent.append(np.array([found.words_sent, found.words_used, found.total_words]))
  np.testing.assert_array_equal(sent[0] - sent[1], more.words * np.array([1, 1, 2]))


@pytest.mark.long
def test_goes_on_with_other_workers_and_another_collective():
  chain = lambda transform: js.local_steps(
    optax.sgd(0.1),
    optax.chain(js.norm_restored(transform), optax.sgd(1.0)),
    every=2,
    apply_residual=True,
  )
  tx = chain(js.make_transform("topka", "workers", k=K))
  step, params, state = start(tx, mesh_of(4), PARAMS, quadratic)
  for number in range(5):
    params, state, _ = step(params, state, updates_of(number, 4))
  with pytest.warns(UserWarning, match="go on from the mean"):
    fewer = js.resize(state, params, mesh_of(2))
  assert (factors_of(fewer, 2) <= 2**0.5 + 1e-6).all()
  signs = chain(js.onebit_transform("workers"))
  other = js.convert(fewer, signs, params, mesh_of(2))
  step, _, _ = start(signs, mesh_of(2), PARAMS, quadratic)
  for number in range(3):
    params, other, _ = step(params, other, updates_of(number, 2))
  update, _ = js.flush(other, params, mesh_of(2))
  assert np.isfinite(flat(update)).all()


def test_bad_input():
  with pytest.raises(TypeError, match="norm_restored: a .* is no jaxsparse transform"):
    js.norm_restored(averaged())
  with pytest.raises(ValueError, match=r"is a js\.norm_restored already, give the tr"):
    js.init(js.norm_restored(restored("workers")), PARAMS, mesh_of(2))
