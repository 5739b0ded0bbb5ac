"""What the tests of Ray run, each in a process of its own: `python ray_programs.py PROGRAM FOLDER`, on two CPUs."""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.v2.jax import JaxTrainer

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.launch.start import free_port

FOLDER = pathlib.Path(sys.argv[2]) if sys.argv[2:] else None


def train(folder: pathlib.Path, dies: int | None = None) -> None:
  """Trains by signs; each rank writes the launcher that it found, its rank, the number of workers and the loss."""
  name = launch.join()
  mesh = jax.make_mesh((jax.device_count(),), ("workers",))
  target = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
  loss_fn = lambda params, inputs: jnp.mean((inputs @ params - inputs @ target) ** 2)
  tx, params = (
    optax.chain(js.spardl_transform("workers", density=0.1), optax.sgd(0.1)),
    jnp.zeros((30, 4)),
  )
  state, step = js.init(tx, params, mesh), js.make_train_step(loss_fn, tx, mesh)
  for number in range(300):
    if number == 20 and jax.process_index() == dies:
      os.kill(os.getpid(), signal.SIGKILL)
    inputs = np.random.default_rng(number).normal(size=(60, 30)).astype(np.float32)
    params, state, metrics = step(params, state, inputs)
  rank = jax.process_index()
  (folder / f"{rank}").write_text(
    f"{name}, {rank} of {step.workers} workers, loss {float(metrics.loss):.0e}"
  )


def fit(folder: pathlib.Path, dies: int | None = None) -> None:
  """As the workers of Ray Train."""

  def loop() -> None:
    assert get_context().get_world_size() == 2
    train(folder, dies)

  scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
  JaxTrainer(
    loop, scaling_config=scaling, run_config=RunConfig(storage_path=str(folder / "ray"))
  ).fit()


@ray.remote(num_cpus=1)
class Worker:
  """An actor that becomes a rank by the variables that torchrun sets, too."""

  def run(self, folder: pathlib.Path, dies: int | None) -> None:
    train(folder, dies)


def call(folder: pathlib.Path, dies: int | None = None) -> None:
  """As actors."""
  own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
  actors = [
    Worker.options(runtime_env={"env_vars": own | {"RANK": str(rank)}}).remote()
    for rank in range(2)
  ]
  failed = 0
  for rank, result in enumerate([actor.run.remote(folder, dies) for actor in actors]):
    try:
      ray.get(result, timeout=200)
    except ray.exceptions.RayError as error:
      failed += 1
      print(f"rank {rank}: {str(error).strip().splitlines()[-1]}")
  sys.exit(failed)


PROGRAMS = {
  "trainer": lambda: fit(FOLDER),
  "actors": lambda: call(FOLDER),
  "trainer, one dies": lambda: fit(FOLDER, dies=1),
  "actors, one dies": lambda: call(FOLDER, dies=1),
}

if __name__ == "__main__":
  ray.init(num_cpus=2, include_dashboard=False)
  PROGRAMS[sys.argv[1]]()
