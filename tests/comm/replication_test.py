"""Law R for what users write: a step whose workers would come to differ is refused before it computes anything."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from tests.cases import mesh_of, normals, quick_of, row

PARAMS = {"kernel": np.zeros((5, 4), np.float32), "bias": np.zeros(4, np.float32)}
ONLY_KERNEL, ONLY_BIAS = (
  {"kernel": True, "bias": False},
  {"kernel": False, "bias": True},
)
SPARSE, DENSE = (
  js.spardl_transform("workers", density=0.2),
  js.dense_transform("workers"),
)


def loss_fn(params, batch):
  return jnp.mean((batch @ params["kernel"] + params["bias"][None] - 1.0) ** 2)


def batch_of(step, rows=12):
  return normals(step, rows, 5)


def grid_of(shape, kind=AxisType.Auto):
  """A mesh of these axes and sizes."""
  devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(
    list(shape.values())
  )
  return Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))


def train(tx, mesh, axis="workers", steps=3, **options):
  """A few steps, with the replicas compared after each."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = js.init(tx, params, mesh, axis=axis)
  step = js.make_train_step(loss_fn, tx, mesh, axis=axis, **options)
  for i in range(steps):
    params, state, metrics = step(params, state, batch_of(i))
    step.check(params, state)
  return params, state, metrics


# A collective knows an axis by the verbs of its comm (verbs_test.py); QSGD uses the
# number of the worker too.
@pytest.mark.parametrize(
  ("name", "alone", "shape"),
  [
    row("qsgd", {"workers": 6}, {"devices": 2, "hosts": 3}, id="qsgd"),
    # Devices along another axis share the gradient of a worker out among themselves.
    row(
      "spardl",
      {"workers": 6, "other": 2},
      {"hosts": 3, "other": 2, "devices": 2},
      id="spardl",
    ),
  ],
)
def test_an_axis_tuple_in_any_order_trains_as_one_axis_does(name, alone, shape):
  options = {"density": 0.2} if name == "spardl" else {}
  make = lambda axis: optax.chain(
    js.make_transform(name, axis, **options), optax.sgd(0.1)
  )
  expected, expected_state, _ = train(make("workers"), grid_of(alone))
  for axis in itertools.permutations(["hosts", "devices"]):
    found = train(make(axis), grid_of(shape), axis)
    pairs = (
      (found[0], expected),
      (found[1][0].carried.residual[0], expected_state[0].carried.residual[0]),
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      *zip(*pairs, strict=True),
    )


@pytest.mark.parametrize(
  ("ours", "axis"),
  [
    ("hosts", ("hosts", "devices")),
    (("hosts", "devices"), "hosts"),
    ("devices", "hosts"),
  ],
)
def test_a_transform_over_another_axis_than_the_step(ours, axis):
  mesh, params = grid_of({"hosts": 3, "devices": 2}), jax.tree.map(jnp.asarray, PARAMS)
  tx = js.spardl_transform(ours, density=0.2)
  with pytest.raises(
    ValueError,
    match="the jaxsparse transform is over the axis .* give all of them the same axis",
  ):
    js.init(tx, params, mesh, axis=axis)
  state = js.init(js.spardl_transform(axis, density=0.2), params, mesh, axis=axis)
  step = js.make_train_step(loss_fn, tx, mesh, axis=axis)
  with pytest.raises(ValueError, match="the jaxsparse transform is over the axis"):
    step(params, state, batch_of(0))
  assert not jax.tree.leaves(state)[0].is_deleted()


def test_leaves_that_no_transform_covers_are_named():
  """js.init warns, since a step of one's own may average them itself; the training step refuses them."""
  masked = optax.masked(SPARSE, ONLY_KERNEL)
  tx, mesh, params = (
    optax.chain(masked, optax.sgd(0.1, momentum=0.9)),
    mesh_of(3),
    jax.tree.map(jnp.asarray, PARAMS),
  )
  message = (
    r"params\['bias'\] would differ .*no jaxsparse transform covers its gradient"
  )
  with pytest.warns(UserWarning, match=message):
    state = js.init(tx, params, mesh)
  with pytest.raises(ValueError, match=message):
    js.make_train_step(loss_fn, tx, mesh)(params, state, batch_of(0))


