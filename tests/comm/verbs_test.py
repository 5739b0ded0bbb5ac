"""The verbs, on a mesh of forced host devices and under vmap: the same answers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxsparse import _compat
from jaxsparse.comm import (
  AxisComm,
  SimComm,
  SoloComm,
  all_gather,
  comm_of,
  in_rank_order,
  number_of_each,
  pack,
  unpack,
)
from tests.cases import WORKERS, mesh_of, normals, quick_of


def on_mesh(function, *args):
  workers = len(args[0])
  mapped = lambda *rows: jax.tree.map(
    lambda x: x[None], function(AxisComm("workers"), *(row[0] for row in rows))
  )
  return jax.jit(
    _compat.shard_map(mapped, mesh_of(workers), P("workers"), P("workers"))
  )(*args)


def simulated(function, *args):
  return jax.jit(
    jax.vmap(lambda *rows: function(SimComm("workers"), *rows), axis_name="workers")
  )(*args)


engines = pytest.mark.parametrize("run", [on_mesh, simulated])
each_size = pytest.mark.parametrize("workers", quick_of(WORKERS))


@engines
@each_size
def test_rank_and_shift(run, workers):
  tree = {
    "i": jnp.arange(workers, dtype=jnp.int32),
    "f": jnp.asarray(normals(0, workers, 3)),
  }
  shifts = (0, 1, 2, -1, 17)
  verbs = lambda comm, i, f: (
    comm.rank + 0 * i,
    [comm.shift({"i": i, "f": f}, by) for by in shifts],
  )
  ranks, got = run(verbs, tree["i"], tree["f"])
  np.testing.assert_array_equal(ranks, np.arange(workers))
  for by, found in zip(shifts, got, strict=True):
    jax.tree.map(
      lambda x, y, by=by: np.testing.assert_array_equal(x, np.roll(y, by, axis=0)),
      found,
      tree,
    )


@engines
@each_size
def test_all_to_all_sends_row_d_to_worker_d(run, workers):
  """Of all workers, and within teams, of leaves of other dtypes."""
  rows = jnp.arange(workers * workers).reshape(workers, workers)
  got = run(lambda comm, *trees: comm.all_to_all(trees), rows, rows % 3 == 0)
  np.testing.assert_array_equal(got[0], rows.T)
  np.testing.assert_array_equal(got[1], rows.T % 3 == 0)
  if workers % 2 == 0:
    half = rows[:, : workers // 2]
    got = run(lambda comm, x: comm.split(2)[0].all_to_all(x), half)
    teams = [x.reshape(2, workers // 2, workers // 2) for x in (got, half)]
    np.testing.assert_array_equal(teams[0], teams[1].swapaxes(1, 2))


@engines
def test_permute_leaves_zeros_where_nobody_sends(run):
  got = run(lambda comm, x: comm.permute(x, [(0, 3), (3, 1)]), jnp.arange(10.0, 15.0))
  np.testing.assert_array_equal(got, [0, 13, 0, 10, 0])


@engines
@pytest.mark.parametrize(
  ("pairs", "message"),
  [
    ([(0, 4)], "numbered 0 … 3"),
    ([(0, 1), (0, 2)], "worker 0 sends more"),
    ([(0, 1), (2, 1)], "worker 1 receives"),
  ],
)
def test_bad_routes(run, pairs, message):
  with pytest.raises(ValueError, match=message):
    run(lambda comm, x: comm.permute(x, pairs), jnp.zeros(4))


@each_size
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_all_reduce_agrees_bit_for_bit(workers, dtype):
  x = jnp.asarray(10 * normals(1, workers, 33)).astype(dtype)
  reduce = lambda comm, row: {
    op: comm.all_reduce(row, op) for op in ("sum", "max", "min")
  }
  meshed, simulator = on_mesh(reduce, x), simulated(reduce, x)
  for op in ("sum", "max", "min"):
    np.testing.assert_array_equal(
      np.asarray(meshed[op], np.float32), np.asarray(simulator[op], np.float32)
    )
    expected = getattr(np, op)(np.asarray(x, np.float64), axis=0)
    np.testing.assert_allclose(
      np.asarray(meshed[op][0], np.float64), expected, rtol=2e-2, atol=1
    )


@pytest.mark.parametrize("teams", [None, 1, 2, 16])
def test_a_simulated_all_reduce_takes_no_array_of_all_entries_for_each_worker(teams):
  """Some arrays of all workers' entries, P n; and of the whole engine, named or not, a total alone."""
  workers, n = 16, 1000

  def temporary_words(comm, use):
    program = jax.vmap(lambda x: use(comm).all_reduce(x), axis_name="workers")
    return (
      jax.jit(program)
      .lower(jnp.zeros((workers, n)))
      .compile()
      .memory_analysis()
      .temp_size_in_bytes
      // 4
    )

  named, unnamed = SimComm("workers", members=workers), SimComm("workers")
  if teams is None:
    own = lambda comm: comm
    assert temporary_words(named, own) == temporary_words(unnamed, own) < 2 * n
  else:
    for view in (0, 1):
      assert (
        temporary_words(named, lambda comm, view=view: comm.split(teams)[view])
        < 2 * workers * n
      )


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_a_worker_alone_has_what_workers_with_equal_arrays_have(workers):
  def verbs(comm, x, number):
    reduced = {op: comm.all_reduce(x, op) for op in ("sum", "max", "min")}
    return (
      reduced,
      comm.all_reduce(number),
      comm.shift(x, 1),
      all_gather(comm, x),
      number_of_each(comm, number),
    )

  x, number = jnp.arange(-2.0, 3.0), jnp.int32(7)
  alone = verbs(SoloComm(workers), x, number)
  together = simulated(verbs, jnp.tile(x, (workers, 1)), jnp.tile(number, workers))
  jax.tree.map(
    lambda own, rows: np.testing.assert_array_equal(rows, np.stack([own] * workers)),
    alone,
    together,
  )
  if workers == 6:  # views sum over their own workers
    assert [
      float(view.all_reduce(jnp.float32(-2))) for view in SoloComm(6).split(2)
    ] == [-6, -4]


