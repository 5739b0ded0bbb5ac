"""The warning where many steps in a row are skipped: once, with how many, and what is not finite."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.train.skipped import MANY, SkipWatch
from tests.cases import averaged, mesh_of, row, sim, start
from tests.partial.rounds_test import join, serve

GOOD, BAD = np.ones((2, 4), np.float32), np.full((2, 4), np.nan, np.float32)


def local(where):
  return js.local_steps(optax.sgd(0.1), averaged(where), every=3)


def run(step, params, state, batches):
  """The texts of the warnings of these steps, and the last parameters and state."""
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for batch in batches:
      params, state, metrics = step(params, state, batch)
      jax.block_until_ready(metrics)
  return [str(one.message) for one in found], params, state


@pytest.mark.parametrize(
  ("where", "chain"),
  [
    row("mesh", averaged, quick=True),
    row("mesh", local),
    row("simulated", averaged),
    row("simulated", local, quick=True),
  ],
)
def test_many_skipped_steps_in_a_row_warn_once(where, chain):
  engine = mesh_of(2) if where == "mesh" else sim(2)
  tx = chain("workers" if where == "mesh" else engine)
  step, params, state = start(tx, engine, jnp.zeros(4))
  few = [*[BAD] * (MANY - 1), GOOD] * 3
  texts, params, state = run(step, params, state, few)
  assert texts == []
  texts, params, state = run(step, params, state, [BAD] * (MANY + 2))
  (text,) = texts
  assert text.startswith(
    f"make_train_step: {MANY} steps in a row were skipped and changed nothing, because of NaN or Inf: "
    "batch holds NaN or Inf; the loss is nan"
  )
  texts, params, state = run(step, params, state, [GOOD, *[BAD] * (MANY + 2)])
  assert texts == []
  assert float(params[0]) != 0


@pytest.mark.parametrize("is_overflow", [True, False])
def test_gradients_and_updates_that_are_not_finite(is_overflow):
  """A sum that float16 cannot hold, or an update of each worker."""
  overflow = optax.chain(js.dense_transform(sim(2)), optax.sgd(0.1))
  divided = optax.stateless(
    lambda grads, _: jax.tree.map(lambda grad: grad / jnp.zeros_like(grad), grads)
  )
  tx = overflow if is_overflow else js.local_steps(divided, averaged(sim(2)), every=1)
  loss = lambda params, batch: (
    params["w"].astype(jnp.float32).sum() * batch.mean() + params["b"].sum()
  )
  params = {"b": jnp.zeros(1), "w": jnp.zeros(4, jnp.float16)}
  step, params, state = start(tx, sim(2), params, loss)
  batch = np.full((2, 1), 1e6 if is_overflow else 1.0, np.float32)
  (text,), _, _ = run(step, params, state, [batch] * (MANY + 1))
  assert "the loss is 0; batch, params, state are finite, so a gradient, an" in text
  assert "params['w'] is float16, at most 65504" in text


def test_what_is_not_finite_is_named():
  """Inf in a state may be the best loss so far."""
  given = {
    "batch": {"x": np.ones(2), "labels": np.arange(2)},
    "params": {"w": jnp.array([1, jnp.inf], jnp.bfloat16), "key": jax.random.key(0)},
    "state": (jnp.float32(jnp.inf), [jnp.array([0, jnp.nan]), jnp.array([jnp.nan])]),
  }
  watch = SkipWatch("it", "rounds")
  for _ in range(MANY):
    watch.look()
    watch.add([jnp.zeros(2, bool), jnp.ones(2, bool)])
  named = (
    r"it: 8 rounds in a row .*: params\['w'\] holds NaN or Inf; "
    r"state\[1\]\[0\] and 1 more holds NaN or Inf\. This"
  )
  with pytest.warns(UserWarning, match=named):
    watch.look(**given)
  watch.look(**given)


def test_flags_that_were_donated_and_traced_ones_are_not_read():
  watch = SkipWatch("it")
  flags = [jnp.ones((), bool) for _ in range(2 * MANY)]
  for flag in flags:
    watch.add(flag)
    flag.delete()
  watch.look()
  jax.jit(lambda flag: watch.add(flag))(True)
  assert not watch._flags
  step, params, state = start(averaged(sim(2)), sim(2), jnp.zeros(4))
  steps = lambda carry, batch: (step(*carry, batch)[:2], None)
  jax.lax.scan(steps, (params, state), np.stack([BAD] * (MANY + 2)))


@pytest.mark.long
def test_updates_of_stacked_gradients_outside_jit():
  tx = js.stacked(averaged(sim(2)), sim(2))
  params = jnp.zeros(4)
  step = lambda params, state, batch: (params, *tx.update(batch, state, params))
  flip = lambda params, state, batch: [step(params, state, batch)[i] for i in (0, 2, 1)]
  (text,), _, _ = run(flip, params, tx.init(params), [BAD] * (MANY + 1))
  assert re.match("js.stacked: 8 steps in a row .*: gradients holds NaN", text)


@pytest.mark.long
def test_rounds_whose_sums_are_not_finite():
  outer = lambda comm: optax.chain(js.dense_transform(comm), optax.scale(-jnp.inf))
  with serve(1) as server, join(server, 0, jnp.zeros(4), outer, every=1) as worker:

    def step(params, state, batch):
      while worker.round == batch:
        params = worker.step(params + 1.0)
      return params, state, ()

    (text,), _, _ = run(step, worker.params, None, range(MANY + 3))
  assert re.match(
    "js.partial.Rounds: 8 rounds in a row .*: params, anchor are finite, so", text
  )
