"""The same collectives on every engine: devices, processes, MPI and the simulator give the same bits."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.costs import counting
from jaxsparse.train import simulation
from jaxsparse.train.engine import engine_of
from jaxsparse.transform.metrics import summary
from tests.cases import (
  CASES,
  DEFAULTS,
  assert_same_bits,
  averaged,
  mesh_of,
  normals,
  row,
  sim,
  start,
)
from tests.ranks import WAYS, run, same_training, trained

STEPS, N = 2, 64


def gradients(collective, workers, engine):
  """Normals; where gloo adds in an order of its own, numbers whose sums are exact in any order."""
  adds = re.search(
    r"f32\[[\d,]*\] = psum", str(counting.schedule(collective, N, workers))
  )
  if engine == "mpi" or not adds:
    return normals(0, STEPS, workers, N)
  signs, steps = (-1.0) ** np.arange(N), 2.0 ** np.arange(STEPS)
  return (
    steps[:, None, None] * np.arange(1, workers + 1)[None, :, None] * signs
  ).astype(np.float32)


def expected(cases, workers, engine):
  """What the simulator makes of the gradients, for the ranks to compare with."""
  data = {"cases": json.dumps([(case.name, case.config(k=12)) for case in cases])}
  for number, case in enumerate(cases):
    collective = case.make(k=12)
    grads = gradients(collective, workers, engine)
    state, totals, residuals = simulation.initial(collective, workers, N), [], []
    for step in grads:
      total, state = simulation.reduce_all(collective, jnp.asarray(step), state)
      totals.append(total)
      residuals.append(
        np.zeros_like(step)
        if state.carried.residual[0] is None
        else state.carried.residual[0]
      )
    words = summary(
      [state._replace(counters=jax.tree.map(jnp.ravel, state.counters))]
    ).words_sent
    found = {"grads": grads, "totals": totals, "residuals": residuals, "words": words}
    data |= {f"{number}/{name}": np.asarray(value) for name, value in found.items()}
  return data


ALL, SOME = [*DEFAULTS, "spardl-teams=3"], ["dense", "oktopk", "spardl"]


@pytest.mark.parametrize(
  ("engine", "ranks", "names", "more"),
  [
    row("processes", 3, ALL, (), id="processes"),
    row("mpi", 3, ALL, (), id="mpi"),
    row("mpi", 1, SOME, ()),
    row("mpi", 2, SOME, ("metrics",)),
    row("mpi", 6, ["spardl"], ()),
    row("mpi", 2, ["spardl"], ("staged",), id="through-host-memory"),
    row("mpi", 3, ["dense", "spardl", "spardl-teams=3"], ("staged",)),
  ],
)
def test_every_collective_gives_the_same_bits(tmp_path, engine, ranks, names, more):
  file = tmp_path / "expected.npz"
  np.savez(
    file, **expected([case for case in CASES if str(case) in names], ranks, engine)
  )
  run("equality", engine, ranks, file, *more)


@pytest.mark.long
def test_metrics_that_one_process_alone_asks_for(tmp_path):
  run("lonely", "processes", 2, tmp_path)
  assert (
    "call it on every process, not only where jax.process_index() == 0"
    in (tmp_path / "0").read_text()
  )


@pytest.mark.parametrize(
  ("engine", "ranks", "names"),
  [
    row("mpi", 2, ["every step"], quick=True, id="step"),
    *(row(engine, 3, [*WAYS], id=engine) for engine in ("devices", "processes", "mpi")),
  ],
)
def test_training_has_the_same_bits_on_every_engine(tmp_path, engine, ranks, names):
  """Also in fragments with a delay, and DeMo, whose sign shows the last bit of a sum near 0."""
  batch = normals(1, ranks, 36)
  expected = {
    name: trained(WAYS[name](sim(ranks)), sim(ranks), batch) for name in names
  }
  if engine == "devices":
    for name in names:
      compare = functools.partial(same_training, name, what=name)
      jax.tree.map(
        compare, trained(WAYS[name]("workers"), mesh_of(ranks), batch), expected[name]
      )
    return
  file = tmp_path / "expected.npz"
  named = {
    f"{name}/{leaf}": x
    for name, leaves in expected.items()
    for leaf, x in leaves.items()
  }
  np.savez(file, batch=batch, **named)
  # through the memory of the host
  run("ways", engine, ranks, file, *(["staged"] if len(names) == 1 else []))


def test_a_state_may_go_from_the_simulator_to_a_mesh_and_back():
  """The arrays of SimComm(members=P) lie as those of a mesh do."""
  comm, loss = sim(4), lambda p, x: jnp.mean((p[None] - x) ** 2)
  tx = lambda axis: optax.chain(js.make_transform("topka", axis, k=4), optax.sgd(1.0))
  simulated, real = (
    js.make_train_step(loss, tx(comm), comm),
    js.make_train_step(loss, tx("workers"), mesh_of(4)),
  )
  runs = []
  for steps in ((simulated, real), (real, simulated)):
    params, state = jnp.zeros(10), js.init(tx(comm), jnp.zeros(10), comm)
    for number, step in enumerate(steps):
      params, state, _ = step(
        *jax.tree.map(np.asarray, (params, state)), normals(number, 8, 10)
      )
    runs.append(((params, state[0].carried.residual[0]), js.metrics(state)))
  assert_same_bits(runs[0][0], runs[1][0])
  # A norm is summed over the devices that the state lies on, and not in the same order.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), runs[0][1], runs[1][1]
  )


@pytest.mark.long
def test_metrics_over_the_workers_of_a_comm_are_those_of_the_whole_state():
  comm = sim(3)
  for tx in (
    js.make_transform("topka", comm, k=9),
    js.local_steps(js.a2sgd_transform(comm), averaged(comm), every=5),
  ):
    step, params, state = start(tx, comm, jnp.zeros(30))
    _, state, _ = step(params, state, normals(0, 3, 30))
    inside = engine_of(comm, "workers").jit(
      lambda s: js.metrics(s, comm),
      (js.specs(state, "workers"),),
      jax.sharding.PartitionSpec(),
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
      inside(state),
      js.metrics(state),
    )
