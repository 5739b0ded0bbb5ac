"""Sixteen workers in every test process, strict arithmetic, and one table of collectives for all tests."""

import itertools

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is what takes the time here, and half of that is making machine code fast. `as_users_compile` has it fast.
jax.config.update("jax_disable_most_optimizations", True)

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


@pytest.fixture
def as_users_compile():
  """For tests of what depends on the machine code: bits of one program beside those of another."""
  jax.config.update("jax_disable_most_optimizations", False)
  jax.clear_caches()
  yield
  jax.config.update("jax_disable_most_optimizations", True)
