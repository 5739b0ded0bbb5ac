"""A state of other workers, or of another collective, owes the same; what is flushed is delivered."""

import collections
import dataclasses
import functools
import pickle

import flax.serialization
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from hypothesis import strategies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.arrays.flatten import leaf_shapes
from jaxsparse.transform.groups import Method, assign_collectives, groups_of
from jaxsparse.transform.shards import Shards
from jaxsparse.transform.state import Layout, is_reduce_state, local_states
from tests.cases import (
  REPLICATING,
  assert_same_bits,
  averaged,
  each_case,
  flat,
  integers,
  mesh_of,
  normals,
  quadratic,
  quick_of,
  residuals_by_leaf,
  row,
  sim,
  start,
)

SHAPES = {"bias": (3,), "kernel": (4, 5), "scale": (), "table": (2, 20)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


@functools.cache
def fresh(case, workers):
  return js.init(
    js.make_transform(case.name, sim(workers), **case.config(density=0.2)),
    PARAMS,
    sim(workers),
  )


def means(state, workers):
  return {
    name: rows.mean(axis=0) for name, rows in residuals_by_leaf(state, workers).items()
  }


def owing(state, draw, seed=0):
  """The state with drawn residuals."""

  def drawn(node):
    if not is_reduce_state(node):
      return node
    parts = jax.tree.map(
      lambda x: jax.device_put(draw(seed, x.size), x.sharding), node.carried.residual
    )
    return node._replace(carried=node.carried._replace(residual=parts))

  return jax.tree.map(drawn, state, is_leaf=is_reduce_state)


def shapes(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@each_case(REPLICATING, ["spardl-teams=2"])
@hypothesis.settings(max_examples=8)
@hypothesis.given(
  data=strategies.data(), seed=strategies.integers(0, 99), whole=strategies.booleans()
)
def test_the_mean_of_residuals_is_kept(case, data, seed, whole):
  teams = dict(case.options).get("teams", 1)
  sizes = strategies.sampled_from([size for size in range(1, 9) if size % teams == 0])
  before, after = data.draw(sizes), data.draw(sizes)
  state = owing(fresh(case, before), integers if whole else normals, seed)
  resized = js.resize(state, PARAMS, sim(after))
  assert jax.tree.structure(resized) == jax.tree.structure(fresh(case, after))
  assert shapes(resized) == shapes(fresh(case, after))
  was, now = residuals_by_leaf(state, before), residuals_by_leaf(resized, after)
  exact = whole and np.log2(after / before) % 1 == 0
  for name, rows in now.items():
    bound = 0 if exact else 1.001 * 2.0**-24 * np.abs(rows).mean(axis=0)
    assert np.all(
      np.abs(rows.mean(axis=0) - was[name].mean(axis=0)) <= bound + 2.0**-50
    )
  if before == after:
    assert_same_bits(resized, state)


# The mesh.


def chain(*transforms):
  return optax.chain(*transforms, optax.sgd(0.1, momentum=0.5))


def trained(tx, where, steps=2):
  step, params, state = start(tx, where, PARAMS, quadratic)
  for number in range(steps):
    params, state, _ = step(params, state, normals(number, 24, 64))
  return params, state


@pytest.fixture(scope="module")
def thresholds():
  """A chain with thresholds from step to step, and parameters and state of three workers."""
  tx = chain(js.spardl_transform("workers", density=0.2, selector="reuse"))
  return tx, *trained(tx, mesh_of(3))


def test_training_goes_on_with_other_workers(thresholds):
  """From arrays on the old mesh and from those of the host, onto another mesh, and by another chain."""
  tx, params, state = thresholds
  owed, words, on_host = (
    means(state, 3),
    float(js.metrics(state).total_words),
    jax.tree.map(np.asarray, state),
  )
  first, other = (js.resize(some, params, mesh_of(2)) for some in (state, on_host))
  for same in (other, js.convert(on_host, tx, params, mesh_of(2))):
    assert_same_bits(same, first)
  assert first[0].carried.residual[0].sharding.mesh == mesh_of(2)
  assert_same_bits(first[1], on_host[1])  # momentum
  assert js.metrics(first).total_words == words
  for name, mean in means(first, 2).items():
    np.testing.assert_allclose(mean, owed[name], atol=1e-7)
  step = js.make_train_step(quadratic, tx, mesh_of(2))
  params, state, _ = step(jax.tree.map(np.asarray, params), first, normals(5, 24, 64))
  step.check(params, state)
  assert js.metrics(state).total_words > words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracking(js.Collective):
  """Someone's collective whose shared total adds up what each worker has given last."""

  scale: float = 1.0

  @property
  def traits(self):
    return dataclasses.replace(super().traits, conserves=False, tracks_workers=True)

  def init(self, n, size):
    zeros = jnp.zeros(n)
    return js.State(residual=zeros, worker=zeros, shared=zeros)

  def cost(self, n, size):
    return js.Cost(1, n)

  def reduce(self, comm, grads, state):
    total = state.shared + comm.all_reduce(grads - state.worker)
    return js.Reduced(total, js.State(grads, grads, total), js.Counters())


@pytest.mark.parametrize("change", ["workers", "options", "nothing"])
def test_what_a_collective_tracks_starts_anew_where_workers_or_the_method_change(
  change,
):
  four = js.SimComm("workers", members=4)
  where = js.SimComm("workers", members=2) if change == "workers" else four
  params = jnp.zeros(3)
  tx = js.make_transform(Tracking(), four)
  step = js.make_train_step(lambda p, batch: jnp.vdot(p, batch[0]), tx, four)
  batch = jnp.arange(1.0, 13.0).reshape(4, 3)
  params, state, _ = step(params, js.init(tx, params, four), batch)
  assert np.array_equal(state.carried.shared[0], batch.sum(0))
  _, flushed = js.flush(state, params, four)
  assert_same_bits(flushed.carried[1:], state.carried[1:])
  if change == "options":
    changed = js.make_transform(Tracking(scale=2.0), four)
    after = js.convert(state, changed, params, where)
  else:
    after = js.resize(state, params, where)
  goes_on = change == "nothing"
  for old, new in zip(state.carried[1:], after.carried[1:], strict=True):
    assert np.any(old[0])
    assert np.any(new[0]) == goes_on
  owed = np.reshape(after.carried.residual[0], (-1, 3)).mean(0)
  assert np.array_equal(owed, batch.mean(0))


def test_totals_go_on_from_the_worker_that_has_sent_most():
  state = js.init(js.make_transform("topka", sim(3), k=3), PARAMS, sim(3))
  # the lower and the upper 32 bits
  totals = {
    "total_words": [9, 2, 1],
    "total_wraps": [0, 1, 1],
  }
  counters = state.counters._replace(
    **{name: jnp.array(rows, jnp.uint32) for name, rows in totals.items()}
  )
  after = js.resize(state._replace(counters=counters), PARAMS, sim(2)).counters
  assert (after.total_words.tolist(), after.total_wraps.tolist()) == ([2, 2], [1, 1])


def test_other_workers_have_the_mean_of_moments_and_the_latest_count():
  """Counts differ where a worker has skipped steps of its own."""
  tx = js.local_steps(
    optax.adam(0.1), chain(js.make_transform("topka", sim(3), k=3)), every=2
  )
  state = js.init(tx, PARAMS, sim(3))
  counts = jnp.array([4, 7, 5], jnp.int32)
  rows = jnp.arange(3.0)

  def trained(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return counts
    return leaf + rows.reshape(3, *[1] * (leaf.ndim - 1))

  state = state._replace(inner=jax.tree.map(trained, state.inner))
  with pytest.warns(UserWarning, match="go on from the mean of those of the 3 workers"):
    inner = js.resize(state, PARAMS, sim(2)).inner
  moments, count = inner[0].mu, inner[0].count
  assert count.tolist() == [7, 7]
  assert all((np.asarray(leaf) == 1.0).all() for leaf in jax.tree.leaves(moments))


PLAN = js.overlap.plan(
  "wfbp", [1.0] * 4, [12, 80, 4, 160], alpha=1e-3, beta=1e-8, gamma=1.0
)


@pytest.mark.parametrize("workers", quick_of([4, 6], quick=[4]))
def test_other_groups_teams_and_collectives(workers):
  """Every leaf keeps its residual, whatever group it is in."""
  whole = chain(js.spardl_transform("workers", density=0.2))
  special = {
    "bias|scale": "topka:density=0.5",
    "table": "spardl:density=0.1:teams=2:selector=reuse",
  }
  others = [
    chain(js.spardl_transform("workers", special, density=0.2)),
    chain(js.bucketed_transform("spardl", "workers", plan=PLAN, density=0.2)),
    chain(js.spardl_transform("workers", density=0.1, teams=2, wire="int8")),
    chain(js.make_transform("qsgd", "workers", error_feedback=True)),
  ]
  state = owing(js.init(whole, PARAMS, mesh_of(4)), integers)
  expected = means(state, 4)
  for tx in (*others, whole):
    state = js.convert(state, tx, PARAMS, mesh_of(workers))
    assert jax.tree.structure(state) == jax.tree.structure(
      js.init(tx, PARAMS, mesh_of(workers))
    )
    for name, mean in means(state, workers).items():
      np.testing.assert_allclose(mean, expected[name], atol=1e-6)


def test_a_residual_without_a_home_is_refused():
  sparse, dense = (
    chain(js.spardl_transform("workers", density=0.2)),
    chain(js.dense_transform("workers")),
  )
  state = owing(js.init(sparse, PARAMS, mesh_of(3)), integers)
  with pytest.raises(
    ValueError,
    match=r"parameters\['bias'\] has a residual .* keeps none: deliver it by ",
  ):
    js.convert(state, dense, PARAMS, mesh_of(3))
  _, flushed = js.flush(state, PARAMS, mesh_of(3))
  assert not js.convert(flushed, dense, PARAMS, mesh_of(3))[0].counters.skipped.any()


# Flush.


def test_what_is_flushed_and_what_was_delivered_are_the_dense_sum():
  step, params, state = start(js.spardl_transform(sim(4), density=0.1), sim(4), PARAMS)
  grads = [normals(number, 4, 64) for number in range(2)]
  for batch in grads:
    params, state, _ = step(params, state, batch)
  update, state = js.flush(state, params, sim(4))
  np.testing.assert_allclose(
    flat(params) + flat(update), sum(grads).mean(axis=0), atol=2.0**-20
  )
  assert js.metrics(state).residual_norm == 0


def test_flush_of_groups_on_a_mesh_keeps_dtypes_and_leaves_the_rest():
  """Leaves without a residual get zeros; a second flush finds what bfloat16 has rounded off the first."""
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  tx = chain(
    js.spardl_transform("workers", {"bias": "dense", "table": "topka:k=3"}, density=0.2)
  )
  state = owing(js.init(tx, params, mesh_of(3)), integers)
  expected = means(state, 3)
  update, state = js.flush(state, params, mesh_of(3))
  assert shapes(update) == shapes(params)
  assert not np.asarray(update["bias"]).any()
  again, _ = js.flush(state, params, mesh_of(3))
  assert not np.asarray(again["bias"]).any()
  for name in SHAPES.keys() - {"bias"}:
    first, second = (
      np.ravel(tree[name]).astype(np.float64) for tree in (update, again)
    )
    np.testing.assert_allclose(first, expected[f"['{name}']"], rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(
      first + second, expected[f"['{name}']"], rtol=2.0**-15, atol=1e-6
    )


# Checkpoints.


@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_of_other_workers(thresholds, tmp_path):
  tx, params, state = thresholds
  like = js.abstract_state(tx, PARAMS, mesh_of(4), workers=3)
  devices = jax.tree.map(lambda x: len(x.sharding.device_set), like)
  # those of the workers on the host, momentum on the mesh
  assert set(jax.tree.leaves(devices)) == {
    1,
    4,
  }
  assert (devices[0].carried.residual[0], devices[1][0].trace["bias"]) == (1, 4)
  with orbax.checkpoint.StandardCheckpointer() as saver:
    saver.save(tmp_path / "checkpoint", (params, state))
    saver.wait_until_finished()
    restored, other = saver.restore(tmp_path / "checkpoint", (PARAMS, like))
  assert_same_bits(
    (restored, js.resize(other, restored, mesh_of(4))),
    (params, js.resize(state, params, mesh_of(4))),
  )


@pytest.mark.parametrize(
  ("one", "other"),
  [
    [
      js.spardl_transform("workers", {names: "topka:k=3"}, density=0.2)
      for names in ("a|b", "a|c")
    ],
    [js.oktopk_transform("workers", density=density) for density in (0.2, 0.1)],
    [js.make_transform(name, "workers", density=0.2) for name in ("topka", "gtopk")],
  ],
  ids=["groups", "options", "collective"],
)
def test_a_checkpoint_of_the_same_sizes_and_another_method_is_refused(one, other):
  """Orbax compares shapes only: residuals would go to other leaves, or thresholds belong to another density."""
  params = {name: np.zeros(20, np.float32) for name in "abc"}
  saved, like = (js.init(tx, params, mesh_of(3)) for tx in (one, other))
  restored = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(saved))
  message = "restored into that of other parameters, .* or options of a collective .* then call js.convert"
  step = lambda *_: js.make_train_step(quadratic, other, mesh_of(3))(
    params, restored, normals(0, 6, 60)
  )
  for use in (js.resize, js.flush, step):
    with pytest.raises(ValueError, match=message):
      use(restored, params, mesh_of(3))


def test_checksums_do_not_depend_on_how_jax_prints(monkeypatch):
  """Their values are those of all future versions: checkpoints are refused where they change."""
  params = {"bias": jnp.zeros(4), "w": jnp.zeros((4, 6))}
  shapes = leaf_shapes(params)
  groups = groups_of(
    shapes,
    assign_collectives(js.make_collective("spardl", density=0.25), {"bias": "dense"}),
  )
  method = Method(tuple(shapes), tuple(shapes.values()), tuple(groups))
  shards = Shards.from_specs(params, {"x": 2, "y": 2}, [P(), P(("x", "y"), None)])
  monkeypatch.setattr(P, "__repr__", lambda _: "another one")
  swapped = Shards.from_specs(params, {"x": 2, "y": 2}, [P(), P(("y", "x"))])
  half = method.groups[0]._replace(collective=js.make_collective("spardl", density=0.5))
  changes = (
    {"groups": (half, *method.groups[1:])},
    {"names": ("['bias']", "['v']")},
    {"shapes": ((4,), (6, 4))},
  )
  others = [(shards, dataclasses.replace(method, **change)) for change in changes]
  layouts = [(None, None), (None, method), (shards, method), (swapped, method), *others]
  numbers = [int(Layout.of_workers(1, 1, *given).checksum) for given in layouts]
  assert numbers[:3] == [957197320, 1977587330, 3284606460]
  assert len(set(numbers)) == 7


def test_leaves_are_known_by_their_paths_whatever_contains_them():
  """As restored without a target, or pickled; and a transform may cover more leaves than local steps do."""
  tx = optax.chain(
    js.make_transform("topka", sim(2), k=3),
    optax.masked(
      js.local_steps(optax.sgd(1.0), averaged(sim(2)), every=4),
      collections.OrderedDict(b=True, a=False),
    ),
  )
  params = collections.OrderedDict(b=np.zeros(4, np.float32), a=np.zeros(6, np.float32))
  state = owing(js.init(tx, params, sim(2)), integers)
  plain = dict(params)
  expected, _ = js.flush(state, params, sim(2))
  for other in (state, pickle.loads(pickle.dumps(jax.device_get(state)))):
    update, _ = js.flush(other, plain, sim(2))
    jax.tree.map(np.testing.assert_array_equal, update, dict(expected))
    js.resize(other, plain, sim(2))
  assert any(np.any(leaf) for leaf in expected.values())


# Bad input.


def test_what_is_wrong_is_said_before_anything_is_changed():
  tx = chain(js.make_transform("topka", "workers", density=0.2))
  params, state = trained(tx, mesh_of(3), steps=1)
  mesh = mesh_of(4)
  smaller = PARAMS | {"table": jnp.zeros((2, 19))}
  cut = jax.tree.map(
    lambda x: (
      np.asarray(x)[: 128 if x.size == 192 else None] if x.ndim else np.asarray(x)
    ),
    state,
  )
  empty = Mesh(np.array(jax.devices()[:0]), ("workers",))
  cases = [
    (
      state,
      smaller,
      mesh,
      r"was made for parameters\['table'\] of shape \(2, 20\), here it has shape \(2, 19\)",
    ),
    (
      state,
      {"other": jnp.zeros(3)},
      mesh,
      r"was made for parameters\['bias'\] of shape \(3,\), here there are",
    ),
    (cut, PARAMS, mesh, "they were cut or padded, as Orbax does"),
    (state[1], PARAMS, mesh, "the optimizer state holds no jaxsparse transform"),
    (
      js.abstract_state(tx, PARAMS, mesh),
      PARAMS,
      mesh,
      r"\.residual\[0\] is a shape, as in js.abstract_state, and no",
    ),
    (
      js.simulate("topka", jnp.ones((3, 4)), k=1).state,
      PARAMS,
      mesh,
      "state is one of js.simulate",
    ),
    (
      state,
      PARAMS,
      sim(0),
      r"SimComm\(.* has no workers: give a mesh with devices, or a comm with members >= 1",
    ),
    (state, PARAMS, empty, r"Mesh\(.* has no workers: give a mesh with devices"),
  ]
  for bad, model, where, message in cases:
    for use in (
      js.resize,
      js.flush,
      lambda *given: js.convert(given[0], tx, *given[1:]),
    ):
      with pytest.raises(ValueError, match=message):
        use(bad, model, where)
  for use in (js.resize, lambda *given: js.convert(given[0], tx, *given[1:])):
    for trace in (
      lambda use=use: jax.jit(lambda state, params: use(state, params, mesh))(
        state, PARAMS
      ),
      lambda use=use: jax.eval_shape(lambda: use(state, PARAMS, mesh)),
    ):
      with pytest.raises(
        ValueError,
        match=r"js.(resize|convert): called under a trace, .* call it outside",
      ):
        trace()
  with pytest.raises(
    ValueError, match=r"optimizer state has .*trace.* and keeps all others"
  ):
    js.convert(
      state,
      optax.chain(js.make_transform("topka", "workers", density=0.2), optax.sgd(0.1)),
      PARAMS,
      mesh,
    )
  with pytest.raises(
    ValueError, match="made for 3 workers, the axis has 4: .* js.resize"
  ):
    js.flush(state, PARAMS, mesh)
  first = lambda x, spec: np.asarray(x)[: x.size // 3] if spec else np.asarray(x)
  alone = jax.tree.map(first, state, js.specs(state, "workers"))
  with pytest.raises(
    ValueError,
    match="state is that of one of 3 workers, .* give the arrays of all 3, concatenated",
  ):
    js.resize(alone, PARAMS, sim(4))
  step = js.make_train_step(quadratic, tx, mesh_of(3))
  step(params, state, normals(0, 24, 64))
  with pytest.raises(ValueError, match="was donated to an earlier step"):
    js.resize(state, PARAMS, mesh)


def test_bits_of_float32_survive():
  """Signs of zeros too, where no worker comes or goes and the collective changes."""
  one, other = (
    js.make_transform(name, "workers", density=0.2) for name in ("spardl", "topka")
  )
  state = js.init(one, PARAMS, mesh_of(2))
  residual = jnp.asarray(np.float32([-0.0, 1e-42, 3.0, 1e38] * 32))
  state = state._replace(carried=state.carried._replace(residual=(residual,)))
  converted = js.convert(state, other, PARAMS, mesh_of(2))
  assert_same_bits(converted.carried.residual[0], residual)


def test_flax_serializes_a_state():
  """As `flax.training.checkpoints` do with a TrainState: static parts of a state are those of the target."""
  outer = optax.chain(
    js.make_transform("topka", "workers", density=0.2, special={"bias": "dense"}),
    optax.sgd(1.0),
  )
  tx, mesh = (
    js.local_steps(optax.sgd(0.1, momentum=0.9), outer, every=2, fragments=2),
    mesh_of(3),
  )
  step, params, fresh = start(tx, mesh, PARAMS)
  trained = step(params, fresh, normals(0, 3, 64))[:2]
  restored = flax.serialization.from_bytes(
    (params, fresh), flax.serialization.to_bytes(trained)
  )
  jax.tree.map(np.testing.assert_array_equal, restored, trained)
  found, expected = (step(*one, normals(1, 3, 64))[:2] for one in (restored, trained))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.filterwarnings("ignore:.*go on from the mean")
@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_local_steps_in_every_step_become_those_of_every_other_one_and_back(workers):
  """Nothing is moved in between, residuals and inner states stay; what is moved is exchanged before."""
  outer = lambda workers: optax.chain(
    js.make_transform("topka", sim(workers), density=0.5), optax.sgd(1.0)
  )
  chain = lambda every, workers: js.local_steps(
    optax.sgd(0.25, momentum=0.5), outer(workers), every=every
  )
  step, params, state = start(chain(1, 2), sim(2), PARAMS, quadratic)
  n = sum(x.size for x in PARAMS.values())
  for number in range(2):
    params, state, _ = step(params, state, integers(number, 2, n))
  local = js.convert(state, chain(2, workers), params, sim(workers))
  assert means(local, workers).keys() == means(state, 2).keys()
  jax.tree.map(np.testing.assert_array_equal, means(local, workers), means(state, 2))
  assert not any(map(np.any, jax.tree.leaves(local.moved)))
  if workers == 2:
    assert_same_bits(local.inner, state.inner)
  step = js.make_train_step(quadratic, chain(2, workers), sim(workers), donate=False)
  params, local, _ = step(params, local, integers(2, workers, n))
  with pytest.raises(
    ValueError,
    match="workers have moved since the last exchange: call step.synchronize",
  ):
    js.convert(local, chain(1, workers), params, sim(workers))
  params, local = step.synchronize(params, local)
  again = js.convert(local, chain(1, workers), params, sim(workers))
  assert jax.tree.structure(again) == jax.tree.structure(
    js.init(chain(1, workers), params, sim(workers))
  )
  assert_same_bits((again.inner, again.outer), (local.inner, local.outer))


@pytest.mark.usefixtures("standard_promotion")
def test_a_dtype_that_a_step_has_changed_is_kept():
  """A float32 rate makes the momentum of bfloat16 parameters float32."""
  params = {"w": jnp.zeros(4, jnp.bfloat16)}
  rate = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)
  make = lambda density: optax.chain(
    js.make_transform("topka", sim(2), density=density), rate(0.1, momentum=0.9)
  )
  step, params, state = start(make(0.5), sim(2), params)
  params, state, _ = step(params, state, normals(0, 2, 4))
  (momentum,) = jax.tree.leaves(state[1].inner_state)
  assert momentum.dtype == jnp.float32
  assert_same_bits(js.convert(state, make(0.25), params, sim(2))[1], state[1])


def test_parameters_that_are_one_array_change_between_exchanges_too():
  params, chain = (
    jnp.zeros(8),
    lambda every: js.local_steps(optax.sgd(0.1), averaged(sim(2)), every=every),
  )
  state = js.convert(js.init(chain(1), params, sim(2)), chain(2), params, sim(2))
  np.testing.assert_array_equal(state.moved, np.zeros((2, 8)))
  assert js.convert(state, chain(1), params, sim(2)).moved == ()
  with pytest.raises(ValueError, match="workers have moved since the last exchange"):
    js.convert(state._replace(moved=state.moved + 1), chain(1), params, sim(2))


def masked_of(one):
  """`one` for a part of the leaves, whose others are averaged in every step."""
  kinds = {
    "one": one,
    "dense": optax.chain(js.dense_transform("workers"), optax.sgd(0.5)),
  }
  return optax.multi_transform(
    kinds, {"bias": "dense", "kernel": "one", "scale": "dense", "table": "one"}
  )


@pytest.mark.parametrize(
  ("inner", "wrap", "workers", "every"),
  [
    row(optax.sgd(0.25, momentum=0.5), lambda tx: tx, 3, 2),
    row(optax.chain(optax.clip(2.0), optax.trace(0.5)), masked_of, 3, 1, quick=True),
    row(
      optax.sgd(lambda count: 1 / (1 + count.astype(jnp.float32))), lambda tx: tx, 4, 4
    ),
  ],
  ids=["momentum", "some leaves", "other workers"],
)
def test_local_steps_begin_with_the_optimizer_of_a_dense_start(
  inner, wrap, workers, every
):
  """At each worker its state, what else the chain has, and totals of words; as docs/how_to/migrating.md says."""
  dense = wrap(optax.chain(js.dense_transform("workers"), inner))
  local = wrap(js.local_steps(inner, averaged(), every=every))
  step, params, state = start(dense, sim(3), PARAMS, quadratic)
  n = sum(x.size for x in PARAMS.values())
  for number in range(3):
    params, state, _ = step(params, state, normals(number, 3, n))
  begun = js.convert(state, local, params, sim(workers))
  assert jax.tree.structure(begun) == jax.tree.structure(
    js.init(local, params, sim(workers))
  )
  (node,) = local_states(begun)
  old = [
    x for x in jax.tree.leaves(state, is_leaf=is_reduce_state) if not is_reduce_state(x)
  ]
  rows = jax.tree.leaves(node.inner)
  assert rows
  for leaf in rows:
    assert any(
      np.array_equal(leaf, np.broadcast_to(x, leaf.shape))
      for x in old
      if np.shape(x) == leaf.shape[1:]
    )
  assert js.metrics(begun).total_words == js.metrics(state).total_words
  go_on = js.make_train_step(quadratic, local, sim(workers), donate=False)
  params, begun, metrics = go_on(params, begun, normals(3, workers, n))
  assert not metrics.skipped
  go_on.synchronize(params, begun)


def test_a_start_of_local_steps_forgets_the_momentum_of_gradients():
  """It would push a worker's first movement, with the same collectives, groups and workers too."""
  corrected = js.momentum_corrected(js.dense_transform("workers"))
  outer = optax.chain(corrected, optax.sgd(0.1))
  step, params, state = start(outer, sim(3), PARAMS, quadratic)
  params, state, _ = step(params, state, normals(0, 3, 64))
  assert np.any(optax.tree.get(state, "momentum"))
  local = js.local_steps(optax.sgd(0.1), outer, every=2)
  begun = js.convert(state, local, params, sim(3))
  assert not np.any(optax.tree.get(begun, "momentum"))
  assert js.metrics(begun).total_words == js.metrics(state).total_words


def test_a_start_of_local_steps_that_would_lose_something_is_refused():
  sparse = optax.chain(js.make_transform("topka", "workers", k=3), optax.sgd(0.1))
  step, params, state = start(sparse, sim(3), PARAMS, quadratic)
  params, state, _ = step(params, state, normals(0, 3, 64))
  local = js.local_steps(optax.sgd(0.1), averaged(), every=2)
  with pytest.raises(
    ValueError,
    match="a residual of gradients is not zero, deliver it by js.flush before",
  ):
    js.convert(state, local, params, sim(3))
  _, state = js.flush(state, params, sim(3))
  js.convert(state, local, params, sim(3))
  other = js.local_steps(optax.sgd(0.1, momentum=0.9), averaged(), every=2)
  with pytest.raises(
    ValueError,
    match=r"inner is not the optimizer that follows .* optax.chain\(transform, opt",
  ):
    js.convert(state, other, params, sim(3))
  with pytest.raises(
    ValueError, match="js.convert replaces jaxsparse transforms and keeps all others"
  ):
    js.convert(
      state, optax.chain(optax.clip(1.0), local, optax.clip(1.0)), params, sim(3)
    )


@pytest.mark.parametrize("workers", quick_of([2, 4], quick=[2]))
def test_rows_of_a_model_state_for_other_workers(workers):
  """Of each worker its own, as the error and docs/how_to/checkpoints.md say."""
  loss = lambda p, batch, model_state: (
    quadratic(p, batch),
    {"mean": 0.5 * model_state["mean"] + batch.mean(0)},
  )
  tx, n = averaged(), sum(x.size for x in PARAMS.values())
  step, params, state = start(tx, sim(3), PARAMS, loss, model_state="worker")
  batch = normals(0, 3, n)
  params, state, metrics = step(
    params, state, batch, model_state={"mean": jnp.zeros((3, n))}
  )
  state, step = (
    js.resize(state, params, sim(workers)),
    js.make_train_step(loss, tx, sim(workers), model_state="worker"),
  )
  with pytest.raises(
    ValueError, match=rf"np.resize\(x, \({workers}, \*x.shape\[1:\]\)\)"
  ):
    step(params, state, normals(1, workers, n), model_state=metrics.model_state)
  rows = jax.tree.map(
    lambda x: np.resize(x, (workers, *x.shape[1:])), metrics.model_state
  )
  np.testing.assert_array_equal(rows["mean"], batch[np.arange(workers) % 3])
  step(params, state, normals(1, workers, n), model_state=rows)
