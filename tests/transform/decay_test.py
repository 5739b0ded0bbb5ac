"""`decay=β`: what was not delivered enters the next step β times, whatever the collective; a skipped step keeps it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.train import simulation
from tests.cases import CONSERVING, bits, each_case, integers, normals

CASES = [case for case in CONSERVING if "decay" in js.collective_options(case.name)]
LEAVES, N, DECAY = ((10, 10),), 100, 0.5


def own(case, **config):
  made = js.make_collective(case.name, **case.config(**({"density": 0.2} if case.is_sparse else {})), **config)
  return made.for_leaves(LEAVES)


def residuals(state):
  return np.asarray(state.carried.residual, np.float64)


@each_case(CASES, ["qsgd-error_feedback=True", "spardl"])
def test_law_c_with_a_decay(case):
  """Total + Σ r′ = Σ (g + s), of which s′ = β r′ is stored; and NaN leaves s as it is."""
  workers, collective = case.workers([4, 6, 8, 5])[0], own(case, decay=DECAY)
  state = simulation.initial(collective, workers, N)
  for step in range(4):
    grads = integers(step, workers, N)
    if step == 2:
      grads[0, 3] = np.nan
    before = state
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    if step == 2:
      np.testing.assert_array_equal(residuals(state), residuals(before))
      continue
    home = grads.astype(np.float64).sum(0) + residuals(before).sum(0)
    left = np.asarray(totals[0], np.float64) + residuals(state).sum(0) / DECAY
    np.testing.assert_allclose(left, home, atol=0 if case.exact and case.rounding < 2**-10 else 0.05)
  assert residuals(state).any()


@each_case(CASES, ["spardl"])
def test_the_first_step_is_that_without_decay_and_a_decay_of_one_changes_nothing(case):
  workers = case.workers([4, 6, 8, 5])[0]
  grads, plain = jnp.asarray(normals(0, workers, N)), own(case)
  assert own(case, decay=1.0) == plain
  (totals, state), (same, decayed) = (
    simulation.reduce_all(one, grads, simulation.initial(one, workers, N)) for one in (plain, own(case, decay=DECAY))
  )
  if case.name == "powersgd":  # its products are rounded alone, or as a part of a sum
    np.testing.assert_allclose(totals, same, rtol=0, atol=1e-6)
    np.testing.assert_allclose(DECAY * residuals(state), residuals(decayed), rtol=0, atol=1e-6)
    return
  np.testing.assert_array_equal(bits(totals), bits(same))
  np.testing.assert_array_equal(DECAY * residuals(state), residuals(decayed))


@pytest.mark.parametrize("decay", [0, 1.5, -0.1, "much", True, float("nan")])
def test_bad_decay(decay):
  with pytest.raises(ValueError, match=rf"decay={decay!r}, choose a number in \(0, 1\]"):
    js.spardl_transform("workers", density=0.1, decay=decay)
  with pytest.raises(ValueError, match=rf"qsgd: decay={decay!r}, choose a number"):
    js.qsgd_transform("workers", decay=decay)
