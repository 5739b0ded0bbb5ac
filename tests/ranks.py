"""What the ranks of the multi-process tests run: `python tests/ranks.py WHAT ENGINE FILE`, by jaxsparse.launch."""

import functools
import itertools
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.train import replicas
from jaxsparse.train.engine import engine_of, local_shard
from jaxsparse.train.starting import start_workers
from jaxsparse.transform.update import init_state, reduce_step


def run(
  program: str,
  engine: str,
  ranks: int,
  file: pathlib.Path,
  *more: str,
  limit: float = 240,
  devices: int = 1,
):
  """Runs a program of this file on so many ranks."""
  command = [sys.executable, __file__, program, engine, str(file), *more]
  launch.run(command, ranks, engine, devices=devices, start_timeout=120, limit=limit)


def join(engine: str):
  """(what js.init takes, the axis of a transform, the rank)."""
  if engine == "mpi":
    comm = js.MpiComm(host_staging=True) if "staged" in sys.argv else js.MpiComm()
    return comm, comm, int(comm.rank)
  launch.join()
  return (
    jax.make_mesh((len(jax.devices()),), ("workers",)),
    "workers",
    jax.process_index(),
  )


def local(x):
  """What this rank holds of an array."""
  return np.asarray(x if x.is_fully_addressable else x.addressable_data(0))


def equality(engine_name: str, file: str) -> None:
  """Several steps of every collective of the file, bit for bit what the simulator made of the same gradients."""
  where, _, rank = join(engine_name)
  engine = engine_of(where, "workers")
  split = jax.sharding.PartitionSpec("workers")
  data = np.load(file)
  for number, (name, config) in enumerate(json.loads(str(data["cases"]))):
    collective, n = (
      js.make_collective(name, **config),
      data[f"{number}/grads"].shape[-1],
    )
    state, own = start_workers(
      engine,
      lambda _, c=collective, n=n: init_state(c, n, engine.workers),
      jnp.zeros(n),
    )
    rows = data[f"{number}/grads"]
    grads = [
      step[rank] if engine.held == 1 else engine.place(step.reshape(-1), split)
      for step in rows
    ]
    program = engine.jit(
      functools.partial(reduce_step, collective, engine.comm),
      (split, own),
      (split, own),
    )
    for step, mine in enumerate(grads):
      total, state = program(mine, state)
      same(
        total, data[f"{number}/totals"][step, rank], f"{name} step {step} rank {rank}"
      )
      if state.carried.residual[0] is not None:
        same(
          state.carried.residual[0],
          data[f"{number}/residuals"][step, rank],
          f"{name} residual {step} rank {rank}",
        )
    if "metrics" in sys.argv:  # under MPI those of all workers must be asked for
      words = jax.jit(lambda s: js.metrics(s, engine.comm))(state).words_sent
      assert float(words) == float(data[f"{number}/words"]), (name, words)


def same(found, wanted, what):
  """The same bits."""
  np.testing.assert_array_equal(
    local(found).view(np.uint32), wanted.view(np.uint32), what
  )


def same_training(name, found, wanted, what):
  """The same bits, but for ways of `DIFFERING`."""
  if name in DIFFERING:
    np.testing.assert_allclose(local(found), wanted, rtol=1e-5, atol=1e-6, err_msg=what)
  else:
    same(found, wanted, what)


def _chain(axis, rate=0.25, momentum=0.5, density=0.3, name="spardl"):
  return optax.chain(
    js.make_transform(name, axis, density=density), optax.sgd(rate, momentum=momentum)
  )


def _averaged_momentum(axis):
  return js.average_momentum(
    optax.sgd(0.25, momentum=0.5), axis, every=2, dtype="float32"
  )


def _own_steps(
  axis, every=3, rate=0.5, apply_residual=False, inner=None, name="spardl"
):
  outer = _chain(axis, rate, name=name)
  return js.local_steps(
    inner or optax.sgd(0.25), outer, every=every, apply_residual=apply_residual
  )


