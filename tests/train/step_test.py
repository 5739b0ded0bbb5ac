"""What a training step takes beside a batch: keys, model state, micro-batches, extra arguments; and any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.costs import counting
from tests.cases import (
  assert_same_bits,
  averaged,
  integers,
  linear,
  mesh_of,
  normals,
  quadratic,
  quick_of,
  row,
  sim,
)
from tests.cases import start as start_with

SPARSE, DENSE = (
  js.make_transform("topka", "workers", density=0.3),
  js.dense_transform("workers"),
)
PARAMS = {"w": np.zeros((5, 4), np.float32)}


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] - 1.0) ** 2)


def make(
  transform=DENSE,
  after=None,
  params=PARAMS,
  loss=loss_fn,
  mesh=None,
  donate=True,
  **options,
):
  """(step, params, state)."""
  tx = optax.chain(transform, after or optax.sgd(0.1))
  return start_with(tx, mesh or mesh_of(3), params, loss, donate=donate, **options)


def batch_of(step, rows=12):
  return normals(step, rows, 5)


# Meshes.


@pytest.mark.parametrize(
  "kind",
  quick_of([AxisType.Auto, AxisType.Explicit], quick=[AxisType.Explicit]),
  ids=str,
)
def test_the_mesh_is_the_users_own(kind):
  """Set with `jax.set_mesh`, of axes of either kind: the same bits, and arrays on the user's mesh."""
  step, params, state = make(SPARSE)
  expected = step(params, state, batch_of(0))[0]
  mesh = Mesh(np.array(jax.devices()[:3]), ("workers",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    step, params, state = make(SPARSE, mesh=mesh)
    compiled = step.lower(params, state, batch_of(0)).compile()
    params, state, _ = compiled(params, state, batch_of(0))
    assert_same_bits(params, expected)
    step.check(params, state)
    assert float(js.metrics(state).residual_norm) > 0
    assert float(jnp.sum(params["w"])) != 0  # usable outside
    assert js.costs.count("spardl", n=100, workers=3, density=0.1).messages == 4
    assert js.simulate("spardl", np.ones((3, 10), np.float32), k=3).total.shape == (10,)
  assert {leaf.sharding.mesh for leaf in jax.tree.leaves((params, state))} == {mesh}


@pytest.mark.parametrize(
  "kind",
  quick_of([AxisType.Auto, AxisType.Explicit], quick=[AxisType.Explicit]),
  ids=str,
)
def test_models_under_vmap_train_as_each_alone(kind):
  """Two of them on three workers, whose axis the models must not be sharded over; in a jit and without."""
  mesh = Mesh(np.array(jax.devices()[:3]), ("workers",), axis_types=(kind,))
  tx, models = (
    optax.chain(js.make_transform("topka", "workers", k=3), optax.sgd(0.1)),
    {"w": jnp.asarray(normals(1, 2, 5, 4))},
  )
  step = js.make_train_step(loss_fn, tx, mesh, donate=False)
  train = jax.vmap(lambda params, state: step(params, state, batch_of(0)))
  after = train(
    *train(models, jax.vmap(lambda params: js.init(tx, params, mesh))(models))[:2]
  )
  assert_same_bits(jax.jit(train)(*after[:2])[0], train(*after[:2])[0])
  params = {"w": models["w"][1]}
  alone = step(*step(params, js.init(tx, params, mesh), batch_of(0))[:2], batch_of(0))
  found = jax.tree.map(lambda x: x[1], after)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, alone
  )


# Arguments that were donated.


def test_arrays_that_were_donated_are_refused_and_donate_false_keeps_them():
  step, params, state = make()
  new_params, new_state, _ = step(params, state, batch_of(0))
  for again in ((params, new_state), (new_params, state)):
    with pytest.raises(
      ValueError,
      match=r"(params|state).* was donated to an earlier step and is gone: .* donate=F",
    ):
      step(*again, batch_of(1))
  for use, given in (
    (js.metrics, (state,)),
    (js.specs, (state, "workers")),
    (step.check, (params, state)),
    (js.init, (DENSE, params, mesh_of(3))),
  ):
    with pytest.raises(ValueError, match="was donated to an earlier step and is gone"):
      use(*given)
  step(new_params, new_state, batch_of(1))
  step, params, state = make(donate=False)
  first, _, _ = step(params, state, batch_of(0))
  again, _, _ = step(params, state, batch_of(0))
  assert_same_bits(first, again)


@pytest.mark.parametrize(
  "where", quick_of([mesh_of(3), sim(3)], quick=[mesh_of(3)]), ids=["mesh", "simulator"]
)
def test_an_array_that_is_given_twice_is_not_donated_twice(where):
  """XLA would end the process."""
  loss = lambda p, x, model_state: (
    jnp.mean((x @ p["a"] + x @ p["b"] + model_state["c"].sum()) ** 2),
    model_state,
  )
  tx = js.make_transform(
    "topka", where if isinstance(where, js.SimComm) else "workers", density=0.5
  )
  step, z = js.make_train_step(loss, tx, where), jnp.ones((5, 5))
  params = {"a": z, "b": z}
  state = js.init(tx, params, where)
  for number in range(3):
    params, state, metrics = step(
      params, state, batch_of(number), model_state={"c": params["a"]}
    )
    assert np.isfinite(metrics.loss)


# Wrappers and extra arguments of optax.


@pytest.mark.parametrize(
  "wrap", quick_of(["masked", "multisteps"], quick=["multisteps"])
)
def test_wrapped_by_optax(wrap):
  """Leaves that stay dense, and several batches a step."""
  sparse, sgd = js.make_transform("topka", "workers", density=0.2), optax.sgd(0.1)
  tx = {
    "masked": optax.chain(
      optax.masked(sparse, {"w": True, "b": False}),
      optax.masked(DENSE, {"w": False, "b": True}),
      sgd,
    ),
    "multisteps": optax.chain(
      sparse, optax.MultiSteps(sgd, 2).gradient_transformation()
    ),
  }[wrap]
  loss = lambda p, batch: quadratic({"w": p["w"]}, batch) + (p["b"] - 1.0) ** 2
  step, params, state = start_with(
    tx, mesh_of(4), {"w": jnp.zeros(20), "b": jnp.zeros(())}, loss
  )
  for i in range(200):
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
      params, state, metrics = step(
        params, state, np.linspace(-1, 1, 20) + 0.1 * normals(i, 8, 20)
      )
  assert float(metrics.loss) < 0.3
  assert float(params["b"]) == pytest.approx(1, abs=0.1)


def test_extra_arguments_and_the_mean_loss_as_value_reach_optax():
  update = lambda grads, state, _=None, *, value, factor: (
    jax.tree.map(lambda g: g * factor, grads),
    state + value,
  )
  scaled = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
  step, params, state = make(after=optax.chain(optax.sgd(0.1), scaled), donate=False)
  for factor in (0.0, 1.0):
    after, summed, metrics = step(
      params, state, batch_of(0), factor=jnp.float32(factor)
    )
    assert np.any(after["w"] != params["w"]) == bool(factor)
    assert summed[1][1] == metrics.loss


# Micro-batches.


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  "dtype",
  quick_of(
    ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"],
    quick=["float16", "complex64"],
  ),
)
def test_gradients_of_micro_batches_are_averaged_in_a_dtype_that_holds_their_sum(dtype):
  """Against numpy; the sum of two of 50,000 is Inf in float16, and complex leaves have an imaginary part."""
  is_complex, is_wide = dtype.startswith("complex"), dtype in ("float64", "complex128")
  comm = sim(2)
  tx = optax.chain(js.dense_transform(comm), optax.sgd(1.0))
  if is_complex:
    conjugate = optax.stateless(lambda grads, _: jax.tree.map(jnp.conj, grads))
    tx = optax.chain(conjugate, optax.contrib.split_real_and_imaginary(tx))
  batch = 50_000 + 100 * normals(0, 8, 3).astype(np.complex128)
  batch += 1j * normals(1, 8, 3) if is_complex else 0
  loss = lambda params, batch: -jnp.real(jnp.vdot(batch.mean(0), params["w"]))
  with jax.enable_x64(is_wide):
    given = jnp.asarray(batch if is_complex else batch.real, dtype)
    params = {"w": jnp.zeros(3, dtype)}
    step = js.make_train_step(loss, tx, comm, accumulate=2)
    after, _, metrics = step(params, js.init(tx, params, comm), given)
    assert (after["w"].dtype, bool(metrics.skipped)) == (dtype, False)
    expected = np.asarray(given).astype(np.complex128).mean(0)
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(after["w"].astype(complex), expected, rtol=tolerance)


