"""What a user gets: an import that changes nothing and needs fsspec, jax, numpy and optax only, and the wheel."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# What other packages change when they are imported is there before; then every public
# module is imported.
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
assert {"jaxsparse.launch.rank", "jaxsparse.comm.mpi", "jaxsparse.partial", "jaxsparse.doctor"} < {*names}
for name in names:
  __import__(name)
after = state()
for name in before:
  if before[name] != after[name]:
    print(name, before[name], after[name])
"""
RANK = {
  f"{prefix}_RANK": "0" for prefix in ("PMI", "PMIX", "OMPI_COMM_WORLD", "JAXSPARSE")
}
RANK |= dict.fromkeys(
  (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "JAXSPARSE_RANKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
  ),
  "2",
)
RANK |= {f"SLURM_{name}": "0" for name in ("JOB_ID", "STEP_ID", "PROCID", "LOCALID")}
RANK |= {"SLURM_STEP_NODELIST": "localhost", "JAXSPARSE_COORDINATOR": "127.0.0.1:1"}


def run(*arguments, status=0, **options):
  """(standard output, standard error) of Python."""
  command = [sys.executable, *arguments]
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=240, check=False, **options
  )
  assert done.returncode == status, done.stdout[-1000:] + done.stderr[-2000:]
  return done.stdout, done.stderr


def test_importing_changes_nothing(tmp_path):
  """In a rank of a run neither."""
  assert run(
    "-c", PROGRAM, env=os.environ | RANK | {"JAXSPARSE_RECORDS": str(tmp_path)}
  ) == ("", "")
  assert not os.listdir(tmp_path)


# Whatever else is installed cannot be imported: what is no dependency of jax, numpy or
# optax.
ALONE = """
import importlib.metadata, re, sys

plain = lambda name: re.sub("[-_.]+", "-", name).lower()

def needed(name, found):
  if name not in found:
    found.add(name)
    for line in importlib.metadata.requires(name) or []:
      if "extra ==" not in line:
        try:
          needed(plain(re.match(r"[\\w.-]+", line)[0]), found)
        except importlib.metadata.PackageNotFoundError:  # of another system or Python
          pass
  return found

needs = {name for top in ("fsspec", "jax", "numpy", "optax") for name in needed(top, set())}
for module, packages in importlib.metadata.packages_distributions().items():
  if needs.isdisjoint(map(plain, packages)) and module != "jaxsparse":
    sys.modules[module] = None

import jax.numpy as jnp
import jaxsparse as js
controller = js.partial.Controller(2, 2)
for use in (lambda: js.partial.Server(controller), lambda: js.partial.Worker("tcp://127.0.0.1:9", 0, jnp.zeros(3)),
            js.partial.Keys.make):
  try:
    use()
  except ModuleNotFoundError as error:
    assert str(error) == "js.partial.Server and Worker need pyzmq: pip install 'jaxsparse[partial]'", error
  else:
    raise AssertionError("no error")
# An option that is wrong, too, does not hide it.
sys.argv = ["jaxsparse.partial", "--workers=2", "--group_size=3"]
from jaxsparse.partial.__main__ import main
main()
"""


def test_fsspec_jax_numpy_and_optax_are_enough():
  """Partial reduce between processes names the extra that it needs."""
  expected = (
    "error: js.partial.Server and Worker need pyzmq: pip install 'jaxsparse[partial]'\n"
  )
  assert run("-c", ALONE, status=1) == ("", expected)


@pytest.mark.long
def test_the_wheel_works_outside_the_tree(tmp_path):
  run("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
  (wheel,) = tmp_path.glob("*.whl")
  site = tmp_path / "site"
  run(
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-deps",
    "--no-index",
    "--target",
    site,
    wheel,
  )
  assert (site / "jaxsparse" / "py.typed").exists()
  assert not (site / "benchmarks").exists()
  program = "import jaxsparse as js, numpy as np; print(js.__file__, js.simulate('spardl', np.ones((3, 6)), k=6).total)"
  printed, _ = run(
    "-c", program, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}
  )
  assert printed.startswith(str(site))
  assert "[3. 3. 3. 3. 3. 3.]" in printed
