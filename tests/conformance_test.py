"""The laws that every collective obeys, for every option it has and any number of workers.

A new file in jaxsparse/collectives/ is in these tables by existing. C is conservation, R replication, 1 exactly once, W
the wire; then come bit equality of simulator and mesh, and behaviour on bad and extreme input.
"""

import functools
import math
import re

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import _compat
from jaxsparse.comm import AxisComm, all_reduce_cost
from jaxsparse.costs.counting import count_jaxpr, schedule
from jaxsparse.train import simulation
from jaxsparse.transform.update import init_state, reduce_step
from tests.cases import (
  AS_USERS,
  CASES,
  CONSERVING,
  REPLICATING,
  bits,
  each,
  each_case,
  integers,
  mesh_of,
  normals,
)

DENSITY = 0.2
FLUSHED = 2.0**-126  # smaller numbers are 0 on this hardware


def residuals_of(state, workers, n):
  kept = state.carried.residual
  return np.zeros((workers, n), np.float32) if kept is None else np.asarray(kept).reshape(workers, n)


def mass(grads, state):
  """Σ_w (gradient + residual), in float64."""
  return np.asarray(grads, np.float64).sum(0) + residuals_of(state, *grads.shape).astype(np.float64).sum(0)


def law_c_nothing_is_lost(case, collective, workers, n):
  state = simulation.initial(collective, workers, n)
  for step in range(3):
    grads = integers(step, workers, n)
    before = mass(grads, state)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    after = np.asarray(totals[0], np.float64) + mass(0 * grads, state)
    if case.exact:
      np.testing.assert_array_equal(after, before)
    else:  # levels are not whole numbers
      np.testing.assert_allclose(after, before, atol=1e-3)


def law_r_every_worker_has_the_same_bits(_, collective, workers, n):
  state = simulation.initial(collective, workers, n)
  for step in range(3):
    totals, state = simulation.reduce_all(collective, jnp.asarray(normals(step, workers, n)), state)
    np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))
    for leaf in jax.tree.leaves(state.carried.shared):
      np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))


def not_a_number_anywhere_skips_the_step_everywhere(_, collective, workers, n):
  state = simulation.initial(collective, workers, n)
  _, state = simulation.reduce_all(collective, jnp.asarray(normals(0, workers, n)), state)
  clean = jnp.asarray(normals(2, workers, n))
  expected, _ = simulation.reduce_all(collective, clean, state)
  for poison in (np.nan, np.inf, -np.inf):
    bad = normals(1, workers, n)
    bad[workers // 2, n - 1] = poison
    totals, after = simulation.reduce_all(collective, jnp.asarray(bad), state)
    np.testing.assert_array_equal(totals, np.zeros((workers, n)))
    jax.tree.map(np.testing.assert_array_equal, after.carried, state.carried)
    assert np.all(after.counters.skipped)
    assert np.all(after.counters.skipped_steps == 1)
    resumed, final = simulation.reduce_all(collective, clean, after)
    np.testing.assert_array_equal(bits(resumed), bits(expected))
    assert not np.any(final.counters.skipped)
    assert np.all(final.counters.skipped_steps == 1)


def extreme_gradients_are_delivered_or_kept(case, collective, workers, n):
  giant = np.ones((workers, n), np.float32)
  giant[0, n // 2] = 2.0**100
  for grads in (0 * giant, -0.5 * np.ones_like(giant), giant, 2.0**-120 * np.ones_like(giant)):
    start = simulation.initial(collective, workers, n)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), start)
    assert np.isfinite(totals).all()
    if case in CONSERVING:
      exact = mass(grads, start)
      left = np.asarray(totals[0], np.float64) + mass(0 * grads, state)
      scale = np.abs(grads, dtype=np.float64).sum(0).max()
      assert np.all(np.abs(left - exact) <= workers * (4 * case.rounding * scale + FLUSHED))
    if grads is giant and case.by_magnitude:
      assert totals[0, n // 2] == 2.0**100


def any_input_is_delivered_or_kept(case, collective, workers, n):
  """Two steps of what hypothesis draws; all examples run the same compiled program."""
  elements = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)

  @hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, (2, workers, n), elements=elements))
  def holds(grads):
    state = simulation.initial(collective, workers, n)
    for step in grads:
      before = mass(step, state)
      scale = np.abs(step).sum(0) + np.abs(residuals_of(state, workers, n)).sum(0)
      totals, state = simulation.reduce_all(collective, jnp.asarray(step), state)
      after = np.asarray(totals[0], np.float64) + mass(0 * step, state)
      # Rounding to levels is relative to the norm and not to the entry.
      scale = scale if case.exact else np.max(scale) * n
      assert np.all(np.abs(after - before) <= workers * (case.rounding * scale + FLUSHED))
      np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))
      if case.name in ("spardl", "gtopk", "randomk"):
        assert np.count_nonzero(totals[0]) <= collective.entries(n) + workers  # rounded up for each of P/d blocks

  holds()