# Aux.


def aux_loss(params, batch):
  flat = batch.reshape(-1)
  above = flat > 2
  aux = {
    "mean": flat.mean(),
    "half": flat[0].astype("bfloat16"),
    "count": above.sum(dtype="int32"),
    "any": above.any(),
  }
  return jnp.sum(params["w"] * 0), aux


def test_aux_is_averaged_where_it_is_floating_point():
  """Of two micro-batches; integers and booleans are counts."""
  batch, aux = np.arange(12, dtype=np.float32), {}  # 0-3, 4-7, 8-11
  for how in ("mean", "sum", "max", "min", "stack"):
    step, params, state = make(
      loss=aux_loss, has_aux=True, aux_reduce=how, accumulate=2
    )
    aux[how] = step(params, state, batch)[2].aux
  dtypes = [x.dtype for x in jax.tree.leaves(aux["mean"])]
  assert dtypes == [jnp.int32, jnp.int32, jnp.bfloat16, jnp.float32]
  found = (
    *(aux["mean"][name] for name in ("mean", "count", "any")),
    aux["sum"]["count"],
  )
  assert (*map(float, found), float(aux["max"]["half"]), float(aux["min"]["half"])) == (
    5.5,
    9,
    5,
    9,
    10,
    0,
  )
  rows = batch.reshape(3, 2, -1)
  np.testing.assert_array_equal(aux["stack"]["mean"], rows.mean(-1))
  np.testing.assert_array_equal(aux["stack"]["any"], (rows > 2).any(-1))


