"""Local steps: the laws over what workers have moved, against numpy, with any collective and on every engine."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.comm import SoloComm
from tests.cases import (
  WIRED,
  assert_same_bits,
  averaged,
  each_case,
  flat,
  integers,
  linear,
  mesh_of,
  normals,
  quadratic,
  quick_of,
  rows,
  sim,
)
from tests.cases import start as start_with

N = 40
PARAMS = {"b": jnp.zeros(4), "w": jnp.zeros((6, 6))}
TOPKA = functools.partial(js.make_transform, "topka", density=0.2)


def start(tx, where, loss=linear):
  return start_with(tx, where, PARAMS, loss)


def residual_of(state, workers):
  return rows(state.outer[0][0].carried.residual[0], workers)


def test_exchanging_every_step_what_sgd_moved_has_the_bits_of_the_plain_chain():
  """Parameters, residuals and momentum; a step with NaN is skipped alike."""
  plain = optax.chain(TOPKA(sim(3)), optax.sgd(0.1, momentum=0.5))
  local = js.local_steps(optax.sgd(1.0), plain, every=1)
  (step, params, state), (step2, params2, state2) = (
    start(tx, sim(3), quadratic) for tx in (plain, local)
  )
  for number in range(4):
    batch = normals(number, 6, N)
    if number == 2:
      batch[-1, -1] = np.nan
    params, state, metrics = step(params, state, batch)
    params2, state2, metrics2 = step2(params2, state2, batch)
    assert bool(metrics.skipped) == bool(metrics2.skipped) == (number == 2)
    assert_same_bits(
      (params2, state2.outer[0][0].carried, state2.outer[0][1]),
      (params, state[0].carried, state[1]),
    )
  # Momentum moves nothing more where nothing is left to exchange.
  before = jax.tree.map(jnp.copy, (params2, state2))
  assert_same_bits(step2.synchronize(params2, state2), before)


@pytest.mark.parametrize(
  ("options", "words"),
  # With the delay the update of "w" is in flight, and "b" alone is sent.
  [({"fragments": 2}, N), ({"mixing": 0.5}, N), ({"fragments": 2, "delay": 1}, 4)],
  ids=["fragments", "mixing", "delay"],
)
def test_a_second_synchronization_without_a_step_between_changes_nothing(
  options, words
):
  """Outer momentum would move the parameters; the words are those of all fragments."""
  outer = optax.chain(js.dense_transform(sim(2)), optax.sgd(1.0, momentum=0.5))
  tx = js.local_steps(optax.sgd(1.0), outer, every=4, **options)
  step, params, state = start(tx, sim(2))
  params, state, _ = step(params, state, integers(0, 2, N))
  params, state = step.synchronize(params, state)
  assert js.metrics(state).words_sent == words
  assert js.metrics(state).since_exchange == 0
  before = jax.tree.map(jnp.copy, (params, state))
  again = step.synchronize(params, state)
  assert_same_bits(again, before)
  after, state, _ = step(*again, integers(1, 2, N))
  assert js.metrics(state).since_exchange == 1
  assert np.any(flat(step.synchronize(after, state)[0]) != flat(before[0]))


@pytest.mark.parametrize(
  "applied", quick_of([False, True], quick=[True]), ids=["hidden", "applied"]
)
def test_metrics_of_each_step_and_what_is_flushed(applied):
  """Inner SGD at rate 1 moves by minus the gradient: with what is flushed the mean of all gradients is delivered."""
  workers, every, total = 4, 3, np.zeros(N)
  outer = optax.chain(TOPKA(sim(workers)), optax.sgd(1.0))
  tx = js.local_steps(optax.sgd(1.0), outer, every=every, apply_residual=applied)
  step, params, state = start(tx, sim(workers))
  for number in range(1, 8):
    grads = integers(number, workers, N)
    total += grads.sum(0)
    params, state, _ = step(params, state, grads)
    found = js.metrics(state)
    assert int(found.since_exchange) == number % every
    assert bool(found.words_sent > 0) == (number % every == 0)
    assert float(found.words_per_step) == pytest.approx(
      float(found.total_words) / number
    )
    assert bool(found.residual_norm > 0) == (number >= every)
  update, _ = js.flush(state, params, sim(workers))
  np.testing.assert_allclose(flat(update) - flat(params), total / workers, atol=1e-4)


@each_case(WIRED, ["gtopk-wire=int4"])
def test_what_any_wire_rounds_off_is_flushed(case):
  """Inner SGD at rate 1 moves by minus the gradient: the mean of all that are finite is delivered or flushed."""
  workers, total = case.workers()[0], np.zeros(N)
  transform = js.make_transform(case.name, sim(workers), **case.config(density=0.2))
  outer = optax.chain(transform, optax.sgd(1.0))
  step, params, state = start(
    js.local_steps(optax.sgd(1.0), outer, every=2), sim(workers)
  )
  for number in range(7):
    grads = normals(number, workers, N)
    if number in (2, 5):
      grads[-1, -1] = np.inf
    params, state, metrics = step(params, state, grads)
    assert bool(metrics.skipped) == (number in (2, 5))
    total += 0 if metrics.skipped else grads.sum(0)
  update, _ = js.flush(state, params, sim(workers))
  np.testing.assert_allclose(flat(update) - flat(params), total / workers, atol=1e-4)


@pytest.mark.parametrize(
  ("every", "decay"), quick_of([(1, 0.5), (3, 1.0)], quick=[(1, 0.5)])
)
def test_a_residual_that_is_applied_in_numpy(every, decay):
  """CSER's local models: the gradient of a worker is taken where all of its own moves are, delivered or not."""
  workers, k, rate, mu = 3, 6, 0.25, 0.5
  outer = optax.chain(
    js.make_transform("topka", sim(workers), k=k, decay=decay), optax.sgd(1.0)
  )
  tx = js.local_steps(
    optax.sgd(rate, momentum=mu), outer, every=every, apply_residual=True
  )
  step, params, state = start(tx, sim(workers), quadratic)
  anchor, own, momentum = np.zeros(N), np.zeros((workers, N)), np.zeros((workers, N))
  for number in range(1, 8):
    batch = normals(number, workers, N)
    params, state, _ = step(params, state, batch)
    momentum = mu * momentum + own - batch
    own = own - rate * momentum
    if number % every == 0:
      moved = anchor - own
      largest = np.argsort(-np.abs(moved), axis=1, kind="stable")[:, :k]
      sent = np.zeros_like(moved)
      np.put_along_axis(sent, largest, np.take_along_axis(moved, largest, 1), 1)
      anchor = anchor - sent.mean(0)
      own = anchor - decay * (moved - sent)
    np.testing.assert_allclose(flat(params), anchor, atol=1e-5)
    moved = rows(state.moved, workers) if every > 1 else 0
    np.testing.assert_allclose(
      flat(params)[None] - residual_of(state, workers) - moved, own, atol=1e-5
    )