SPARDL = js.make_collective("spardl", density=0.3)
WAYS = {
  "every step": _chain,
  "local": _own_steps,
  "sparseloco": lambda axis: js.sparseloco(
    optax.sgd(0.25), axis, every=3, density=0.25, chunk=16
  ),
  # A sparse exchange adds in rank order; gloo's all-reduce does not.
  "streaming": lambda axis: js.streaming_diloco(
    optax.sgd(0.25), axis, fragments=2, every=4, momentum=0.5, collective=SPARDL
  ),
  "demo": lambda axis: js.demo_transform(
    axis, learning_rate=0.25, density=0.25, chunk=16
  ),
  "averaged momentum": lambda axis: _own_steps(axis, inner=_averaged_momentum(axis)),
}
"""Ways to train whose products are exact, so that every program has their bits; those of the demo are rounded."""
DIFFERING = {"averaged momentum"}
"""Those whose sums are: a dense all-reduce adds in an order of its own on every engine."""


def trained(tx, where, batch):
  """Parameters and the loss after ten steps towards f32[P, 36], or under MPI the f32[1, 36] of this rank."""
  params = {"a": jnp.zeros(7), "b": jnp.zeros((4, 5)), "c": jnp.zeros(9)}
  step = js.make_train_step(
    lambda p, x: jnp.sum((jax.flatten_util.ravel_pytree(p)[0] - x[0]) ** 2) / 2,
    tx,
    where,
  )
  state = js.init(tx, params, where)
  for _ in range(10):
    params, state, metrics = step(params, state, batch)
  return params | {"loss": metrics.loss}


def ways(engine_name: str, file: str) -> None:
  """Trains in each of `WAYS` that the file names, and compares with the parameters there."""
  where, axis, rank = join(engine_name)
  data = dict(np.load(file))
  batch = data.pop("batch")
  for name in dict.fromkeys(key.partition("/")[0] for key in data):
    found = trained(
      WAYS[name](axis), where, batch[rank, None] if engine_name == "mpi" else batch
    )
    # gloo adds in its own order
    np.testing.assert_allclose(
      local(found.pop("loss")), data[f"{name}/loss"], rtol=2e-6
    )
    for leaf, x in found.items():
      same_training(name, x, data[f"{name}/{leaf}"], f"{name} {leaf} rank {rank}")


def ends(engine_name: str, file: str, statement: str, others: str) -> None:
  """Every rank steps once and writes its process id and the time; then rank 1 repeats one statement, others another."""
  where, axis, rank = join(engine_name)
  tx, params = js.dense_transform(axis), jnp.zeros(40)
  state = js.init(tx, params, where)
  program = js.make_train_step(lambda p, x: jnp.sum(p * x.mean()), tx, where)

  def step():
    nonlocal params, state
    params, state, _ = program(
      params, state, np.ones(1 if engine_name == "mpi" else program.workers, np.float32)
    )

  step()
  pathlib.Path(file, str(rank)).write_text(f"{os.getpid()} {time.monotonic()}")
  files = [pathlib.Path(file, str(number)) for number in range(2)]
  while not all(one.exists() and one.read_text() for one in files):
    time.sleep(0.01)
  while not pathlib.Path(file, "end").exists():
    exec(statement if rank == 1 else others, globals() | {"step": step})
    time.sleep(0.01)


def quiet(engine_name: str, _: str) -> None:
  """All ranks count each other, and rank 0 prints how many there are."""
  where, _, rank = join(engine_name)
  engine = engine_of(where, "workers")
  total = engine.jit(
    engine.comm.all_reduce,
    (jax.sharding.PartitionSpec(),),
    jax.sharding.PartitionSpec(),
  )
  count = float(local_shard(total(jnp.float32(1))))
  if rank == 0:
    print(count)


def train_sharded(mesh, batch):
  """(parameters, residual, words between hosts) after steps of hosts with several devices each, as whole arrays."""
  spec = jax.sharding.PartitionSpec
  put = lambda x, *names: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, spec(*names))
  )
  params = {
    "b": put(np.zeros(3, np.float32)),
    "w": put(np.full((3, 4), 0.5, np.float32), None, "devices"),
  }
  tx = optax.chain(
    js.spardl_transform("hosts", density=0.4), optax.sgd(0.25, momentum=0.5)
  )
  state = js.init(tx, params, mesh, axis="hosts")
  loss = lambda p, x: jnp.mean(((x + p["b"][None]) @ p["w"] - 1.0) ** 2)
  step = js.make_train_step(loss, tx, mesh, axis="hosts")
  for _ in range(5):
    params, state, _ = step(params, state, put(batch, ("hosts", "devices")))
  step.check(params, state)
  words = js.metrics(state).words_sent
  whole = jax.jit(
    lambda tree: tree, out_shardings=jax.sharding.NamedSharding(mesh, spec())
  )
  return jax.tree.map(local, whole((params, state[0].carried.residual[0], words)))