@pytest.mark.parametrize("workers", quick_of([3, 4], quick=[3]))
def test_complex_aux_and_model_states_are_averaged(workers):
  spectrum = lambda batch: jax.lax.complex(batch.sum(), 2 * batch.sum())

  def loss(params, batch, model_state):
    return (
      jnp.sum(params["w"] * 0),
      {"spectrum": model_state["spectrum"] + spectrum(batch)},
      spectrum(batch),
    )

  step, params, state = make(mesh=mesh_of(workers), loss=loss, has_aux=True)
  batch = np.arange(workers, dtype=np.float32)[:, None]
  _, _, metrics = step(
    params, state, batch, model_state={"spectrum": jnp.complex64(1j)}
  )
  mean = batch.mean() * (1 + 2j)
  np.testing.assert_allclose(metrics.aux, mean, rtol=1e-6)
  np.testing.assert_allclose(metrics.model_state["spectrum"], 1j + mean, rtol=1e-6)
  step, params, state = make(
    mesh=mesh_of(workers), loss=loss, has_aux=True, aux_reduce="stack"
  )
  _, _, metrics = step(
    params, state, batch, model_state={"spectrum": jnp.complex64(1j)}
  )
  np.testing.assert_allclose(metrics.aux, batch[:, 0] * (1 + 2j), rtol=1e-6)
  step, params, state = make(
    mesh=mesh_of(workers), loss=loss, has_aux=True, aux_reduce="max"
  )
  with pytest.raises(ValueError, match="aux is complex: there is no max of it"):
    step(params, state, batch, model_state={"spectrum": jnp.complex64(1j)})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("aux_reduce", ["mean", "stack"])
def test_a_random_key_in_aux_is_refused(aux_reduce, accumulate):
  loss = lambda p, batch: (jnp.sum(p) * batch.mean(), {"key": jax.random.key(0)})
  step, params, state = start_with(
    averaged(sim(2)),
    sim(2),
    jnp.zeros(3),
    loss,
    has_aux=True,
    aux_reduce=aux_reduce,
    accumulate=accumulate,
  )
  with pytest.raises(
    TypeError,
    match=rf"aux\['key'\] is a random key, which aux_reduce='{aux_reduce}' .*key_data",
  ):
    step(params, state, np.ones((4, 1), np.float32))


@pytest.mark.parametrize("workers", quick_of([3, 5, 7], quick=[7]))
def test_a_model_state_that_is_equal_on_all_workers_stays_as_it_is(workers):
  """In all its bits, though the sum of P equal numbers is rounded."""
  given = {
    "large": jnp.asarray(normals(0, 1, 200) * 2.0**60),
    "half": jnp.asarray(normals(1, 1, 200)).astype("bfloat16"),
    "spectrum": jnp.asarray(normals(2, 1, 200) + 1j * normals(3, 1, 200)),
  }
  loss = lambda params, batch, model_state: (
    0 * (params["w"].sum() + batch.sum()),
    model_state,
  )
  step, params, state = make(mesh=mesh_of(workers), loss=loss)
  _, _, metrics = step(
    params, state, np.zeros((workers, 1), np.float32), model_state=given
  )
  assert_same_bits(metrics.model_state, given)


# Keys.


def test_each_worker_and_micro_batch_has_a_key_of_its_own():
  def loss(params, batch, rng):
    del batch
    return jnp.sum(params["w"] * 0), jax.random.normal(rng, ())

  step, params, state = make(loss=loss, has_aux=True, aux_reduce="stack", accumulate=2)
  params, state, first = step(params, state, batch_of(0), rng=jax.random.key(1))
  params, state, other = step(params, state, batch_of(0), rng=jax.random.key(2))
  _, _, again = step(params, state, batch_of(0), rng=jax.random.key(1))
  assert len({*np.ravel(first.aux).tolist(), *np.ravel(other.aux).tolist()}) == 12
  np.testing.assert_array_equal(first.aux, again.aux)


# Micro-batches.


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_give_the_step_of_the_whole_batch(dtype):
  """With whole numbers, whose sums are exact in any order; means of losses are rounded, or not, as XLA likes."""
  loss = lambda params, batch: jnp.mean(
    (batch.astype(dtype) @ params["w"]).astype(jnp.float32) * jnp.arange(4.0)[None]
  )
  params, batch = {"w": np.zeros((5, 4), dtype)}, 32 * integers(0, 24, 5)
  found = []
  for accumulate in (1, 4):
    step, start, state = make(params=params, loss=loss, accumulate=accumulate)
    for _ in range(2):
      start, state, metrics = step(start, state, batch)
    assert start["w"].dtype == dtype
    found.append((start["w"], metrics.loss))
  np.testing.assert_allclose(*(np.asarray(w, np.float32) for w, _ in found), rtol=1e-6)
  assert found[0][1] == pytest.approx(
    float(found[1][1]), rel=4 * float(jnp.finfo(dtype).eps)
  )