def test_a_residual_from_before_is_applied_in_the_first_step():
  """Law C for a state whose residual is of steps without `apply_residual`; a skipped step leaves it."""
  outer = optax.chain(js.make_transform("topka", sim(2), k=4), optax.sgd(1.0))
  hidden, applied = (
    js.local_steps(optax.sgd(1.0), outer, every=2, apply_residual=value)
    for value in (False, True)
  )
  step, params, state = start(hidden, sim(2))
  for number in range(2):
    params, state, _ = step(params, state, integers(number, 2, N))
  before = residual_of(state, 2)
  assert np.any(before)
  state, step = (
    js.convert(state, applied, params, sim(2)),
    js.make_train_step(linear, applied, sim(2), donate=False),
  )
  zeros = np.zeros((2, N), np.float32)
  _, skipped, metrics = step(params, state, zeros + np.nan)
  assert metrics.skipped
  np.testing.assert_array_equal(residual_of(skipped, 2), before)
  found = js.metrics(skipped)
  assert float(found.words_per_step) == pytest.approx(float(found.total_words) / 3)
  anchor = flat(params)
  for _ in range(2):
    params, state, _ = step(params, state, zeros)
    np.testing.assert_array_equal(
      residual_of(state, 2).mean(0) - flat(params), before.mean(0) - anchor
    )
  assert np.any(flat(params) != anchor)


