"""`js.stacked`: gradients with a leading axis of workers in a jit of one's own, against `js.make_train_step`."""

import copy
import dataclasses
import itertools
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.transform.state import checksum_of
from tests.cases import assert_same_bits, mesh_of, normals, quick_of, sim, start
from tests.compositions_test import COMPOSITIONS

WORKERS, N = 3, 56
PARAMS = {"bias": jnp.ones(5), "scale": jnp.ones(3), "w": jnp.ones((6, 8))}
ROWS, SHARED = P("workers"), P()


def quadratic(params, batch):
  flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])
  return jnp.mean(jnp.sum((flat[None] - batch) ** 2, 1))


def broadcast(tree, workers, mesh=None):
  rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), tree)
  return jax.device_put(rows, NamedSharding(mesh, ROWS)) if mesh else rows


def stepped(tx, by_hand=False):
  """One step of a trainer; `by_hand` takes the gradients of replicas by vmap."""

  @jax.jit
  def step(params, state, batch):
    if by_hand:
      parts = batch.reshape(-1, 2, N)
      grads = jax.vmap(jax.grad(quadratic))(tx.own_params(params, state), parts)
    else:
      _, grads = tx.value_and_grad(quadratic)(params, state, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


@pytest.mark.parametrize(
  ("composition", "form"),
  quick_of(
    itertools.product(COMPOSITIONS, ["shared", "rows"]),
    quick=[("local 4 applied", "rows")],
  ),
)
def test_the_bits_of_a_training_step(composition, form):
  """Also with NaN at one worker; parameters that are shared, or have a row for each worker."""
  transform = js.make_transform(
    "topka",
    "workers",
    density=0.2,
    **({"decay": 0.5} if composition == "decayed" else {}),
  )
  transform = (
    js.dense_transform("workers") if composition == "local inner" else transform
  )
  chain, mesh = COMPOSITIONS[composition](transform), mesh_of(WORKERS)
  tx = js.stacked(chain, mesh)
  step, params, state = start(chain, mesh, PARAMS, quadratic)
  own, state2 = stepped(tx, by_hand=form == "rows"), tx.init(params)
  assert_same_bits(state2, state)
  params2 = broadcast(params, WORKERS, mesh) if form == "rows" else params
  with jax.numpy_dtype_promotion("standard"):
    for number in range(6):
      batch = normals(number, 2 * WORKERS, N)
      batch[-1, 0] = np.nan if number == 2 else 1
      params, state, _ = step(params, state, batch)
      params2, state2 = jax.block_until_ready(own(params2, state2, batch))
  shared = jax.tree.map(lambda x: x[0], params2) if form == "rows" else params2
  chex.assert_trees_all_close((shared, state2), (params, state), rtol=1e-5, atol=1e-6)
  for leaf in jax.tree.leaves(params2) if form == "rows" else ():
    assert_same_bits(leaf, jnp.broadcast_to(leaf[:1], leaf.shape))


def test_replicas_are_not_gathered_and_keep_their_shards():
  """Rows of two workers of two devices each: the only messages are those of the transform and of shards inside."""
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:4]).reshape(2, 2),
    ("workers", "fsdp"),
    axis_types=(AxisType.Auto,) * 2,
  )
  inside = {"bias": P(), "scale": P(), "w": P("fsdp", None)}
  put = lambda tree, specs: jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
  )
  tx = js.stacked(
    optax.chain(
      js.spardl_transform("workers", density=0.2), optax.sgd(0.1, momentum=0.9)
    ),
    mesh,
  )
  state = tx.init(put(PARAMS, inside))
  grads = put(
    broadcast(PARAMS, 2), {name: P("workers", *spec) for name, spec in inside.items()}
  )
  program = jax.jit(tx.update).lower(grads, state, grads).compile()
  assert "all-gather" not in "".join(
    line for line in program.as_text().splitlines() if "[2,6,8]" in line
  )
  updates, after = program(grads, state, grads)
  assert updates["w"].sharding.is_equivalent_to(grads["w"].sharding, 3)
  assert (
    after[0]
    .carried.residual[0]
    .sharding.is_equivalent_to(state[0].carried.residual[0].sharding, 1)
  )


