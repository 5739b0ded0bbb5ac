"""EF21 with momentum, in numpy: means of gradients that workers track by the changes that they exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import (
  CASES,
  CONSERVING,
  REPLICATING,
  Case,
  each_case,
  flat,
  mesh_of,
  normals,
  quick_of,
  start,
  update_program,
)

N, WORKERS, MOMENTUM = 120, 3, 0.75
TRACKED = [
  case
  for case in CASES
  if case.workers([WORKERS])
  and str(case) != "dense-dtype=bfloat16"
  and case in CONSERVING
  and case in REPLICATING
]


def tracked(case, params, momentum=MOMENTUM):
  tx = js.ef21(js.make_transform(case.name, "workers", **case.config(k=9)), momentum)
  state = js.init(tx, params, mesh_of(WORKERS))
  return update_program(tx, state, WORKERS), state


def parts(state):
  """(means, what is not delivered, [P, N] each, the total) in a state."""
  worker, shared = state.carried.worker[0], state.carried.shared[0]
  owed = (
    np.zeros((WORKERS, N))
    if worker.undelivered is None
    else np.asarray(worker.undelivered, np.float64)
  )
  return (
    np.asarray(worker.mean).reshape(WORKERS, N),
    owed.reshape(WORKERS, N),
    np.asarray(shared.total),
  )


@each_case(TRACKED, ["onebit", "spardl"])
def test_the_total_is_what_is_delivered_of_the_means(case):
  """Of float16 leaves too: what they round off belongs to no worker. A skipped step changes nothing."""
  program, state = tracked(case, jnp.zeros(N, jnp.float16))
  means = np.zeros((WORKERS, N))
  before = np.zeros(N)
  for step in range(6):
    grads = normals(step, WORKERS, N).astype(np.float16)
    if step == 3:
      bad = grads.copy()
      bad[1, 7] = np.nan
      updates, after = program(bad, state)
      assert not np.any(updates)
      jax.tree.map(np.testing.assert_array_equal, after.carried, state.carried)
    updates, state = program(grads, state)
    means = MOMENTUM * means + (1 - MOMENTUM) * grads.astype(np.float64)
    found, owed, total = parts(state)
    np.testing.assert_allclose(found, means, atol=1e-5)
    np.testing.assert_allclose(total, (means - owed).sum(0), atol=1e-5)
    expected = (total - MOMENTUM * before) / (WORKERS * (1 - MOMENTUM))
    before = total
    np.testing.assert_allclose(updates[0], expected, rtol=2e-3, atol=1e-5)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  ("name", "options", "error"), [("dense", {}, 1e-4), ("nbit", {"bits": 4}, 0.05)]
)
def test_one_adam_moves_as_far_as_behind_a_dense_exchange(name, options, error):
  """On noise, where the step of Adam of averages would be four times as long; Adam in numpy."""
  tx = js.ef21(js.make_transform(name, "workers", **options), 0.9)
  tx = optax.chain(tx, optax.adam(1.0))
  state = js.init(tx, jnp.zeros(N), mesh_of(WORKERS))
  program = update_program(tx, state, WORKERS)
  moments = np.zeros((2, N))
  for step in range(1, 41):
    grads = normals(step, WORKERS, N)
    updates, state = program(grads, state)
    mean = grads.astype(np.float64).mean(0)
    decays = np.array([[0.9], [0.999]])
    moments = decays * moments + (1 - decays) * [mean, mean**2]
    first, second = moments / (1 - decays**step)
  expected = -first / np.sqrt(second)
  rms = lambda x: np.sqrt(np.mean(np.square(x)))
  assert rms(updates[0] - expected) < 3 * error * rms(expected)
  assert abs(rms(updates[0]) / rms(expected) - 1) < error


@pytest.mark.parametrize("name", quick_of(["onebit", "topka"], quick=["topka"]))
def test_gradients_that_stay_as_they_are_arrive_exactly_however_they_differ(name):
  """Without tracking, what is delivered of them goes on changing by as much as they differ."""
  options = {"k": 9} if name == "topka" else {}
  grads = normals(0, 1, N) + 30 * normals(1, WORKERS, N)
  mean, errors = grads.mean(0), {}
  for track in (True, False):
    tx = js.make_transform(name, "workers", **options)
    tx = js.ef21(tx, 0.0) if track else tx
    state = js.init(tx, jnp.zeros(N), mesh_of(WORKERS))
    program = update_program(tx, state, WORKERS)
    for _ in range(60):
      updates, state = program(grads, state)
    errors[track] = np.abs(np.asarray(updates[0]) - mean).max()
  assert errors[True] < 0.05 < 1 < errors[False]


@pytest.mark.long
@pytest.mark.parametrize("name", ["dense", "onebit"])
def test_what_large_gradients_were_rounded_by_is_forgotten(name):
  """One step with gradients of 10⁹ among thousands with those of 1: sums of float32 are rounded to 64 then."""
  program, state = tracked(Case(name), jnp.zeros(N))
  run = jax.jit(
    lambda grads, state: jax.lax.fori_loop(
      0, 60_000, lambda _, state: program(grads, state)[1], state
    )
  )
  grads = normals(0, WORKERS, N)
  _, state = program(np.float32(1e9) * grads, state)
  updates, _ = program(grads, run(grads, state))
  np.testing.assert_allclose(updates[0], grads.mean(0), atol=0.03)


@pytest.mark.long
def test_new_workers_begin_anew_and_owe_nothing():
  chain = lambda axis: optax.chain(
    js.ef21(js.onebit_transform(axis), MOMENTUM), optax.sgd(1.0)
  )
  step, params, state = start(chain("workers"), mesh_of(2), jnp.zeros(N))
  params, state, _ = step(params, state, normals(0, 2, N))
  state = js.resize(state, params, mesh_of(WORKERS))
  step, _, _ = start(chain("workers"), mesh_of(WORKERS), jnp.zeros(N))
  assert not np.any(flat(jax.tree.leaves(js.flush(state, params, mesh_of(WORKERS))[0])))
  grads = normals(1, WORKERS, N)
  _, state, _ = step(params, state, grads)
  means, owed, total = parts(state[0])
  np.testing.assert_allclose(means, (1 - MOMENTUM) * grads, rtol=1e-6)
  np.testing.assert_allclose(total, (means - owed).sum(0), atol=1e-5)


def test_what_is_lost_cannot_be_tracked():
  for make, message in (
    (
      lambda: js.ef21(js.make_transform("qsgd", "workers")),
      "ef21: qsgd.* loses a part of what it is given",
    ),
    (
      lambda: js.ef21(js.spardl_transform("workers", k=3, residual="partial")),
      "ef21: spardl.* loses a part",
    ),
    (
      lambda: js.ef21(js.make_transform("topka", "workers", k=3, decay=0.9)),
      "ef21: topka.* loses a part",
    ),
    (
      lambda: js.ef21(js.dense_transform("workers", dtype="bfloat16")),
      "ef21: dense:dtype=bfloat16 loses a part",
    ),
    (
      lambda: js.ef21(
        js.momentum_corrected(js.make_transform("topka", "workers", k=3))
      ),
      "ef21: .* has a momentum already",
    ),
    (
      lambda: js.ef21(js.onebit_transform("workers"), "0.9"),
      "ef21: momentum='0.9', choose a number",
    ),
    (
      lambda: js.ef21(js.onebit_transform("workers"), 1.0),
      "ef21: momentum=1.0, choose a number from 0 up, below 1",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      make()
  with pytest.raises(TypeError, match="ef21: .* is no jaxsparse transform"):
    js.ef21(optax.sgd(1.0))
