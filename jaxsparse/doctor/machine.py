"""Checks of versions, devices and memory."""

import ctypes.util
import os
import pathlib
import platform
from collections.abc import Iterator
from importlib import metadata

from jaxsparse import __version__, launch
from jaxsparse.doctor import programs
from jaxsparse.doctor.finding import Finding

_TRANSPARENT = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")


def versions() -> Finding:
  """Versions of Python and of the packages that jaxsparse needs."""
  names = ("jax", "jaxlib", "numpy", "optax")
  found = [f"jaxsparse {__version__}", f"Python {platform.python_version()}"]
  return Finding("ok", "versions", ", ".join([*found, *(f"{name} {metadata.version(name)}" for name in names)]))


def devices(timeout: float) -> Iterator[Finding]:
  """The devices of JAX. A probe asks for them: a GPU that this process holds would be missing to the workers."""
  answer, error, _ = programs.run(programs.probe("jax"), timeout)
  if answer is None:
    fix = "test without the accelerator: JAX_PLATFORMS=cpu python -m jaxsparse.doctor"
    if wanted := os.environ.get("JAX_PLATFORMS"):
      fix = f"unset JAX_PLATFORMS, which is {wanted!r}"
    yield Finding("FAIL", "JAX", f"finds no devices: {error}", fix)
    return
  kind, count = answer["platform"], answer["devices"]
  found = f"{count} {kind} device{'s' * (count != 1)} ({answer['kind']})"
  unused = len(list(_GPUS.iterdir())) if kind == "cpu" and _GPUS.is_dir() else 0
  if unused:
    fix = "unset JAX_PLATFORMS" if os.environ.get("JAX_PLATFORMS") else "pip install 'jax[cuda13]'"
    yield Finding("warn", "JAX", f"{found}, though this machine has {unused} NVIDIA GPU{'s' * (unused != 1)}", fix)
  else:
    yield Finding("ok", "JAX", found)
  if kind == "gpu":
    yield nccl()


def nccl() -> Finding:
  """Whether NCCL is installed; JAX loads it at the first message between GPUs."""
  wheels = [f"{wheel.name} {wheel.version}" for wheel in metadata.distributions() if "nccl" in (wheel.name or "")]
  library = ctypes.util.find_library("nccl") or ctypes.util.find_library("rccl")
  if found := [*wheels, *([library] if library else [])]:
    return Finding("ok", "NCCL", ", ".join(found))
  return Finding("warn", "NCCL", "not found: GPUs may not reach each other", "pip install 'jax[cuda13]' brings it")


def huge_pages() -> Iterator[Finding]:
  """Whether the kernel gives huge pages, and whether glibc asks for them and keeps freed memory."""
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
    cause = f"{libc or 'this C library'} {version} cannot ask for huge pages, glibc 2.35 or newer can"
    yield Finding("warn", what, cause, "use a newer distribution where updates on CPU have to be fast")
  elif not missing:
    yield Finding("ok", what, f"GLIBC_TUNABLES={tunables}")
  else:
    cause = f"no {', '.join(missing)}: page faults cost more than the arithmetic of an update on CPU"
    settings = ":".join(f"{name}={value}" for name, value in (known | {name: ours[name] for name in missing}).items())
    fix = f"export GLIBC_TUNABLES={settings} before Python starts; jaxsparse.launch sets it for its ranks"
    yield Finding("warn", what, cause, fix)
