"""The laws that every collective obeys, for every option it has and any number of workers.

A new file in jaxsparse/collectives/ is in these tables by existing. C is conservation, R replication, 1 exactly once, W
the wire; then come bit equality of simulator and mesh, and behaviour on bad and extreme input.
"""

import functools
import re

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import _compat, simulation
from jaxsparse.comm import AxisComm
from jaxsparse.transform import init_state, reduce_step
from tests.cases import CASES, CONSERVING, WORKERS, bits, integers, mesh_of, normals

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_conserving = pytest.mark.parametrize("case", CONSERVING, ids=str)
each_size = pytest.mark.parametrize("workers", WORKERS)


def residuals_of(state, workers, n):
  kept = state.carried.residual
  return np.zeros((workers, n), np.float32) if kept is None else np.asarray(kept).reshape(workers, n)


def mass(grads, state):
  """Σ_w (gradient + residual), in float64."""
  return np.asarray(grads, np.float64).sum(0) + residuals_of(state, *grads.shape).astype(np.float64).sum(0)


@each_conserving
@each_size
@pytest.mark.parametrize("n", [1, 11, 48])
def test_law_c_nothing_is_lost(case, workers, n):
  collective = case.make(density=0.2)
  state = simulation.initial(collective, workers, n)
  for step in range(3):
    grads = integers(step, workers, n)
    before = mass(grads, state)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    np.testing.assert_array_equal(before, np.asarray(totals[0], np.float64) + mass(0 * grads, state))


@pytest.mark.parametrize("case", [case for case in CASES if case not in CONSERVING], ids=str)
def test_what_declares_to_lose_mass_loses_it(case):
  collective = case.make(density=0.1)
  state = simulation.initial(collective, 6, 60)
  grads = integers(0, 6, 60)
  totals, after = simulation.reduce_all(collective, jnp.asarray(grads), state)
  assert np.any(mass(grads, state) != np.asarray(totals[0]) + mass(0 * grads, after))


@each_case
@each_size
def test_law_r_every_worker_has_the_same_bits(case, workers):
  collective = case.make(density=0.2)
  state = simulation.initial(collective, workers, 41)
  for step in range(3):
    totals, state = simulation.reduce_all(collective, jnp.asarray(normals(step, workers, 41)), state)
    np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))


@each_case
@each_size
@pytest.mark.parametrize("n", [3, 20])
def test_law_1_each_entry_arrives_exactly_once(case, workers, n):
  grads = np.broadcast_to(2.0 ** np.arange(workers, dtype=np.float32)[:, None], (workers, n))
  out = js.simulate(case.name, grads, **case.config(k=n))
  expected = 2**workers - 1
  if "bfloat16" in str(case):  # 8 bits of mantissa
    expected = float(jnp.bfloat16(expected))
  np.testing.assert_array_equal(out.total, np.full(n, expected, np.float32))
  np.testing.assert_array_equal(out.residuals, np.zeros((workers, n)))


@each_case
@pytest.mark.parametrize("workers", [*range(1, 17), 128])
def test_law_w_the_schedule_costs_what_the_paper_says(case, workers):
  for n, k in ((1, 1), (96, 7), (1000, 10), (1001, 1001)):
    counted = js.costs.count(case.name, n=n, workers=workers, **case.config(k=k))
    predicted = js.costs.predict(case.name, n=n, workers=workers, **case.config(k=k))
    assert counted == predicted
    if workers == 1:
      assert counted.messages == counted.words == 0


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


@each_case
@each_size
def test_law_w_the_compiler_keeps_the_messages_as_they_are(case, workers):
  n, k = 1001, 13
  collective = case.make(k=k)
  grads = jnp.asarray(normals(0, workers, n).reshape(-1))
  text = worker_program(collective, workers).lower(grads, mesh_state(collective, workers, n)).compile().as_text()
  buffers = re.findall(r"(\w+)\[([\d,]*)\]\S* collective-permute(?:-start)?\(", text)
  reduces = re.findall(r"(\w+)\[([\d,]*)\]\S* all-reduce(?:-start)?\(", text)
  others = re.findall(r"\s(all-gather|all-to-all|reduce-scatter|collective-broadcast)(?:-start)?\(", text)
  assert not others
  assert all(dtype == "u32" for dtype, _ in buffers)
  sizes = [int(np.prod([int(d) for d in dims.split(",") if d])) for _, dims in reduces]
  dense = [js.costs.all_reduce_cost(size, workers, jnp.dtype(collective.dtype).itemsize) for size in sizes if size > 1]
  cost = js.costs.count(case.name, n=n, workers=workers, **case.config(k=k))
  if workers > 1:
    assert len(buffers) + sum(c.messages for c in dense) == cost.messages
    assert sum(int(dims) for _, dims in buffers) + sum(c.words for c in dense) == cost.words


