"""Importing changes nothing, in a rank of a run neither."""

import os
import subprocess
import sys

# What other packages change when they are imported is there before; then every public module is imported.
PROGRAM = """
import atexit, gc, logging, os, pkgutil, signal, sys, threading, warnings
import jax, numpy, optax, zmq
import jax.experimental.mesh_utils, jax.experimental.multihost_utils, jax.experimental.pallas
from jax._src import xla_bridge

def state():
  numbers = sorted(signal.valid_signals())
  names = ("exit", "excepthook", "unraisablehook", "displayhook", "stdin", "stdout", "stderr", "path", "meta_path")
  return {f"sys.{name}": copied(getattr(sys, name)) for name in names} | {
    "threading.excepthook": threading.excepthook,
    "signal handlers": [signal.getsignal(number) for number in numbers],
    "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "atexit handlers": atexit._ncallbacks(),
    "environment": dict(os.environ),
    "descriptors": [os.fstat(number) for number in range(3)],
    "threads": threading.enumerate(),
    "tracing": (sys.gettrace(), sys.getprofile()),
    "limits": (sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold()),
    "folder": os.getcwd(),
    "configuration of JAX": dict(jax.config.values),
    "JAX has devices": xla_bridge.backends_are_initialized(),
    "JAX has joined": jax.distributed.is_initialized(),
    "MPI has started": "mpi4py.MPI" in sys.modules,
    "log": (logging.root.level, list(logging.root.handlers)),
    "numpy": (numpy.geterr(), numpy.get_printoptions()),
    "warnings": list(warnings.filters),
  }

copied = lambda x: list(x) if isinstance(x, list) else x
before = state()
import jaxsparse
names = [module.name for module in pkgutil.walk_packages(jaxsparse.__path__, "jaxsparse.")]
assert {"jaxsparse.launch.rank", "jaxsparse.comm.mpi", "jaxsparse.partial", "jaxsparse.doctor.probes"} < {*names}
for name in names:
  __import__(name)
after = state()
for name in before:
  if before[name] != after[name]:
    print(name, before[name], after[name])
"""
RANK = {f"{prefix}_RANK": "0" for prefix in ("PMI", "PMIX", "OMPI_COMM_WORLD", "JAXSPARSE")}
RANK |= dict.fromkeys(
  ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "JAXSPARSE_RANKS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "2"
)
RANK |= {f"SLURM_{name}": "0" for name in ("JOB_ID", "STEP_ID", "PROCID", "LOCALID")}
RANK |= {"SLURM_STEP_NODELIST": "localhost", "JAXSPARSE_COORDINATOR": "127.0.0.1:1"}


def test_importing_changes_nothing(tmp_path):
  environment = os.environ | RANK | {"JAXSPARSE_RECORDS": str(tmp_path)}
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
  assert not os.listdir(tmp_path)
