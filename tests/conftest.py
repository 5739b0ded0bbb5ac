"""Sixteen workers in every test process, strict arithmetic, quick compilation, and what `make test` leaves out."""

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

# XLA reads the variable when JAX makes its devices; child processes read both when they start.
os.environ |= quick_compilation.ENVIRONMENT
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_disable_most_optimizations", True)
jax.devices()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_CHILDREN = str(pathlib.Path(__file__).with_name("children"))
os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, *filter(None, [os.environ.get("PYTHONPATH")])])

# Examples of a test share one program, so they are cheap, but shrinking them is not: no clock.
hypothesis.settings.register_profile("jaxsparse", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.register_profile("all", deadline=None, max_examples=100, print_blob=True)
hypothesis.settings.load_profile("jaxsparse")


@pytest.fixture
def standard_promotion():
  """Of dtypes, which Adam and other optimizers of optax need."""
  with jax.numpy_dtype_promotion("standard"):
    yield


_TESTS = itertools.count(1)
_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 40_000


@pytest.fixture(autouse=True)
def few_programs():
  """Forgets compiled programs before memory maps run out: a program takes a few, a process may have 65,530."""
  yield
  if next(_TESTS) % 20 == 0 and (not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > _MOST_MAPS):
    jax.clear_caches()
