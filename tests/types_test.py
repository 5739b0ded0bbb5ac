"""Counters stop at their largest number."""

import jax.numpy as jnp
import pytest

import jaxsparse as js
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


def test_metrics_are_the_counters_of_all_workers_combined_as_each_field_says():
  each = jnp.array([1, 3])
  counters = Counters.zeros()._replace(
    **dict.fromkeys(("words_sent", "words_used", "overflow", "total_words"), each),
    skipped=jnp.array([False, True]),
    threshold_age=each,
  )
  state = ReduceState(State(), counters, Layout.of_workers(2, 10))
  one = summary([state])
  assert (int(one.words_sent), float(one.words_used), int(one.overflow)) == (3, 2.0, 4)
  assert (bool(one.skipped), int(one.threshold_age), float(one.total_words)) == (
    True,
    3,
    3.0,
  )
  two = summary([state, state])
  assert (int(two.words_sent), float(two.words_used), int(two.overflow)) == (6, 4.0, 8)
  assert int(two.threshold_age) == 3
  assert {*js.Metrics.names()} >= {*Counters._fields} - {"total_wraps"}
  assert all(getattr(one, name).shape == () for name in js.Metrics.names())
  assert {*dir(one)} >= {*js.Metrics.names(), "as_dict"}
  with pytest.raises(AttributeError, match="word_sent"):
    _ = one.word_sent


def test_counters_have_the_dtypes_that_their_fields_say():
  dtypes = {
    name: str(value.dtype) for name, value in Counters.zeros()._asdict().items()
  }
  words = ("words_sent", "words_used", "total_words", "total_wraps")
  assert {name for name, dtype in dtypes.items() if dtype == "uint32"} == {*words}
  kinds = {int: ("int32", "uint32"), float: ("float32",), bool: ("bool",)}
  for name, value in Counters()._asdict().items():
    assert dtypes[name] in kinds[type(value)]
