"""Selection as a user times it, and the passes of a compiled program."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.selection.passes import passes_of
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
  assert any(one["note"] == "in place" for one in update["passes"])
  assert sum(one["reads"] for one in update["passes"]) >= 4  # gradient and residual, to select and for the rest
  assert {goal["met"] is None for goal in result["goals"]} == {False}


@pytest.mark.parametrize(
  ("function", "counts"),
  [
    (lambda x, y, places: (x + y).at[places].set(0.0, mode="drop"), (2, 1)),
    (lambda x, y, places: x[places] + y[places], (0, 0)),
    (lambda x, y, places: ((x > y) & (x > places[0])).astype(jnp.int8), (2, 0.25)),
    (lambda x, y, places: jax.lax.cond(places[0] > 0, jnp.sum, lambda x: x[0] + y[0], x), (0, 0)),
  ],
)
def test_passes(function, counts):
  n = 4096
  found = passes_of(jax.jit(function).lower(jnp.ones(n), jnp.ones(n), jnp.arange(3)).compile().as_text(), n)
  assert (sum(one.reads for one in found), sum(one.writes for one in found)) == counts, found
  assert [one.note for one in found if one.opcode == "conditional"] in ([], ["another branch: 1"])