# Model state.


MODEL_STATE = {"mean": np.zeros(5, np.float32), "steps": np.int32(0)}


@pytest.mark.parametrize(("workers", "aux_reduce"), [(3, "mean"), (4, "stack")])
def test_words_beside_the_transform_are_those_of_its_program(workers, aux_reduce):
  """Of floats: all-reduces of integers are agreements in a program's cost."""
  model_state = {"mean": jnp.zeros((11, 3)), "half": jnp.zeros(9, jnp.bfloat16)}

  def loss(params, batch, model_state):
    return (
      0 * params["w"].sum() + batch.sum(),
      model_state,
      {"rows": jnp.zeros(12), "row": jnp.zeros(3)},
    )

  step, params, state = make(
    mesh=mesh_of(workers), loss=loss, has_aux=True, aux_reduce=aux_reduce
  )
  run = functools.partial(step, model_state=model_state)
  arguments = params, state, np.zeros((workers, 1), np.float32)
  _, after, metrics = run(*arguments)
  all_words = counting.count_jaxpr(jax.make_jaxpr(run)(*arguments).jaxpr, workers).words
  assert int(metrics.words_beside) == all_words - int(js.metrics(after).words_sent) > 0


def moments_loss(params, batch, model_state):
  state = {
    "mean": 0.5 * model_state["mean"] + 0.5 * batch.mean(0),
    "steps": model_state["steps"] + 1,
  }
  return jnp.sum(params["w"] * 0), state


def test_model_state_is_averaged_or_of_each_worker():
  batch = integers(1, 12, 5)
  means = batch.reshape(3, 4, 5).mean(1)
  step, params, state = make(loss=moments_loss)
  params, state, metrics = step(params, state, batch, model_state=MODEL_STATE)
  params, state, metrics = step(params, state, batch, model_state=metrics.model_state)
  np.testing.assert_allclose(
    metrics.model_state["mean"], 0.75 * means.mean(0), rtol=1e-6
  )
  assert int(metrics.model_state["steps"]) == 2
  step, params, state = make(loss=moments_loss, model_state="worker")
  each = jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *x.shape)), MODEL_STATE)
  params, state, metrics = step(params, state, batch, model_state=each)
  np.testing.assert_allclose(metrics.model_state["mean"], 0.5 * means, rtol=1e-6)
  np.testing.assert_array_equal(metrics.model_state["steps"], [1, 1, 1])


def test_model_state_outlives_not_a_number_of_one_worker_in_a_local_step():
  """A step without an exchange is skipped by all workers, or the mean would hold NaN for good."""
  tx = js.local_steps(optax.sgd(0.1), averaged(), every=4)
  loss = lambda p, b, model_state: (loss_fn(p, b), moments_loss(p, b, model_state)[1])
  step, params, state = start_with(tx, mesh_of(3), PARAMS, loss)
  stats, bad, skipped = {"mean": jnp.ones(5), "steps": jnp.int32(7)}, batch_of(0), []
  bad[-1, -1] = np.nan
  for number in range(9):
    params, state, metrics = step(
      params, state, bad if number % 2 else batch_of(number), model_state=stats
    )
    stats = metrics.model_state
    skipped.append(bool(metrics.skipped))
  assert skipped == [False, True] * 4 + [False]
  assert np.isfinite(stats["mean"]).all()
  assert (int(stats["steps"]), int(js.metrics(state).skipped_steps)) == (7 + 5, 4)


def test_a_model_state_that_overflows_at_one_worker_is_not_kept():
  """Its gradient is finite."""
  loss = lambda p, b, model_state: (
    loss_fn(p, b),
    model_state + jnp.exp(1000 * b.mean()),
  )
  step, params, state = make(loss=loss, donate=False)
  batch = np.zeros((12, 5), np.float32)
  after, state, metrics = step(params, state, batch, model_state=jnp.float32(1))
  assert not metrics.skipped
  batch[-1] = 1.0
  same, _, metrics = step(after, state, batch, model_state=jnp.float32(1))
  assert metrics.skipped
  assert float(metrics.model_state) == 1
  assert_same_bits(same, after)


def test_counts_of_a_model_state_are_the_largest_and_a_mean_that_overflows_is_not_kept():
  after = lambda batch: {"mean": batch.max(), "steps": batch.min().astype(jnp.int32)}
  loss = lambda params, batch, model_state: (
    0 * params["w"].sum() * model_state["mean"],
    after(batch),
  )
  step, params, state = make(loss=loss)
  batch, given = (
    np.repeat(np.float32([[0], [5], [1]]), 4, axis=0),
    {"mean": jnp.float32(7), "steps": jnp.int32(7)},
  )
  for column, expected in (
    (batch, (2, 5)),
    (np.full((12, 1), 3e38, np.float32), (7, 7)),
  ):
    params, state, metrics = step(
      params, state, np.hstack([batch, column]), model_state=given
    )
    assert (
      float(metrics.model_state["mean"]),
      int(metrics.model_state["steps"]),
    ) == expected
    assert not metrics.skipped


