"""Parameters in float16 and bfloat16: the cast of an update is inside error feedback, and judged for NaN and Inf."""

import functools
import re
import warnings

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.arrays import flatten
from tests.cases import averaged, normals, quick_of, row, sim, start


def test_a_mean_that_float16_cannot_hold_is_skipped_and_kept():
  """Each gradient fits, and what two steps leave in the residual does not."""
  tx = optax.chain(js.make_transform("topka", sim(2), k=1), optax.sgd(1.0))
  step, params, state = start(tx, sim(2), jnp.zeros(3, jnp.float16))
  grads = np.array([[60000.0, 44000.0, 0.0]] * 2, np.float32)
  params, state, metrics = step(params, state, grads)
  assert not metrics.skipped
  # 88,000
  after, skipped, metrics = step(params, state, grads * np.array([0, 1, 0], np.float32))
  assert metrics.skipped
  np.testing.assert_array_equal(after, params)
  np.testing.assert_array_equal(
    skipped[0].carried.residual[0], state[0].carried.residual[0]
  )


def test_a_mean_of_narrow_updates_is_as_exact_as_the_parameters():
  """Half of the sum of two bfloat16 is no bfloat16: parameters in float32 get all of it, and no residual owes it."""
  outer = optax.chain(
    js.make_transform("topka", js.SimComm("w"), density=1.0), optax.sgd(1.0)
  )
  tx = js.local_steps(optax.sgd(1.0), outer, every=1)
  params = jnp.zeros(1)
  step = lambda grads: tx.update(grads, tx.init(params), params)[0]
  grads = jnp.array([[1.0], [1 + 2**-7]], jnp.bfloat16)
  updates = jax.jit(jax.vmap(step, axis_name="w"))(grads)
  np.testing.assert_array_equal(updates, [[-1 - 2**-8]] * 2)


def test_what_is_rounded_off_decays_as_the_residual_does():
  """All is delivered, and of the mean bfloat16 holds all but 2⁻⁸."""
  tx = js.make_transform("topka", js.SimComm("w"), density=1.0, decay=0.5)
  update = jax.jit(
    jax.vmap(lambda grads: tx.update(grads, tx.init(grads)), axis_name="w")
  )
  updates, state = update(jnp.array([[1.0], [1 + 2**-7]], jnp.bfloat16))
  np.testing.assert_array_equal(updates, [[1], [1]])
  np.testing.assert_array_equal(state.carried.residual[0], [[2**-9], [2**-9]])
  # Local steps of an optimizer in float32, also where a wrapper drops extra arguments.
  inner = optax.stateless(
    lambda grads, _: jax.tree.map(
      lambda grad: -grad.astype(jnp.float32) * (1 + 2**-9), grads
    )
  )
  drops_extra = lambda tx: optax.GradientTransformation(
    tx.init, lambda *given: tx.update(*given)
  )
  for wrap in (lambda tx: tx, drops_extra, optax.flatten):
    outer = optax.chain(wrap(js.make_transform("topka", sim(2), k=1)), optax.sgd(1.0))
    step, params, state = start(
      js.local_steps(inner, outer, every=1), sim(2), jnp.zeros(1, jnp.bfloat16)
    )
    params, state, _ = step(params, state, np.ones((2, 1), np.float32))
    assert float(params[0]) == -1
    np.testing.assert_array_equal(
      state.outer[0][0].carried.residual[0].ravel(), [2**-9, 2**-9]
    )
  # Of several leaves a wrapper makes one with another name.
  outer = optax.chain(
    optax.flatten(js.make_transform("topka", sim(2), k=2)), optax.sgd(1.0)
  )
  tx, params = (
    js.local_steps(inner, outer, every=1),
    dict.fromkeys("ab", jnp.zeros(1, jnp.bfloat16)),
  )
  step = js.make_train_step(
    lambda p, x: (p["a"] + p["b"])[0] * x.mean(), tx, sim(2), donate=False
  )
  params, state, _ = step(
    params, js.init(tx, params, sim(2)), jnp.ones((2, 1), jnp.bfloat16)
  )
  assert all(float(leaf[0]) == -1 for leaf in params.values())
  np.testing.assert_array_equal(
    state.outer[0][0].carried.residual[0].ravel(), [2**-9] * 4
  )


def test_the_mean_of_losses_whose_sum_is_too_large_for_float16():
  loss = lambda params, batch: jnp.vdot(params, batch[0])
  step, params, state = start(averaged(sim(3)), sim(3), jnp.ones(1, jnp.float16), loss)
  batch = jnp.array([[30_000.0], [40_000], [50_000]], jnp.float16)
  loss = step(params, state, batch)[2].loss
  assert (loss.dtype, float(loss)) == (jnp.float16, 40_000)