def test_diloco_in_numpy():
  """Douillard et al., Algorithm 1: inner Adam of each worker's own, optax's, whose state stays; Nesterov outside."""
  workers, every, rate, mu, inner = 3, 4, 0.7, 0.9, optax.adam(0.05)
  outer = optax.chain(
    js.dense_transform(sim(workers)), optax.sgd(rate, momentum=mu, nesterov=True)
  )
  step, params, state = start(
    js.local_steps(inner, outer, every=every), sim(workers), quadratic
  )
  anchor, momentum = np.zeros(N), np.zeros(N)
  own, moments = [anchor] * workers, [inner.init(jnp.zeros(N))] * workers
  for number in range(1, 2 * every + 2):
    batch = normals(number, workers, N)
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
      params, state, _ = step(params, state, batch)
      for w in range(workers):
        update, moments[w] = inner.update(jnp.float32(own[w] - batch[w]), moments[w])
        own[w] = own[w] + np.asarray(update)
    apart = np.sqrt(((own - np.mean(own, 0)) ** 2).sum() / workers)
    if number % every == 0:
      delta = anchor - np.mean(own, 0)
      momentum = mu * momentum + delta
      anchor = anchor - rate * (delta + mu * momentum)
      own, apart = [anchor] * workers, 0
    np.testing.assert_allclose(flat(params), anchor, atol=1e-5)
    np.testing.assert_allclose(
      flat(params)[None] - rows(state.moved, workers), own, atol=1e-5
    )
    assert float(js.metrics(state).drift) == pytest.approx(apart, abs=1e-5)
  # the outer collective has no residual
  update, _ = js.flush(state, params, sim(workers))
  np.testing.assert_allclose(flat(update), anchor - np.mean(own, 0), atol=1e-5)


@pytest.mark.parametrize(
  "applied", quick_of([False, True], quick=[False]), ids=["hidden", "applied"]
)
def test_a_schedule_has_the_bits_of_constant_periods_one_after_the_other(applied):
  """An H that grows, one that shrinks, which is 1 at least; a skipped step counts in none.

  The schedule changes within a period, which keeps the H of its beginning.
  """
  outer = optax.chain(TOPKA(sim(3)), optax.sgd(1.0))
  make = lambda every: start(
    js.local_steps(
      optax.sgd(0.1, momentum=0.9), outer, every=every, apply_residual=applied
    ),
    sim(3),
    quadratic,
  )
  constant = {every: make(every)[0] for every in (2, 4)}  # which have the same states
  schedule = lambda step: jnp.where(step < 3, 2.9, jnp.where(step < 10, 4.5, -1.0))
  step, params, state = make(schedule)
  params2, state2 = params, state
  exchanged, periods = [], [2, 2, 4, 4]
  for number in range(1, 15):
    batch = normals(number, 6, N)
    if number == 7:
      batch[-1, -1] = np.nan
    params, state, metrics = step(params, state, batch)
    exchanged += [number] * (int(state.since) == 0)
    if periods:
      params2, state2, _ = constant[periods[0]](params2, state2, batch)
      assert_same_bits((params, state), (params2, state2))
      periods = periods[int(state2.since) == 0 :]
    assert bool(metrics.skipped) == (number == 7)
  assert exchanged == [2, 4, 9, 13, 14]
  assert int(js.metrics(state).skipped_steps) == 1


