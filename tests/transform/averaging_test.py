"""Momentum that workers average now and then: against numpy, with what local steps have beside it, and bad input."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import averaged, flat, mesh_of, normals, quadratic, row, sim
from tests.cases import start as start_with

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"a": jnp.zeros(6), "b": jnp.zeros((4, 5)), "c": jnp.zeros(9)}
N, WORKERS = 35, 3


def start(tx, where, params=PARAMS):
  return start_with(tx, where, params, quadratic)


def moments(state, name="trace"):
  """[P, n], the moments of each worker."""
  (found,) = (value for path, value in optax.tree.get_all_with_path(state, name))
  return np.concatenate(
    [np.asarray(leaf).reshape(WORKERS, -1) for leaf in jax.tree.leaves(found)], axis=1
  )


@pytest.mark.parametrize(
  ("where", "every", "exchange"),
  [
    row(sim(WORKERS), 3, 2),
    row(mesh_of(WORKERS), 3, 2),
    row(mesh_of(WORKERS), 2, 1, quick=True),
    row(sim(WORKERS), 1, 4),
  ],
)
def test_momentum_in_numpy(where, every, exchange):
  """Momentum of each worker, its mean every K steps; the mean of the parameters every H."""
  axis = where if isinstance(where, js.SimComm) else "workers"
  inner = js.average_momentum(
    optax.sgd(0.1, momentum=0.9), axis, every=every, dtype="float32"
  )
  step, params, state = start(
    js.local_steps(inner, averaged(axis), every=exchange), where
  )
  own, momentum = np.zeros((WORKERS, N)), np.zeros((WORKERS, N))
  for number in range(1, 8):
    batch = normals(number, WORKERS, N)
    params, state, _ = step(params, state, batch)
    momentum = 0.9 * momentum + own - batch
    own -= 0.1 * momentum
    if number % every == 0:
      momentum[:] = momentum.mean(0)
    if number % exchange == 0:
      own[:] = own.mean(0)
      np.testing.assert_allclose(flat(params), own[0], atol=1e-5)
    np.testing.assert_allclose(moments(state), momentum, atol=1e-5)
    words = js.metrics(state).words_sent
    assert (words > 0) == (number % every == 0 or number % exchange == 0)


def muon_with_signs(where, every=2, exchange=1, **options):
  muon = optax.contrib.muon(
    0.1, adam_learning_rate=0.01, mu_dtype=options.pop("mu_dtype", None)
  )
  inner = js.average_momentum(muon, where, every=every)
  return js.local_steps(
    inner,
    optax.chain(js.onebit_transform(where), optax.sgd(1.0)),
    every=exchange,
    **options,
  )


def momentum_of(state):
  """The momentum of Muon and of its Adam, leaves [P, …]."""
  return [
    leaf
    for _, tree in optax.tree.get_all_with_path(state, "mu")
    for leaf in jax.tree.leaves(tree)
  ]


def spread(state):
  return max(float(jnp.abs(leaf - leaf[:1]).max()) for leaf in momentum_of(state))


@pytest.mark.parametrize(
  "options",
  [
    row({"apply_residual": True}),
    row({"exchange": 4, "fragments": 2, "apply_residual": True}),
    row({"exchange": 4, "fragments": 2, "delay": 1, "mixing": 0.5}),
    row({"exchange": 3, "mu_dtype": jnp.bfloat16}),
  ],
)
@pytest.mark.filterwarnings("ignore:js.init. the optimizer keeps .* in bfloat16")
def test_muon_and_its_adam_beside_fragments_delay_residuals_and_dtypes(options):
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
  step, params, state = start(
    muon_with_signs("workers", **options), mesh_of(WORKERS), params
  )
  assert len(momentum_of(state)) == 3
  for number in range(1, 7):
    params, state, _ = step(params, state, normals(number, WORKERS, N))
    assert (spread(state) == 0) == (number % 2 == 0)
  assert np.isfinite(flat(params)).all()


@pytest.mark.long
def test_goes_on_with_other_workers_and_another_k():
  step, params, state = start(muon_with_signs("workers", every=3), mesh_of(4))
  for number in range(4):
    params, state, _ = step(params, state, normals(number, 4, N))
  with pytest.warns(UserWarning, match="go on from the mean"):
    fewer = js.resize(state, params, mesh_of(2))
  often = js.convert(fewer, muon_with_signs("workers", every=2), params, mesh_of(2))
  step, _, _ = start(muon_with_signs("workers", every=2), mesh_of(2))
  params, often, _ = step(params, often, normals(4, 2, N))
  assert spread(often) == 0  # one step since the last, and this one
  update, _ = js.flush(often, params, mesh_of(2))
  assert np.isfinite(flat(update)).all()


def test_parameters_that_are_one_array():
  inner = js.average_momentum(optax.adam(0.1), "workers", every=1)
  step, params, state = start(
    js.local_steps(inner, averaged(), every=2), mesh_of(WORKERS), jnp.zeros(N)
  )
  _, state, _ = step(params, state, normals(0, WORKERS, N))
  assert spread(state) == 0
  assert js.metrics(state).words_sent > 0


class Gaussian(NamedTuple):
  mu: jax.Array
  sigma: jax.Array


@pytest.mark.parametrize("kind", [Gaussian, collections.OrderedDict])
def test_parameters_called_mu_are_no_momentum(kind):
  """The second moments of such parameters stay each worker's own."""
  params = kind(mu=jnp.zeros(4), sigma=jnp.zeros(6))
  inner = js.average_momentum(optax.adam(0.1), sim(WORKERS), every=1)
  tx = js.local_steps(inner, averaged(sim(WORKERS)), every=2)
  step, params, state = start(tx, sim(WORKERS), params)
  _, state, _ = step(params, state, normals(0, WORKERS, 10))
  adam, _ = state.inner.inner
  spread_of = lambda leaf: np.ptp(leaf, axis=0).max()
  assert [spread_of(leaf) for leaf in jax.tree.leaves(adam.mu)] == [0, 0]
  assert all(spread_of(leaf) > 0 for leaf in jax.tree.leaves(adam.nu))