# Bad input.

OTHER_STATE = lambda p, b, model_state: (loss_fn(p, b), {"other": model_state["mean"]})
NO_STATE = lambda p, b, model_state: loss_fn(p, b) + model_state["mean"].sum()


@pytest.mark.parametrize(
  ("options", "given", "message"),
  [
    ({"aux_reduce": "median"}, {}, "make_train_step: aux_reduce='median', choose"),
    ({"model_state": "best"}, {}, "make_train_step: model_state='best', choose"),
    ({"accumulate": 0}, {}, "make_train_step: accumulate=0, choose"),
    ({"accumulate": 1.5}, {}, "make_train_step: accumulate=1.5, choose"),
    (
      {"accumulate": 5},
      {},
      r"\(12, 5\): .* among the 3 workers of axis 'workers', 5 micro-batches each",
    ),
    (
      {},
      {"value_fn": loss_fn},
      r"step: extra\['value_fn'\]=<function .*: give arrays or numbers, and no line",
    ),
    ({"loss": aux_loss}, {}, "loss_fn returned 2 values.* has_aux=True"),
    (
      {"loss": OTHER_STATE},
      {"model_state": MODEL_STATE},
      r"returned model_state\['mean'\] of nothing, it was given one of float32",
    ),
    (
      {"loss": NO_STATE},
      {"model_state": MODEL_STATE},
      r"returned .*, it should return \(loss, model_state\)",
    ),
    (
      {"loss": moments_loss, "model_state": "worker"},
      {"model_state": MODEL_STATE},
      r"\(5,\): .* leading axis of 3",
    ),
    (
      {"mesh": js.SimComm("workers")},
      {},
      r"give a jax.sharding.Mesh, a js.MpiComm, or js.SimComm\(axis, members=P\)",
    ),
    (
      {"axis": "data"},
      {},
      r"axis 'data' is not an axis of the mesh, choose from \('workers',\)",
    ),
    ({"transform": optax.identity()}, {}, "no jaxsparse transform, so"),
  ],
)
def test_what_is_refused(options, given, message):
  first_step = lambda step, *arguments: step(*arguments, batch_of(0), **given)
  with pytest.raises((ValueError, TypeError), match=message):
    first_step(*make(**options))


def test_what_is_wrong_is_said_before_anything_is_donated():
  with pytest.raises(
    ValueError, match="axis 'data' is not an axis of the mesh, choose"
  ):
    js.init(SPARSE, jnp.zeros(3), mesh_of(2), axis="data")
  step, params, state = make(SPARSE)
  for given, message in (
    (
      (params, state, np.zeros((7, 5))),
      r"batch has shape \(7, 5\): its leading axis must divide among the 3",
    ),
    ((params, state, {"label": np.float32(1)}), r"batch\['label'\] has shape \(\)"),
    (
      (params, make(SPARSE, mesh=mesh_of(2))[2], batch_of(0)),
      "made for 2 workers, the axis has 3",
    ),
    (
      ({"w": jnp.zeros((5, 5))}, state, batch_of(0)),
      r"\['w'\] of shape \(5, 4\), here it has shape \(5, 5\)",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      step(*given)
    assert not params["w"].is_deleted()
    assert not state[0].carried.residual[0].is_deleted()


# Flax.


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
    self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)

  def __call__(self, x):
    return self.last(nnx.relu(self.norm(self.first(x))))


@pytest.mark.long
def test_a_flax_model_with_batch_norm_trains():
  graph, params, model_state = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

  def loss(params, batch, model_state):
    model = nnx.merge(graph, params, model_state, copy=True)
    return jnp.mean((model(batch) - batch.sum(1, keepdims=True)) ** 2), nnx.state(
      model, nnx.BatchStat
    )

  # flax needs both
  with (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    step, params, state = make(SPARSE, optax.sgd(0.05), params, loss, accumulate=2)
    before, losses = jax.tree.map(np.array, model_state), []
    for i in range(60):
      params, state, metrics = step(
        params, state, batch_of(i, 96), model_state=model_state
      )
      model_state = metrics.model_state
      losses.append(float(metrics.loss))
    step.check(params, state)
  assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])
  assert all(
    jax.tree.leaves(
      jax.tree.map(lambda a, b: bool(np.any(a != np.array(b))), before, model_state)
    )
  )


# Losses that communicate.


