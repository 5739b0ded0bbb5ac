"""What crosses an axis in compiled programs: as much as `cost` says, and what nobody has asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from tests.cases import CASES, linear, mesh_of, row, start, update_program

N, K = 1000, 40
ROWS = [(case, workers) for case in CASES if not case.options for workers in (2, 3, 8)]
QUICK = [("dense", 3), ("onebit", 2)]


@pytest.mark.parametrize(
  ("case", "workers"),
  [
    row(*one, quick=(str(one[0]), one[1]) in QUICK, id="{}-{}".format(*one))
    for one in ROWS
  ],
)
def test_an_update_sends_what_its_collective_costs(case, workers):
  """Agreements, of integers and of single numbers, cost no words."""
  tx = js.make_transform(case.name, "workers", **case.config(k=K))
  state = js.init(tx, jnp.zeros(N), mesh_of(workers))
  lowered = update_program(tx, state, workers).lower(
    jax.ShapeDtypeStruct((workers, N), jnp.float32), state
  )
  found = js.costs.audit(lowered, mesh_of(workers)).operations
  words = sum(one.bytes for one in found if one.dtype != "s32" and one.entries > 1) / 4
  cost = js.costs.count(case.make(k=K).for_leaves(((N,),)), n=N, workers=workers)
  assert words == pytest.approx(cost.words, abs=len(found))


def test_a_gather_that_nobody_asked_for_is_found_with_its_line():
  mesh = mesh_of(4)

  def loss(params, batch):
    jax.debug.callback(lambda _: None, jax.lax.all_gather(params, "workers").sum())
    return linear(params, batch)

  step, params, state = start(
    js.onebit_transform("workers"), mesh, jnp.zeros(50_000), loss
  )
  lowered = step.lower(params, state, jnp.ones((4, 50_000)))
  first = js.costs.audit(lowered, mesh).operations[0]
  assert (first.kind, first.dtype, first.entries, first.bytes) == (
    "all-gather",
    "f32",
    200_000,
    600_000,
  )
  assert "audit_test.py" in first.source
  with pytest.raises(
    ValueError,
    match=r"(?s)more than at_most=100,000 bytes cross axis 'workers'.*f32\[200,000\]",
  ):
    js.costs.audit(lowered, mesh, at_most=100_000)


def test_what_stays_inside_a_worker_is_of_another_axis():
  """Of groups over both axes the devices of a worker share the bytes."""
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("workers", "model"))
  lies = NamedSharding(mesh, P("workers", "model"))
  x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=lies)
  inside = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P("workers"))).lower(
    x
  )
  assert not js.costs.audit(inside, mesh).operations
  assert js.costs.audit(inside, mesh, "model").bytes == 2 * 64 * 4 / 2
  both = (
    jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P()))
    .lower(x)
    .compile()
  )
  assert (
    js.costs.audit(both, mesh).bytes > 0 < js.costs.audit(both, mesh, "model").bytes
  )
  with pytest.raises(ValueError, match="axis 'data' is not an axis of the mesh"):
    js.costs.audit(inside, mesh, "data")
  wider = Mesh(np.array(jax.devices()[:8] * 2).reshape(4, 4), mesh.axis_names)
  for other, devices in (mesh_of(4), 4), (wider, 16):
    with pytest.raises(
      ValueError, match=f"the program has 8 devices, the mesh has {devices}: give its"
    ):
      js.costs.audit(both, other)


TEXT = """HloModule step

FileNames
1 "/site-packages/jax/numpy.py"
2 "/home/user/train.py"

FunctionNames
1 "mean"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3}
2 {file_name_id=2 function_name_id=1 line=7}

StackFrames
1 {file_location_id=1 parent_frame_id=2}
2 {file_location_id=2 parent_frame_id=2}

%body (x: f32[8]) -> f32[8] {
  %r = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add, metadata={stack_frame_id=1}
}

