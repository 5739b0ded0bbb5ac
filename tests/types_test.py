"""Counters stop at their largest number."""

import jax.numpy as jnp
import pytest

from jaxsparse.transform.metrics import summary
from jaxsparse.transform.state import Layout, ReduceState
from jaxsparse.types import Counters, State, saturated, saturated_product, saturated_sum

MOST = 2**32 - 1
NUMBERS = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, MOST)


@pytest.mark.parametrize("a", NUMBERS)
@pytest.mark.parametrize("b", NUMBERS)
def test_sums_and_products_are_exact_or_the_largest_number(a, b):
  assert int(saturated_sum(jnp.uint32(a), jnp.uint32(b))) == min(a + b, MOST)
  assert int(saturated_product(jnp.uint32(a), b)) == min(a * b, MOST)
  assert int(saturated_sum(a, b, 1)) == min(a + b + 1, MOST)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@pytest.mark.parametrize("value", [0, 5, 2**31, 2**32, 10**12])
def test_casts_stop_at_the_largest_number(dtype, value):
  most = jnp.iinfo(dtype).max
  assert int(saturated(value, dtype)) == min(value, most)
  assert int(saturated(jnp.float32(value), dtype)) == min(value, most)
  if value <= MOST:
    assert int(saturated(jnp.uint32(value), dtype)) == min(value, most)
  assert saturated(value, jnp.float32).dtype == jnp.float32


def test_the_overflow_of_many_workers_does_not_wrap_around():
  counters = Counters.zeros()._replace(overflow=jnp.full(32, 2**28, jnp.int32))
  state = ReduceState(State(), counters, Layout.of_workers(32, 10))
  assert int(summary([state]).overflow) > 0.9 * 2**31