def test_synchronize_and_what_owns_a_worker():
  chain = COMPOSITIONS["local 4"](js.make_transform("topka", "workers", density=0.2))
  tx, step = (
    js.stacked(chain, sim(WORKERS)),
    js.make_train_step(quadratic, chain, sim(WORKERS), donate=False),
  )
  params, state = PARAMS, tx.init(PARAMS)
  params, state = stepped(tx)(params, state, normals(0, 2 * WORKERS, N))
  own = tx.own_params(params, state)
  apart = jax.tree.map(lambda own, p: jnp.abs(own - p[None]).max(), own, params)
  assert all(x > 0 for x in jax.tree.leaves(apart))
  expected = step.synchronize(params, state)
  grads = jax.tree.map(jnp.zeros_like, own)
  updates, state = tx.update(grads, state, params, synchronize=True)
  assert_same_bits((optax.apply_updates(params, updates), state), expected)


def test_refusals():
  mesh = mesh_of(WORKERS)
  tx = js.stacked(
    optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1)), mesh
  )
  state = tx.init(PARAMS)
  with pytest.raises(
    ValueError,
    match=r"gradients\['bias'\] has shape \(5,\), not a row for each of 3 workers",
  ):
    tx.update(PARAMS, state, PARAMS)
  with pytest.raises(
    ValueError, match=r"gradients or parameters have no leaf \['bias'\]"
  ):
    tx.update(
      {
        name: leaf
        for name, leaf in broadcast(PARAMS, WORKERS).items()
        if name != "bias"
      },
      state,
      PARAMS,
    )
  with pytest.raises(
    ValueError, match=r"made for parameters\['bias'\] of shape \(5,\)"
  ):
    tx.update(broadcast(PARAMS, WORKERS), state, PARAMS | {"bias": jnp.ones(7)})
  with pytest.raises(
    ValueError, match=r"batch\[0\] has shape \(4, 56\): its leading axis must divide"
  ):
    tx.value_and_grad(quadratic)(PARAMS, state, jnp.ones((4, N)))
  uncovered = js.stacked(
    optax.masked(
      js.spardl_transform("workers", density=0.2),
      {"bias": False, "scale": True, "w": True},
    ),
    mesh,
  )
  with pytest.warns(UserWarning, match="no jaxsparse transform covers"):
    state = uncovered.init(PARAMS)
  with pytest.raises(
    ValueError, match=r"updates\['bias'\] would differ between the workers"
  ):
    uncovered.update(broadcast(PARAMS, WORKERS), state, PARAMS)


@pytest.mark.long
def test_a_loss_scale_that_changes_is_taken_away_before_the_transform():
  """Delivered and owed is the sum of the gradients, in their own size; a step that overflows has not happened."""
  tx = js.stacked(
    optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(1.0)),
    sim(WORKERS),
  )
  state, entered, delivered = tx.init(PARAMS), 0.0, 0.0
  for number, scale in enumerate([2.0**10, 2.0**126, 2.0**4, 2.0**12]):
    grads = {
      name: jnp.asarray(normals(number, WORKERS, *leaf.shape)) * scale
      for name, leaf in PARAMS.items()
    }
    overflows = number == 1
    grads["scale"] = grads["scale"] * jnp.float32(jnp.inf if overflows else 1)
    updates, state = jax.jit(tx.update)(
      jax.tree.map(lambda g, s=scale: g / s, grads), state
    )
    assert bool(js.metrics(state).skipped) == overflows
    entered += (
      0 if overflows else sum(np.float64(g).sum() / scale for g in grads.values())
    )
    delivered -= WORKERS * sum(np.float64(u).sum() for u in updates.values())
  assert delivered + np.float64(state[0].carried.residual[0]).sum() == pytest.approx(
    entered, abs=1e-4
  )


