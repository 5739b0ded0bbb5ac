"""Programs that a check starts in processes of their own. Each prints its answer as one line of JSON."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from jaxsparse import _compat, launch
from jaxsparse.doctor.programs import ANSWER
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, local_shard

_AXIS = "workers"
_ENTRIES = 60


def answer(name: str) -> None:
  """Runs the probe of this name and prints its answer; of several ranks each does, and the doctor reads one."""
  print(f"{ANSWER}{json.dumps(_PROBES[name]())}", flush=True)


def _jax() -> dict[str, Any]:
  first = jax.devices()[0]
  return {"platform": jax.default_backend(), "devices": len(jax.devices()), "kind": first.device_kind}


def _mpi4jax() -> dict[str, Any]:
  import mpi4jax
  import mpi4py
  from mpi4jax._src import xla_bridge
  from mpi4py import MPI

  library = MPI.Get_library_version().split(",")[0].splitlines()[0]
  versions = {"mpi4py": mpi4py.__version__, "mpi4jax": mpi4jax.__version__}
  return {"library": library.strip("\0 "), "cuda": bool(xla_bridge.HAS_CUDA_EXT), **versions}


def _engine(engine: str) -> dict[str, Any]:
  """Reduces known gradients, dense and by SparDL with k = n: both must give their mean, bit for bit."""
  where, name = _workers(engine)
  workers = engine_of(where, _AXIS)
  rows = np.outer(np.arange(1, workers.workers + 1), np.arange(_ENTRIES) - 9.0).astype(np.float32)
  for collective in (js.make_collective("dense"), js.make_collective("spardl", k=_ENTRIES)):
    update = timing.Update(workers, collective, workers.comm, _ENTRIES)
    whole = workers.place(rows.reshape(-1), PartitionSpec(_AXIS))
    mine = rows[where.communicator.Get_rank()] if isinstance(where, js.MpiComm) else whole
    mean, _ = update.program(mine, update.state)
    for found in np.asarray(local_shard(mean)).reshape(-1, _ENTRIES):  # one row for each worker of this process
      np.testing.assert_array_equal(found, rows.mean(0), f"{collective} on {name}")
  return {"workers": workers.workers, "where": name}


def _scatter() -> dict[str, Any]:
  """Reduce-scatters along each axis of processes with several devices, and along both: the sums must be right."""
  launch.join()
  mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("hosts", "devices"))
  rows = np.arange(mesh.size * _ENTRIES, dtype=np.float32).reshape(*mesh.devices.shape, _ENTRIES)
  spec = PartitionSpec("hosts", "devices")
  given = jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, spec), rows.__getitem__)
  for axes, over in ((("hosts",), (0,)), (("devices",), (1,)), (("hosts", "devices"), (0, 1))):
    scatter = lambda x, axes=axes: jax.lax.psum_scatter(x[0, 0], axes, tiled=True)[None, None]
    part = local_shard(jax.jit(_compat.shard_map(scatter, mesh, (spec,), spec))(given))[0, 0]
    whole, host = rows.sum(over, keepdims=True), jax.process_index()
    mine = whole[host % whole.shape[0], 0].reshape(-1, part.size)  # of the first device of this process
    np.testing.assert_array_equal(part, mine[host * len(mine) // mesh.shape["hosts"] if "hosts" in axes else 0])
  return {"devices": mesh.size}


def _workers(engine: str) -> tuple[Mesh | js.Comm, str]:
  """Two workers, and a description of them."""
  if engine == "mpi":
    return js.MpiComm(), f"{jax.default_backend()} ranks of MPI"
  if engine == "sim":
    return js.SimComm(_AXIS, members=2), f"one {jax.default_backend()} device, simulated,"
  if engine == "processes":
    launch.join()
    devices, of = jax.devices(), "processes"
  else:
    jax.config.update("jax_num_cpu_devices", 2)
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    devices, of = devices[:2], "devices"
  kind = devices[0].platform
  over = {"cpu": "gloo", "gpu": "NCCL"}.get(kind) if engine == "processes" else None
  return Mesh(np.array(devices), (_AXIS,)), f"{kind} {of}" + (f" over {over}" if over else "")


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {
  "jax": _jax,
  "mpi4jax": _mpi4jax,
  "scatter": _scatter,
  **{engine: functools.partial(_engine, engine) for engine in ("devices", "sim", "processes", "mpi")},
}
