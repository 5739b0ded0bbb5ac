"""Each collective as an optax transformation: what optax asks of any of its own, and clear errors."""

import ast
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import _compat
from jaxsparse.transform import metrics as telemetry
from jaxsparse.transform import state as states
from jaxsparse.transform.update import init_state
from tests.cases import CASES, REPLICATING, UNLIKE, chained, each_case, mesh_of, normals, row

WORKERS = 3
CASES = [case for case in CASES if not case.options or case.options in ((("teams", 3),), (("means", "leaf"),))]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def params_of(**dtypes):
  params = {"w": normals(0, 4, 3), "b": np.zeros(3, np.float32)}
  return {name: jnp.asarray(leaf, dtypes.get(name)) for name, leaf in params.items()} | {"none": None}


def updater(tx, state):
  """A jitted update over a real mesh: one gradient of the whole batch, its mean over workers outside."""
  spec = js.specs(state, "workers")

  def worker(grads, state):
    return tx.update(jax.tree.map(lambda g: g[0], grads), state)

  return jax.jit(_compat.shard_map(worker, mesh_of(WORKERS), (P("workers"), spec), (P(), spec)))


def grads_of(step, **dtypes):
  return jax.tree.map(lambda p: jnp.asarray(normals(step, WORKERS, *p.shape), p.dtype), params_of(**dtypes))


def transform_of(case, **entries):
  return js.make_transform(case.name, "workers", **case.config(**(entries or {"density": 0.3})))


@each_case([case for case in CASES if case.name not in ("a2sgd", "onebit", "qsgd")])
def test_everything_delivered_is_the_mean(case):
  tx = transform_of(case, density=1.0)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  grads = grads_of(1)
  updates, _ = updater(tx, state)(grads, state)
  expected = jax.tree.map(lambda g: g.mean(0), grads)
  chex.assert_trees_all_close(updates, expected, atol=1e-2 if "bfloat16" in str(case) else 1e-6)


@pytest.mark.parametrize(
  ("case", "dtypes"),
  [
    row(
      case, dtypes, quick=dtypes == ("bfloat16", "float16") and str(case) in UNLIKE, id="-".join([*dtypes, str(case)])
    )
    for dtypes in (("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float16"))
    for case in CASES
  ],
)
def test_dtypes_and_shardings_are_kept_and_the_state_is_a_fixed_point(case, dtypes):
  tx, of = transform_of(case), dict(zip(("w", "b"), dtypes, strict=True))
  state = js.init(tx, params_of(**of), mesh_of(WORKERS))
  update = updater(tx, state)
  updates, after = update(grads_of(1, **of), state)
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, params_of(**of))
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  kept = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), after, state)
  assert all(jax.tree.leaves(kept))
  update(grads_of(2, **of), after)
  assert update._cache_size() == 1  # no recompilation on the second call


@each_case(CASES)
def test_scan_equals_a_loop(case):
  tx = transform_of(case)
  start = js.init(tx, params_of(), mesh_of(WORKERS))
  spec = js.specs(start, "workers")
  steps = jax.tree.map(lambda *g: jnp.stack(g, 1), *(grads_of(i) for i in range(3)))

  def worker(grads, state):
    state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, jax.tree.map(lambda g: g[0], grads))
    return updates, state

  scan = jax.jit(_compat.shard_map(worker, mesh_of(WORKERS), (P("workers"), spec), (P(), spec)))
  updates, final = scan(steps, start)
  state, update = start, updater(tx, start)
  for i in range(3):
    each, state = update(grads_of(i), state)
    chex.assert_trees_all_close(each, jax.tree.map(lambda u, i=i: u[i], updates), rtol=1e-6)
  chex.assert_trees_all_close(state, final, rtol=1e-6)


