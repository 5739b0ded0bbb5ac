"""Programs that a check starts in processes of their own. Each prints its answer as one line of JSON."""

import ctypes
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from jaxsparse import _compat, launch
from jaxsparse.doctor.checks import ANSWER

_ENTRIES = 60


def _find_devices() -> dict[str, Any]:
  first = jax.devices()[0]
  return {"platform": jax.default_backend(), "devices": len(jax.devices()), "kind": first.device_kind}


def _load_mpi() -> dict[str, Any]:
  import mpi4jax
  import mpi4py
  from mpi4jax._src import xla_bridge
  from mpi4py import MPI

  library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
  reads = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
  versions = f"mpi4py {mpi4py.__version__}, mpi4jax {mpi4jax.__version__}"
  return {
    "library": library,
    "versions": versions,
    "cuda": bool(xla_bridge.HAS_CUDA_EXT),
    "aware": reads and bool(reads()),
  }


def _reduce(engine: str) -> dict[str, Any]:
  """A training step by known gradients, dense and by SparDL with k = n: both must move by their mean, bit for bit."""
  where: Any
  axis: Any = "workers"
  if engine == "mpi":
    where = axis = js.MpiComm()
  elif engine == "sim":
    where = js.SimComm(axis, members=2)
  else:
    if engine == "processes":
      launch.join()
    else:
      jax.config.update("jax_num_cpu_devices", 2)
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    where = Mesh(np.array(devices[:2]), (axis,))
  for make in (js.dense_transform, functools.partial(js.spardl_transform, k=_ENTRIES)):
    tx, params = optax.chain(make(axis), optax.sgd(-1.0)), jnp.zeros(_ENTRIES)
    step = js.make_train_step(lambda params, batch: jnp.vdot(params, batch[0]), tx, where)
    rows = np.outer(np.arange(1, step.workers + 1), np.arange(_ENTRIES) - 9.0).astype(np.float32)
    batch = rows[where.communicator.Get_rank(), None] if engine == "mpi" else rows
    moved, _, _ = step(params, js.init(tx, params, where), batch)
    np.testing.assert_array_equal(moved.addressable_data(0), rows.mean(0), f"{make} on {engine}")
  platform = next(iter(moved.devices())).platform
  return {"detail": f"{step.workers} workers on {platform} have the mean of their gradients by dense and spardl"}


def _scatter() -> dict[str, Any]:
  """Reduce-scatters along each axis of processes with several devices, and along both: the sums must be right."""
  launch.join()
  mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("hosts", "devices"))
  rows = np.arange(mesh.size * _ENTRIES, dtype=np.float32).reshape(*mesh.devices.shape, _ENTRIES)
  spec = PartitionSpec("hosts", "devices")
  given = jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, spec), rows.__getitem__)
  for axes, over in ((("hosts",), (0,)), (("devices",), (1,)), (("hosts", "devices"), (0, 1))):
    scatter = lambda x, axes=axes: jax.lax.psum_scatter(x[0, 0], axes, tiled=True)[None, None]
    part = jax.jit(_compat.shard_map(scatter, mesh, (spec,), spec))(given).addressable_data(0)[0, 0]
    whole, host = rows.sum(over, keepdims=True), jax.process_index()
    mine = whole[host % whole.shape[0], 0].reshape(-1, part.size)  # of the first device of this process
    np.testing.assert_array_equal(part, mine[host * len(mine) // mesh.shape["hosts"] if "hosts" in axes else 0])
  return {"detail": f"{mesh.size} devices of 2 processes have the sums of psum_scatter"}


if __name__ == "__main__":
  probes = {"jax": _find_devices, "mpi4jax": _load_mpi, "scatter": _scatter}
  answer = probes.get(sys.argv[1], functools.partial(_reduce, sys.argv[1]))()
  print(f"{ANSWER}{json.dumps(answer)}", flush=True)  # of several ranks each does, and the doctor reads one
