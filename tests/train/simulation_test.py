"""The simulator's own promises."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from tests.cases import normals


def test_a_loop_of_steps_carries_the_state():
  grads = normals(0, 2, 3, 10)
  first = js.simulate("spardl", grads[0], k=2)
  by_state = js.simulate("spardl", grads[1], state=first.state, k=2)
  by_residuals = js.simulate("spardl", grads[1], first.residuals, k=2)
  np.testing.assert_array_equal(by_state.total, by_residuals.total)
  np.testing.assert_array_equal(by_state.residuals, by_residuals.residuals)


def test_dense_leaves_nothing():
  out = js.simulate("dense", jnp.ones((3, 4)))
  np.testing.assert_array_equal(out.total, np.full(4, 3.0))
  np.testing.assert_array_equal(out.residuals, np.zeros((3, 4)))


def test_a_collective_of_your_own():
  class Doubled(type(js.make_collective("dense"))):
    def reduce(self, comm, grads, state):
      return super().reduce(comm, 2 * grads, state)

  np.testing.assert_array_equal(js.simulate(Doubled(), jnp.ones((3, 4))).total, np.full(4, 6.0))
  assert js.costs.count(Doubled(), n=12, workers=3, dtype="bfloat16") == js.costs.count(
    "dense", n=12, workers=3, dtype="bfloat16"
  )
  with pytest.raises(TypeError, match="unknown option density, choose from dtype"):
    js.simulate(Doubled(), jnp.ones((3, 4)), density=0.1)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (lambda: js.simulate("spardl", jnp.zeros(3), k=1), ValueError, r"shape \(3,\), give \[workers, entries\]"),
    (lambda: js.simulate("spardl", jnp.zeros((0, 3)), k=1), ValueError, r"shape \(0, 3\)"),
    (lambda: js.simulate("spardl", jnp.zeros((2, 3), jnp.int32), k=1), TypeError, "dtype int32"),
    (lambda: js.simulate("spardl", jnp.zeros((2, 3)), jnp.zeros((2, 4)), k=1), ValueError, r"shape \(2, 4\)"),
    (lambda: js.simulate("dense", jnp.zeros((2, 3)), jnp.zeros((2, 3))), ValueError, "dense keeps no residual"),
    (lambda: js.simulate("spardl", jnp.zeros((2, 3)), k=4), ValueError, "at most the number of gradient entries, 3"),
  ],
)
def test_bad_input(call, error, message):
  with pytest.raises(error, match=message):
    call()


def test_state_of_other_sizes():
  state = js.simulate("spardl", jnp.zeros((2, 4)), k=1).state
  with pytest.raises(ValueError, match="made for 2 workers, the axis has 3"):
    js.simulate("spardl", jnp.zeros((3, 4)), state=state, k=1)
  with pytest.raises(ValueError, match="residual of 4 entries a worker, the gradients have 5"):
    js.simulate("spardl", jnp.zeros((2, 5)), state=state, k=1)
  with pytest.raises(ValueError, match="residuals or state, not both"):
    js.simulate("spardl", jnp.zeros((2, 4)), jnp.zeros((2, 4)), state=state, k=1)