@each_case
@each_size
def test_the_mesh_and_the_simulator_agree_bit_for_bit(case, workers):
  n = 37
  collective = case.make(density=0.15)
  on_mesh, simulated = mesh_state(collective, workers, n), simulation.initial(collective, workers, n)
  program = worker_program(collective, workers)
  for step in range(3):
    grads = jnp.asarray(normals(step, workers, n))
    total, on_mesh = program(grads.reshape(-1), on_mesh)
    totals, simulated = simulation.reduce_all(collective, grads, simulated)
    np.testing.assert_array_equal(bits(total), bits(totals).reshape(-1))
    np.testing.assert_array_equal(bits(residuals_of(on_mesh, workers, n)), bits(residuals_of(simulated, workers, n)))


@each_case
@each_size
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_not_a_number_anywhere_skips_the_step_everywhere(case, workers, poison):
  n = 29
  collective = case.make(density=0.1)
  state = simulation.initial(collective, workers, n)
  _, state = simulation.reduce_all(collective, jnp.asarray(normals(0, workers, n)), state)
  bad = normals(1, workers, n)
  bad[workers // 2, n - 2] = poison
  totals, after = simulation.reduce_all(collective, jnp.asarray(bad), state)
  np.testing.assert_array_equal(totals, np.zeros((workers, n)))
  jax.tree.map(np.testing.assert_array_equal, after.carried, state.carried)
  assert np.all(after.counters.skipped)
  assert np.all(after.counters.skipped_steps == 1)
  clean = jnp.asarray(normals(2, workers, n))
  resumed, final = simulation.reduce_all(collective, clean, after)
  expected, _ = simulation.reduce_all(collective, clean, state)
  np.testing.assert_array_equal(bits(resumed), bits(expected))
  assert not np.any(final.counters.skipped)
  assert np.all(final.counters.skipped_steps == 1)


@each_case
@each_size
@pytest.mark.parametrize("kind", ["zeros", "equal", "giant", "tiny"])
@pytest.mark.parametrize("n", [1, 5, 30])
def test_extreme_gradients(case, workers, kind, n):
  grads = np.zeros((workers, n), np.float32)
  if kind == "equal":
    grads[:] = -0.5
  elif kind == "giant":
    grads[:] = 1
    grads[0, n // 2] = 2.0**100
  elif kind == "tiny":
    grads[:] = 2.0**-120
  out = js.simulate(case.name, grads, **case.config(density=0.1))
  assert np.isfinite(out.total).all()
  if case in CONSERVING:
    left = np.asarray(out.residuals, np.float64).sum(0)
    exact = np.asarray(grads, np.float64).sum(0)
    np.testing.assert_allclose(
      np.asarray(out.total, np.float64) + left, exact, rtol=2**-7 if "bf" in str(case) else 1e-6
    )
  if kind == "giant":
    assert out.total[n // 2] == 2.0**100


gradients = st.integers(1, 9).flatmap(
  lambda workers: st.integers(1, 24).flatmap(
    lambda n: hypothesis.extra.numpy.arrays(
      np.float32, (2, workers, n), elements=st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
    )
  )
)


@each_conserving
@hypothesis.given(grads=gradients, density=st.floats(0.001, 1.0))
def test_the_laws_hold_for_any_input(case, grads, density):
  _, workers, n = grads.shape
  collective = case.make(density=density)
  state = simulation.initial(collective, workers, n)
  for step in grads:
    before = mass(step, state)
    scale = np.abs(step).sum(0) + np.abs(residuals_of(state, workers, n)).sum(0)
    totals, state = simulation.reduce_all(collective, jnp.asarray(step), state)
    after = np.asarray(totals[0], np.float64) + mass(0 * step, state)
    rounding = workers * (2.0**-8 if "bfloat16" in str(case) else 2.0**-22)
    assert np.all(np.abs(after - before) <= rounding * scale)
    np.testing.assert_array_equal(bits(totals), bits(np.broadcast_to(totals[0], totals.shape)))
    if case.is_sparse:
      k = collective.entries(n)
      assert np.count_nonzero(totals[0]) <= max(k, 1) + workers  # ⌈k/P⌉ for each of P blocks