@pytest.mark.parametrize("where", [mesh_of(3), sim(3)], ids=str)
def test_a_mean_over_the_tokens_of_all_workers(where):
  """Of which one worker has none, so that its own mean would be 0/0; a statistic may be reduced, too."""
  axis = where if isinstance(where, js.SimComm) else "workers"

  def loss(params, batch):
    values, weights = batch[..., 0], batch[..., 1]
    tokens = jax.lax.psum(weights.sum(), "workers")
    centre = jax.lax.pmean(params["w"].mean(), "workers")
    return 3 * jnp.sum(weights * (params["w"].sum() - values) ** 2) / tokens + centre**2

  step, params, state = start_with(
    optax.chain(js.dense_transform(axis), optax.sgd(1.0)),
    where,
    {"w": jnp.ones(2)},
    loss,
    donate=False,
  )
  batch = np.stack([np.arange(6.0), [1, 1, 0, 0, 1, 0]], axis=-1).astype(np.float32)
  after, _, metrics = step(params, state, batch)
  error = 2 - batch[batch[:, 1] > 0, 0]
  np.testing.assert_allclose(metrics.loss, np.mean(error**2) + 1, rtol=1e-6)
  np.testing.assert_allclose(
    after["w"], 1 - 2 * np.mean(error) - 1 * np.ones(2), rtol=1e-6
  )


# What is neither trained nor averaged.


@pytest.mark.parametrize(
  "where",
  [mesh_of(3), Mesh(mesh_of(6).devices.reshape(3, 2), ("workers", "x")), sim(3)],
  ids=str,
)
@pytest.mark.parametrize("accumulate", quick_of([1, 2], quick=[2]))
def test_a_teacher_is_neither_trained_nor_averaged(where, accumulate):
  """In any dtype, whole or sharded inside a worker; it may be the parameters at the start, which are donated."""
  axis = where if isinstance(where, js.SimComm) else "workers"
  target = lambda shared: (
    shared["first"]["w"] + 0.5 * shared["steps"].astype(jnp.float32)[None]
  )
  loss = lambda params, batch, shared: (
    jnp.sum((params["w"] - target(shared)) ** 2) + 0 * batch.sum()
  )
  make = lambda **given: start_with(
    optax.chain(js.dense_transform(axis), optax.sgd(0.25)),
    where,
    {"w": jnp.ones((5, 4))},
    loss,
    **given,
  )
  step, params, state = make(accumulate=accumulate, donate=True)
  shared = {
    "first": params,
    "steps": jnp.arange(4, dtype=jnp.int8),
    "key": jax.random.key(0),
  }
  if not isinstance(where, js.SimComm) and len(where.axis_names) == 2:
    shared["steps"] = jax.device_put(
      shared["steps"], NamedSharding(where, PartitionSpec("x"))
    )
  params, state, _ = step(params, state, batch_of(0), shared=shared)
  expected = 1 + 0.25 * np.arange(4) * np.ones((5, 1))
  np.testing.assert_allclose(params["w"], expected, rtol=1e-6)
  shared["first"] = jax.tree.map(jnp.copy, params)  # what it had was donated
  lowered = step.lower(params, state, batch_of(0), shared=shared)
  expected = step(*jax.tree.map(jnp.copy, (params, state)), batch_of(1), shared=shared)[
    0
  ]
  compiled = lowered.compile()
  assert_same_bits(
    compiled(params, state, batch_of(1), {"shared": shared})[0], expected
  )


# Under a trace.


@pytest.mark.parametrize(
  "chain",
  [
    row(SPARSE, id="plain"),
    row(js.local_steps(optax.sgd(0.1), DENSE, every=2), quick=True, id="local"),
  ],
)
def test_a_step_of_captured_arrays_is_traced(chain):
  """States that are there are checked while something else is traced."""
  step, params, state = make(chain, donate=False)
  captured = lambda: step(params, state, batch_of(0))
  after, _, _ = captured()
  shapes, _, _ = jax.eval_shape(captured)
  assert shapes["w"].shape == after["w"].shape
  assert jax.make_jaxpr(captured)().jaxpr.eqns
  np.testing.assert_array_equal(jax.jit(captured)()[0]["w"], after["w"])
  error, (found, _, _) = checkify.checkify(captured)()
  error.throw()
  np.testing.assert_array_equal(found["w"], after["w"])
  with jax.set_mesh(mesh_of(3)):
    assert float(jax.jit(lambda: js.metrics(state).total_words)()) == 0


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_teacher_a_model_state_and_own_keys_in_a_scan_and_a_skipped_step(dtype):
  inner = optax.chain(
    optax.add_noise(1e-3, 0.5, key=jax.random.key(0)), optax.sgd(0.1, momentum=0.9)
  )
  tx = js.local_steps(
    inner, optax.chain(SPARSE, optax.sgd(1.0)), every=2, apply_residual=True
  )

  def loss(params, batch, shared, model_state):
    error = (params["w"] - shared["steps"].astype(dtype)).astype(jnp.float32)
    return jnp.mean(error**2) + batch.sum() * error.sum(), model_state

  mesh, params = mesh_of(3), {"w": jnp.ones(12, dtype)}
  step, state = (
    js.make_train_step(loss, tx, mesh, donate=False),
    js.init(tx, params, mesh),
  )
  given = {
    "shared": {"steps": jnp.arange(12, dtype=jnp.int8)},
    "model_state": {"mean": jnp.full(7, 0.1, dtype)},
  }

  def one(carry, _):
    *carry, metrics = step(*carry, jnp.zeros((3, 1)), **given)
    return tuple(carry), metrics.loss

  (params, state), losses = jax.jit(lambda *carry: jax.lax.scan(one, carry, length=4))(
    params, state
  )
  assert losses[-1] < losses[0]
  after, skipped, metrics = step(
    params, state, jnp.zeros((3, 1)).at[1, 0].set(jnp.nan), **given
  )
  assert bool(metrics.skipped)
  assert_same_bits((after, metrics.model_state), (params, given["model_state"]))
  before, kept = (jax.random.key_data(one.inner[0].rng_key) for one in (state, skipped))
  np.testing.assert_array_equal(before, kept)
  assert len(np.unique(before, axis=0)) == 3