def scale_by_local_norm():
  """A transformation before ours, whose state is of one worker: what shapes do not show, the jaxpr of the step does."""

  def update(updates, state, params=None):
    del state, params
    return updates, jnp.sqrt(optax.tree.norm(updates))

  return optax.GradientTransformation(lambda _: jnp.zeros(()), update)


MEAN = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "workers"))
KEEPS = r"transformation 0 of the chain \(\w+\) keeps arrays and comes before"


REFUSED = {
  "trace": (lambda: optax.chain(optax.trace(0.9), SPARSE), KEEPS),
  "adam": (lambda: optax.chain(optax.scale_by_adam(), SPARSE), KEEPS),
  "chain": (
    lambda: optax.chain(optax.chain(optax.identity(), optax.ema(0.9)), SPARSE),
    KEEPS,
  ),
  "wrapper": (
    lambda: optax.apply_if_finite(SPARSE, 3),
    "apply_if_finite around a jaxsparse transform .*put it after",
  ),
  "scalar of one worker": (
    lambda: optax.chain(scale_by_local_norm(), SPARSE),
    r"state\[0\]\[0\] would differ .* Put that transform first",
  ),
  "averaged": (
    lambda: optax.chain(MEAN, SPARSE),
    "before the jaxsparse transform|averaged over 'workers' already",
  ),
}


@pytest.mark.parametrize(("chain", "message"), REFUSED.values(), ids=REFUSED)
def test_chains_whose_workers_would_differ_are_refused(chain, message):
  tx = optax.chain(chain(), optax.sgd(0.1))
  with pytest.raises(ValueError, match=message):
    train(tx, mesh_of(3))


PASSING = {
  "rest dense": lambda: (
    optax.masked(SPARSE, ONLY_KERNEL),
    optax.masked(DENSE, ONLY_BIAS),
    optax.sgd(0.1),
  ),
  "rest frozen": lambda: (
    optax.masked(SPARSE, ONLY_KERNEL),
    optax.masked(optax.set_to_zero(), ONLY_BIAS),
  ),
  "finite after": lambda: (SPARSE, optax.apply_if_finite(optax.sgd(0.1), 3)),
  "stateless before": lambda: (
    optax.clip(1.0),
    optax.scale_by_schedule(optax.constant_schedule(1.0)),
    SPARSE,
  ),
}


@pytest.mark.parametrize("name", quick_of(PASSING, quick=["finite after"]))
def test_chains_that_keep_workers_equal_pass(name):
  params, _, _ = train(optax.chain(*PASSING[name]()), mesh_of(3))
  assert np.any(params["kernel"] != 0)


def test_gradients_that_are_averaged_in_a_shard_map_of_ones_own():
  mesh, params = mesh_of(3), jax.tree.map(jnp.asarray, PARAMS)
  state = js.init(SPARSE, params, mesh)
  specs = js.specs(state, "workers")

  def program(average):
    def worker(params, state, batch):
      return SPARSE.update(average(jax.grad(loss_fn)(params, batch)), state)

    mapped = jax.shard_map(
      worker,
      mesh=mesh,
      in_specs=(P(), specs, P("workers")),
      out_specs=(P(), specs),
      check_vma=False,
    )
    return lambda: jax.jit(mapped).lower(params, state, batch_of(0))

  program(lambda grads: grads)()
  bare = {"mesh": mesh, "in_specs": (P(), specs), "out_specs": (P(), specs)}
  with pytest.raises(ValueError, match="summed or averaged over 'workers' already"):
    jax.eval_shape(jax.shard_map(SPARSE.update, **bare), params, state)
  with pytest.warns(
    UserWarning,
    match="come into a shard_map .* as they are: if they are averaged already, or every",
  ):
    jax.eval_shape(jax.shard_map(SPARSE.update, check_vma=False, **bare), params, state)
  clipped = lambda grads: jax.tree.map(
    lambda g: g / jax.lax.pmax(jnp.abs(g).max(), "workers"), grads
  )
  program(clipped)()  # a scale of all workers is no average
  for average in (
    lambda grads: jax.lax.pmean(grads, "workers"),
    lambda grads: jax.tree.map(
      lambda g: (jax.lax.psum(g, "workers") / 3).astype(jnp.float32), grads
    ),
  ):
    with pytest.raises(
      ValueError,
      match=r"gradients\['bias'\] is summed or averaged over 'workers' already",
    ):
      program(average)()


