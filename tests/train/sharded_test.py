"""Workers of several devices: every device reduces its own shards, and nothing else of a step changes."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from tests.cases import (
  AS_USERS,
  FEWER,
  assert_same_bits,
  averaged,
  each_case,
  integers,
  normals,
  quick_of,
)
from tests.ranks import run, train_sharded

KINDS = [AxisType.Auto, AxisType.Explicit]
BOTH_KINDS = pytest.mark.parametrize(
  "kind", quick_of(KINDS, quick=[AxisType.Explicit]), ids=str
)
MESHES = [
  {"hosts": 4, "x": 2},
  {"hosts": 2, "x": 4},
  {"hosts": 3, "x": 2},
  {"hosts": 2, "x": 2, "y": 2},
]
ONE_DEVICE, TWO_HOSTS = {"hosts": 4}, {"hosts": 2, "x": 2}
LEAVES = {
  "fsdp": ((8, 6), P("x")),
  "odd": ((7,), P()),
  "one": ((), P()),
  "tensor": ((5, 8), P(None, "x")),
  "whole": ((4, 3, 2), P()),
}
MIXED = {"both": ((12,), P(("y", "x"))), "mixed": ((4, 6), P("x", "y"))}


def mesh_of(sizes, kind=AxisType.Auto):
  devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(
    tuple(sizes.values())
  )
  return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def put(tree, mesh, specs, before=()):
  placed = lambda x, spec: jax.device_put(x, NamedSharding(mesh, P(*before, *spec)))
  return {name: placed(x, specs[name]) for name, x in tree.items()}


def gradients(draw, seed, workers, leaves):
  """Of all workers, f32[P, ...] by leaf."""
  return {
    name: draw(seed + i, workers, *shape)
    for i, (name, (shape, _)) in enumerate(leaves.items())
  }


def pieces(x, spec, inside):
  """[S, entries]: the shard of each device, or its share of one that several devices hold, with padding."""
  shards = jax.device_put(x, NamedSharding(mesh_of(inside), spec)).addressable_shards
  copies = 1 + max(shard.replica_id for shard in shards)
  padded = [
    np.pad(np.ravel(shard.data), (0, -shard.data.size % copies)) for shard in shards
  ]
  return np.stack(
    [
      x.reshape(copies, -1)[shard.replica_id]
      for x, shard in zip(padded, shards, strict=True)
    ]
  )


def flat_pieces(tree, leaves, inside, rows):
  """f32[S, rows, m] of a pytree whose leaves have a leading axis of `rows`."""
  each = lambda row: np.concatenate(
    [pieces(tree[n][row], spec, inside) for n, (_, spec) in leaves.items()], axis=1
  )
  return np.stack([each(row) for row in range(rows)], axis=1)


def started(tx, mesh, leaves, bare=None):
  """Parameters of zeros with the shardings of `leaves`, and the state: by default `bare` where types tell shards."""
  specs = {name: spec for name, (_, spec) in leaves.items()}
  params = put(
    {name: jnp.zeros(shape) for name, (shape, _) in leaves.items()}, mesh, specs
  )
  if not (mesh.axis_types[0] == AxisType.Explicit if bare is None else bare):
    return params, js.init(tx, params, mesh, axis="hosts"), specs
  init = lambda out: jax.shard_map(
    tx.init, mesh=mesh, in_specs=P(), out_specs=out, axis_names={"hosts"}
  )
  spec = js.specs(jax.eval_shape(init(P()), params), "hosts")
  return params, jax.jit(init(spec))(params), specs


def update_of(tx, mesh, state):
  """The bare update in a shard_map over the hosts alone: gradients and updates of all workers as rows."""

  def worker(grads, state):
    updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
    return jax.tree.map(lambda x: x[None], updates), state

  spec = js.specs(state, "hosts")
  specs = (P("hosts"), spec)
  mapped = jax.shard_map(
    worker, mesh=mesh, in_specs=specs, out_specs=specs, axis_names={"hosts"}
  )
  return jax.jit(
    mapped, out_shardings=(None, jax.tree.map(lambda x: x.sharding, state))
  )


def check_against_the_simulator(
  name, sizes, leaves, kind=AxisType.Auto, steps=2, draw=normals, options=None, **config
):
  """Updates and residuals of every device have the bits of `js.simulate` on its gradients."""
  mesh, inside = mesh_of(sizes, kind), dict(list(sizes.items())[1:])
  workers, devices = sizes["hosts"], math.prod(inside.values())
  tx = js.make_transform(name, "hosts", **config)
  _, state, specs = started(tx, mesh, leaves)
  own = config | ({"k": -(-config["k"] // devices)} if "k" in config else {})
  update, states = update_of(tx, mesh, state), [None] * devices
  # A compiler may fuse the products of factors with what they are subtracted from. Of n
  # bits the steps of blocks are divided by P, and not the entries that are multiples of
  # them.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  same = close if name in ("nbit", "powersgd") else assert_same_bits
  for step in range(steps):
    grads = gradients(draw, 10 * step, workers, leaves)
    arguments = put(grads, mesh, specs, ["hosts"]), state
    if options and step == 0:
      update = update.lower(*arguments).compile(options)
    updates, state = update(*arguments)
    rows, updates = (
      flat_pieces(grads, leaves, inside, workers),
      jax.tree.map(np.asarray, updates),
    )
    got = flat_pieces(updates, leaves, inside, workers)
    for device in range(devices):
      shards = state.layout.shards
      # by leaf
      mine = jnp.split(jnp.asarray(rows[device]), np.cumsum(shards.sizes)[:-1], axis=1)
      mine = [
        leaf.reshape(workers, *piece)
        for leaf, piece in zip(mine, shards.pieces, strict=True)
      ]
      out = js.simulate(name, mine, state=states[device], **own)
      states[device] = out.state
      expected = np.asarray(
        mean(jnp.concatenate([leaf.reshape(-1) for leaf in out.total]), workers)
      )
      for worker in (
        range(workers) if js.make_collective(name, **config).traits.replicates else [0]
      ):
        same(
          *(
            kept(one, leaves, inside, device) for one in (got[device, worker], expected)
          )
        )
      if (residual := state.carried.residual[0]) is not None:
        mine = np.asarray(residual).reshape(workers, devices, -1)[:, device]
        residuals = np.concatenate(
          [leaf.reshape(workers, -1) for leaf in out.residuals], axis=1
        )
        same(mine, residuals)


# by a constant, as in the update
mean = jax.jit(lambda total, workers: total / workers, static_argnums=1)


def kept(flat, leaves, inside, device):
  """Without the entries that are padding on this device: the transform drops them."""
  ones = {name: np.ones((1, *shape), np.float32) for name, (shape, _) in leaves.items()}
  return flat[flat_pieces(ones, leaves, inside, 1)[device, 0] > 0]


@each_case(FEWER, ["powersgd"])
def test_every_device_has_the_bits_of_the_simulator(case):
  sizes = {"hosts": case.workers([4, 6, 5, 8])[0], "x": 2}
  check_against_the_simulator(case.name, sizes, LEAVES, **case.config(density=0.2))


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "kind"),
  [*itertools.product(MESHES, KINDS)],
  ids=lambda given: (
    "x".join(map(str, given.values())) if isinstance(given, dict) else str(given)
  ),
)
def test_any_mesh_and_any_sharding(sizes, kind):
  """`k` is divided among devices and rounded up."""
  # in the order of a pytree
  leaves = dict(sorted((LEAVES | MIXED).items())) if "y" in sizes else LEAVES
  check_against_the_simulator("topka", sizes, leaves, kind, draw=integers, k=29)


@pytest.mark.long
def test_large_shards_of_the_candidate_path():
  leaves = {"a": ((2, 20_000), P(None, "x")), "b": ((30_001,), P())}
  check_against_the_simulator(
    "spardl", {"hosts": 3, "x": 2}, leaves, options=AS_USERS, density=0.01
  )


def test_shardings_where_neither_types_nor_init_tell_them():
  mesh = mesh_of(MESHES[0])
  shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in LEAVES.items()}
  state_of = lambda given, bare=True: started(
    js.make_transform("topka", "hosts", shardings=given, k=9), mesh, LEAVES, bare
  )[1]
  bare, known = state_of(shardings), state_of(shardings, bare=False)
  assert bare.layout.shards == known.layout.shards
  assert jax.tree.map(jnp.shape, bare) == jax.tree.map(jnp.shape, known)
  for given, message in (
    (
      {"one": P()},
      r"shardings=.*: parameters\['fsdp'\] has none, give a PartitionSpec or",
    ),
    (
      shardings | {"odd": P("x")},
      r"parameters\['odd'\] has shape \(7,\) .* cuts 7 entries into 2 shards",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      state_of(given)


@pytest.mark.long
def test_groups_of_leaves():
  """`special=`: each group of leaves has the bits of the simulator on its pieces."""
  special = {"odd|one": "dense", "tensor": "topka:k=9"}
  groups = {
    ("odd", "one"): ("dense", {}),
    ("tensor",): ("topka", {"k": 5}),
    ("fsdp", "whole"): ("spardl", {"density": 0.25}),
  }
  tx, mesh = js.spardl_transform("hosts", special, density=0.25), mesh_of(MESHES[2])
  _, state, specs = started(tx, mesh, LEAVES)
  grads = gradients(integers, 5, 3, LEAVES)
  updates, state = update_of(tx, mesh, state)(put(grads, mesh, specs, ["hosts"]), state)
  updates = jax.tree.map(np.asarray, updates)
  for names, (name, config) in groups.items():
    leaves = {leaf: LEAVES[leaf] for leaf in names}
    rows, got = (flat_pieces(tree, leaves, {"x": 2}, 3) for tree in (grads, updates))
    for device in range(2):
      out = js.simulate(name, jnp.asarray(rows[device]), **config)
      np.testing.assert_array_equal(got[device, 0], np.asarray(mean(out.total, 3)))
  assert int(js.metrics(state).delivered) > 0


# The training step.

MODEL = {
  "down": ((16, 12), P("x")),
  "gain": ((12,), P()),
  "up": ((12, 16), P(None, "x")),
}


def loss_fn(params, batch, **sharding):
  """Tensor parallel: no weight is needed whole on any device."""
  hidden = jnp.tanh((batch * params["gain"][None]) @ params["up"])
  return jnp.mean((jnp.matmul(hidden, params["down"], **sharding) - 1.0) ** 2)


LOSSES = {
  AxisType.Auto: loss_fn,
  AxisType.Explicit: functools.partial(loss_fn, out_sharding=P()),
}


def model_of(
  tx, kind=AxisType.Auto, sizes=MESHES[0], loss=None, donate=False, **options
):
  """(step, params, state) of a small tensor-parallel model."""
  mesh = mesh_of(sizes, kind)
  specs = {name: spec if "x" in sizes else P() for name, (_, spec) in MODEL.items()}
  params = {
    name: jnp.asarray(normals(i, *shape)) / 4
    for i, (name, (shape, _)) in enumerate(MODEL.items())
  }
  params = put(params, mesh, specs)
  step = js.make_train_step(
    loss or LOSSES[kind], tx, mesh, axis="hosts", donate=donate, **options
  )
  return step, params, js.init(tx, params, mesh, axis="hosts")


def batch_of(step, rows=16):
  return normals(step, rows, 12)


def chain_of(transform):
  return optax.chain(
    transform, optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)
  )


SPARSE = chain_of(js.spardl_transform("hosts", density=0.2))


@functools.cache
def sparse_model(kind=AxisType.Auto):
  """The model with `SPARSE`, and parameters and state after a step: most tests share its program."""
  step, params, state = model_of(SPARSE, kind)
  return step, *step(params, state, batch_of(0))[:2]


def lie_alike(tree, like):
  """Whether arrays have the shapes and shardings of others."""
  same = lambda x, y: (
    x.shape == y.shape and x.sharding.is_equivalent_to(y.sharding, x.ndim)
  )
  return jax.tree.all(jax.tree.map(same, tree, like))


@pytest.mark.parametrize(
  ("kind", "sizes"),
  quick_of(
    [(KINDS[0], MESHES[0]), (KINDS[1], MESHES[0]), (KINDS[0], ONE_DEVICE)],
    quick=[(KINDS[1], MESHES[0])],
  ),
  ids=str,
)
def test_a_step_keeps_shardings_donates_and_compiles_once(kind, sizes):
  compiled, counts, losses = [], [], []
  listen = lambda event, _, **__: (
    compiled.append(event) if "backend_compile" in event else None
  )
  step, params, state = model_of(SPARSE, kind, sizes, donate=True)
  first = jax.tree.map(jnp.copy, (params, state))
  n, residual = (
    sum(x.size for x in jax.tree.leaves(params)),
    state[0].carried.residual[0],
  )
  assert lie_alike(state[2][0].trace, params)
  assert residual.addressable_shards[0].data.size == (
    sum(state[0].layout.shards.sizes) if "x" in sizes else n
  )
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for i in range(4):
      old = params["up"], state[0].carried.residual[0]
      params, state, metrics = step(params, state, batch_of(i))
      counts.append(len(compiled))
      losses.append(float(metrics.loss))
      assert all(x.is_deleted() for x in old)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert counts[-1] == counts[0] >= 1
  assert lie_alike((params, state), first)
  assert jax.tree.all(
    jax.tree.map(
      lambda x, y: x.sharding.mesh == y.sharding.mesh, (params, state), first
    )
  )
  assert losses[-1] < losses[0]
  step.check(params, state)


@pytest.mark.long
@pytest.mark.parametrize(
  (
    "kind",
    "rows",
  ),  # of a micro-batch of one host: 1, which its two devices do not divide, or 2
  [*itertools.product(KINDS, [8, 16])],
  ids=str,
)
def test_dense_between_hosts_is_plain_data_parallel_training(kind, rows):
  """Micro-batches, aux, keys and model state too: against workers of one device."""

  def loss(params, batch, rng, model_state):
    # of two rows each device has one, and a part of each weight
    if kind == AxisType.Explicit:
      batch = jax.sharding.reshard(batch, P())
    value = (
      LOSSES[kind](params, batch) + 0.01 * jax.random.normal(rng) * params["gain"].sum()
    )
    return value, model_state + batch.mean(), {"largest": batch.max()}

  results, tx = [], chain_of(js.dense_transform("hosts"))
  for sizes in (ONE_DEVICE, MESHES[0]):
    step, params, state = model_of(
      tx, kind, sizes, loss, has_aux=True, aux_reduce="stack", accumulate=2
    )
    # batches are sharded inside too
    kept, lies = (
      jnp.zeros(()),
      NamedSharding(mesh_of(sizes, kind), P(tuple(sizes))),
    )
    for i in range(3):
      batch = jax.device_put(batch_of(i, rows), lies)
      params, state, metrics = step(
        params, state, batch, rng=jax.random.key(i), model_state=kept
      )
      kept = metrics.model_state
    results.append(jax.tree.map(np.asarray, (params, metrics.loss, metrics.aux, kept)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), *results
  )


def words_by_level(text, devices):
  """(operation, words of its result, whether it is between hosts) of each collective of a compiled program."""
  found = []
  pattern = r"= \(?(\w+)\[([\d,]*)\].*? "
  pattern += r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)"
  for _, dims, op, rest in re.findall(pattern, text):
    size = math.prod(int(d) for d in dims.split(",") if d)
    if lists := re.search(
      r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", rest
    ):
      groups = [
        list(map(int, one.split(","))) for one in re.findall(r"\{([\d,]+)\}", lists[1])
      ]
    elif iota := re.search(
      r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest
    ):
      shape, dims, order = (
        [int(d) for d in part.split(",")] if part else None for part in iota.groups()
      )
      groups = (
        np.arange(math.prod(dims))
        .reshape(dims)
        .transpose(order)
        .reshape(shape)
        .tolist()
      )
    else:  # of JAX 0.12
      mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest)
      sizes, names = (
        {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])},
        re.findall(r"\w+", mesh[2]),
      )
      ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
      ids = np.moveaxis(
        ids, [[*sizes].index(name) for name in names], range(-len(names), 0)
      )
      groups = ids.reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    found.append(
      (
        op,
        size,
        any(len({device // devices for device in group}) > 1 for group in groups),
      )
    )
  return found


@BOTH_KINDS
def test_law_w_by_level(kind):
  """Between hosts only the messages of the collective on n/S entries, and the mean loss; no leaf is gathered whole."""
  step, params, state = sparse_model(kind)
  text = step.lower(params, state, batch_of(0)).compile().as_text()
  found, n = words_by_level(text, 2), sum(state[0].layout.shards.sizes)
  between = [(op, words) for op, words, far in found if far]
  cost = js.costs.count("spardl", n=n, workers=4, density=0.2)
  sent = [words for op, words in between if op == "collective-permute"]
  assert (len(sent), sum(sent)) == (cost.messages, cost.words)
  # the loss
  assert [(op, words) for op, words in between if op != "collective-permute"] == [
    ("all-reduce", 1)
  ]
  inside = [(op, words) for op, words, far in found if not far]
  # `gain`, and nothing more
  assert all(words < 16 * 12 / 2 for op, words in inside if op == "all-gather"), inside
  assert (
    int(js.metrics(state).words_sent)
    == int(js.metrics(state).total_words)
    == 2 * cost.words
  )


def test_nan_on_one_shard_skips_the_step_on_all_shards():
  """A gradient of one column is NaN at one worker: that column lies on one of the two devices."""
  mesh, tx = (
    mesh_of(MESHES[0]),
    optax.chain(js.make_transform("topka", "hosts", density=0.2), optax.sgd(0.1)),
  )
  params = put(
    {"w": jnp.zeros((6, 8)), "r": jnp.zeros(5)}, mesh, {"w": P(None, "x"), "r": P()}
  )
  loss = lambda p, batch: (
    jnp.sum((p["w"] - 1) ** 2 * batch.mean(0)[None]) + jnp.sum((p["r"] - 1) ** 2)
  )
  step = js.make_train_step(loss, tx, mesh, axis="hosts", donate=False)
  good = np.ones((4, 8), np.float32)
  bad = good.copy()
  bad[-1, -1] = np.nan
  params, state, _ = step(params, js.init(tx, params, mesh, axis="hosts"), good)
  same, skipped, metrics = step(params, state, bad)
  assert bool(metrics.skipped)
  assert_same_bits((same, skipped[0].carried), (params, state[0].carried))
  _, state, metrics = step(same, skipped, good)
  assert not bool(metrics.skipped)
  assert np.asarray(state[0].counters.skipped_steps).tolist() == [1] * 8


@pytest.mark.long
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_local_steps_and_what_their_transforms_remember(kind, applied):
  """Moments, what was moved and momentum lie as the parameters; Law C over all shards: what is flushed is the rest."""
  sparse = js.momentum_corrected(
    js.make_transform("topka", "hosts", density=0.2, decay=0.5), 0.5
  )
  outer = optax.chain(sparse, optax.sgd(1.0))
  tx = js.local_steps(
    optax.sgd(0.1, momentum=0.5), outer, every=2, apply_residual=applied
  )
  step, params, state = first = model_of(tx, kind)
  assert (
    state.moved["up"].sharding.spec
    == state.inner[0].trace["up"].sharding.spec
    == P("hosts", None, "x")
  )
  for i in range(5):
    params, state, _ = step(params, state, batch_of(i))
  step.check(params, state)
  assert lie_alike((params, state), first[1:])
  assert int(js.metrics(state).since_exchange) == 1
  assert float(js.metrics(state).drift) > 0
  update, flushed = js.flush(state, params, mesh_of(MESHES[0], kind), axis="hosts")
  moved = {name: np.asarray(state.moved[name]).mean(0) for name in params}
  # residuals, too
  assert any(np.any(np.asarray(update[name]) != moved[name]) for name in params)
  assert (
    float(js.metrics(flushed).drift) == float(js.metrics(flushed).residual_norm) == 0
  )


@pytest.mark.long
@BOTH_KINDS
def test_stacked_in_a_jit_of_ones_own(kind):
  """The parameters, moments and residuals of a training step, where they lie; nothing of a worker is gathered."""
  chain = js.local_steps(
    optax.sgd(0.1, momentum=0.5),
    optax.chain(js.make_transform("topka", "hosts", density=0.2), optax.sgd(1.0)),
    every=2,
  )
  step, params, state = model_of(chain, kind, sizes=TWO_HOSTS)
  mesh = mesh_of(TWO_HOSTS, kind)
  tx = js.stacked(chain, mesh, axis="hosts")

  @jax.jit
  def train(params, state, batch):
    loss, grads = tx.value_and_grad(LOSSES[kind])(params, state, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  own = params, tx.init(params)
  assert lie_alike(own[1], state)
  for number in range(4):
    batch = jax.device_put(batch_of(number), NamedSharding(mesh, P("hosts")))
    *own, loss = jax.block_until_ready(train(*own, batch))
    params, state, metrics = step(params, state, batch)
    np.testing.assert_allclose(loss, metrics.loss, rtol=1e-5)
  assert lie_alike(own[0], params)
  for one, other in zip(
    jax.tree.leaves(own), jax.tree.leaves((params, state)), strict=True
  ):
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_muon_orthogonalizes_whole_matrices():
  """Newton-Schulz of shards alone would be another update: that of hosts of two devices is that of hosts of one."""
  muon = js.average_momentum(
    optax.contrib.muon(0.05, adam_learning_rate=0.01), "hosts", every=3, dtype="float32"
  )
  tx = js.local_steps(muon, averaged("hosts"), every=2)
  ends = []
  for sizes in ({"hosts": 2}, TWO_HOSTS):
    step, params, state = model_of(tx, sizes=sizes)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      for number in range(4):
        params, state, _ = jax.block_until_ready(step(params, state, batch_of(number)))
    ends.append(params)
  for name, alone in ends[0].items():
    np.testing.assert_allclose(
      np.asarray(ends[1][name]), np.asarray(alone), rtol=2e-4, atol=2e-5
    )
  assert any(np.abs(np.asarray(leaf)).max() > 0.01 for leaf in ends[0].values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:js.resize. the workers have parameters")
def test_parameters_of_workers_of_their_own():
  """A2SGD: averaging sends each entry once; other hosts go on from the mean of what was moved."""
  tx = js.local_steps(chain_of(js.a2sgd_transform("hosts")), averaged("hosts"), every=3)
  step, params, state = first = model_of(tx)
  drifts = []
  for i in range(4):
    params, state, _ = step(params, state, batch_of(i))
    drifts.append(float(js.metrics(state).drift))
  assert [drift > 0 for drift in drifts] == [True, True, False, True]
  moved = {
    name: np.asarray(state.moved[name]).astype(np.float64).mean(0) for name in params
  }
  synchronized = step.synchronize(params, state)
  assert lie_alike(synchronized, first[1:])
  step.check(*synchronized)
  _, fresh, like = model_of(tx, sizes=TWO_HOSTS)
  resized = js.resize(state, fresh, mesh_of(TWO_HOSTS), axis="hosts")
  assert lie_alike(resized, like)
  for name, mean_moved in moved.items():
    np.testing.assert_allclose(
      synchronized[0][name], np.asarray(params[name]) - mean_moved, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
      resized.moved[name], np.stack([mean_moved] * 2), rtol=1e-6
    )


@pytest.mark.long
def test_hosts_of_several_processes_and_devices(tmp_path):
  """Two processes of two devices each over gloo have the results of four devices of one process."""
  file = tmp_path / "batch.npz"
  np.savez(file, batch=normals(1, 8, 3))
  run("sharded", "processes", 2, file, devices=2)
  expected = train_sharded(mesh_of({"hosts": 2, "devices": 2}), np.load(file)["batch"])
  with np.load(file.with_suffix(".out.npz")) as found:
    for got, wanted in zip(found.values(), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


@BOTH_KINDS
def test_it_lowers_for_gpus(kind):
  """The compiler of GPUs gets the same program: two maps, and between hosts one buffer for each message."""
  step, params, state = sparse_model(kind)
  arguments = params, state, batch_of(0)
  program, specs = step._program(*arguments)
  with js.traced_for("cuda"):
    text = (
      program.trace(*step._engine.place(arguments, specs))
      .lower(lowering_platforms=("cuda",))
      .as_text()
    )
  assert 'manual_axes={"hosts"}' in text
  assert 'manual_axes={"x"}' in text
  assert (
    text.count("stablehlo.collective_permute")
    == js.costs.count("spardl", n=200, workers=4, density=0.2).messages
  )


@pytest.mark.long
def test_a_state_of_the_host_goes_on_bit_for_bit():
  """As a checkpoint may be restored: the state knows how its residuals lie."""
  step, params, state = sparse_model()
  expected, expected_state, _ = step(params, state, batch_of(1))
  after, after_state, _ = step(params, jax.tree.map(np.asarray, state), batch_of(1))
  assert_same_bits(after, expected)
  assert (
    after_state[0].carried.residual[0].sharding
    == expected_state[0].carried.residual[0].sharding
  )


@pytest.mark.parametrize("kind", quick_of(KINDS, quick=[AxisType.Explicit]), ids=str)
def test_a_state_of_other_hosts(kind):
  """Each device takes over the residuals of the same device; moments keep shards, from arrays of the host as well."""
  _, params, state = sparse_model(kind)
  mesh = mesh_of(TWO_HOSTS, kind)
  other, fresh, like = model_of(SPARSE, kind, TWO_HOSTS)
  fresh = jax.tree.map(
    lambda x, new: jax.device_put(np.asarray(x), new.sharding), params, fresh
  )
  # [worker // 2, worker % 2, device, entry]
  rows = np.asarray(state[0].carried.residual[0]).reshape(2, 2, 2, -1)
  for given in (jax.tree.map(np.asarray, state), state):
    resized = js.resize(given, fresh, mesh, axis="hosts")
    np.testing.assert_array_equal(
      np.asarray(resized[0].carried.residual[0]), rows.sum(0).reshape(-1) / 2
    )
    assert jax.tree.structure(resized) == jax.tree.structure(like)
    assert lie_alike(resized, like)
  assert lie_alike(js.abstract_state(SPARSE, fresh, mesh, axis="hosts"), like)
  of_four = js.abstract_state(SPARSE, fresh, mesh, axis="hosts", workers=4)
  jax.tree.map(
    lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)),
    of_four,
    state,
  )
  update, flushed = js.flush(resized, fresh, mesh, axis="hosts")
  got = [
    pieces(np.asarray(update[name]), spec, {"x": 2})
    for name, (_, spec) in sorted(MODEL.items())
  ]
  np.testing.assert_allclose(
    np.concatenate(got, axis=1), rows.sum((0, 1)) / 4, atol=1e-7
  )
  other(fresh, flushed, batch_of(1))
  with pytest.raises(
    ValueError,
    match="workers with 2 devices along 'x' inside, here .* 4 devices along 'x'",
  ):
    js.resize(state, params, mesh_of({"hosts": 2, "x": 4}, kind), axis="hosts")


def test_what_is_wrong_is_said_before_anything_is_changed():
  tx, mesh = js.make_transform("topka", "hosts", density=0.2), mesh_of(MESHES[0])
  step, params, state = model_of(tx)
  split = params | {
    "up": jax.device_put(np.asarray(params["up"]), NamedSharding(mesh, P("hosts", "x")))
  }
  with pytest.raises(
    ValueError,
    match=r"params\['up'\] .* is sharded as .*'hosts'.* each of which needs all of it",
  ):
    js.init(tx, split, mesh, axis="hosts")
  with pytest.raises(ValueError, match=r"params\['up'\] .* is sharded as"):
    step(split, state, batch_of(0))
  for sizes, message in (
    (MESHES[1], "was made for 2 workers, the axis has 4"),
    (
      {"hosts": 4, "x": 4},
      "made for workers with 4 devices along 'x' inside, .* has 2 devices along 'x'",
    ),
  ):
    _, _, other = model_of(tx, sizes=sizes)
    with pytest.raises(ValueError, match=message):
      step(params, other, batch_of(0))
  mixed = Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(KINDS))
  with pytest.raises(
    ValueError,
    match="'hosts' AxisType.Auto, 'x' AxisType.Explicit: .* give all axes one type",
  ):
    js.make_train_step(LOSSES[AxisType.Auto], tx, mixed, axis="hosts")(
      params, state, batch_of(0)
    )
  with pytest.raises(
    ValueError,
    match="'x' lies inside a worker, and is not Explicit.* make the state with js.init",
  ):
    jax.eval_shape(lambda p: js.init(tx, p, mesh, axis="hosts"), params)
  specs = P(), js.specs(state, "hosts")
  everything = jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs)
  with pytest.raises(
    ValueError,
    match="workers with 2 devices along 'x' inside, .*one device.* axis_names={'hosts'}",
  ):
    jax.eval_shape(everything, params, state)
  step(params, state, batch_of(0))
