"""What is read from a compiled program, against numbers by hand, and programs for devices that are not here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from benchmarks import specs
from benchmarks.compiled import hlo, programs, rows, weights
from tests.cases import row

# 1,000 entries: gathered at 10 indices, 10 values put in place, a sum in a branch, a
# loop of 5 rounds and an open one.
TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[1000]{0})->f32[1000]{0}}

%gathered (param_0: f32[1000], param_1: s32[10]) -> f32[10] {
  %param_0 = f32[1000]{0} parameter(0)
  %param_1 = s32[10]{0} parameter(1)
  %twice = f32[1000]{0} add(%param_0, %param_0)
  ROOT %gather.1 = f32[10]{0} gather(%twice, %param_1), offset_dims={}, slice_sizes={1}
}

%placed (param_0.1: f32[1000], param_1.1: s32[10], param_2.1: f32[10]) -> f32[1000] {
  %param_0.1 = f32[1000]{0} parameter(0)
  %param_1.1 = s32[10]{0} parameter(1)
  %param_2.1 = f32[10]{0} parameter(2)
  ROOT %scatter.1 = f32[1000]{0} scatter(%param_0.1, %param_1.1, %param_2.1), to_apply=%assigned
}

%body (state: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %state = (s32[], f32[1000]{0}) parameter(0)
  %part = f32[1000]{0} get-tuple-element(%state), index=1
  %count = s32[] get-tuple-element(%state), index=0
  %copied = f32[1000]{0} copy(%part)
  ROOT %next = (s32[], f32[1000]{0}) tuple(%count, %copied)
}

%rest (part.1: f32[1000]) -> f32[] {
  %part.1 = f32[1000]{0} parameter(0)
  ROOT %summed = f32[] reduce(%part.1, %zero), dimensions={0}, to_apply=%plus
  %zero = f32[] constant(0)
}

%none (part.2: f32[1000]) -> f32[] {
  %part.2 = f32[1000]{0} parameter(0)
  ROOT %nothing = f32[] constant(0)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0), sharding={devices=[8]<=[8]}
  %i = s32[10]{0} constant({...})
  %found = f32[10]{0} fusion(%x, %i), kind=kLoop, calls=%gathered
  %start = (f32[10]{0}, f32[10]{0}) collective-permute-start(%found), source_target_pairs={{0,1},{1,0}}
  %y = (f32[1000]{0}, s32[1000]{0:T(1024)}) sort(%x, %x), dimensions={0}, to_apply=%less
  %arrived = f32[10]{0} collective-permute-done(%start)
  %again = (f32[10]{0}, f32[10]{0}) collective-permute-start(%arrived), backend_config={"is_sync":true,"x":1}
  %back = f32[10]{0} collective-permute-done(%again)
  %put = f32[1000]{0} fusion(%x, %i, %back), kind=kLoop, calls=%placed
  %first = (s32[], f32[1000]{0}) tuple(%k, %put)
  %k = s32[] constant(0)
  %known = (s32[], f32[1000]{0}) while(%first), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %open = (s32[], f32[1000]{0}) while(%known), condition=%c, body=%body
  %last = f32[1000]{0} get-tuple-element(%open), index=1
  %p = pred[] constant(true)
  %cond = f32[] conditional(%p, %last, %last), true_computation=%rest, false_computation=%none
  ROOT %out = f32[1000]{0} bitcast(%last)
}

%c (s: (s32[], f32[1000])) -> pred[] {
  %s = (s32[], f32[1000]{0}) parameter(0)
  ROOT %t = pred[] constant(true)
}
"""


def test_a_program_that_was_read_by_hand():
  found = hlo.summarize(TEXT, large=4000)
  gather, put, sort, copy = 10 * (4 + 4 + 4), 10 * (4 + 4 + 4), 4 * 4000, 2 * 4000
  assert found.bytes == gather + put + sort + (5 + 1) * copy
  assert found[:3] == (3, 1, 2)  # kernels, in branches, in loops
  assert (found.sorts, found.copies, found.synchronizations) == (1, 2, 2)
  assert found.exchanges == [
    hlo.Exchange("collective-permute", 40, True, sort),
    hlo.Exchange("collective-permute", 40, False, 0),
  ]


