"""What is finite: leaves of states, which decide whether a step is kept."""

import jax.numpy as jnp
import pytest

from jaxsparse.sparse import flatten


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
  trees = ({"a": jnp.zeros(2), "b": jnp.array(leaf, jnp.float32)} for leaf in (before, after))
  assert bool(flatten.stays_finite(*trees)) == stays