def test_in_a_step_of_ones_own():
  """The gradient at the parameters of the worker; on a mesh with axes of the kind that is not the default."""
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:3]), ("workers",), axis_types=(AxisType.Explicit,)
  )
  tx = js.local_steps(
    optax.sgd(0.1), optax.chain(TOPKA("workers"), optax.sgd(1.0)), every=2
  )
  step, params, state = start(tx, mesh, quadratic)
  spec = js.specs(state, "workers")

  def worker(params, state, batch):
    grads = jax.grad(quadratic)(js.own_params(params, state), batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  own = jax.jit(
    jax.shard_map(
      worker, mesh=mesh, in_specs=(P(), spec, P("workers")), out_specs=(P(), spec)
    )
  )
  params2, state2 = jax.device_put(params, jax.NamedSharding(mesh, P())), state
  for number in range(4):
    batch = jax.device_put(normals(number, 6, N), jax.NamedSharding(mesh, P("workers")))
    params, state, _ = step(params, state, batch)
    params2, state2 = jax.block_until_ready(own(params2, state2, batch))
  chex.assert_trees_all_close((params, state.moved), (params2, state2.moved), rtol=1e-6)


def test_a_gradient_at_the_anchor_is_refused():
  """In a step of one's own, where types tell that the anchor is equal on all workers."""
  mesh = mesh_of(3)
  tx = js.local_steps(
    optax.sgd(0.1), optax.chain(TOPKA("workers"), optax.sgd(1.0)), every=2
  )
  _, params, state = start(tx, mesh, quadratic)
  spec = js.specs(state, "workers")

  def worker(params, state, batch):
    return tx.update(jax.grad(quadratic)(params, batch), state, params)

  step = jax.shard_map(
    worker, mesh=mesh, in_specs=(P(), spec, P("workers")), out_specs=(P(), spec)
  )
  with pytest.raises(
    ValueError,
    match=r"take the gradient of one worker at js.own_params\(params, state\)",
  ):
    jax.eval_shape(step, params, state, normals(0, 6, N))


def test_other_workers_and_what_is_flushed():
  """The mean of what is moved and owed is kept, and delivered densely by js.flush."""
  tx = js.local_steps(
    optax.adam(0.1),
    optax.chain(TOPKA("workers"), optax.sgd(0.5, momentum=0.5)),
    every=3,
  )
  step, params, state = start(tx, mesh_of(4), quadratic)
  with jax.numpy_dtype_promotion("standard"):  # adam needs it
    for number in range(5):
      params, state, _ = step(params, state, normals(number, 8, N))
    count = jax.device_put(np.int32([5, 7, 6, 5]), state.inner[0].count.sharding)
    state = state._replace(
      inner=(state.inner[0]._replace(count=count), *state.inner[1:])
    )
    owed = (rows(state.moved, 4) + residual_of(state, 4)).mean(0)
    params = jax.tree.map(np.asarray, params)
    with pytest.warns(
      UserWarning, match="all 6 of them go on from the mean of those of the 4 workers"
    ):
      resized = js.resize(state, params, mesh_of(6))
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert describe(resized) == describe(js.init(tx, params, mesh_of(6)))
    assert describe(js.abstract_state(tx, params, mesh_of(6))) == describe(resized)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      js.abstract_state(tx, params, mesh_of(6), workers=4), state
    )
    np.testing.assert_allclose(
      (rows(resized.moved, 6) + residual_of(resized, 6)).mean(0), owed, atol=1e-6
    )
    np.testing.assert_allclose(
      rows(resized.inner[0].mu, 6)[0], rows(state.inner[0].mu, 4).mean(0), atol=1e-6
    )
    assert resized.inner[0].count.tolist() == [7] * 6
    update, flushed = js.flush(resized, params, mesh_of(6))
    np.testing.assert_allclose(flat(update), owed, atol=1e-6)
    assert (
      float(js.metrics(flushed).residual_norm) == float(js.metrics(flushed).drift) == 0
    )
    assert not np.any(rows(flushed.moved, 6))
    js.make_train_step(quadratic, tx, mesh_of(6))(params, flushed, normals(9, 12, N))


SGD, CHAIN = optax.sgd(1.0), optax.chain(TOPKA(sim(2)), optax.sgd(1.0))
CHOICES = [
  ({"every": 2**31}, "every=2147483648, choose a whole number from 1 to 2147483647"),
  ({"every": 0}, "every=0, choose a whole number from 1 to 2147483647, or None"),
  ({"every": 0.5}, "every=0.5, choose a whole number from 1 to 2147483647, or None"),
  ({"every": True}, "every=True, choose a whole number from 1 to 2147483647, or None"),
  (
    {"every": lambda step: jnp.stack([step, step])},
    r"every\(0\) has the shape \(2,\), give a schedule of one number",
  ),
  (
    {"every": lambda step: step, "fragments": 2},
    "fragments=2, choose a whole number from 1 to 1",
  ),
  ({"every": 6, "fragments": 7}, "fragments=7, choose a whole number from 1 to 6"),
  (
    {"every": 6, "fragments": 2, "delay": 3},
    "delay=3, choose a whole number from 0 to 2",
  ),
  ({"every": None, "delay": 1}, "delay=1, choose a whole number from 0 to 0"),
  ({"every": 3, "mixing": 1.0}, "mixing=1.0 with every=3, choose a number in \\[0, 1"),
  (
    {"every": 3, "delay": 1, "apply_residual": True},
    "apply_residual=True with delay=1, choose one of them",
  ),
  ({"every": 8, "fragments": 4}, "fragments=4, choose at most the number of leaves, 2"),
  ({"outer": SGD}, "outer has no jaxsparse transform"),
  ({"inner": CHAIN}, "inner has a jaxsparse transform with a residual"),
  (
    {"outer": js.local_steps(SGD, CHAIN, every=2)},
    "inner or outer has local steps itself",
  ),
]


