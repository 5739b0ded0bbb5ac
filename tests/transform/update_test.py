"""Each collective as an optax transformation: what optax asks of any of its own, and clear errors."""

import ast
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.collectives import collective_options
from jaxsparse.comm import SoloComm
from jaxsparse.transform import metrics as telemetry
from jaxsparse.transform import state as states
from tests.cases import (
  AS_USERS,
  CASES,
  each_case,
  mesh_of,
  normals,
  quick_of,
  update_program,
)

WORKERS = 3
CASES = [
  case
  for case in CASES
  if not case.options or case.options in ((("teams", 3),), (("means", "leaf"),))
]


def params_of(**dtypes):
  params = {"w": normals(0, 4, 3), "b": np.zeros(3, np.float32)}
  return {
    name: jnp.asarray(leaf, dtypes.get(name)) for name, leaf in params.items()
  } | {"none": None}


def grads_of(step, **dtypes):
  return jax.tree.map(
    lambda p: jnp.asarray(normals(step, WORKERS, *p.shape), p.dtype),
    params_of(**dtypes),
  )


def spardl(**options):
  return js.spardl_transform("workers", **options)


@each_case(CASES, ["a2sgd", "dense", "spardl"])
def test_dtypes_and_shardings_are_kept_and_the_state_is_a_fixed_point(case):
  tx, dtypes = (
    js.make_transform(case.name, "workers", **case.config(density=0.3)),
    {"w": "bfloat16", "b": "float16"},
  )
  state = js.init(tx, params_of(**dtypes), mesh_of(WORKERS))
  update = update_program(tx, state, WORKERS)
  updates, after = update(grads_of(1, **dtypes), state)
  chex.assert_trees_all_equal_shapes_and_dtypes(
    jax.tree.map(lambda u: u[0], updates), params_of(**dtypes)
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  kept = jax.tree.map(
    lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), after, state
  )
  assert all(jax.tree.leaves(kept))
  update(grads_of(2, **dtypes), after)
  assert update._cache_size() == 1  # no recompilation on the second call


def test_an_update_copies_no_vector():
  """One worker that donates its gradient and state: writes in place follow all reads of the buffer."""
  tx, params = (
    js.spardl_transform(SoloComm(4), density=0.01, selector="chunked"),
    jnp.zeros(1 << 14),
  )
  program = (
    jax.jit(tx.update, donate_argnums=(0, 1))
    .lower(params, tx.init(params))
    .compile(AS_USERS)
  )
  assert not re.findall(rf"= f32\[{params.size}\]\S* copy\(", program.as_text())


def test_inject_hyperparams_with_the_static_args_that_its_errors_name():
  """Sizes of messages are static."""
  inject = lambda **named: optax.inject_hyperparams(js.spardl_transform, **named)(
    axis="workers", density=0.3
  )
  with pytest.raises(TypeError, match="static_args"):
    js.init(inject(), params_of(), mesh_of(WORKERS))
  with pytest.raises(
    TypeError,
    match=r"spardl: decay, teams must be plain .* give static_args=\('density', ",
  ) as error:
    js.init(inject(static_args="density"), params_of(), mesh_of(WORKERS))
  static = ast.literal_eval(str(error.value).partition("static_args=")[2])
  assert set(static) <= {"axis", *collective_options("spardl")}
  found = []
  for tx in (inject(static_args=static), spardl(density=0.3)):
    state = js.init(tx, params_of(), mesh_of(WORKERS))
    found.append(update_program(tx, state, WORKERS)(grads_of(1), state)[0])
  chex.assert_trees_all_equal(*found)


NO_NUMBER = (0, -0.1, 1.5, float("nan"), "much", True)
NAMES = "a2sgd, chunktopk, dcttopk, dense, gaussiank, .*, topkdsa"
OPTIONS = "density, k, decay, wire, selector, teams, sag, residual"


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    *[
      ("spardl", {"density": bad}, rf"density={bad!r}, choose a number in \(0, 1\]")
      for bad in NO_NUMBER
    ],
    *[
      (
        "spardl",
        {"density": 1.0, "decay": bad},
        rf"decay={bad!r}, choose a number in \(0, 1\]",
      )
      for bad in NO_NUMBER
    ],
    *[
      ("spardl", {"k": bad}, f"k={bad!r}, choose a whole number from 1")
      for bad in (0, -3, 2.5, True)
    ],
    ("qsgd", {"decay": 2}, "qsgd: decay=2, choose a number"),
    ("spardl", {}, "exactly one of density and k, got density="),
    ("spardl", {"density": 0.1, "k": 3}, "exactly one of density and k, got density="),
    ("spardl", {"k": 16}, "k=16, choose at most the number of gradient entries, 15"),
    ("spardl", {"rho": 0.1}, f"spardl: unknown option rho, choose from {OPTIONS}"),
    (
      "spardl",
      {"density": 0.1, "residual": "all"},
      "residual='all', choose one of 'global', 'partial', 'local'",
    ),
    ("dense", {"dtype": "int8"}, "dtype='int8', choose one of 'float32', 'bfloat16'"),
    ("spardle", {}, f"unknown collective 'spardle', choose one of {NAMES}"),
  ],
)
def test_bad_options(name, options, message):
  with pytest.raises((ValueError, TypeError), match=message):
    js.init(
      js.make_transform(name, "workers", **options), params_of(), mesh_of(WORKERS)
    )


def test_density_is_read_as_a_decimal_number():
  assert js.make_collective("spardl", density=0.07).entries(100) == 7
  assert js.make_collective("spardl", density=np.float64(0.01)).entries(1000) == 10
  assert js.make_collective("spardl", density=1e-9).entries(100) == 1