@jax.tree_util.register_pytree_node_class
class Statistics:
  """A node that equals no other one, as `eqx.nn.State`."""

  def __init__(self, mean, count, static="static"):
    self.mean, self.count, self.static = mean, count, static

  def tree_flatten(self):
    return (self.mean, self.count), self.static

  @classmethod
  def tree_unflatten(cls, static, leaves):
    return cls(*leaves, static)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nodes_of_a_model_state_need_not_compare(accumulate):
  """But their leaves and static data do."""
  tx, comm, batch = js.dense_transform("workers"), sim(2), np.ones((4, 3), np.float32)
  given = Statistics(jnp.zeros(3), jnp.int32(0))

  def stepped(change):
    loss = lambda params, batch, model_state: (
      jnp.mean(batch @ params),
      change(model_state, batch),
    )
    step = js.make_train_step(loss, tx, comm, donate=False, accumulate=accumulate)
    params = jnp.zeros(3)
    return step(params, js.init(tx, params, comm), batch, model_state=given)[2]

  after = stepped(lambda was, x: Statistics(was.mean + x.mean(0), was.count + 1))
  assert_same_bits(after.model_state.mean, jnp.full(3, float(accumulate)))
  for change, message in (
    (lambda was, _: Statistics(was.mean[:2], was.count), r"float32\[2\]"),
    (
      lambda was, _: Statistics(was.mean, None),
      r"of nothing, it was given one of int32",
    ),
    (lambda was, _: Statistics(was.mean, was.count, "other"), "of the structure"),
  ):
    with pytest.raises(ValueError, match=message):
      stepped(change)


MODEL = {"w": jnp.ones(3), "activation": jax.nn.relu}
GIVEN = {
  "init": lambda tx, comm: js.init(tx, MODEL, comm),
  "abstract_state": lambda tx, comm: js.abstract_state(tx, MODEL, comm),
  "step": lambda tx, comm: js.make_train_step(quadratic, tx, comm)(
    MODEL, js.init(tx, {"w": jnp.ones(3)}, comm), np.ones((2, 3), np.float32)
  ),
  "stacked.init": lambda tx, comm: js.stacked(tx, comm).init(MODEL),
  "value_and_grad": lambda tx, comm: js.stacked(tx, comm).value_and_grad(quadratic)(
    MODEL, js.init(tx, {"w": jnp.ones(3)}, comm), np.ones((2, 3), np.float32)
  ),
  "stacked.update": lambda tx, comm: js.stacked(tx, comm).update(
    {"w": jnp.ones((2, 3))}, js.init(tx, {"w": jnp.ones(3)}, comm), MODEL
  ),
  "flush": lambda tx, comm: js.flush(
    js.init(tx, {"w": jnp.ones(3)}, comm), MODEL, comm
  ),
  "own init": lambda tx, _: jax.vmap(lambda _: tx.init(MODEL), axis_name="workers")(
    jnp.ones(2)
  ),
  "Rounds": lambda tx, _: js.partial.Rounds(
    "tcp://127.0.0.1:1", 0, MODEL, outer=lambda _: tx, every=1
  ),
}