def sharded(_: str, file: str) -> None:
  """Trains hosts of several devices, and writes what came out."""
  launch.join()
  shape = (jax.process_count(), jax.local_device_count())
  auto = (jax.sharding.AxisType.Auto,) * 2
  found = train_sharded(
    jax.make_mesh(shape, ("hosts", "devices"), axis_types=auto), np.load(file)["batch"]
  )
  if jax.process_index() == 0:
    np.savez(pathlib.Path(file).with_suffix(".out.npz"), *jax.tree.leaves(found))


def lonely(engine_name: str, file: str) -> None:
  """Metrics that rank 0 alone asks for."""
  where, axis, rank = join(engine_name)
  tx = js.make_transform("topka", axis, k=4)
  state = js.init(tx, jnp.zeros(10), where)
  assert float(js.metrics(state).residual_norm) == 0  # all together
  if rank == 0:
    try:
      js.metrics(state, timeout=3)
    except RuntimeError as error:
      pathlib.Path(file, "0").write_text(str(error))
  else:
    end = time.monotonic() + 60
    while not pathlib.Path(file, "0").exists() and time.monotonic() < end:
      time.sleep(0.1)


SCHEDULES = optax.cosine_decay_schedule(0.1, 100), optax.cosine_decay_schedule(0.1, 200)
TABLES = (
  np.linspace(0.1, 0.2, 5, dtype=np.float32),
  np.linspace(0.1, 0.3, 5, dtype=np.float32),
)
# few messages to compile
_plain, _local = (
  functools.partial(make, name="topka") for make in (_chain, _own_steps)
)
TRANSFORMS = {
  "learning rate": lambda axis, me: _plain(axis, rate=(0.25, 0.5)[me]),
  "schedule": lambda axis, me: _plain(axis, rate=SCHEDULES[me]),
  "table of rates": lambda axis, me: _plain(
    axis, rate=lambda step: jnp.asarray(TABLES[me])[step % 5]
  ),
  "injected rate": lambda axis, me: optax.inject_hyperparams(
    lambda rate: _plain(axis, rate)
  )(rate=(0.25, 0.5)[me]),
  "momentum": lambda axis, me: _plain(axis, momentum=(0.5, 0.75)[me]),
  "no momentum": lambda axis, me: _plain(axis, momentum=(0.5, None)[me]),
  "density": lambda axis, me: _plain(axis, density=(0.3, 0.5)[me]),
  "every": lambda axis, me: _local(axis, every=(3, 5)[me]),
  "outer rate": lambda axis, me: _local(axis, every=2, rate=(0.5, 0.25)[me]),
  "apply_residual": lambda axis, me: _local(axis, apply_residual=(False, True)[me]),
}
OPTIONS = {
  "loss scale": ({"scale": 1.0}, {"scale": 2.0}),
  "constant": (
    {"target": np.zeros((9, 4), np.float32)},
    {"target": np.ones((9, 4), np.float32)},
  ),
  "batch size": ({"rows": 4}, {"rows": 8}),
  "batch type": ({"dtype": np.float32}, {"dtype": jnp.bfloat16}),
  "accumulate": ({}, {"accumulate": 2}),
  "donate": ({}, {"donate": False}),
  "values of params": ({}, {"bias": {"b": np.ones(4, np.float32)}}),
  "names of params": ({}, {"bias": {"c": np.zeros(4, np.float32)}}),
  "random key": ({"seed": 0}, {"seed": 1}),
  "random bits": ({"partitionable": True}, {"partitionable": False}),
}
"""What two ranks do differently; each is told by an error of `js.init` or of the first step."""
FEW = [
  "table of rates",
  "no momentum",
  "density",
  "constant",
  "batch type",
  "values of params",
  "random key",
]
"""Of these what `make test` runs: each comparison once."""


def different(engine_name: str, file: str) -> None:
  """Two ranks that run other programs, then the same, then others that nobody compares; each writes its errors."""
  where, axis, me = join(engine_name)
  cases = {name: {"tx": make(axis, me)} for name, make in TRANSFORMS.items()}
  cases |= {name: options[me] for name, options in OPTIONS.items()}
  same = {"nothing": {}, "not compared": cases["outer rate"]}
  is_few = "few" in sys.argv
  told = {"across": _across(me, is_few) if engine_name == "processes" else []}
  for name, options in (
    {name: cases[name] for name in FEW} if is_few else cases | same
  ).items():
    if name == "not compared":
      replicas.check_same = lambda *_: None
    try:
      with jax.threefry_partitionable(options.pop("partitionable", True)):
        _trained_alike(where, axis, me, engine_name, **options)
    except ValueError as error:
      told[name] = str(error).partition("; on this process they are ")[0]
  pathlib.Path(file, f"{me}.json").write_text(json.dumps(told))