@pytest.mark.long
def test_a_flax_optimizer_and_a_checkpoint_of_its_variables():
  """Names are those of arrays whether a transformation gets variables or arrays."""
  model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
  tx = js.stacked(
    optax.chain(js.spardl_transform("workers", density=0.2), optax.sgd(0.1)),
    mesh_of(WORKERS),
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  grads = jax.tree.map(lambda p: jnp.ones((WORKERS, *p.shape)), nnx.state(model))
  nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
    model, optimizer, grads
  )
  state = nnx.as_pure(optimizer.opt_state)
  layout = state[0].layout
  assert layout.method.names == ("['bias']", "['kernel']")
  js.specs(state, "workers")
  checksum = jnp.uint32(
    checksum_of(None, dataclasses.replace(layout.method, names=("a", "b")))
  )
  other = (state[0]._replace(layout=layout._replace(checksum=checksum)), *state[1:])
  with pytest.raises(ValueError, match="restored into"):
    js.specs(other, "workers")


@pytest.mark.long
@pytest.mark.parametrize("around", quick_of([False, True], quick=[True]))
def test_injected_rates_stay_after_a_resize(around):
  schedule, transform = (
    optax.exponential_decay(0.1, 1, 0.5),
    js.spardl_transform("workers", density=0.2),
  )
  chain = lambda learning_rate: optax.chain(transform, optax.sgd(learning_rate))
  after = optax.chain(
    transform, optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
  )
  tx = optax.inject_hyperparams(chain)(learning_rate=schedule) if around else after
  step, params, state = start(tx, sim(4), PARAMS, quadratic)
  for number in range(4):
    if number == 2:
      step, state = (
        js.make_train_step(quadratic, tx, sim(WORKERS), donate=False),
        js.resize(state, params, sim(WORKERS)),
      )
    params, state, _ = step(params, state, normals(number, 12, N))
  (node,) = (
    one for one in (state if not around else [state]) if hasattr(one, "hyperparams")
  )
  assert float(node.hyperparams["learning_rate"]) == float(schedule(3))


ONE_REPLICA_A_PROCESS = """
import warnings
import jax, jax.numpy as jnp, numpy as np, optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxsparse as js
from jaxsparse import launch
from jaxsparse import launch

warnings.simplefilter("error", UserWarning)
launch.join()
mesh = jax.make_mesh((jax.device_count(),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
chain = js.local_steps(optax.adam(0.1), optax.chain(js.onebit_transform("workers"), optax.sgd(1.0)), every=2)
tx, split = js.stacked(chain, mesh), NamedSharding(mesh, P("workers"))
own = lambda row: jax.make_array_from_process_local_data(split, row)
loss_fn = lambda p, batch: jnp.mean((p[None] - batch) ** 2)


@jax.jit
def train(rows, state, batch):
  grads = jax.vmap(jax.grad(loss_fn))(tx.own_params(rows, state), batch)
  updates, state = tx.update(grads, state, rows)
  return optax.apply_updates(rows, updates), state


rows, state = own(np.zeros((1, 30), np.float32)), tx.init(jnp.zeros(30))
for number in range(6):
  batch = np.full((1, 4, 30), jax.process_index() + 1, np.float32)
  rows, state = jax.block_until_ready(train(rows, state, own(batch)))
found = multihost_utils.process_allgather(rows, tiled=True)
assert (found == found[:1]).all() and (found > 0.2).all(), found
"""


@pytest.mark.long
def test_one_replica_a_process(tmp_path):
  program = tmp_path / "program.py"
  program.write_text(ONE_REPLICA_A_PROCESS)
  launch.run([sys.executable, str(program)], ranks=2, start_timeout=120, limit=240)


def test_dropout_of_nnx_differs_between_workers_and_steps():
  """As docs/how_to/your_trainer.md has it."""
  mesh = mesh_of(WORKERS)
  tx = js.stacked(optax.chain(js.dense_transform("workers"), optax.sgd(0.1)), mesh)

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.linear, self.dropout = (
        nnx.Linear(40, 40, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
      )

  @nnx.jit
  def masks(model, optimizer, rngs, batch):
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, batch, keys, others):
      model = nnx.merge(graph, params, others, copy=True)
      nnx.reseed(model, dropout=keys[0])
      return jnp.mean(model.linear(batch)), model.dropout(jnp.ones(40)) > 0

    keys = jax.random.split(rngs.dropout(), WORKERS)
    value_and_grad = tx.value_and_grad(loss_fn, has_aux=True)
    (_, found), _ = value_and_grad(
      params, nnx.as_pure(optimizer.opt_state), batch, keys, others=others
    )
    return found

  model, rngs = Model(nnx.Rngs(0, dropout=1)), nnx.Rngs(dropout=2)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    found = [
      np.asarray(masks(model, optimizer, rngs, normals(0, WORKERS, 40)))
      for _ in range(2)
    ]
  rows = np.concatenate(found)
  assert len(np.unique(rows, axis=0)) == len(rows) == 2 * WORKERS