%few (x: f32[8]) -> f32[8] {
  %p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

%many (x: f32[8]) -> f32[8] {
  %q = f32[8]{0} collective-permute(%x), source_target_pairs={{0,2},{2,0}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = f32[8] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %c = f32[8] conditional(%i, %x, %x), branch_computations={%few, %many}
  %s = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%x), replica_groups={{0,2},{1,3}}, dimensions={0}
  %d = bf16[8]{0} all-gather-done(%s)
  %t = (u32[6]{0}, u32[6]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{1,3}}
  %u = u32[6]{0} collective-permute-done(%t)
  %v = f32[4]{0} reduce-scatter(%x), replica_groups={{0,2},{1,3}}, dimensions={0}
  %k = f32[] all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add
  %l = f32[] all-reduce(%y), replica_groups={}, to_apply=%add
  %m = f32[] all-reduce(%y), to_apply=%add
  %a = f32[12]{0} all-to-all(%x), replica_groups={}, dimensions={0}
  %g = f32[20]{0} ragged-all-to-all(%x), replica_groups={}
  %j = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=2] {'a'}, to_apply=%add
  ROOT %i = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_loops_branches_asynchronous_pairs_and_all_notations():
  """Four devices of two workers: 0 and 1 of the first, 2 and 3 of the second."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("workers", "model"))
  found = js.costs.audit(TEXT, mesh)
  assert [(one.kind, one.bytes) for one in found.operations] == [
    ("all-reduce", 5 * 8 * 4),
    ("ragged-all-to-all", 20 * 4 / 2),
    ("collective-permute", 8 * 4),  # of the branch that sends most
    ("all-reduce", 8 * 4),
    ("collective-permute", 6 * 4),
    ("all-to-all", 12 * 4 / 2),  # each of the four sends half of its entries
    ("reduce-scatter", 4 * 4),
    ("all-gather", 8 * 2 / 2),
    ("all-reduce", 4),  # of one number, which is not scattered
    ("all-reduce", 4 / 2),  # of all devices
    ("all-reduce", 4 / 2),
  ]
  assert found.operations[0].source == "/home/user/train.py:7"
  assert "160  all-reduce f32[8]  /home/user/train.py:7" in str(found)
  assert (
    js.costs.audit(TEXT, mesh, "model").bytes == 8 * 4 + 8 * 4 + 32 * 4 / 2 + 2 * 4 / 2
  )
  with pytest.raises(NotImplementedError, match="replica_groups=.<all>.* not known"):
    js.costs.audit(TEXT.replace("mesh['a'=2,'b'=2]", "<all>"), mesh)


def _mean(x):
  return jax.lax.psum(x, "workers") / 2


def _scanned(x, length, mean=_mean):
  return jax.lax.scan(lambda x, _: (mean(x), None), x, length=length)[0]


def _custom(mean):
  """`mean` with derivatives of its own."""
  function = jax.custom_vjp(mean)
  function.defvjp(lambda x: (mean(x), None), lambda _, cotangent: (cotangent,))
  return function


def _mapped_again(x):
  """Three means in a shard_map inside a shard_map."""
  inner = jax.shard_map(
    lambda x: _scanned(x, 3),
    in_specs=P(),
    out_specs=P(),
    axis_names={"model"},
    check_vma=False,
  )
  return inner(x)


# A program that exchanges means of 1,000 entries, (x, i32[] argument) -> x, and how
# often; None for a loop whose length is not known.
LOOPS = {
  "scan": (lambda x, _: _scanned(x, 5), 5),
  "scan in scan": (lambda x, _: _scanned(x, 3, lambda x: _scanned(x, 2)), 6),
  "scan in a branch": (
    lambda x, i: jax.lax.cond(i > 0, lambda x: _scanned(x, 4), _mean, x),
    4,
  ),
  "branch in scan": (
    lambda x, i: _scanned(x, 4, lambda x: jax.lax.cond(i > 0, _mean, jnp.sin, x)),
    4,
  ),
  "jit": (lambda x, _: _scanned(x, 3, jax.jit(_mean)), 3),
  "custom_vjp": (lambda x, _: _scanned(x, 3, _custom(_mean)), 3),
  "checkpoint": (lambda x, _: _scanned(x, 3, jax.checkpoint(_mean)), 3),
  "shard_map in shard_map": (lambda x, _: _mapped_again(x), 3),
  "while": (
    lambda x, _: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: _mean(x) + 1, x),
    None,
  ),
  "fori_loop to an argument": (
    lambda x, i: jax.lax.fori_loop(0, i, lambda _, x: _mean(x), x),
    None,
  ),
  "condition of a while": (
    lambda x, _: jax.lax.while_loop(
      lambda x: (_mean(x) < 9).all(), lambda x: jnp.sin(x) + 1, x
    ),
    None,
  ),
  "while in a branch that sends less": (
    lambda x, i: jax.lax.cond(
      i > 0,
      lambda x: jax.lax.fori_loop(0, i, lambda _, x: _mean(x), x),
      lambda x: _scanned(x, 50),
      x,
    ),
    None,
  ),
  "while in scan in jit": (
    lambda x, i: _scanned(
      x, 2, jax.jit(lambda x: jax.lax.fori_loop(0, i, lambda _, x: _mean(x), x))
    ),
    None,
  ),
  "while in custom_vjp": (
    lambda x, _: _custom(
      lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: _mean(x) + 1, x)
    )(x),
    None,
  ),
  "while without messages": (
    lambda x, i: _mean(jax.lax.fori_loop(0, i, lambda _, x: jnp.sin(x), x)),
    1,
  ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_of_a_loop_all_rounds_count_and_one_of_unknown_length_is_refused(name):
  worker, times = LOOPS[name]
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("workers", "model"))
  program = jax.shard_map(
    worker,
    mesh=mesh,
    in_specs=(P("workers"), P()),
    out_specs=P("workers"),
    axis_names={"workers"} if name == "shard_map in shard_map" else set(),
    check_vma=False,
  )
  lowered = jax.jit(program).lower(jnp.ones(2000), jnp.int32(1))
  if times is None:
    with pytest.raises(
      NotImplementedError,
      match=r"all-reduce .*audit_test\.py:\d+ is inside a loop of unknown length",
    ):
      js.costs.audit(lowered, mesh, at_most=10**9)
  else:
    assert js.costs.audit(lowered, mesh).bytes == times * 4000


def test_a_condition_runs_once_more_than_the_body_of_its_loop():
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("workers", "model"))
  text = TEXT.replace("condition=%c, body=%body", "condition=%body, body=%few")
  assert js.costs.audit(text, mesh).operations[0].bytes == 6 * 8 * 4
  unknown = TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
  with pytest.raises(NotImplementedError, match=r"f32\[8\] of /home/user/train.py:7"):
    js.costs.audit(unknown, mesh)