@pytest.mark.parametrize("value", quick_of([257.0, 99968.0], quick=[99968.0]))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_flush_of_local_steps_leaves_what_the_dtype_cannot_hold(dtype, value):
  """257 is 256 in bfloat16, and 99,968 too large for float16."""
  tx = js.local_steps(
    optax.sgd(1.0),
    optax.chain(js.make_transform("topka", sim(2), k=1), optax.sgd(1.0)),
    every=None,
  )
  step, params, state = start(tx, sim(2), jnp.zeros(1, dtype))
  rounds = 2 if value > 60000 else 1
  for _ in range(rounds):
    params, state, metrics = step(
      params, state, np.full((2, 1), value / rounds, np.float32)
    )
    assert not metrics.skipped
  moved = np.asarray(state.moved, np.float64).mean()
  update, state = js.flush(state, params, sim(2))
  assert np.isfinite(update.astype(jnp.float32)).all()
  assert float(update[0]) + np.asarray(state.moved, np.float64).mean() == moved


def test_an_exchange_of_local_steps_keeps_what_the_dtype_cannot_hold_once():
  """Two steps move 1 + 2⁻¹⁰, of which bfloat16 holds 1: the rest is in `moved`, and not in the residual too."""
  outer = optax.chain(js.make_transform("topka", sim(2), k=1), optax.sgd(1.0))
  tx = js.local_steps(optax.sgd(1.0), outer, every=2)
  step, params, state = start(tx, sim(2), jnp.zeros(1, jnp.bfloat16))
  for moved in (1.0, 2**-10):
    params, state, _ = step(params, state, np.full((2, 1), moved, np.float32))
  assert float(params[0]) == -1.0
  np.testing.assert_array_equal(state.moved, [[2**-10]] * 2)
  (outer_state,) = state.outer
  assert not np.any(outer_state[0].carried.residual[0])


@pytest.mark.parametrize(
  ("dtype", "like"),
  [(jnp.float16, np.float16), (jnp.bfloat16, ml_dtypes.bfloat16)],
  ids=str,
)
def test_rounding_is_that_of_the_cast(dtype, like):
  elements = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False)

  @hypothesis.given(
    hypothesis.extra.numpy.arrays(np.float32, 16, elements=elements),
    st.integers(-140, 0),
  )
  def holds(values, exponent):
    values = (values.astype(np.float64) * 2.0**exponent).astype(np.float32)
    # which this hardware flushes
    values = np.where(np.abs(values) < 2.0**-126, 0, values).astype(np.float32)
    with np.errstate(over="ignore"):
      expected = values.astype(like).astype(np.float32)
    expected = np.where(np.abs(expected) < 2.0**-126, 0, expected)
    found = np.array(
      flatten.rounding([16], [jnp.dtype(dtype)])(jnp.asarray(values), None)
    )
    np.testing.assert_array_equal(
      np.where(np.abs(found) < 2.0**-126, 0, found), expected
    )

  holds()


def test_rounding_of_entries_is_that_of_their_leaf():
  dtypes = list(map(jnp.dtype, (jnp.bfloat16, jnp.float32, jnp.float16)))
  to, values = flatten.rounding([3, 2, 4], dtypes), jnp.asarray(normals(0, 9))
  order = np.random.default_rng(0).permutation(9)
  np.testing.assert_array_equal(
    to(values[order], jnp.asarray(order)), to(values, None)[order]
  )
  # an empty slot
  assert float(to(jnp.array([0.1]), jnp.array([9]))[0]) == np.float32(0.1)
  assert flatten.rounding([3, 2], [dtypes[1]] * 2) is None


RATE = optax.scale_by_learning_rate(1e-3)
WINDOW = optax.chain(js.scale_by_window_adam(2), optax.add_decayed_weights(0.01), RATE)


def by_signs(inner, comm, **options):
  signs = optax.chain(js.onebit_transform(comm), optax.sgd(1.0))
  return js.local_steps(inner, signs, **options)


def injected(comm):
  make = lambda b2, eps: optax.chain(js.scale_by_window_adam(2, b2=b2, eps=eps), RATE)
  inner = optax.inject_hyperparams(make)(b2=0.999, eps=1e-8)
  return by_signs(inner, comm, every=1, apply_residual=True)


def corrected(comm):
  """Gradients whose squares float16 does not hold, clipped."""
  sparse = js.warmed_up(js.make_transform("topka", comm, density=0.5), {4: 1.0})
  return optax.chain(js.momentum_corrected(sparse, 0.5, clip_norm=0.1), optax.sgd(0.05))


STATEFUL = {
  "window adam": lambda comm: by_signs(WINDOW, comm, every=1, apply_residual=True),
  "window adam, every 4": lambda comm: by_signs(WINDOW, comm, every=4),
  "window adam, in flight": lambda comm: by_signs(WINDOW, comm, every=4, delay=1),
  "window adam, injected": injected,
  "window adam, in MultiSteps": lambda comm: by_signs(
    optax.MultiSteps(WINDOW, 2), comm, every=2
  ),
  "averaged momentum": lambda comm: by_signs(
    js.average_momentum(WINDOW, comm, every=2), comm, every=1
  ),
  "corrected momentum": corrected,
  "EF21": lambda comm: optax.chain(
    js.ef21(js.onebit_transform(comm), momentum=0.5), optax.sgd(1e-5, momentum=0.5)
  ),
}