@pytest.mark.parametrize(
  ("options", "message"), CHOICES, ids=[message for _, message in CHOICES]
)
def test_choices(options, message):
  with pytest.raises(ValueError, match=f"local_steps: {message}"):
    js.init(
      js.local_steps(**{"inner": SGD, "outer": CHAIN, "every": 2} | options),
      PARAMS,
      sim(2),
    )


def test_local_steps_in_the_wrong_place():
  tx = js.local_steps(SGD, CHAIN, every=2)
  with pytest.raises(ValueError, match="MultiSteps around a jaxsparse transform"):
    js.init(optax.MultiSteps(tx, 2).gradient_transformation(), PARAMS, sim(2))
  with pytest.raises(
    ValueError, match="a2sgd: its totals differ between workers.* js.local_steps"
  ):
    js.init(
      js.local_steps(SGD, optax.chain(js.a2sgd_transform(sim(2)), SGD), every=2),
      PARAMS,
      sim(2),
    )
  with pytest.raises(ValueError, match="update needs the parameters"):
    jax.vmap(
      lambda _: tx.update(PARAMS, tx.init(PARAMS)), axis_name="workers", axis_size=2
    )(jnp.zeros(2))
  with pytest.raises(
    ValueError,
    match=r"the optimizer state has .moved\['b'\].* where that of the new chain has",
  ):
    js.convert(js.init(tx, PARAMS, sim(2)), CHAIN, PARAMS, sim(2))


