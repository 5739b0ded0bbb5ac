"""Sixteen workers in every test process, strict arithmetic, quick compilation, and what `make test` leaves out."""

import ctypes
import gc
import itertools
import os
import pathlib

import hypothesis
import jax
import pytest

import tests.children.sitecustomize  # noqa: F401
from tests import quick_compilation
from tests.whole_run import (  # noqa: F401
  pytest_addoption,
  pytest_collection_modifyitems,
  pytest_configure,
  pytest_sessionfinish,
  pytest_terminal_summary,
  pytest_unconfigure,
)

# XLA reads the variable when JAX makes its devices; child processes read both when they
# start.
os.environ |= quick_compilation.ENVIRONMENT
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_disable_most_optimizations", True)
jax.devices()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_CHILDREN = str(pathlib.Path(__file__).with_name("children"))
os.environ["PYTHONPATH"] = os.pathsep.join(
  [_CHILDREN, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Examples of a test share one program, so they are cheap, but shrinking them is not: no
# clock.
hypothesis.settings.register_profile(
  "jaxsparse", deadline=None, max_examples=25, print_blob=True
)
hypothesis.settings.register_profile(
  "all", deadline=None, max_examples=100, print_blob=True
)
hypothesis.settings.load_profile("jaxsparse")


@pytest.fixture
def standard_promotion():
  """Of dtypes, which Adam and other optimizers of optax need."""
  with jax.numpy_dtype_promotion("standard"):
    yield


_TESTS = itertools.count(1)
_LIBC = ctypes.CDLL(None)
_PROCESS = pathlib.Path("/proc/self")
_MOST_MAPS = 40_000  # a program takes a few, a process may have 65,530
_MOST_PAGES = 3 << 18  # 3 GB of 4 kB; the programs of a test take 3 MB


def _has_many_programs():
  if not _PROCESS.exists():
    return True
  resident = int((_PROCESS / "statm").read_text().split()[1])
  return (
    resident > _MOST_PAGES or (_PROCESS / "maps").read_bytes().count(b"\n") > _MOST_MAPS
  )


@pytest.fixture(autouse=True)
def few_programs():
  """Forgets compiled programs before memory maps or memory run out."""
  yield
  if next(_TESTS) % 20 == 0 and _has_many_programs():
    jax.clear_caches()
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
      _LIBC.malloc_trim(0)  # glibc keeps what compilers have freed in threads
