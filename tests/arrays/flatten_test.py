"""What is finite: leaves of states, which decide whether a step is kept."""

import jax
import jax.numpy as jnp
import pytest

from jaxsparse.arrays import flatten
from tests.cases import AS_USERS


@pytest.mark.parametrize(
  ("before", "after", "stays"),
  [
    ([1, 2], [3, 4], True),
    ([1, 2], [3, jnp.inf], False),
    ([1, jnp.inf], [3, jnp.inf], True),
    ([1, jnp.nan], [3, 4], True),
  ],
)
def test_only_a_leaf_that_was_finite_has_to_stay_so(before, after, stays):
  """The best loss so far of a schedule begins with Inf."""
  trees = (
    {"a": jnp.zeros(2), "b": jnp.array(leaf, jnp.float32)} for leaf in (before, after)
  )
  assert bool(flatten.stays_finite(*trees)) == stays


@pytest.mark.parametrize("shape", [(64, 3), (64, 4), (195,)])
def test_products_are_finite_unless_they_overflow(shape):
  """As users compile them: a multiply-add with the product, not rounded, is not 0."""
  is_finite = lambda x, rate: flatten.all_finite([x * rate])
  x = jax.random.normal(jax.random.key(0), shape)
  program = jax.jit(is_finite).lower(x, jnp.float32(0)).compile(AS_USERS)
  assert program(x, jnp.float32(-0.004))
  assert program(x, jnp.float32(1e38) / jnp.abs(x).max())
  assert not program(x, jnp.float32(3e38))


def test_a_program_that_skips_leaves_grows_linearly_with_their_number():
  """Compiled, each leaf by a loop of its own."""

  def lines(number):
    def skipped(leaves):
      finite = flatten.all_finite(leaves)
      return [jnp.where(finite, 2 * leaf, 0.0) for leaf in leaves]

    return (
      jax.jit(skipped)
      .lower([jnp.ones((4, 4))] * number)
      .compile()
      .as_text()
      .count("\n")
    )

  assert lines(60) - lines(40) < 1.2 * (lines(40) - lines(20))
