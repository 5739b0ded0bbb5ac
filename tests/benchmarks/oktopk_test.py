"""The benchmark of Ok-Topk's rules: the paper's in numpy is the library's where no message overflows."""

import numpy as np
import pytest

from benchmarks.oktopk import rules
from tests.benchmarks.commands import result_of

WORKERS, N, K = 4, 2000, 400


def reduced(name, steps=4):
  """Totals and counts of gradients that grow smaller, so thresholds select fewer than k."""
  rule = rules.rule_of(name, WORKERS, N, K)
  random = np.random.default_rng(0)
  grads = random.normal(size=(steps, WORKERS, N)).astype(np.float32)
  scales = 0.5 ** np.arange(steps, dtype=np.float32)
  return [rule(scale * grad) for scale, grad in zip(scales, grads, strict=True)]


def test_the_papers_rule_is_the_librarys_where_no_message_overflows():
  for ours, theirs in zip(reduced("none"), reduced("paper"), strict=True):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1][1] == theirs[1][1]
    assert ours[1][0].mean() == pytest.approx(theirs[1][0].mean())


def test_limits_leave_the_largest_entries():
  values = np.array([3.0, -5.0, 1.0, 4.0])
  chosen = np.array([True, True, True, False])
  rules.keep(values, chosen, 2)
  assert chosen.tolist() == [True, True, False, False]
  whole, limited = (
    rules.Rule(2, 8, 2, *rules.LIMITS[name]) for name in ("paper", "of a region")
  )
  grads = np.array([[9, 8, 7, 6, 0, 0, 0, 1], [9, 8, 0, 0, 0, 0, 0, 7]], np.float32)
  assert whole(grads)[0].tolist() == [18, 16, 0, 0, 0, 0, 0, 0]
  # k/P is one entry, and a half more is none: one of each region
  assert np.count_nonzero(limited(grads)[0]) == 2


@pytest.mark.long
def test_tables_of_rules_and_of_xi():
  found = result_of(
    "oktopk",
    "--workers=4",
    "--steps=20",
    "--seed=0",
    "--rules=paper,search",
    "--densities=0.01",
  )
  assert [row["rule"] for row in found["rules"]] == ["paper", "search"]
  (seen,) = found["seen"]
  assert 0.01 < seen["fill_in"][0] < 0.04
  assert seen["xi_most"][0] >= seen["xi"][0] > 0
