"""Selection as a user times it."""

import json

from tests.benchmarks import commands


def test_every_program_is_checked_and_timed():
  flags = "--n=40000", "--inputs=normal,gradients,equal", "--repetitions=1", "--update=2", "--json"
  # What it counts is of programs as users have them.
  done = commands.run("benchmarks.selection", *flags, XLA_FLAGS="", JAX_DISABLE_MOST_OPTIMIZATIONS="0")
  assert done.returncode == 0, done.stderr[-2000:]
  result = json.loads(done.stdout)
  rows = result["selection"]
  assert all(row[name] > 0 for row in rows for name in ("lax_top_k", "top_k", "threshold", "candidates"))
  # All equal is too many for any bracket.
  assert [(row["method"], row["missed"]) for row in rows] == [("bracket", missed) for missed in (False, False, True)]
  update = result["update"]
  assert (update["workers"], update["fallbacks"]) == (2, 0)
  assert 0 < update["buffers"] <= 3  # the mean takes the place of the donated gradients
  assert {goal["met"] is None for goal in result["goals"]} == {False}
