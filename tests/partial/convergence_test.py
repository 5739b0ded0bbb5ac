"""The condition of Theorem 1 of partial reduce, by hand."""

import math

import pytest

import jaxsparse as js

condition = js.partial.convergence_condition


def test_by_hand():
  """N = 8, P = 3, γ = 0.04: η = 0.015, and ρ̄ = 0.879/0.121 + 2 · 0.93755/0.06245² = 488.06 at ρ = 0.879."""
  settings = {"workers": 8, "group_size": 3, "rate": 0.04}
  network = 2 * 8**3 * 0.015**2 * 488.06 / 3**2
  assert condition(0.879, **settings) == pytest.approx(network, rel=1e-4)
  with_loss = condition(0.879, **settings, smoothness=20.0)
  assert with_loss == pytest.approx(network + 0.3, rel=1e-4)
  # all average with all: nothing but the loss
  assert condition(0.0, **settings, smoothness=20.0) == pytest.approx(0.3)
  assert condition(1.0, **settings) == math.inf


@pytest.mark.parametrize(
  ("change", "what"),
  [
    ({"rho": 1.5}, "rho=1.5, choose 0 to 1"),
    ({"rho": math.nan}, "rho=nan, choose 0 to 1"),
    ({"group_size": 9}, "group_size=9 of 8 workers"),
    ({"group_size": 0}, "group_size=0"),
    ({"rate": -0.1}, "rate=-0.1, choose a number of at least 0"),
    ({"smoothness": math.nan}, "smoothness=nan, choose"),
  ],
)
def test_bad_input_is_refused(change, what):
  given = {"rho": 0.5, "workers": 8, "group_size": 3, "rate": 0.1} | change
  with pytest.raises(ValueError, match=what):
    condition(given.pop("rho"), **given)
