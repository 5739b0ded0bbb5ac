"""Selection as a user times it, and how the passes of a compiled program are read off its text."""

import functools
import json

import jax
import jax.numpy as jnp

from benchmarks.selection.passes import passes_of
from tests.benchmarks import commands

# What it counts is of programs as users have them.
run = functools.partial(commands.run, "benchmarks.selection", XLA_FLAGS="", JAX_DISABLE_MOST_OPTIMIZATIONS="0")


def test_every_program_is_checked_and_timed():
  inputs = ["normal", "gradients", "equal"]
  done = run("--n=40000", f"--inputs={','.join(inputs)}", "--repetitions=1", "--update=2", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stderr.count("goal: ") == 5
  result = json.loads(done.stdout)
  rows = {row["input"]: row for row in result["selection"]}
  assert list(rows) == inputs
  assert all(row[name] > 0 for row in rows.values() for name in ("lax_top_k", "top_k", "threshold", "candidates"))
  assert all(row["method"] == "bracket" for row in rows.values())
  assert [row["missed"] for row in rows.values()] == [False, False, True]  # all equal is too many for any bracket
  update = result["update"]
  assert (update["workers"], update["fallbacks"]) == (2, 0)
  assert 0 < update["buffers"] <= 3  # the mean takes the place of the donated gradients
  assert any(one["note"] == "in place" for one in update["passes"])
  assert sum(one["reads"] for one in update["passes"]) >= 4  # gradient and residual, to select and for the rest
  assert {goal["met"] is None for goal in result["goals"]} == {False}


# One read of two arrays that packs them, zeros, a scatter of few entries, one into what is read, and a choice.
PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[1000]{0}, f32[1000]{0})->f32[1000]{0}}

FileNames
1 "f.py"

%packing (p.0: f32[1000], p.1: f32[1000]) -> u32[32] {
  %p.0 = f32[1000]{0} parameter(0)
  %p.1 = f32[1000]{0} parameter(1)
  %sum = f32[1000]{0} add(%p.0, %p.1), metadata={op_name="jit(f)/add" stack_frame_id=1}
  %whole = f32[992]{0} slice(%sum), slice={[0:992]}
  %rest = f32[8]{0} slice(%p.1), slice={[992:1000]}
  ROOT %words = u32[32]{0} custom(%whole, %rest)
}

%few (p.2: f32[1000], p.3: s32[5,1]) -> f32[5] {
  %p.2 = f32[1000]{0} parameter(0)
  %p.3 = s32[5,1]{1,0} parameter(1)
  ROOT %got = f32[5]{0} gather(%p.2, %p.3), offset_dims={}, slice_sizes={1}
}

%put (p.4: f32[1000], p.5: s32[5,1], p.6: f32[5]) -> f32[10,100] {
  %p.4 = f32[1000]{0} parameter(0)
  %p.5 = s32[5,1]{1,0} parameter(1)
  %p.6 = f32[5]{0} parameter(2)
  %in = f32[1000]{0} scatter(%p.4, %p.5, %p.6), to_apply=%assign
  ROOT %shaped = f32[10,100]{1,0} bitcast(%in)
}

%rewrite (p.7: f32[1000], p.8: s32[5,1], p.9: f32[5]) -> f32[1000] {
  %p.7 = f32[1000]{0} parameter(0)
  %p.8 = s32[5,1]{1,0} parameter(1)
  %p.9 = f32[5]{0} parameter(2)
  %twice = f32[1000]{0} add(%p.7, %p.7)
  ROOT %out = f32[1000]{0} scatter(%twice, %p.8, %p.9), to_apply=%assign
}

%quick (arg.1: (s32[5,1], f32[1000])) -> (s32[5,1]) {
  %arg.1 = (s32[5,1]{1,0}, f32[1000]{0}) parameter(0)
  %one = s32[5,1]{1,0} get-tuple-element(%arg.1), index=0
  ROOT %same = (s32[5,1]{1,0}) tuple(%one)
}

%slow (arg.2: (s32[5,1], f32[1000])) -> (s32[5,1]) {
  %arg.2 = (s32[5,1]{1,0}, f32[1000]{0}) parameter(0)
  %all = f32[1000]{0} get-tuple-element(%arg.2), index=1
  %sorted = (f32[1000]{0}, s32[1000]{0}) sort(%all, %all), dimensions={0}, to_apply=%less
  %best = s32[1000]{0} get-tuple-element(%sorted), index=1
  %five = s32[5,1]{1,0} slice(%best), slice={[0:5]}
  ROOT %result = (s32[5,1]{1,0}) tuple(%five)
}

ENTRY %main (g: f32[1000], r: f32[1000]) -> (f32[10,100], f32[1000]) {
  %g = f32[1000]{0} parameter(0), metadata={op_name="g"}
  %r = f32[1000]{0} parameter(1), metadata={op_name="r"}
  %zero = f32[] constant(0)
  %words.1 = u32[32]{0} fusion(%g, %r), kind=kLoop, calls=%packing, backend_config={"outer_dimension_partitions":["2"]}
  %tuple.1 = (s32[5,1]{1,0}, /*index=1*/f32[1000]{0}) tuple(%words.1, /*index=1*/%g)
  %choice = (s32[5,1]{1,0}) conditional(%flag, %tuple.1, %tuple.1), branch_computations={%slow, %quick}
  %places = s32[5,1]{1,0} get-tuple-element(%choice), index=0
  %zeros = f32[1000]{0} broadcast(%zero), dimensions={}
  %mask = pred[1000]{0} compare(%g, %r), direction=GT
  %values = f32[5]{0} fusion(%g, %places), kind=kLoop, calls=%few
  %mean = f32[10,100]{1,0} fusion(%zeros, %places, %values), kind=kLoop, calls=%put
  %new = f32[1000]{0} fusion(%r, %places, %values), kind=kLoop, calls=%rewrite
  %bare = f32[1000]{0} scatter(%new, %places, %values), to_apply=%assign
  ROOT %both = (f32[10,100]{1,0}, f32[1000]{0}) tuple(%mean, %bare)
}
"""


def test_passes_of_a_program():
  assert passes_of(PROGRAM, 1000) == [
    ("words.1", "fusion", 2, 0, ""),
    ("choice", "conditional", 0, 0, "another branch: 3"),
    ("zeros", "broadcast", 0, 1, ""),
    ("mask", "compare", 2, 0.25, ""),
    ("mean", "fusion", 0, 0, "in place"),
    ("new", "fusion", 1, 1, ""),
    ("bare", "scatter", 0, 0, "in place"),
  ]


def test_passes_of_what_this_compiler_makes():
  n = 4096
  program = jax.jit(lambda x, y, places: (x + y).at[places].set(0.0, mode="drop"))
  compiled = program.lower(jnp.ones(n), jnp.ones(n), jnp.arange(3)).compile()
  found = passes_of(compiled.as_text(), n)
  assert [sum(one.reads for one in found), sum(one.writes for one in found)] == [2, 1]
