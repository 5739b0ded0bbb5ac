"""Where the workers of a benchmark run: real accelerators where there are enough, else forced CPU devices."""

import jax
import numpy as np
from jax.sharding import Mesh

AXIS = "workers"


def mesh_of(workers: int) -> Mesh:
  """A mesh of `workers` devices along `AXIS`. Call it before anything else uses JAX: it makes the CPU devices.

  Raises:
    ValueError: for fewer than one worker.
  """
  if workers < 1:
    raise ValueError(f"--workers={workers}, choose at least 1")
  jax.config.update("jax_num_cpu_devices", workers)
  devices = jax.devices()
  if len(devices) < workers:
    devices = jax.devices("cpu")
  return Mesh(np.array(devices[:workers]), (AXIS,))


def describe(mesh: Mesh) -> str:
  """For example "6 workers on cpu"."""
  return f"{mesh.size} workers on {mesh.devices.flat[0].platform}"
