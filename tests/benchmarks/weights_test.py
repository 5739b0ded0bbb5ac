"""The goals of published weights that are printed."""

from benchmarks.weights import report


def test_a_goal_that_one_rate_misses_is_told():
  row = report.Row(1e-6, 1000, 4, 9.4, 9.9, 2.0, 6, 2000, 12, 10, *[1.0] * 8)
  other = row._replace(rate=1e-5, index_bits=7.0, diff_jit=5.0)
  missed = [goal.what for goal in report.goals([row, other]) if goal.met is False]
  assert missed == [
    "bits of an index at a rate of 1e-06 <= 9.5",
    "find, jitted: reads of the weights <= 4",
  ]