def _trained_alike(
  where,
  axis,
  me,
  engine,
  tx=None,
  scale=1.0,
  target=1.0,
  rows=4,
  dtype=np.float32,
  bias=None,
  seed=0,
  **options,
):
  tx, params = (
    tx or _plain(axis),
    (bias or {"b": jnp.zeros(4)}) | {"w": jnp.zeros((9, 4))},
  )
  state, key = js.init(tx, params, where), jax.random.key(seed)
  out = lambda p, x, rng: (
    x.astype(jnp.float32) @ (p["w"] - target) + p["b"][None] + jax.random.uniform(rng)
  )
  loss = lambda p, x, rng: scale * jnp.mean(out(p, x, rng) ** 2)
  step = js.make_train_step(loss, tx, where, **options)
  batch = np.random.default_rng(0).normal(size=(2, rows, 9)).astype(dtype)
  for number in range(2):
    own = batch[me, me * number :]  # under MPI a rank may later give fewer rows
    params, state, _ = step(
      params, state, own if engine == "mpi" else batch.reshape(-1, 9), rng=key
    )
  step.check(params, state)


def _across(me, is_few):
  """The errors of two ranks that share each worker of a mesh, and have other rates, losses, parameters or replicas."""
  spec, told = jax.sharding.PartitionSpec, []
  kinds = ((jax.sharding.AxisType.Explicit,) * 2, (jax.sharding.AxisType.Auto,) * 2)[
    : 1 if is_few else 2
  ]
  for kind, other in itertools.product(kinds, ("rate", "scale", "params", "replicas")):
    mine = lambda name, other=other: me if name == other else 0
    mesh = jax.sharding.Mesh(
      np.array(jax.devices()).reshape(2, 2).T, ("workers", "model"), axis_types=kind
    )
    put = lambda x, *names, mesh=mesh: jax.make_array_from_callback(
      x.shape, jax.sharding.NamedSharding(mesh, spec(*names)), x.__getitem__
    )
    params = {
      "a": put(np.float32(np.eye(9, 4)), None, "model"),
      "b": put(np.float32([mine("params")] * 4)),
    }
    scale = 1.0 + mine("scale")
    loss = lambda p, x, scale=scale: scale * jnp.mean((x @ p["a"] + p["b"] - 1.0) ** 2)
    try:
      tx = _plain("workers", rate=0.25 + mine("rate"))
      state, step = js.init(tx, params, mesh), js.make_train_step(loss, tx, mesh)
      params, state, _ = step(params, state, np.ones((4, 9), np.float32))
      step.check(params, state)
      step.check(params | {"b": put(np.float32([mine("replicas")] * 4))}, state)
    except ValueError as error:
      told.append(str(error))
  return told


def one_sided(engine_name: str, file: str) -> None:
  """Rank 1 alone gives its third step another batch, while rank 0 goes on."""
  where, axis, me = join(engine_name)
  replicas._PATIENCE = 3.0
  tx, params = _chain(axis), {"w": jnp.zeros((9, 4))}
  state, step = (
    js.init(tx, params, where),
    js.make_train_step(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), tx, where),
  )
  for number in range(4):
    batch = np.ones((4 if me == 1 and number == 2 else 8, 9), np.float32)
    try:
      params, state, metrics = step(params, state, batch)
    except RuntimeError as error:
      if me == 1:
        # a traceback would name some that are none
        causes = "" if error.__suppress_context__ else " with causes"
        pathlib.Path(file, "1").write_text(str(error) + causes)
      raise
    jax.block_until_ready(metrics.loss)


if __name__ == "__main__":
  jax.config.update("jax_disable_most_optimizations", True)  # as in conftest.py
  programs = (equality, ends, quiet, different, one_sided, lonely, sharded, ways)
  {program.__name__: program for program in programs}[sys.argv[1]](
    *sys.argv[2 : 6 if sys.argv[1] == "ends" else 4]
  )