@engines
@pytest.mark.parametrize("teams", quick_of([1, 2, 3, 6, 12], quick=[1, 3]))
def test_split(run, teams):
  length = 12 // teams

  def places(comm, x):
    team, member = comm.split(teams)
    assert (team.size, member.size) == (length, teams)
    return (
      team.rank,
      member.rank,
      team.shift(x, 1),
      member.shift(x, 1),
      team.all_reduce(x),
      member.all_reduce(x),
    )

  got = run(places, jnp.arange(12.0))
  grid = np.arange(12).reshape(teams, length)
  expected = [
    np.broadcast_to(np.arange(length), grid.shape),
    np.broadcast_to(np.arange(teams)[:, None], grid.shape),
    np.roll(grid, 1, axis=1),
    np.roll(grid, 1, axis=0),
    np.broadcast_to(grid.sum(1, keepdims=True), grid.shape),
    np.broadcast_to(grid.sum(0), grid.shape),
  ]
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_array_equal(x, y.reshape(-1))


@engines
def test_split_of_a_split(run):
  """Workers 0 4 8, 1 5 9, …, and workers 0 1, 2 3, …."""
  sums = lambda comm, x: (
    comm.split(3)[1].all_reduce(x),
    comm.split(3)[0].split(2)[0].all_reduce(x),
  )
  across, within = run(sums, jnp.arange(12.0))
  np.testing.assert_array_equal(across, [12, 15, 18, 21] * 3)
  np.testing.assert_array_equal(
    within, np.repeat(np.arange(12).reshape(6, 2).sum(1), 2)
  )


@engines
@each_size
def test_all_gather_has_rows_in_the_home_frame_and_numbers_are_in_rank_order(
  run, workers
):
  x = jnp.asarray(normals(0, workers, 2))
  numbers = np.random.default_rng(0).integers(0, 2**31, workers, dtype=np.int32)

  def verbs(comm, x, number):
    rows = all_gather(comm, x)
    return rows, in_rank_order(comm, rows), number_of_each(comm, number)

  got, in_order, found = run(verbs, x, jnp.asarray(numbers))
  for rank in range(workers):
    np.testing.assert_array_equal(got[rank], np.roll(x, -rank, axis=0))
    np.testing.assert_array_equal(in_order[rank], x)
  np.testing.assert_array_equal(found, np.tile(numbers, (workers, 1)))


@pytest.mark.parametrize(
  "dtype",
  ["float32", "int32", "uint8", "int8", "bfloat16", "float16", "bool", "uint16"],
)
def test_pack_is_undone_by_unpack(dtype):
  shapes = (), (1,), (3,), (5, 7), (0,)
  parts = [
    np.random.default_rng(0).integers(0, 2, shape).astype(jnp.dtype(dtype))
    for shape in shapes
  ]
  trees = [(x, {"y": np.float32(np.nan), "z": x}) for x in parts]
  packed, unpacked = jax.jit(
    lambda trees: ([*map(pack, trees)], [unpack(pack(tree), tree) for tree in trees])
  )(trees)
  for x, words in zip(parts, packed, strict=True):
    assert words.dtype == jnp.uint32
    assert words.size == 2 * -(-x.size * x.dtype.itemsize // 4) + 1
  jax.tree.map(np.testing.assert_array_equal, unpacked, trees)


@pytest.mark.parametrize(
  "axis", list(itertools.permutations(["hosts", "devices"])), ids="-".join
)
@pytest.mark.parametrize(
  "shape",
  [{"hosts": 3, "devices": 2}, {"devices": 2, "other": 2, "hosts": 3}],
  ids="-".join,
)
def test_a_tuple_of_axes_is_one_row_of_workers_in_its_own_order(axis, shape):
  """`axis_index` counts in the order of the tuple, `ppermute` in that of the mesh: the verbs count in the tuple's."""
  mesh = jax.make_mesh(
    tuple(shape.values()),
    tuple(shape),
    axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
  )

  def verbs(x):
    comm = AxisComm(axis)
    team, member = comm.split(2)
    sums = team.all_reduce(x), member.all_reduce(x)
    rows = comm.all_to_all(x + 10 * jnp.arange(6.0))[4:5]  # that of worker 4
    return (
      comm.rank[None],
      comm.shift(x, 1),
      comm.permute(x, [(0, 4), (4, 5)]),
      team.shift(x, 1),
      *sums,
      rows,
    )

  got = jax.jit(_compat.shard_map(verbs, mesh, P(axis), P(axis)))(jnp.arange(6.0))
  expected = [
    [0, 1, 2, 3, 4, 5],
    [5, 0, 1, 2, 3, 4],
    [0, 0, 0, 0, 0, 4],
    [2, 0, 1, 5, 3, 4],
    [3, 3, 3, 12, 12, 12],
    [3, 5, 7, 3, 5, 7],
    [4, 14, 24, 34, 44, 54],
  ]
  for found, wanted in zip(got, expected, strict=True):
    np.testing.assert_array_equal(found, wanted)


def test_comm_of():
  comm = AxisComm("workers")
  assert comm_of("workers") == comm
  assert comm_of(comm) is comm
  with pytest.raises(TypeError, match="axis=3: give the name of a shard_map axis"):
    comm_of(3)