AFTER = {
  "sgd": optax.sgd(0.03, momentum=0.9),
  "adam": optax.adam(0.1),
  "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}


@pytest.mark.parametrize(
  ("case", "after"),
  [
    row(case, after, quick=str(case) in ("a2sgd", "dense", "spardl"), id=f"{name}-{case}")
    for name, after in AFTER.items()
    for case in CASES
  ],
)
def test_first_in_a_chain(case, after):
  tx = chained(case, after, density=0.5)
  params, mesh = params_of(), mesh_of(WORKERS)
  state = js.init(tx, params, mesh)
  step = js.make_train_step(lambda p, batch: jnp.mean((batch @ p["w"] + p["b"][None] - 1.0) ** 2), tx, mesh)
  batch = jnp.asarray(normals(3, 4 * WORKERS, 4))
  losses = []
  for _ in range(60):
    with jax.numpy_dtype_promotion("standard"):  # adam needs it
      params, state, metrics = step(params, state, batch)
    losses.append(float(metrics.loss))
  assert losses[-1] < 0.7 * losses[0]


@each_case([case for case in CASES if case in REPLICATING], ["dense", "oktopk", "spardl"])
def test_inject_hyperparams(case):
  """Sizes of messages are static: under inject_hyperparams they are named in static_args, and everything works."""
  config = case.config(density=0.3)
  factory = functools.partial(js.make_transform, case.name)
  static = ("axis", *js.collective_options(case.name))
  tx = optax.inject_hyperparams(getattr(js, f"{case.name}_transform"), static_args=static)(axis="workers", **config)
  state, plain = js.init(tx, params_of(), mesh_of(WORKERS)), factory("workers", **config)
  got, _ = updater(tx, state)(grads_of(1), state)
  other = js.init(plain, params_of(), mesh_of(WORKERS))
  expected, _ = updater(plain, other)(grads_of(1), other)
  chex.assert_trees_all_equal(got, expected)


def test_inject_hyperparams_without_static_args_says_what_to_do():
  tx = optax.inject_hyperparams(js.spardl_transform)(axis="workers", density=0.3)
  with pytest.raises(TypeError, match="static_args"):
    js.init(tx, params_of(), mesh_of(WORKERS))
  tx = optax.inject_hyperparams(js.spardl_transform, static_args="density")(axis="workers", density=0.3)
  with pytest.raises(TypeError, match=r"spardl: decay, teams must be plain .* give static_args=\('density', ") as error:
    js.init(tx, params_of(), mesh_of(WORKERS))
  static = ast.literal_eval(str(error.value).partition("static_args=")[2])
  tx = optax.inject_hyperparams(js.spardl_transform, static_args=static)(axis="workers", density=0.3)
  js.init(tx, params_of(), mesh_of(WORKERS))


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, float("nan"), "much", True])
def test_bad_density(density):
  with pytest.raises(ValueError, match=rf"density={density!r}, choose a number in \(0, 1\]"):
    js.spardl_transform("workers", density=density)


@pytest.mark.parametrize("k", [0, -3, 2.5, True])
def test_bad_k(k):
  with pytest.raises(ValueError, match=f"k={k!r}, choose a whole number from 1"):
    js.spardl_transform("workers", k=k)


def test_k_larger_than_the_gradient():
  with pytest.raises(ValueError, match="k=16, choose at most the number of gradient entries, 15"):
    js.init(js.spardl_transform("workers", k=16), params_of(), mesh_of(WORKERS))


@pytest.mark.parametrize("config", [{}, {"density": 0.1, "k": 3}])
def test_both_or_neither_of_density_and_k(config):
  with pytest.raises(ValueError, match="exactly one of density and k, got density="):
    js.spardl_transform("workers", **config)


def test_density_is_read_as_a_decimal_number():
  assert js.make_collective("spardl", density=0.07).entries(100) == 7
  assert js.make_collective("spardl", density=np.float64(0.01)).entries(1000) == 10
  assert js.make_collective("spardl", density=1e-9).entries(100) == 1


def test_unknown_names_and_options_list_the_choices():
  with pytest.raises(
    ValueError,
    match="unknown collective 'spardle', choose one of a2sgd, chunktopk, dcttopk, dense, gaussiank, .*, topkdsa",
  ):
    js.make_transform("spardle", "workers")
  with pytest.raises(
    TypeError, match="spardl: unknown option rho, choose from density, k, decay, wire, selector, teams, sag, residual"
  ):
    js.make_transform("spardl", "workers", rho=0.1)
  with pytest.raises(ValueError, match="residual='all', choose one of 'global', 'partial', 'local'"):
    js.make_transform("spardl", "workers", density=0.1, residual="all")
  with pytest.raises(ValueError, match="dtype='int8', choose one of 'float32', 'bfloat16'"):
    js.dense_transform("workers", dtype="int8")


@every_case
def test_outside_shard_map(case):
  tx = transform_of(case)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  with pytest.raises(ValueError, match="axis 'workers' is not mapped here.*inside jax.shard_map"):
    tx.init(params_of())
  with pytest.raises(ValueError, match="axis 'workers' is not mapped here.*inside jax.shard_map"):
    jax.jit(tx.update)(params_of(), state)


