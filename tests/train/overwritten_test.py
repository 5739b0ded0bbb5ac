"""Flax's `_overwrite_with_gradient`: histories and scales of fp8, whose "gradients" are their next values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, linen, nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse.arrays.flatten import OVERWRITTEN
from tests.cases import assert_same_bits, mesh_of, normals, sim

WORKERS = 3
PARAMS = {
  "params": {"w": np.ones((4, 2), np.float32)},
  OVERWRITTEN: {"history": np.zeros(3, np.float32), "scale": np.ones(1, np.float32)},
}


@jax.custom_vjp
def observed(x, history, scale):  # noqa: ARG001
  """x, whose largest magnitude goes into the history; the next scale is that of the history."""
  return x


def forward(x, history, scale):
  largest = jnp.max(jnp.abs(x))
  following = jnp.roll(history, -1).at[0].set(largest), scale * 0 + 1 + jnp.max(history)
  return x, following


def backward(following, grads):
  return grads, *following


observed.defvjp(forward, backward)


def loss_fn(variables, batch):
  seen = jnp.clip(observed(batch, **variables[OVERWRITTEN]), -9, 9)
  return jnp.mean((seen @ variables["params"]["w"] - 1.0) ** 2)


def expected(batches):
  """The collection after steps of one worker with whole batches."""
  history, scale = np.zeros(3, np.float32), np.ones(1, np.float32)
  for batch in batches:
    scale = np.ones(1, np.float32) + history.max()
    history = np.concatenate([[np.abs(batch).max()], history[2:], history[:1]])
  return {"history": history, "scale": scale}


def chains():
  dense = js.dense_transform("workers")
  outer = optax.chain(dense, optax.sgd(1.0))
  return {
    "dense": optax.chain(dense, optax.sgd(0.1)),
    "every step": js.local_steps(optax.sgd(0.1), outer, every=1, apply_residual=True),
    "local": js.local_steps(optax.sgd(0.1, momentum=0.5), outer, every=2),
  }


def with_bad(batch, value):
  bad = batch.copy()
  bad[-1, 0] = value
  return bad


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", chains())
def test_the_maximum_over_workers_is_assigned(name, accumulate):
  """Also of micro-batches; with NaN, or Inf in a history alone, all workers skip the step."""
  tx, comm = chains()[name], sim(WORKERS)
  state = js.init(tx, PARAMS, comm)
  step = js.make_train_step(loss_fn, tx, comm, accumulate=accumulate, donate=False)
  batches = [normals(number, 2 * WORKERS, 4) for number in range(3)]
  params = PARAMS
  for batch in batches:
    params, state, metrics = step(params, state, batch)
  assert_same_bits(params[OVERWRITTEN], expected(batches))
  assert not np.array_equal(params["params"]["w"], PARAMS["params"]["w"])
  assert metrics.words_beside == js.costs.predict("dense", n=5, workers=WORKERS).words
  for value in (np.nan, np.inf):
    after, state, metrics = step(params, state, with_bad(batches[0], value))
    assert bool(metrics.skipped)
    assert_same_bits(after, params)
  after, state = step.synchronize(params, state)
  assert_same_bits(after[OVERWRITTEN], params[OVERWRITTEN])


def test_what_takes_parameters_takes_both_collections():
  tx, comm = chains()["local"], sim(WORKERS)
  state = js.init(tx, PARAMS, comm)
  assert_same_bits(state, js.init(tx, PARAMS["params"], comm))
  shapes = jax.tree.map(jnp.shape, js.abstract_state(tx, PARAMS, comm))
  assert shapes == jax.tree.map(jnp.shape, state)
  step = js.make_train_step(loss_fn, tx, comm, donate=False)
  frozen = core.freeze(PARAMS)
  params, state, _ = step(frozen, js.init(tx, frozen, comm), normals(0, WORKERS, 4))
  assert isinstance(params, core.FrozenDict)
  step.check(params, state)
  update, _ = js.flush(state, params, comm)
  assert_same_bits(
    update[OVERWRITTEN], jax.tree.map(jnp.zeros_like, params[OVERWRITTEN])
  )
  assert float(jnp.abs(update["params"]["w"]).max()) > 0
  with pytest.warns(UserWarning, match="parameters or optimizers of their own"):
    js.resize(state, params, sim(2))
  assert js.agreement(loss_fn, PARAMS, np.ones((WORKERS, 4), np.float32), comm).own == 1


@pytest.mark.parametrize("form", ["shared", "rows"])
def test_stacked_returns_the_next_values(form):
  """As `TrainState.apply_gradients` assigns them; with parameters in rows they have rows, too."""
  comm = sim(WORKERS)
  tx = js.stacked(chains()["dense"], comm)
  state = tx.init(PARAMS["params"])
  repeat = lambda x: np.broadcast_to(x, (WORKERS, *x.shape))
  params = jax.tree.map(repeat, PARAMS) if form == "rows" else PARAMS
  batches = [normals(number, 2 * WORKERS, 4) for number in range(2)]

  @jax.jit
  def train(params, state, batch):
    _, grads = tx.value_and_grad(loss_fn)(params, state, batch)
    updates, state = tx.update(grads["params"], state, params["params"])
    moved = optax.apply_updates(params["params"], updates)
    return {"params": moved, OVERWRITTEN: grads[OVERWRITTEN]}, state

  for batch in batches:
    params, state = train(params, state, batch)
  wanted = expected(batches)
  assert_same_bits(
    params[OVERWRITTEN], jax.tree.map(repeat, wanted) if form == "rows" else wanted
  )
  after, state = train(params, state, with_bad(batches[0], np.inf))
  assert_same_bits(after, params)
  grads = jax.tree.map(repeat, PARAMS)
  with pytest.raises(TypeError, match=r"gradients\['_overwrite_with_gradient'\]"):
    tx.update(grads, state, PARAMS)


def test_an_update_of_your_own_refuses_them_by_name():
  tx, comm = chains()["dense"], sim(WORKERS)
  named = r"gradients\['_overwrite_with_gradient'\]\['history'\] belongs to Flax's"

  def own(batch):
    state = tx.init(PARAMS["params"])
    return tx.update(jax.grad(loss_fn)(PARAMS, batch), state, PARAMS)[0]

  with pytest.raises(TypeError, match=named):
    jax.vmap(own, axis_name="workers")(normals(0, WORKERS, 2, 4))
  with pytest.raises(TypeError, match=named):
    jax.vmap(lambda _: tx.init(PARAMS), axis_name="workers")(jnp.zeros(WORKERS))
  with pytest.raises(TypeError, match=named):
    js.init(
      optax.lookahead(tx, 2, 0.5), optax.LookaheadParams.init_synced(PARAMS), comm
    )
  with pytest.raises(TypeError, match=r"\['encoder'\]\['_overwrite_with_gradient'\]"):
    js.init(tx, {"encoder": PARAMS, "decoder": np.ones(3)}, comm)
  with pytest.raises(ValueError, match="have the collections 'batch_stats', "):
    js.init(tx, {"batch_stats": np.ones(3)} | PARAMS, comm)
  with pytest.raises(TypeError, match=r"params\['_overwrite_with_gradient'\]"):
    js.partial.Rounds("tcp://127.0.0.1:1", 0, PARAMS, outer=chains, every=1)


def test_variables_of_nnx_are_known_by_their_type():
  scale = nnx.variable_type_from_name(OVERWRITTEN, allow_register=True)
  variables = {"w": nnx.Param(jnp.ones(3)), "scale": scale(jnp.ones(1))}
  tx, comm = chains()["dense"], sim(WORKERS)
  with pytest.raises(TypeError, match=r"gradients\['scale'\] belongs to Flax's"):
    js.init(tx, variables, comm)
  js.init(tx, {"params": {"w": variables["w"]}, OVERWRITTEN: variables["scale"]}, comm)


@pytest.mark.long
@pytest.mark.parametrize("stacked", [False, True])
def test_a_dense_layer_of_flax(stacked):
  """The histories are those of one device with the whole batch; the loss falls as there."""

  class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
      hidden = linen.Dense(32, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)
      return linen.Dense(1)(linen.tanh(hidden))

  model, mesh = Model(), mesh_of(4)
  x = 3 * normals(0, 64, 16)
  y = np.sin(x.sum(1, keepdims=True))
  variables = model.init(jax.random.key(1), x)
  loss = lambda variables, batch: jnp.mean(
    (model.apply(variables, batch[0]) - batch[1]) ** 2
  )
  chain = optax.chain(js.dense_transform("workers"), optax.sgd(0.05))
  one = TrainState.create(apply_fn=None, params=variables, tx=optax.sgd(0.05))
  tx = js.stacked(chain, mesh)
  many = TrainState.create(apply_fn=None, params=variables, tx=tx)
  state = js.init(chain, variables, mesh)
  params, step = variables, js.make_train_step(loss, chain, mesh, donate=False)
  alone = jax.jit(
    lambda train: train.apply_gradients(grads=jax.grad(loss)(train.params, (x, y)))
  )

  @jax.jit
  def together(train, batch):
    _, grads = tx.value_and_grad(loss)(train.params, train.opt_state, batch)
    return train.apply_gradients(grads=grads)

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    for _ in range(50):
      one = alone(one)
      if stacked:
        many = jax.block_until_ready(together(many, (x, y)))
        params = many.params
      else:
        params, state, _ = step(params, state, (x, y))
    found, wanted = (
      float(loss(jax.device_get(params), (x, y))),
      float(loss(one.params, (x, y))),
    )
  scales = lambda params: next(iter(params[OVERWRITTEN]["Dense_0"].values()))
  for name in ("input_amax_history", "input_scale"):
    assert_same_bits(scales(params)[name], scales(one.params)[name])
  assert found == pytest.approx(wanted, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize("own", ["shard_map", "nnx"])
def test_loops_of_your_own(own):
  """As docs/how_to/precision.md has them: the parameters are those of `js.make_train_step`."""
  model = linen.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
  mesh, batch = mesh_of(2), normals(0, 12, 30)
  chain = optax.chain(js.spardl_transform("workers", density=0.5), optax.sgd(0.1))
  variables = model.init(jax.random.key(0), batch)
  loss = lambda variables, batch: jnp.mean((model.apply(variables, batch) - 1.0) ** 2)

  def of_worker(variables, state, batch):
    grads = jax.grad(loss)(js.own_params(variables, state), batch)
    updates, state = chain.update(grads["params"], state, variables["params"])
    moved = optax.apply_updates(variables["params"], updates)
    scales = jax.lax.pmax(grads[OVERWRITTEN], "workers")
    return {"params": moved, OVERWRITTEN: scales}, state

  def of_nnx(params, state, batch):
    tx = js.stacked(chain, mesh)
    module = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(batch)
    scales = nnx.variable_type_from_name(OVERWRITTEN)
    graph, kernel, own, others = nnx.split(module, nnx.Param, scales, ...)
    like = {"params": kernel, OVERWRITTEN: own}

    def loss_fn(params, batch, others):
      parts = params["params"], params[OVERWRITTEN], others
      return jnp.mean((nnx.merge(graph, *parts, copy=True)(batch) - 1.0) ** 2)

    given = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(params))
    _, grads = tx.value_and_grad(loss_fn)(given, state, batch, others=others)
    updates, state = tx.update(grads["params"], state, given["params"])
    moved = optax.apply_updates(given["params"], updates)
    after = {"params": moved, OVERWRITTEN: grads[OVERWRITTEN]}
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(after)), state

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    params, state = variables, js.init(chain, variables, mesh)
    step = js.make_train_step(loss, chain, mesh, donate=False)
    if own == "shard_map":
      specs = P(), js.specs(state, "workers"), P("workers")
      mapped = jax.shard_map(of_worker, mesh=mesh, in_specs=specs, out_specs=specs[:2])
      train = jax.jit(mapped)
    else:
      train = jax.jit(of_nnx)
    params2, state2 = variables, state
    for _ in range(3):
      params, state, _ = step(params, state, batch)
      placed = jax.device_put(batch, jax.NamedSharding(mesh, P("workers")))
      params2, state2 = jax.block_until_ready(train(params2, state2, placed))
  assert_same_bits(params2, params)