def test_outside_shard_map():
  tx = spardl(density=0.3)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  for call in (
    lambda: tx.init(params_of()),
    lambda: jax.jit(tx.update)(params_of(), state),
  ):
    with pytest.raises(
      ValueError, match="axis 'workers' is not mapped here.*inside jax.shard_map"
    ):
      call()


def test_gradients_that_jax_already_summed():
  tx = spardl(density=0.5)
  state = js.init(tx, jnp.zeros(4), mesh_of(WORKERS))
  spec = js.specs(state, "workers")

  def worker(params, state, batch):
    return tx.update(jax.grad(lambda p: jnp.sum(p * batch[0]))(params), state)

  program = jax.shard_map(
    worker,
    mesh=mesh_of(WORKERS),
    in_specs=(P(), spec, P("workers")),
    out_specs=(P(), spec),
  )
  with pytest.raises(
    ValueError, match="summed or averaged over 'workers' already.*js.own_params"
  ):
    jax.jit(program)(jnp.zeros(4), state, jnp.zeros((WORKERS, 4)))


@pytest.mark.parametrize(
  ("tree", "error", "message"),
  [
    (
      {"a": {"ids": jnp.zeros(3, jnp.int32)}},
      TypeError,
      r"gradients\['a'\]\['ids'\] has dtype int32",
    ),
    (
      [jnp.zeros(2), jnp.zeros(3, jnp.complex64)],
      TypeError,
      r"gradients\[1\] has dtype complex64",
    ),
    ({}, ValueError, "hold no entry"),
    ({"a": jnp.zeros((0, 3))}, ValueError, "hold no entry"),
  ],
)
def test_gradients_that_are_not_gradients(tree, error, message):
  with pytest.raises(error, match=message):
    js.init(spardl(density=0.3), tree, mesh_of(WORKERS))


def test_state_of_another_model_or_collective():
  state = js.init(spardl(density=0.5), params_of(), mesh_of(WORKERS))
  others = "is one of spardl:density=0.5, and this transform is .*: make one of it with js.convert"
  smaller = js.init(spardl(density=0.5), jnp.zeros(5), mesh_of(WORKERS))
  special = spardl(density=0.5, special={"b": "dense"})
  for tx, given, message in (
    (
      special,
      state,
      "is one of spardl:density=0.5, and this transform is dense, spardl:density=0.5:",
    ),
    (
      spardl(density=0.5),
      js.init(special, params_of(), mesh_of(WORKERS)),
      "is one of dense, spardl:density=0.5, and",
    ),
    (
      spardl(density=0.5),
      smaller,
      r"made for parameters of shape \(5,\), here there are",
    ),
    (spardl(density=0.5, selector="reuse"), state, others),
    (js.oktopk_transform("workers", density=0.5), state, others),
    (spardl(density=0.25), state, others),
    (spardl(density=0.5, residual="local"), state, others),
  ):
    with pytest.raises(ValueError, match=message):
      update_program(tx, given, WORKERS)(grads_of(1), given)


def test_metrics_of_two_transforms_are_per_label_and_in_all():
  labels = {"w": "sparse", "b": "dense", "none": "dense"}
  transforms = {"sparse": spardl(k=3), "dense": js.dense_transform("workers")}
  tx = optax.multi_transform(transforms, labels)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  update = update_program(tx, state, WORKERS)
  for step in range(3):
    _, state = update(grads_of(step), state)
  found = js.metrics(state).as_dict()
  for name in ("words_sent", "words_used", "selected", "delivered", "total_words"):
    assert found[name] == found[f"sparse/{name}"] + found[f"dense/{name}"], name
  assert found["density"] == pytest.approx(found["delivered"] / 15)
  assert found["residual_norm"] == pytest.approx(found["sparse/residual_norm"])
  assert found["total_bytes"] == 4 * found["total_words"] == 12 * found["words_sent"]
  assert all(type(value) is float for value in found.values())
  with pytest.raises(ValueError, match="holds 0 jaxsparse transforms"):
    js.metrics(optax.adam(0.1).init(params_of()))


def test_words_of_all_steps_are_counted_beyond_32_bits():
  counters, step = js.Counters.zeros(), js.Counters(words_sent=3_000_000_000)
  for _ in range(3):
    counters = telemetry.count_step(
      [step], 10, counters, jnp.bool_(True), jnp.zeros(10)
    )
  state = states.ReduceState(
    js.State((None,), ((),), ((),)), counters, states.Layout.of_workers(1, 10)
  )
  assert float(js.metrics(state).total_words) == np.float32(9e9)


@pytest.mark.parametrize(
  "name", quick_of(js.collective_names(), quick=["dense", "nbit", "powersgd", "spardl"])
)
def test_derivatives_of_a_step_are_right_or_refused(name):
  """As of hypergradients: of the loss after a step with respect to a scale of the gradient."""
  options = {"density": 1.0} if "density" in collective_options(name) else {}
  tx, params, grads = (
    js.make_transform(name, SoloComm(3), **options),
    jnp.ones((2, 3)),
    jnp.asarray(normals(0, 2, 3)),
  )
  update = lambda grads: tx.update(grads, tx.init(params))[0]
  loss = lambda scale: jnp.sum((params - update(scale * grads)) ** 2)
  if name == "dense":
    alone = update(grads)
    np.testing.assert_allclose(
      jax.grad(loss)(1.0), -2 * jnp.vdot(params - alone, alone), rtol=1e-5
    )
  else:
    with pytest.raises(
      TypeError, match=f"{name}: there is no derivative of an exchange"
    ):
      jax.eval_shape(jax.grad(loss), 1.0)
  constant = lambda scale: update(jax.lax.stop_gradient(scale * grads))
  jax.eval_shape(jax.jacfwd(constant), 1.0)
