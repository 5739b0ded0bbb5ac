"""Whenever a rank is killed, those that are left train to the end, and leave nothing behind."""

import os
import pickle
import sys

import numpy as np
import pytest

import jaxsparse as js
from tests.docs_test import snippets
from tests.launch_test import launched, soon

TRAIN = ("--", sys.executable, "train.py")
# Kills rank 1 of the given attempt at a call of a function: before it, or when it
# returns.
KILL = """
import os, signal

def killed(owner, name, attempt=0, call=1, after=False):
  if (os.environ["JAXSPARSE_RANK"], os.environ["JAXSPARSE_ATTEMPT"]) != ("1", str(attempt)):
    return
  function, calls = getattr(owner, name), []

  def wrapped(*arguments, **options):
    calls.append(1)
    found = function(*arguments, **options) if after or len(calls) < call else None
    if len(calls) == call:
      os.kill(os.getpid(), signal.SIGKILL)
    return found

  setattr(owner, name, wrapped)

import orbax.checkpoint
from jaxsparse import launch
from jaxsparse.train import replicas
from jaxsparse.train.step import TrainStep
"""
PHASES = {
  "joining": ["killed(launch, 'join')"],
  "compiling": ["killed(replicas, 'check_same', call=4)"],
  "stepping": ["killed(TrainStep, '__call__', call=120)"],
  "saving": ["killed(orbax.checkpoint.CheckpointManager, 'save', call=2, after=True)"],
  "restoring": [
    "killed(TrainStep, '__call__', call=120)",
    "killed(orbax.checkpoint.CheckpointManager, 'restore', attempt=1)",
  ],
}


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed(tmp_path, phase):
  files = tmp_path / "files"
  files.mkdir()
  (program,) = snippets("docs/how_to/checkpoints.md")
  (tmp_path / "train.py").write_text("\n".join([KILL, *PHASES[phase], program]))
  options = ("--ranks=3", "--restarts=2", "--start_timeout=60", "--limit=280")
  done = launched(
    *options, *TRAIN, cwd=tmp_path, env=os.environ | {"TMPDIR": str(files)}
  )
  assert done.returncode == 0, done.stderr[-3000:]
  lost = len(PHASES[phase])
  assert done.stderr.count("rank 1 was ended by SIGKILL; ") == lost
  assert done.stdout.startswith(f"{3 - lost} workers, attempt {lost}: accuracy ")
  assert float(done.stdout.split()[-1]) > 0.88
  assert sorted(os.listdir(tmp_path / "checkpoints"), key=int)[-1] == "400"
  assert soon(
    lambda: not [name for name in os.listdir(files) if name.startswith("jaxsparse-")]
  )


# What ranks of MPI and the simulator run: gradients of each worker's own, which no
# parameter changes.
WALK = """
import jax.numpy as jnp, numpy as np, optax
import jaxsparse as js

def walk_of(where):
  tx = optax.chain(js.spardl_transform(where, density=0.2), optax.sgd(0.25, momentum=0.5))
  return tx, js.make_train_step(lambda params, batch: jnp.vdot(params["w"], batch[0]), tx, where)

batch_of = lambda step, worker: np.random.default_rng([step, worker]).normal(size=(1, 40)).astype(np.float32)
params = {"w": jnp.zeros(40)}
"""
# Each rank has its own state, and rank 0 keeps those of all; rank 1 is killed in the
# first attempt.
MPI = """
import os, pickle, signal
import jax
from jaxsparse import launch
from mpi4py import MPI

comm, world, begin = js.MpiComm(), MPI.COMM_WORLD, 0
tx, step = walk_of(comm)
state = js.init(tx, params, comm)
if os.path.exists("saved"):
  with open("saved", "rb") as file:
    begin, params, state = pickle.load(file)
  like = js.abstract_state(tx, params, comm, workers=3)
  assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, like)
  state = js.resize(state, params, comm)
for number in range(begin, 30):
  if (number, world.rank, launch.attempt()) == (17, 1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
  params, state, _ = step(params, state, batch_of(number, world.rank))
  if number % 10 == 9:
    states = world.gather(jax.tree.map(np.asarray, state))
    if world.rank == 0:
      together = lambda spec, *arrays: np.concatenate(arrays) if spec else arrays[0]
      whole = jax.tree.map(together, js.specs(state, "ranks"), *states)
      with open("new", "wb") as file:
        pickle.dump((number + 1, jax.tree.map(np.asarray, params), whole), file)
      os.replace("new", "saved")
if world.rank == 0:
  print(f"{world.size} ranks, attempt {launch.attempt()}, from {begin}")
"""


@pytest.mark.long
def test_a_rank_of_mpi_that_is_killed(tmp_path):
  (tmp_path / "train.py").write_text(WALK + MPI)
  done = launched(
    "--ranks=3", "--engine=mpi", "--restarts=1", "--limit=200", *TRAIN, cwd=tmp_path
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert "rank 1 was ended by SIGKILL; " in done.stderr
  assert done.stdout == "2 ranks, attempt 1, from 10\n"
  walk, state = {}, None
  exec(WALK, walk)
  params = walk["params"]
  for workers, steps in ((3, range(10)), (2, range(10, 30))):
    comm = js.SimComm("workers", members=workers)
    tx, step = walk["walk_of"](comm)
    state = js.resize(state, params, comm) if state else js.init(tx, params, comm)
    for number in steps:
      batch = np.concatenate(
        [walk["batch_of"](number, worker) for worker in range(workers)]
      )
      params, state, _ = step(params, state, batch)
  np.testing.assert_allclose(
    pickle.loads((tmp_path / "saved").read_bytes())[1]["w"],
    params["w"],
    rtol=1e-5,
    atol=1e-6,
  )