@pytest.mark.parametrize("wrapped", ["chain", "local_steps"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_model_with_functions_is_refused_by_the_name_of_its_leaf(name, wrapped):
  outer = optax.chain(js.dense_transform("workers"), optax.sgd(1.0))
  tx = (
    js.local_steps(optax.adam(0.1), outer, every=2)
    if wrapped == "local_steps"
    else outer
  )
  with pytest.raises(
    TypeError, match=r"\['activation'\] is <.*eqx.partition.*nnx.split"
  ):
    GIVEN[name](tx, sim(2))


@pytest.mark.parametrize(
  ("name", "n"),
  [
    row("residual", 8, quick=True),
    row("residual", 1 << 17),
    row("momentum", 8),
    row("momentum", 1 << 17),
    row("moved", 8),
  ],
)
def test_a_restored_state_that_would_skip_all_steps_is_refused_until_it_is_flushed(
  name, n
):
  mesh, batch = mesh_of(2), np.ones((2, n), np.float32)
  sparse = js.make_transform("topka", "workers", density=0.25)
  tx = optax.chain(
    js.momentum_corrected(sparse, 0.5) if name == "momentum" else sparse,
    optax.sgd(0.1),
  )
  if name == "moved":
    tx = js.local_steps(optax.sgd(0.1), tx, every=2)
  make_step = lambda: js.make_train_step(linear, tx, mesh, donate=False)
  params = jnp.zeros(n)
  params, state, _ = make_step()(params, js.init(tx, params, mesh), batch)

  def damage(path, leaf):
    values = np.array(leaf)
    if jax.tree_util.keystr(path).endswith(f".{name}") or (
      name == "residual" and "residual" in jax.tree_util.keystr(path)
    ):
      values.reshape(-1)[3] = np.nan
    return jax.device_put(values, leaf.sharding)

  damaged = jax.tree_util.tree_map_with_path(damage, state)
  for use in (
    lambda: make_step()(params, damaged, batch),
    lambda: js.resize(damaged, params, mesh),
  ):
    with pytest.raises(
      ValueError, match=rf"{name}.* has NaN or Inf, .* or call js.flus"
    ):
      use()
  with pytest.warns(UserWarning, match=rf"js.flush: .*{name}.* has NaN or Inf: these"):
    update, flushed = js.flush(damaged, params, mesh)
  assert np.isfinite(update).all()
  _, _, metrics = make_step()(params, flushed, batch)
  assert not metrics.skipped


def _mean_square(params, batch):
  return jnp.mean((params[None] - batch) ** 2)


@pytest.mark.parametrize("what", ["model_state", "aux"])
def test_means_of_float16_do_not_overflow(what):
  """P times the number does."""
  large = jnp.full(1, 40000.0, jnp.float16)
  if what == "aux":
    loss = lambda params, batch: (_mean_square(params, batch), large)
  else:
    loss = lambda params, batch, model_state: (
      _mean_square(params, batch),
      large + 0 * model_state,
    )
  comm = sim(4)
  tx = optax.chain(js.dense_transform(comm), optax.sgd(0.1))
  params = jnp.zeros(3)
  step = js.make_train_step(loss, tx, comm, has_aux=what == "aux")
  named = {} if what == "aux" else {"model_state": jnp.zeros(1, jnp.float16)}
  *_, metrics = step(params, js.init(tx, params, comm), jnp.ones((4, 3)), **named)
  assert getattr(metrics, what).tolist() == [40000.0]
  assert int(metrics.words_beside) == js.costs.count("dense", n=1, workers=4).words


def test_a_step_is_for_several_trees_and_numbers():
  comm = sim(2)
  outer = optax.chain(js.dense_transform(comm), optax.sgd(1.0))
  tx = js.local_steps(optax.inject_hyperparams(optax.sgd)(0.1), outer, every=4)
  loss = lambda params, batch: _mean_square(*params.values(), batch)
  step = js.make_train_step(loss, tx, comm, donate=False)
  batch = jnp.ones((2, 3))
  for name in "wv":
    params = {name: jnp.zeros(3)}
    state = js.init(tx, params, comm)
    state.inner.hyperparams["learning_rate"] = 0.5
    traced, *_ = jax.jit(step.traced)(params, state, batch)
    params, state, _ = step(params, state, batch)
    np.testing.assert_array_equal(traced[name], params[name])
    params, _ = step.synchronize(params, state)
    np.testing.assert_allclose(params[name], 1 / 3, rtol=1e-6)


def test_an_empty_batch_is_refused():
  comm = sim(2)
  tx = optax.chain(js.dense_transform(comm), optax.sgd(0.1))
  step = js.make_train_step(_mean_square, tx, comm)
  params = jnp.zeros(3)
  with pytest.raises(ValueError, match=r"batch has shape \(0, 3\)"):
    step(params, js.init(tx, params, comm), jnp.zeros((0, 3)))


@pytest.mark.parametrize("name", ["shared", "model_state"])
def test_arguments_that_share_buffers_with_returned_parameters_are_copied(name):
  mesh = mesh_of(2)
  tx = optax.chain(js.dense_transform("workers"), optax.sgd(0.1))

  def loss_fn(params, batch, **named):
    loss = sum(_mean_square(leaf, batch) for leaf in params.values())
    loss = loss + 0.0 * named[name].sum()
    return (loss, named[name]) if name == "model_state" else loss

  step = js.make_train_step(loss_fn, tx, mesh)
  params = {"a": jnp.zeros(3), "b": jnp.ones(3)}
  state = js.init(tx, params, mesh)
  batch = jnp.ones((2, 3))
  params, state, _ = step(params, state, batch, **{name: jnp.zeros(3)})
  first = jax.devices()[0]
  for _ in range(2):
    argument = jax.device_put(params["a"], first)
    expected = np.asarray(params["a"])
    params, state, _ = step(params, state, batch, **{name: argument})
    np.testing.assert_array_equal(argument, expected)
    # A parameter that shares its buffer with another one.
    params["b"] = jax.device_put(params["a"], first)
    params, state, _ = step(params, state, batch, **{name: argument})
    np.testing.assert_array_equal(params["a"], params["b"])