def test_control_flow_and_collectives_of_the_loss_are_followed():
  """Loops, branches and sums over workers within a loss neither hide a difference nor invent one."""

  def loss(params, batch):
    center = jax.lax.pmean(batch.mean(0, keepdims=True), "workers")
    body = lambda carry, row: (
      carry + jnp.sum((row[None] - center) @ params["kernel"]),
      None,
    )
    total, _ = jax.lax.scan(body, jnp.zeros(()), batch)
    total = jax.lax.cond(total > 0, lambda x: x, lambda x: -x, total)
    return jax.lax.fori_loop(0, 3, lambda _, x: x * 0.9, total) + jnp.sum(
      params["bias"] ** 2
    )

  params = jax.tree.map(jnp.asarray, PARAMS)
  state, step = (
    js.init(SPARSE, params, mesh_of(3)),
    js.make_train_step(loss, SPARSE, mesh_of(3)),
  )
  params, state, _ = step(params, state, batch_of(0))
  step.check(params, state)
  params = jax.tree.map(jnp.asarray, PARAMS)
  uncovered = optax.masked(DENSE, ONLY_BIAS)
  with pytest.warns(UserWarning, match="kernel"):
    state = js.init(uncovered, params, mesh_of(3))
  with pytest.raises(ValueError, match="kernel"):
    js.make_train_step(loss, uncovered, mesh_of(3))(params, state, batch_of(0))


@pytest.mark.parametrize(
  "unknown",
  [
    lambda x, _: (
      jax.pure_callback(lambda: np.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32))
      + 0 * x
    ),
    lambda x, rank: jax.lax.custom_linear_solve(
      lambda v: v * (1.0 + rank),
      x,
      lambda _, b: b / (1.0 + rank),
      lambda _, b: b / (1.0 + rank),
    ),
    lambda x, rank: _by_reference(x, rank),
    lambda x, rank: jax.checkpoint(lambda v: v * rank)(x),
    lambda x, rank: jax.lax.while_loop(
      lambda c: c[0] < rank, lambda c: (c[0] + 1, c[1] + 1), (0.0, x)
    )[1],
    lambda x, rank: jax.lax.cond(rank > 0, lambda x: x + 1, lambda x: x, x),
    lambda x, rank: jax.lax.scan(lambda c, _: ((c[1], rank), None), (x, x), length=2)[
      0
    ][0],
    lambda x, rank: (
      x * jax.lax.psum(rank, "workers", axis_index_groups=[[0], [1], [2]])
    ),
  ],
  ids=[
    "callback",
    "custom_linear_solve",
    "reference",
    "checkpoint",
    "while",
    "cond",
    "scan",
    "groups",
  ],
)
def test_nothing_that_is_not_known_passes_for_the_same(unknown):
  def update(updates, state, params=None):
    del params
    rank = jax.lax.axis_index("workers").astype(jnp.float32)
    return jax.tree.map(lambda u: u * unknown(jnp.float32(1.0), rank), updates), state

  tx = optax.chain(
    DENSE, optax.GradientTransformation(lambda _: optax.EmptyState(), update)
  )
  params = jax.tree.map(jnp.asarray, PARAMS)
  step = js.make_train_step(loss_fn, tx, mesh_of(3))
  with pytest.raises(
    ValueError,
    match=r"params\['bias'\] would differ between the workers along axis 'workers'",
  ):
    step(params, js.init(tx, params, mesh_of(3)), batch_of(0))


def _by_reference(x, rank):
  ref = jax.new_ref(x)
  ref[...] = x + rank
  return ref[...]