def test_gradients_that_jax_already_summed():
  tx = js.spardl_transform("workers", density=0.5)
  state = js.init(tx, jnp.zeros(4), mesh_of(WORKERS))
  spec = js.specs(state, "workers")

  def worker(params, state, batch):
    return tx.update(jax.grad(lambda p: jnp.sum(p * batch[0]))(params), state)

  program = jax.shard_map(worker, mesh=mesh_of(WORKERS), in_specs=(P(), spec, P("workers")), out_specs=(P(), spec))
  with pytest.raises(ValueError, match="already summed over 'workers'.*check_vma=False"):
    jax.jit(program)(jnp.zeros(4), state, jnp.zeros((WORKERS, 4)))


@every_case
@pytest.mark.parametrize(
  ("tree", "error", "message"),
  [
    ({"a": {"ids": jnp.zeros(3, jnp.int32)}}, TypeError, r"gradients\['a'\]\['ids'\] has dtype int32"),
    ([jnp.zeros(2), jnp.zeros(3, jnp.complex64)], TypeError, r"gradients\[1\] has dtype complex64"),
    ({}, ValueError, "hold no entry"),
    ({"a": jnp.zeros((0, 3))}, ValueError, "hold no entry"),
  ],
)
def test_gradients_that_are_not_gradients(case, tree, error, message):
  with pytest.raises(error, match=message):
    js.init(transform_of(case), tree, mesh_of(WORKERS))


def test_state_of_another_model():
  tx = js.spardl_transform("workers", density=0.5)
  state = js.init(tx, jnp.zeros(5), mesh_of(WORKERS))
  with pytest.raises(ValueError, match="residual of 5 entries a worker, the gradients have 15"):
    updater(tx, state)(grads_of(1), state)


def test_state_of_another_collective():
  state = js.init(js.spardl_transform("workers", density=0.5), params_of(), mesh_of(WORKERS))
  others = "the optimizer state is not one of .* and these options: make one of it with js.convert"
  same_arrays = (
    "the optimizer state is one of spardl:density=0.5, and this transform is .*: make one of it with js.convert"
  )
  for tx, message in (
    (js.spardl_transform("workers", density=0.5, selector="reuse"), others),
    (js.oktopk_transform("workers", density=0.5), others),
    (js.spardl_transform("workers", density=0.25), same_arrays),
    (js.spardl_transform("workers", density=0.5, residual="local"), same_arrays),
  ):
    with pytest.raises(ValueError, match=message):
      updater(tx, state)(grads_of(1), state)


@every_case
def test_a_state_made_eagerly_can_be_donated(case):
  """No array is in it twice."""
  state = init_state(case.make(density=0.5), 30, case.workers([6, 8, 5])[0])
  pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]
  assert len(set(pointers)) == len(pointers)


def test_metrics_of_one_transform_and_of_none():
  state = js.init(optax.chain(js.dense_transform("workers"), optax.adam(0.1)), params_of(), mesh_of(WORKERS))
  assert not js.metrics(state).skipped
  assert js.metrics(state).parts == ()
  with pytest.raises(ValueError, match="holds 0 jaxsparse transforms"):
    js.metrics(state[1])


def test_metrics_of_two_transforms_are_per_label_and_in_all():
  labels = {"w": "sparse", "b": "dense", "none": "dense"}
  transforms = {"sparse": js.spardl_transform("workers", k=3), "dense": js.dense_transform("workers")}
  tx = optax.multi_transform(transforms, labels)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  update = updater(tx, state)
  for step in range(3):
    _, state = update(grads_of(step), state)
  found = js.metrics(state)
  assert set(found.parts) == {"sparse", "dense"}
  sparse, dense = found.parts["sparse"], found.parts["dense"]
  for name in ("words_sent", "words_used", "selected", "delivered", "total_words"):
    assert float(getattr(found, name)) == float(getattr(sparse, name)) + float(getattr(dense, name)), name
  assert float(found.density) == pytest.approx(float(found.delivered) / 15)
  assert float(found.residual_norm) == pytest.approx(float(sparse.residual_norm))
  assert float(found.total_words) == 3 * float(found.words_sent)
  flat = found.as_dict()
  assert all(type(value) is float for value in flat.values())
  assert flat["total_bytes"] == 4 * flat["total_words"] == 12 * flat["words_sent"]
  assert flat["sparse/words_sent"] + flat["dense/words_sent"] == flat["words_sent"]


def test_words_of_all_steps_are_counted_beyond_32_bits():
  counters, step = js.Counters.zeros(), js.Counters(words_sent=3_000_000_000)
  for _ in range(3):
    counters = telemetry.count_step([step], 10, counters, jnp.bool_(True))
  state = states.ReduceState(js.State(), counters, states.Layout.of_workers(1, 10))
  assert float(js.metrics(state).total_words) == np.float32(9e9)
