"""Each kind of total that a collective returns ends a step by the same law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from tests.cases import normals

KINDS = {
  "dense": ("qsgd", {"error_feedback": True}),
  "entries": ("topka", {"density": 0.5}),
  "signs": ("onebit", {}),
  "codes": ("nbit", {}),
  "factors": ("powersgd", {"rank": 1}),
  "coefficients": ("dcttopk", {"density": 0.5, "chunk": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mean_rounds_off_stays_in_residuals(kind):
  """P times the mean, rounded to bfloat16, and the residuals of P workers are the sum of the gradients."""
  name, options = KINDS[kind]
  tx = js.make_transform(name, js.SimComm("w"), **options)
  worker = lambda grads: tx.update({"leaf": grads}, tx.init({"leaf": grads}))
  grads = jnp.asarray(normals(0, 3, 8, 8), jnp.bfloat16)
  updates, state = jax.jit(jax.vmap(worker, axis_name="w"))(grads)
  assert updates["leaf"].dtype == jnp.bfloat16
  delivered = 3 * np.asarray(updates["leaf"][0], np.float64).ravel()
  owed = np.asarray(state.carried.residual[0], np.float64).sum(0)
  entered = np.asarray(grads, np.float64).sum(0).ravel()
  np.testing.assert_allclose(delivered + owed, entered, rtol=0, atol=1e-5)


def test_a_total_of_another_form_needs_a_class_of_its_own():
  reduced = js.Reduced(
    js.Sparse(jnp.zeros(1, int), jnp.ones(1)), js.State(), js.Counters()
  )
  with pytest.raises(TypeError, match="js.Reduced has a total that is a Sparse: give"):
    reduced.mean(2, None)
