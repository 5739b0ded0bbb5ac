"""The warning where many steps in a row are skipped: once, with how many, and what is not finite."""

import itertools
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


def divided(grads):
  return jax.tree.map(lambda grad: grad / jnp.zeros_like(grad), grads)


def local_division(where):
  inner = optax.stateless(lambda grads, _: divided(grads))
  return js.local_steps(inner, averaged(where), every=1)


@pytest.mark.parametrize(
  ("cause", "finding"),
  [
    row(
      "gradient", r"gradients\['w'\] of worker 1 holds NaN or Inf\. This", quick=True
    ),
    row("model state", r"model_state of worker 1 holds NaN or Inf\. This"),
    row("update", r"gradients are finite, an update or a sum over workers is not; "),
    row("sum", r"gradients are finite, an update or a sum over workers is not\. This"),
  ],
)
@pytest.mark.parametrize("where", [row("mesh"), row("simulated", quick=True)])
def test_what_is_not_finite_where_loss_and_parameters_are(cause, finding, where):
  """A root at 0, a model state, an update of each worker, and a sum that float32 cannot hold."""
  engine = mesh_of(2) if where == "mesh" else sim(2)
  axis = "workers" if where == "mesh" else engine
  tx = local_division(axis) if cause == "update" else averaged(axis)

  def loss(params, batch, model_state):
    scale = batch.mean()
    root = jnp.sqrt(scale * params["w"].astype(jnp.float32)).sum()
    loss = root + 1 if cause == "gradient" else params["w"].sum().astype(jnp.float32)
    state = jnp.where((scale == 0) & (cause == "model state"), jnp.inf, model_state)
    return 3e38 * loss if cause == "sum" else loss, state

  w = jnp.zeros(4) if cause == "sum" else jnp.ones(4, jnp.float16)
  params = {"b": jnp.zeros(1), "w": w}
  step, params, state = start(tx, engine, params, loss)
  named = lambda *given: step(*given, model_state=jnp.zeros(2))
  batch = np.array([[1.0], [0.0]], np.float32)
  (text,), _, _ = run(named, params, state, [batch] * (MANY + 1))
  assert re.search(f"batch, params, state are finite; {finding}", text)


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


def test_rows_of_flags_at_any_place():
  """A warning where `MANY` in a row are set, and where they are."""
  for before, length in itertools.product(range(2 * MANY), (MANY - 1, MANY)):
    watch = SkipWatch("it")
    flags = [*[True] * (before % 3), *[False] * (before + 1), *[True] * length, False]
    with warnings.catch_warnings(record=True) as found:
      warnings.simplefilter("always")
      for number, flag in enumerate(flags):
        watch.add(jnp.bool_(flag))
        watch.look()
        assert len(found) == (length == MANY and number >= len(flags) - 2)


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
    "js.partial.Rounds: 8 rounds in a row .*: params, anchor are finite; a", text
  )