def law_1_each_entry_arrives_exactly_once(case, collective, workers, n):
  """Where all entries are delivered."""
  grads = np.broadcast_to(2.0 ** np.arange(workers, dtype=np.float32)[:, None], (workers, n))
  totals, state = simulation.reduce_all(collective, jnp.asarray(grads), simulation.initial(collective, workers, n))
  expected = 2**workers - 1
  if "bfloat16" in str(case):  # 8 bits of mantissa
    expected = float(jnp.bfloat16(expected))
  np.testing.assert_array_equal(totals, np.full((workers, n), expected, np.float32))
  np.testing.assert_array_equal(residuals_of(state, workers, n), np.zeros((workers, n)))


LAWS = (
  law_c_nothing_is_lost,
  law_r_every_worker_has_the_same_bits,
  not_a_number_anywhere_skips_the_step_everywhere,
  extreme_gradients_are_delivered_or_kept,
  any_input_is_delivered_or_kept,
)


LOSING = {
  *("a2sgd", "a2sgd-means=leaf"),  # whose workers keep gradients of their own
  *("chunktopk-combine=contributors", "dcttopk-combine=contributors"),
  *("qsgd", "qsgd-levels=1"),
  *("spardl-residual=local", "spardl-residual=partial"),
}
EXEMPT = {
  law_c_nothing_is_lost: LOSING,
  any_input_is_delivered_or_kept: LOSING,
  law_r_every_worker_has_the_same_bits: {"a2sgd", "a2sgd-means=leaf"},
  law_1_each_entry_arrives_exactly_once: {str(case) for case in CASES if not case.exact or case.name == "a2sgd"},
}
"""The cases for which a law does not hold, or of which rounding leaves nothing to compare (law 1)."""


def test_what_is_exempt_says_so():
  assert {str(case) for case in CASES if case not in CONSERVING} == LOSING
  assert {str(case) for case in CASES if case not in REPLICATING} == EXEMPT[law_r_every_worker_has_the_same_bits]


def hold(laws, case, collective, workers, n, subtests):
  """Tests the laws of which the case is not exempt."""
  for law in laws:
    if str(case) not in EXEMPT.get(law, ()):
      with subtests.test(law.__name__):
        law(case, collective, workers, n)


@each(CASES, quick=[1, 4])
def test_the_laws(case, workers, subtests):
  """All in one test, since they share a compiled program, and compiling is what takes the time."""
  hold(LAWS, case, case.make(density=DENSITY).for_leaves(((5, 4), (10,))), workers, 30, subtests)


@each(CASES, [1, 3, 5, 6], quick=[3], options="none")
def test_the_laws_of_fewer_entries_than_workers(case, workers, subtests):
  hold(LAWS, case, case.make(density=DENSITY), workers, 1, subtests)


@each(CASES, [1, 2, 3, 5, 6, 8, 13], quick=[3], options="none")
def test_the_laws_where_everything_is_delivered(case, workers, subtests):
  laws = (law_1_each_entry_arrives_exactly_once, any_input_is_delivered_or_kept)
  hold(laws, case, case.make(density=1.0), workers, 11, subtests)


@pytest.mark.parametrize("case", [case for case in CASES if case not in CONSERVING], ids=str)
def test_what_declares_to_lose_mass_loses_it(case):
  collective = case.make(density=0.1)
  state = simulation.initial(collective, 6, 60)
  grads = integers(0, 6, 60)
  totals, after = simulation.reduce_all(collective, jnp.asarray(grads), state)
  assert np.any(mass(grads, state) != np.asarray(totals[0]) + mass(0 * grads, after))