WAYS = [
  {"every": 1},
  {"every": 1, "apply_residual": True},
  {"every": 4, "delay": 1},
  {"every": 4, "fragments": 2},
]
OTHERS = [  # renamed, of another width, with one more leaf, and in another container
  (
    {"b": jnp.zeros(4), "v": jnp.zeros((6, 6))},
    r"parameters\['w'\] of shape \(6, 6\), here there are .*\['v'\]",
  ),
  (
    {"b": jnp.zeros(5), "w": jnp.zeros((6, 5))},
    r"parameters\['[bw]'\] of shape .*, here it has shape",
  ),
  (
    PARAMS | {"z": jnp.zeros(2)},
    r"nothing at state.*\['z'\], that of .* shape .* of other parameters",
  ),
  (
    [jnp.zeros(4), jnp.zeros((6, 6))],
    r"parameters\['[bw]'\] of shape .*, here there are parameters\[0\], \[1\]",
  ),
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_state_of_other_parameters_is_refused_by_name(options):
  tx = js.local_steps(optax.adam(0.1), averaged(sim(2)), **options)
  step, _, state = start(
    tx, sim(2), lambda p, batch: sum(map(jnp.sum, jax.tree.leaves(p))) * batch.mean()
  )
  for params, message in OTHERS:
    for use in (
      lambda params: step(params, state, normals(0, 2, N)),
      lambda params: step.synchronize(params, state),
    ):
      with pytest.raises(
        ValueError, match=f"the optimizer state (was made for|has) {message}"
      ):
        use(params)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("every", quick_of([1, 2], quick=[2]))
def test_an_empty_leaf_and_inner_optimizers_with_random_keys(every):
  """On simulated workers; each has a key of its own, also in a state for more of them."""
  params = {"empty": jnp.zeros((0, 3)), "w": jnp.zeros(N)}
  make = lambda workers: js.local_steps(
    optax.noisy_sgd(0.1, key=0), averaged(sim(workers)), every=every
  )
  step = js.make_train_step(
    lambda p, batch: linear({"w": p["w"]}, batch), make(2), sim(2), donate=False
  )
  state, start = js.init(make(2), params, sim(2)), params
  for number in range(2):
    params, state, _ = step(params, state, normals(number, 2, N))
  assert params["empty"].shape == (0, 3)
  assert np.all(params["w"] != start["w"])
  with pytest.warns(UserWarning, match="all 4 of them go on from the mean"):
    wider = js.resize(state, params, sim(4))
  keys = lambda state: [
    jax.random.key_data(x)
    for x in jax.tree.leaves(state.inner)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  ]
  (before,), (after,) = keys(state), keys(wider)
  np.testing.assert_array_equal(after[:2], before)
  assert len(np.unique(after, axis=0)) == 4


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore:.*go on from the mean")
@pytest.mark.parametrize("where", [mesh_of, sim])
def test_the_noise_of_workers_is_independent(where):
  """The mean over 4 workers of 4 steps of noise has the variance of one step; 6 workers go on so on another mesh."""
  noise = optax.chain(optax.add_noise(1.0, 0.0, key=jax.random.key(0)), optax.sgd(1.0))
  axis = lambda workers: "workers" if where is mesh_of else sim(workers)
  make = lambda workers: js.local_steps(noise, averaged(axis(workers)), every=2)
  params, loss = jnp.zeros(4000), lambda p, batch: 0 * jnp.sum(p) * jnp.sum(batch)
  step = js.make_train_step(loss, make(4), where(4), donate=False)
  state = js.init(make(4), params, where(4))
  for _ in range(4):
    params, state, _ = step(params, state, np.zeros((4, 1), np.float32))
  assert float(jnp.std(params)) == pytest.approx(1, rel=0.05)
  before, state = jax.device_get(params), js.resize(state, params, where(6))
  step = js.make_train_step(loss, make(6), where(6), donate=False)
  for _ in range(2):
    params, state, _ = step(jax.device_get(params), state, np.zeros((6, 1), np.float32))
  assert float(np.std(params - before)) == pytest.approx(np.sqrt(2 / 6), rel=0.05)


FROZEN = {"train": optax.adam(0.1), "frozen": optax.set_to_zero()}
LABELS = {"b": "frozen", "w": "train"}


def of_w(params, batch):
  """A loss that does not use the other leaf."""
  return jnp.mean((params["w"] - 1) ** 2) + 0 * batch.mean()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  ("make", "loss"),
  [
    (
      lambda outer: js.local_steps(
        optax.multi_transform(FROZEN, LABELS), outer, every=2
      ),
      None,
    ),
    (lambda outer: js.local_steps(optax.adam(0.1), outer, every=1), of_w),
    (lambda outer: optax.chain(outer, optax.adam(0.1)), of_w),
  ],
)
def test_frozen_leaves_that_signs_would_move_are_named(make, loss):
  outer = optax.chain(js.onebit_transform("workers"), optax.sgd(1.0))
  tx, mesh, loss = (
    make(outer),
    mesh_of(2),
    loss or (lambda p, batch: of_w(p, batch) + jnp.sum(p["b"])),
  )
  with pytest.warns(
    UserWarning,
    match=r"onebit: the gradient or update of \['b'\] is zero, and would move",
  ):
    js.make_train_step(loss, tx, mesh, donate=False)(
      PARAMS, js.init(tx, PARAMS, mesh), np.ones((2, 1), np.float32)
    )


@pytest.mark.usefixtures("standard_promotion")
def test_frozen_leaves_around_local_steps_stay(recwarn):
  signs = optax.chain(js.onebit_transform("workers"), optax.sgd(1.0))
  tx = optax.multi_transform(
    FROZEN | {"train": js.local_steps(optax.adam(0.1), signs, every=1)}, LABELS
  )
  mesh, params = mesh_of(2), PARAMS
  step, state = (
    js.make_train_step(of_w, tx, mesh, donate=False),
    js.init(tx, PARAMS, mesh),
  )
  for _ in range(3):
    params, state, _ = step(params, state, np.ones((2, 1), np.float32))
  np.testing.assert_array_equal(params["b"], PARAMS["b"])
  assert np.all(np.asarray(params["w"]) > 0)
  assert not recwarn.list