COPIES = {
  "tree.map": lambda tx: jax.tree.map(lambda leaf: leaf, tx),
  "flatten": lambda tx: jax.tree.unflatten(*jax.tree.flatten(tx)[::-1]),
  "_replace": lambda tx: tx._replace(init=tx.init),
  "copy": copy.copy,
  "eqx": lambda tx: eqx.combine(*eqx.partition({"tx": tx}, eqx.is_array))["tx"],
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_what_they_have(name):
  transform = js.make_transform("topka", "workers", density=0.2)
  tx = js.stacked(optax.chain(transform, optax.sgd(0.1)), sim(WORKERS))
  assert vars(COPIES[name](tx)) == vars(tx)
  assert COPIES[name](tx).update is tx.update
  assert vars(COPIES[name](transform)) == vars(transform) or name == "_replace"


def test_it_is_an_argument_of_a_jitted_function():
  transform = js.make_transform("topka", "workers", density=0.2)
  tx = js.stacked(optax.chain(transform, optax.sgd(0.1)), sim(WORKERS))
  state, batch = tx.init(PARAMS), normals(0, WORKERS, N)

  class Trainer(eqx.Module):
    tx: optax.GradientTransformation

  loss = lambda tx: tx.value_and_grad(quadratic)(PARAMS, state, batch)[0]
  expected = jax.jit(lambda: loss(tx))()
  assert_same_bits(jax.jit(loss)(tx), expected)
  assert_same_bits(eqx.filter_jit(loss)(tx), expected)
  assert_same_bits(
    eqx.filter_jit(lambda trainer: loss(trainer.tx))(Trainer(tx)), expected
  )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_of_aux_are_taken_as_the_table_says(axis_type):
  """As docs/how_to/your_trainer.md has them, with both types of axes."""
  mesh = jax.make_mesh((2,), ("workers",), (axis_type,), devices=jax.devices()[:2])
  tx = js.stacked(js.dense_transform("workers"), mesh)
  batch, params = normals(0, 6, 4), jnp.ones(4)
  state = tx.init(params)

  def loss_fn(params, batch):
    each = batch * params[None]
    return jnp.mean(each), (each, each.mean(), jnp.int32(3))

  @jax.jit
  def take(params, state, batch):
    (_, aux), _ = tx.value_and_grad(loss_fn, has_aux=True)(params, state, batch)
    logits, mean, count = aux
    whole = jax.lax.collapse(logits, 0, 2)
    return whole, mean.mean(), count.sum(), logits.mean(0), count.max(0)

  found = take(params, state, jax.device_put(batch, NamedSharding(mesh, ROWS)))
  halves = batch.reshape(2, 3, 4)
  wanted = batch, batch.mean(), 6, halves.mean(0), 3
  chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_norms_and_metrics_on_an_explicit_mesh():
  """As docs/sharp_bits.md has them."""
  mesh = jax.make_mesh((2,), ("workers",), devices=jax.devices()[:2])
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  loss, params = put(jnp.float32(2), SHARED), {"w": put(jnp.ones(4), ROWS)}

  def measured(taken):
    metric = nnx.metrics.Average()
    for _ in range(2):
      metric.update(values=taken(loss))
      metric.reset()
      metric.update(values=taken(loss))
    return float(metric.compute())

  with jax.numpy_dtype_promotion("standard"):
    refusal = "Length of device assignment"
    with pytest.raises(ValueError, match=refusal):
      measured(lambda x: x)
    if jax.__version_info__ < (0, 12):
      with pytest.raises(ValueError, match=refusal):
        optax.tree.norm(params)
    else:  # newer versions compute it
      assert float(optax.tree.norm(params)) == 2
    assert measured(float) == measured(jax.device_get) == 2
    assert float(jax.jit(optax.tree.norm)(params)) == 2
    with jax.set_mesh(mesh):
      assert measured(lambda x: x) == float(optax.tree.norm(params)) == 2
