"""Sixteen workers in every test process, strict arithmetic, and one table of collectives for all tests."""

import itertools

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every example compiles a program: few of them, and no clock.
hypothesis.settings.register_profile("jaxsparse", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("jaxsparse")

_TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs():
  """Forgets compiled programs from time to time: each is a few memory maps, and a process may have 65530 of them."""
  yield
  if next(_TESTS) % 20 == 0:
    jax.clear_caches()