def test_a_copy_of_the_momentum_elsewhere_in_the_state_stays_each_workers_own():
  copy = optax.snapshot("copy", lambda updates: updates)
  inner = js.average_momentum(
    optax.chain(optax.trace(0.9), copy, optax.sgd(0.1)), sim(WORKERS), every=1
  )
  tx = js.local_steps(inner, averaged(sim(WORKERS)), every=2)
  step, params, state = start(tx, sim(WORKERS), jnp.zeros(10))
  _, state, _ = step(params, state, normals(0, WORKERS, 10))
  (momentum, copied, _) = state.inner.inner
  spread_of = lambda tree: np.ptp(jax.tree.leaves(tree)[0], axis=0).max()
  assert spread_of(momentum) == 0
  assert spread_of(copied) > 0


@pytest.mark.parametrize(
  ("inner", "options", "message"),
  [
    (
      optax.adam(0.1),
      {"every": 0},
      "average_momentum: every=0, choose a whole number from 1 to 2147483647",
    ),
    (optax.adam(0.1), {"every": 2, "dtype": "int8"}, "dense: dtype='int8', choose"),
    (
      optax.sgd(0.1),
      {"every": 2},
      "average_momentum: the state of inner has no momentum, no mu or trace",
    ),
    (
      js.local_steps(optax.sgd(0.1, momentum=0.9), averaged(), every=2),
      {"every": 2},
      "average_momentum: inner has local steps itself, give js.local_steps",
    ),
  ],
)
def test_bad_input(inner, options, message):
  with pytest.raises(ValueError, match=message):
    js.init(
      js.local_steps(
        js.average_momentum(inner, "workers", **options), averaged(), every=2
      ),
      PARAMS,
      mesh_of(2),
    )