def test_a_program_of_this_platform():
  """A scatter into a donated array is counted by its entries, a pass over it is not."""
  place = jax.jit(
    lambda x, i, v: x.at[i].set(v, unique_indices=True, mode="drop"), donate_argnums=0
  )
  shapes = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((10**6,), "f4"), ((10,), "i4"), ((10,), "f4"))
  ]
  assert hlo.summarize(place.lower(*shapes).compile().as_text(), 4 * 10**6).bytes < 1000
  double = jax.jit(lambda x: 2 * x).lower(shapes[0]).compile().as_text()
  assert hlo.summarize(double, 4 * 10**6).bytes == pytest.approx(8 * 10**6, rel=1e-3)


def test_reads_of_weights_of_find_and_add():
  """Each reads the weights before and those behind, or writes them; what is read more grows with the changes."""
  mesh = Mesh(np.array(jax.devices()[:1]), ("device",))
  found = weights.rows(mesh, 1 << 18, [0.001, 0.2])
  assert [(row.program, row.share) for row in found] == [
    (program, share) for share in (0.001, 0.2) for program in ("find", "add")
  ]
  few, many = found[:2], found[2:]
  for one, other in zip(few, many, strict=True):
    assert 2 <= one.reads < 3 < other.reads
  assert [goal.met for goal in weights.goals(few)] == [True, True]
  assert not weights.goals(many)[0].met


def test_goals_name_what_was_missed():
  row = lambda name, **more: rows.Row(
    *(name, 3.0, 20, 0, 0, 5.0, 0.5, 9.0, 0, 0, 0, [])
  )._replace(**more)
  slow = row("spardl", seconds=11.0, kernels=71)
  message = hlo.Exchange("collective-permute", 40, False, 0.0)
  steps = row("dense", peak=12.0), row("signs", peak=16.5, exchanges=[message])
  missed = [
    goal.what
    for goal in rows.goals("cuda", [slow, row("onebit")], steps)
    if not goal.met
  ]
  assert missed == [
    "compile seconds of an update ≤ 10",
    "spardl: kernels ≤ 70",
    "step, signs: bytes a parameter above dense ≤ 4.4",
    "step, signs: synchronous exchanges ≤ 0",
  ]


@pytest.mark.long
@pytest.mark.parametrize("name", js.collective_names())
def test_every_update_is_lowered_for_accelerators_without_one(name):
  """No array is made, neither of a state nor of a gradient."""
  (spec,) = specs.parse([name], 4, density=0.01)
  for platform in ("cuda", "tpu"):
    with js.traced_for(platform):
      traced = programs.traced(spec, jax.devices()[:4], 1 << 16)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "collective_permute" in text or "all_reduce" in text
    assert not re.search(r"stablehlo.custom_call @(?!Sharding|SPMD|annotate|xla)", text)


@pytest.mark.parametrize("inside", [row(()), row(("shards",), quick=True)])
def test_a_step_is_lowered_from_shapes(inside):
  """`js.abstract_state` of shapes is what `js.init` makes of arrays, and a step has the same program for both."""
  devices = np.array(jax.devices()[:4]).reshape((2, 2) if inside else 4)
  mesh = Mesh(devices, ("workers", *inside))
  params = jax.device_put(
    {"w": jnp.ones((8, 4))}, NamedSharding(mesh, P(None, *inside))
  )
  tx = js.spardl_transform("workers", density=0.5)
  step = js.make_train_step(lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), tx, mesh)
  batch, shape_of = (
    jnp.ones((8, 8)),
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
  )
  shapes = jax.tree.map(shape_of, params)
  state, like = js.init(tx, params, mesh), js.abstract_state(tx, shapes, mesh)
  assert jax.tree.map(shape_of, state) == like
  assert (
    step.lower(shapes, like, batch).as_text()
    == step.lower(params, state, batch).as_text()
  )