QUICK_STATES = [("window adam", "float16"), ("corrected momentum", "float16")]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  ("name", "dtypes"),
  [
    row(name, (dtype, dtype), quick=(name, dtype) in QUICK_STATES)
    for name in STATEFUL
    for dtype in ("float16", "bfloat16")
  ]
  + [row("window adam", ("bfloat16", "float32")), row("EF21", ("float16", "float32"))],
)
def test_states_of_parameters_of_16_bits_are_those_of_float32(name, dtypes):
  """32 steps, with gradients of 0, and of numbers whose squares float16 does not hold; leaves of two dtypes too."""
  comm = sim(2)
  tx = STATEFUL[name](comm)
  grads = np.concatenate(
    [300 + 30 * normals(0, 32, 2, 6), np.zeros((32, 2, 1)), np.full((32, 2, 1), 1e-4)],
    axis=2,
  ).astype(np.float32)

  def end(*dtypes):
    params = [jnp.zeros(4, dtype) for dtype in dtypes]
    loss = lambda params, batch: sum(
      jnp.vdot(leaf, part.astype(leaf.dtype)).astype(jnp.float32)
      for leaf, part in zip(params, jnp.split(batch[0], 2), strict=True)
    )
    step, params, state = start(tx, comm, params, loss)
    for grad in grads:
      params, state, metrics = step(params, state, grad)
      assert not metrics.skipped
    owed, _ = js.flush(state, params, comm)
    wide = lambda tree: np.concatenate([np.asarray(x, np.float64) for x in tree])
    return wide(params) - wide(owed)

  expected = end("float32", "float32")
  np.testing.assert_allclose(end(*dtypes), expected, atol=0.03 * abs(expected).max())
  assert abs(expected[:6]).min() > 0.001


def first_of_two(inner):
  """The second leaf is frozen."""
  return optax.partition(
    {"train": inner, "freeze": optax.set_to_zero()}, {"a": "train", "b": "freeze"}
  )


OPTIMIZERS = {
  "adamw": optax.adamw(0.1),
  "nadam": optax.nadam(0.1),
  "rmsprop": optax.rmsprop(0.1),
  "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
  "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
  "sgd": optax.sgd(0.1, momentum=0.9),
  "lion": optax.lion(0.1),
  "window": WINDOW,
}


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_that_an_optimizer_keeps_in_16_bits_are_named(name, is_local):
  comm = sim(2)
  inner = first_of_two(OPTIMIZERS[name])
  dense = js.dense_transform(comm)
  tx = js.local_steps(inner, dense, every=2) if is_local else optax.chain(dense, inner)

  def warned(dtype, frozen):
    params = {"a": jnp.zeros(3, dtype), "b": jnp.zeros(2, frozen)}
    with warnings.catch_warnings(record=True) as found:
      warnings.simplefilter("always")
      js.init(tx, params, comm)
    return [str(one.message) for one in found]

  assert warned(jnp.float32, jnp.float16) == []
  for dtype, loss in {"float16": "1e-8", "bfloat16": "0.999"}.items():
    texts = warned(dtype, jnp.float32)
    if name in ("sgd", "lion", "window"):
      assert texts == []
    else:
      (text,) = texts
      assert re.search(
        rf"optimizer keeps state.*nu\['a'\] in {dtype}, .*{loss}.*js.scale_by_window",
        text,
      )


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  "make",
  [
    lambda sparse, factor: js.momentum_corrected(sparse, factor, clip_norm=factor),
    js.ef21,
    lambda sparse, factor: js.local_steps(
      optax.sgd(0.1), optax.chain(sparse, optax.sgd(1.0)), every=2, mixing=factor
    ),
  ],
  ids=["momentum_corrected", "ef21", "local_steps"],
)
def test_numbers_of_numpy_promote_nothing_where_x64_is_on(make):
  with jax.enable_x64(True):
    params = jnp.zeros(6, jnp.float32)
    tx = make(js.make_transform("topka", sim(2), density=0.5), np.float64(0.5))
    init = lambda _: tx.init(params)
    update = lambda grads, state: tx.update(grads, state, params)[1]
    workers = functools.partial(jax.vmap, axis_name="workers")
    state = jax.eval_shape(workers(init), jnp.arange(2))
    grads = jax.ShapeDtypeStruct((2, 6), jnp.float32)
    after = jax.eval_shape(workers(update), grads, state)
  dtypes = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(tree)]
  assert dtypes(after) == dtypes(state)


def test_a_period_of_8_bits_does_not_overflow():
  """Its second turn is after step 66 of 100: 100 · 2 does not fit."""
  params = {name: jnp.zeros(2) for name in "abc"}
  tx = js.local_steps(
    optax.sgd(0.1), averaged(sim(2)), every=np.int8(100), fragments=np.int8(3)
  )
  step, params, state = start(tx, sim(2), params)
  for done, sends in ((64, False), (65, True)):
    _, after, _ = step(params, state._replace(since=jnp.int32(done)), normals(0, 2, 6))
    assert (js.metrics(after).words_sent > 0) == sends