def test_a_state_of_other_workers_is_refused_by_their_number():
  tx = js.local_steps(optax.sgd(1.0), averaged(), every=2)
  state, params, batch = (
    js.init(tx, jnp.zeros(N), mesh_of(3)),
    jnp.zeros(N),
    np.ones((2, N), np.float32),
  )
  loss = lambda p, batch: jnp.vdot(p, batch[0])
  step, stacked = (
    js.make_train_step(loss, tx, mesh_of(2), donate=False),
    js.stacked(tx, mesh_of(2)),
  )
  for use in (
    step,
    lambda params, state, _: step.synchronize(params, state),
    stacked.value_and_grad(loss),
    lambda *_: stacked.update(jnp.zeros((2, N)), state, params),
  ):
    with pytest.raises(
      ValueError, match=r"made for 3 workers, the axis has 2: .* js\.resize"
    ):
      use(params, state, batch)


@pytest.mark.parametrize("where", quick_of([mesh_of, sim], quick=[mesh_of]))
def test_a_rate_that_is_set_by_hand(where):
  """As a number, or one for each worker."""
  axis = "workers" if where is mesh_of else sim(2)
  tx = js.local_steps(
    optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), averaged(axis), every=2
  )
  step = js.make_train_step(
    lambda p, batch: jnp.vdot(p, batch[0]), tx, where(2), donate=False
  )
  state, params = js.init(tx, jnp.zeros(N), where(2)), jnp.zeros(N)
  batch, inner = (
    np.ones((2, N), np.float32),
    lambda state: state.inner.hyperparams["learning_rate"],
  )
  for rate, moved in ((0.5, -1.0), (np.float32([0.25, 0.75]), -1.0), (0.0, 0.0)):
    given = optax.tree.set(state, learning_rate=rate)
    after, given, _ = step(params, given, batch)
    after, given, _ = step(after, given, batch)
    np.testing.assert_array_equal(after, np.full(N, moved, np.float32))
    np.testing.assert_array_equal(inner(given), np.broadcast_to(rate, 2))
  wrong = r"inner.hyperparams\['learning_rate'\] has shape \(3,\): give a number, or a row for each of the 2 workers"
  with pytest.raises(ValueError, match=wrong):
    step(params, optax.tree.set(state, learning_rate=np.ones(3, np.float32)), batch)


@pytest.mark.parametrize("where", quick_of([mesh_of, sim], quick=[mesh_of]))
@pytest.mark.parametrize("is_local", [False, True])
def test_a_rate_that_is_set_by_hand_is_taken_wherever_a_state_is(is_local, where):
  """Before a step makes an array of the number, with local steps one for each worker."""
  axis, rate = (
    "workers" if where is mesh_of else sim(2),
    optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
  )
  chained = optax.chain(js.dense_transform(axis), rate)
  tx = js.local_steps(rate, averaged(axis), every=2) if is_local else chained
  loss, params, batch = (
    lambda p, batch: jnp.vdot(p, batch[0]),
    jnp.zeros(N),
    np.ones((2, N), np.float32),
  )
  step, stacked = (
    js.make_train_step(loss, tx, where(2), donate=False),
    js.stacked(tx, where(2)),
  )
  state = optax.tree.set(js.init(tx, params, where(2)), learning_rate=0.5)
  found = [
    js.convert(state, tx, params, where(2)),
    js.flush(state, params, where(2))[1],
    js.resize(state, params, where(2)),
    stacked.update(
      stacked.value_and_grad(loss)(params, state, batch)[1], state, params
    )[1],
    step.synchronize(params, state)[1],
  ]
  for after in found:
    rates = optax.tree.get(after, "learning_rate")
    np.testing.assert_array_equal(
      rates, np.full(2 if is_local else (), 0.5, np.float32)
    )
  step.check(params, state)
  step.lower(params, state, batch)


def test_own_params_are_those_of_one_worker_in_the_dtype_of_the_parameters():
  tx = js.local_steps(optax.adam(0.1), averaged(sim(2)), every=3)
  with pytest.raises(
    ValueError,
    match="the state of 2 workers, give that of one: call it inside shard_map",
  ):
    js.own_params(PARAMS, js.init(tx, PARAMS, sim(2)))
  with jax.enable_x64(True):
    third = jnp.full(3, 1 / 3)
    alone = js.local_steps(optax.sgd(0.1), averaged(SoloComm(1)), every=3)
    np.testing.assert_array_equal(js.own_params(third, alone.init(third)), third)