@each(CASES, [*range(1, 17), 128], quick=[1, 3, 8, 128], options="main")
def test_law_w_the_schedule_costs_what_the_paper_says(case, workers):
  for n, k in ((1, 1), (96, 7), (1001, 1001)) if workers <= 16 else ((1000, 10),):
    side = math.isqrt(n)
    collective = case.make(k=k).for_leaves(((side, n // side), (n % side,)))
    counted = js.costs.count(collective, n=n, workers=workers)
    predicted = js.costs.predict(collective, n=n, workers=workers)
    if collective.sizes_vary:
      assert all(was <= most for was, most in zip(counted, predicted, strict=True)), (counted, predicted)
      assert counted.words >= 2 * k * (workers - 1) / workers  # of any sparse all-reduce (SparDL, §2)
    else:
      assert counted == predicted
    if workers == 1:
      assert counted.messages == counted.words == 0


@each_case(CASES)
def test_the_state_keeps_its_types_under_x64(case):
  """Traced only: types are all that 64-bit mode could change."""
  workers, n = max(3, 2 * dict(case.options).get("teams", 1)), 300
  collective = case.make(density=0.1)
  describe = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
  grads = jax.ShapeDtypeStruct((workers, n), jnp.float32)
  with jax.enable_x64(False):
    expected = describe(jax.eval_shape(lambda: simulation.initial(collective, workers, n)))
  with jax.enable_x64(True):
    state = jax.eval_shape(lambda: simulation.initial(collective, workers, n))
    totals, after = jax.eval_shape(functools.partial(simulation.reduce_all, collective), grads, state)
  assert totals.dtype == jnp.float32
  assert describe(state) == expected
  assert describe(after) == expected


@pytest.mark.long
def test_oktopk_gives_the_same_under_x64():
  """Its thresholds, counts and regions are compared, added up and divided."""
  bits_of = {}
  for wide in (False, True):
    with jax.enable_x64(wide):
      state, totals = None, []
      for step in range(3):
        out = js.simulate("oktopk", normals(step, 3, 200), state=state, k=20)
        state = out.state
        totals.append(bits(out.total))
    bits_of[wide] = totals
  np.testing.assert_array_equal(*bits_of.values())


def worker_program(collective, workers):
  """One reduction over a real mesh: f32[P · n] of all workers and their states to the totals and states of each."""

  def worker(grads, state):
    return reduce_step(collective, AxisComm("workers"), grads, state)

  def program(grads, state):
    spec = js.specs(state, "workers")
    mapped = _compat.shard_map(worker, mesh_of(workers), (P("workers"), spec), (P("workers"), spec))
    return mapped(grads, state)

  return jax.jit(program)


def mesh_state(collective, workers, n):
  spec = functools.partial(js.specs, axis="workers")
  init = lambda: init_state(collective, n, workers)
  make = lambda out: _compat.shard_map(init, mesh_of(workers), (), out)
  return jax.jit(make(spec(jax.eval_shape(make(P())))))()


# engines_test.py compares the bits of all; these send all kinds of messages.
@each_case(CASES, ["a2sgd", "dense", "qsgd", "spardl", "spardl-teams=2"])
def test_the_mesh_sends_these_messages_and_agrees_with_the_simulator_bit_for_bit(case, subtests):
  n, k, workers = 103, 13, case.workers([6, 8, 5])[0]
  collective = case.make(k=k)
  on_mesh, simulated = mesh_state(collective, workers, n), simulation.initial(collective, workers, n)
  flat, rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((workers * n,), (workers, n)))
  program = worker_program(collective, workers).lower(flat, on_mesh).compile(AS_USERS)
  simulator = simulation.reduce_all.lower(collective, rows, simulated).compile(AS_USERS)
  with subtests.test("the compiler keeps the messages as they are (law W)"):
    check_messages(program.as_text(), collective, workers, n)
  with subtests.test("bit equality"):
    for step in range(3):
      grads = jnp.asarray(normals(step, workers, n))
      total, on_mesh = program(
        jax.device_put(grads.reshape(-1), NamedSharding(mesh_of(workers), P("workers"))), on_mesh
      )
      totals, simulated = simulator(grads, simulated)
      np.testing.assert_array_equal(bits(total), bits(totals).reshape(-1))
      np.testing.assert_array_equal(bits(residuals_of(on_mesh, workers, n)), bits(residuals_of(simulated, workers, n)))


def check_messages(text, collective, workers, n):
  """The collective ops of the compiled program, those of all branches of its switches."""
  buffers = re.findall(r"(\w+)\[([\d,]*)\]\S* collective-permute(?:-start)?\(", text)
  reduces = re.findall(r"[fb]\w+\[([\d,]*)\]\S* all-reduce(?:-start)?\(", text)  # integers are agreements
  others = re.findall(r"\s(all-gather|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\(", text)
  assert not others
  assert all(dtype == "u32" for dtype, _ in buffers)
  itemsize = jnp.dtype(getattr(collective, "dtype", "float32")).itemsize
  sizes = [int(np.prod([int(d) for d in dims.split(",") if d])) for dims in reduces]
  dense = [all_reduce_cost(size, workers, itemsize) for size in sizes if size > 1]
  cost = count_jaxpr(schedule(collective, n, workers), workers, branch="every")
  if workers > 1:
    assert len(buffers) + sum(c.messages for c in dense) == cost.messages
    assert sum(int(dims) for _, dims in buffers) + sum(c.words for c in dense) == cost.words