@pytest.mark.long
def test_copies_along_the_other_axes_of_a_mesh_are_compared():
  mesh, params = grid_of({"workers": 3, "model": 2}), jax.tree.map(jnp.asarray, PARAMS)
  add = lambda u: u + jax.lax.axis_index("model").astype(u.dtype)
  apart = optax.stateless(lambda updates, _: jax.tree.map(add, updates))
  train(optax.chain(SPARSE, optax.sgd(0.1)), mesh)
  tx = optax.chain(SPARSE, apart)
  step = js.make_train_step(loss_fn, tx, mesh)
  # a worker has one value, which the compiler shards
  with pytest.raises(NameError, match="unbound axis name: model"):
    step(params, js.init(tx, params, mesh), batch_of(0))
  pieces = [
    jax.device_put(np.full(4, i % 2, np.float32), device)
    for i, device in enumerate(mesh.devices.flat)
  ]
  bias = jax.make_array_from_single_device_arrays(
    (4,), NamedSharding(mesh, P()), pieces
  )
  with pytest.raises(ValueError, match=r"params\['bias'\] and 0 other"):
    step.check(params | {"bias": bias}, ())


@pytest.mark.parametrize(
  "axis",
  [
    row("workers"),
    row(js.SimComm("workers", members=3)),
    row(js.SimComm("elsewhere", members=3), quick=True),
  ],
)
def test_the_check_works_on_every_engine(axis):
  """A simulator may name its axis as it likes."""
  engine, tx = (
    mesh_of(3) if axis == "workers" else axis,
    js.spardl_transform(axis, density=0.2),
  )
  train(optax.chain(tx, optax.sgd(0.1)), engine)
  with (
    pytest.warns(UserWarning, match="bias"),
    pytest.raises(ValueError, match=r"params\['bias'\] would differ"),
  ):
    train(optax.masked(tx, ONLY_KERNEL), engine)


def test_a_state_that_was_cut_is_refused():
  """What Orbax makes of a state of 6 workers for 4, where it is not strict."""
  tx, params = optax.chain(SPARSE, optax.sgd(0.1)), jax.tree.map(jnp.asarray, PARAMS)
  six, like = js.init(tx, params, mesh_of(6)), js.init(tx, params, mesh_of(4))
  cut = jax.tree.map(
    lambda a, b: np.asarray(a)[: b.size].reshape(b.shape) if b.ndim else np.asarray(a),
    six,
    like,
  )
  step = js.make_train_step(loss_fn, tx, mesh_of(4))
  for use in (
    lambda: step(params, cut, batch_of(0)),
    lambda: js.metrics(cut),
    lambda: js.specs(cut, "workers"),
  ):
    with pytest.raises(
      ValueError,
      match="made for 6 workers and 24 .* those of 4 workers and 24 entries: .* cut",
    ):
      use()


@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_that_orbax_fits_to_other_shapes_is_refused(tmp_path):
  tx, params = optax.chain(SPARSE, optax.sgd(0.1)), jax.tree.map(jnp.asarray, PARAMS)
  other = js.init(tx, {"kernel": jnp.zeros(20)}, mesh_of(4))  # of a smaller model
  with orbax.checkpoint.StandardCheckpointer() as saver:
    saver.save(tmp_path / "checkpoint", other)
  like = jax.tree.map(
    orbax.checkpoint.utils.to_shape_dtype_struct, js.init(tx, params, mesh_of(4))
  )
  with orbax.checkpoint.StandardCheckpointer() as saver:
    state = saver.restore(tmp_path / "checkpoint", like, strict=False)
  with pytest.raises(
    ValueError,
    match="restored into that of other parameters, .* than it was saved from",
  ):
    js.make_train_step(loss_fn, tx, mesh_of(4))(params, state, batch_of(0))


def test_a_restored_state_without_a_target_is_explained():
  tx, params = optax.chain(SPARSE, optax.sgd(0.1)), jax.tree.map(jnp.asarray, PARAMS)
  state = js.init(tx, params, mesh_of(3))
  plain = [
    {
      "carried": {"residual": state[0].carried.residual[0]},
      "counters": {},
      "layout": {},
    },
    None,
  ]
  with pytest.raises(
    ValueError, match="made of plain dicts and lists, as a checkpoint is when Orbax"
  ):
    js.make_train_step(loss_fn, tx, mesh_of(3))(params, plain, batch_of(0))
