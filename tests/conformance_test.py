"""The laws that every collective obeys, for every option it has and any number of workers.

A new file in jaxsparse/collectives/ is in these tables by existing. C is conservation,
R replication, 1 exactly once, W the wire; then come bit equality of simulator and mesh,
and behaviour on bad and extreme input.
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
from jaxsparse.collectives import _kinds, make_collective
from jaxsparse.collectives._base import choices_of
from jaxsparse.comm import agreement_messages, all_reduce_cost
from jaxsparse.costs.counting import count_jaxpr, schedule
from jaxsparse.select import exact
from jaxsparse.train import simulation
from tests.cases import (
  AS_USERS,
  CASES,
  CONSERVING,
  FEWER,
  REPLICATING,
  WORKERS,
  Case,
  assert_same_bits,
  each,
  each_case,
  integers,
  mesh_of,
  normals,
  row,
  update_program,
)

DENSITY = 0.2
FLUSHED = 2.0**-126  # smaller numbers are 0 on this hardware


def residuals_of(state, workers, n):
  kept = state.carried.residual[0]
  return (
    np.zeros((workers, n), np.float32)
    if kept is None
    else np.asarray(kept).reshape(workers, n)
  )


def mass(grads, state):
  """Σ_w (gradient + residual), in float64."""
  return np.asarray(grads, np.float64).sum(0) + residuals_of(
    state, *grads.shape
  ).astype(np.float64).sum(0)


def lost_in_three_steps(collective, workers, n):
  """f64[3, n]."""
  state, lost = simulation.initial(collective, workers, n), []
  for step in range(3):
    grads = integers(step, workers, n)
    before = mass(grads, state)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    lost.append(before - np.asarray(totals[0], np.float64) - mass(0 * grads, state))
  return np.array(lost)


def law_c_nothing_is_lost(case, collective, workers, n):
  atol = 0 if case.exact else 1e-3  # levels are not whole numbers
  np.testing.assert_allclose(
    lost_in_three_steps(collective, workers, n), np.zeros((3, n)), atol=atol
  )


def what_declares_to_lose_mass_loses_it(_, collective, workers, n):
  assert 1 in (workers, n) or np.any(lost_in_three_steps(collective, workers, n))


def law_r_every_worker_has_the_same_bits(_, collective, workers, n):
  state = simulation.initial(collective, workers, n)
  for step in range(3):
    totals, state = simulation.reduce_all(
      collective, jnp.asarray(normals(step, workers, n)), state
    )
    assert_same_bits(totals, np.broadcast_to(totals[0], totals.shape))
    for leaf in jax.tree.leaves(state.carried.shared[0]):
      np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))


def not_a_number_anywhere_skips_the_step_everywhere(_, collective, workers, n):
  state = simulation.initial(collective, workers, n)
  _, state = simulation.reduce_all(
    collective, jnp.asarray(normals(0, workers, n)), state
  )
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
    assert_same_bits(resumed, expected)
    assert not np.any(final.counters.skipped)
    assert np.all(final.counters.skipped_steps == 1)


def extreme_gradients_are_delivered_or_kept(case, collective, workers, n):
  giant = np.ones((workers, n), np.float32)
  giant[0, n // 2] = 2.0**100
  for grads in (
    0 * giant,
    -0.5 * np.ones_like(giant),
    giant,
    2.0**-120 * np.ones_like(giant),
  ):
    start = simulation.initial(collective, workers, n)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), start)
    assert np.isfinite(totals).all()
    if case in CONSERVING:
      exact = mass(grads, start)
      left = np.asarray(totals[0], np.float64) + mass(0 * grads, state)
      scale = np.abs(grads, dtype=np.float64).sum(0).max()
      assert np.all(
        np.abs(left - exact) <= workers * (4 * case.rounding * scale + FLUSHED)
      )
    if grads is giant and case.by_magnitude:
      assert totals[0, n // 2] == 2.0**100


def any_input_is_delivered_or_kept(case, collective, workers, n):
  """Two steps of what hypothesis draws; all examples run the same compiled program."""
  elements = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)

  @hypothesis.given(
    hypothesis.extra.numpy.arrays(np.float32, (2, workers, n), elements=elements)
  )
  @hypothesis.example(np.full((2, workers, n), 2.0**-125, np.float32))
  def holds(grads):
    state = simulation.initial(collective, workers, n)
    for step in grads:
      before = mass(step, state)
      scale = np.abs(step).sum(0) + np.abs(residuals_of(state, workers, n)).sum(0)
      totals, state = simulation.reduce_all(collective, jnp.asarray(step), state)
      after = np.asarray(totals[0], np.float64) + mass(0 * step, state)
      # Rounding to levels is relative to the norm and not to the entry, and each
      # product of a transform may be flushed.
      scale, flushed = (
        (scale, FLUSHED) if case.exact else (np.max(scale) * n, n * FLUSHED)
      )
      assert np.all(
        np.abs(after - before) <= workers * (case.rounding * scale + flushed)
      )
      assert_same_bits(totals, np.broadcast_to(totals[0], totals.shape))
      if case.name in ("spardl", "gtopk", "micro", "randomk"):
        # rounded up for each of P/d blocks
        assert np.count_nonzero(totals[0]) <= collective.entries(n) + workers

  holds()


def law_1_each_entry_arrives_exactly_once(case, collective, workers, n):
  """Where all entries are delivered."""
  grads = np.broadcast_to(
    2.0 ** np.arange(workers, dtype=np.float32)[:, None], (workers, n)
  )
  totals, state = simulation.reduce_all(
    collective, jnp.asarray(grads), simulation.initial(collective, workers, n)
  )
  expected = 2**workers - 1
  if "bfloat16" in str(case):  # 8 bits of mantissa
    expected = float(jnp.bfloat16(expected))
  np.testing.assert_array_equal(totals, np.full((workers, n), expected, np.float32))
  np.testing.assert_array_equal(residuals_of(state, workers, n), np.zeros((workers, n)))


def what_is_not_partial_keeps_no_entry_whole(_, collective, workers, n):
  """An entry that is kept as it is would still be in the momentum, as momentum correction masks none."""
  state = simulation.initial(collective, workers, n)
  one = jax.tree.map(lambda leaf: leaf[0], state)
  if collective.is_partial(n, one) is not False:
    return
  before = np.zeros((workers, n), np.float32)
  # In the second step the thresholds of the first one are too high.
  for grads in normals(0, workers, n), normals(1, workers, n) / 1000:
    _, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    after = residuals_of(state, workers, n)
    assert np.all(after != grads + before)
    before = after


LAWS = (
  law_c_nothing_is_lost,
  what_declares_to_lose_mass_loses_it,
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
  what_declares_to_lose_mass_loses_it: {str(case) for case in CASES} - LOSING,
  any_input_is_delivered_or_kept: LOSING,
  law_r_every_worker_has_the_same_bits: {"a2sgd", "a2sgd-means=leaf"},
  # rounding to 0 keeps an entry whole
  what_is_not_partial_keeps_no_entry_whole: {
    str(case) for case in CASES if not case.exact
  },
  law_1_each_entry_arrives_exactly_once: {
    str(case)
    for case in CASES
    if not case.exact or str(case) in ("a2sgd", "a2sgd-means=leaf", "rows-capacity=7")
  },
}
"""The cases for which a law does not hold, or of which rounding leaves nothing to compare (law 1)."""


def test_what_is_exempt_says_so():
  assert {str(case) for case in CASES if case not in CONSERVING} == LOSING
  assert {str(case) for case in CASES if case not in REPLICATING} == EXEMPT[
    law_r_every_worker_has_the_same_bits
  ]


def hold(laws, case, collective, workers, n, subtests):
  """Tests the laws of which the case is not exempt."""
  for law in laws:
    if str(case) not in EXEMPT.get(law, ()):
      with subtests.test(law.__name__):
        law(case, collective, workers, n)


# The tests of each collective compare the other choices with numpy.
@each(
  CASES,
  WORKERS[:-1],
  quick=[4],
  options="a2sgd|dense|qsgd|spardl-(teams=4|residual=local)|topka",
)
def test_the_laws(case, workers, subtests):
  """All in one test, since they share a compiled program, and compiling is what takes the time."""
  hold(
    LAWS,
    case,
    case.make(density=DENSITY).for_leaves(((5, 4), (10,))),
    workers,
    30,
    subtests,
  )


@each(
  CONSERVING,
  [6, 8],
  quick=[],
  options="spardl-wire=(f32|int4)",
)
def test_nothing_is_lost_of_blocks_that_are_searched_by_candidates(case, workers):
  """In messages of every format, after each exchange with other workers."""
  rows = workers * (exact.SHORT // 64 + 1)
  n = rows * 64
  collective = case.make(density=0.01).for_leaves(((rows, 64),))
  state = simulation.initial(collective, workers, n)
  for step in range(2):
    grads = normals(step, workers, n)
    before = mass(grads, state)
    totals, state = simulation.reduce_all(collective, jnp.asarray(grads), state)
    assert_same_bits(totals, np.broadcast_to(totals[0], totals.shape))
    after = np.asarray(totals[0], np.float64) + mass(0 * grads, state)
    # Magnitudes of sums of at most 8 normal numbers are below 32.
    np.testing.assert_allclose(after, before, atol=32 * case.rounding)


@each(CASES, [1, 2, 3, 5, 6, 8, 13], quick=[3], options="$")
def test_the_laws_where_everything_is_delivered(case, workers, subtests):
  """Also of fewer entries than workers, of which a share is rounded up to all."""
  laws = (
    law_1_each_entry_arrives_exactly_once,
    any_input_is_delivered_or_kept,
    what_is_not_partial_keeps_no_entry_whole,
  )
  if workers == 3:
    hold((laws[0], *LAWS), case, case.make(density=DENSITY), workers, 1, subtests)
  else:
    hold(laws, case, case.make(density=1.0), workers, 11, subtests)


@each(CASES, [*range(1, 17), 128], quick=[1, 6])
def test_law_w_the_schedule_costs_what_the_paper_says(case, workers):
  for n, k in ((1, 1), (96, 7), (1001, 1001)) if 1 < workers <= 16 else ((1000, 10),):
    side = math.isqrt(n)
    collective = case.make(k=k).for_leaves(((side, n // side), (n % side,)))
    counted = js.costs.count(collective, n=n, workers=workers)
    predicted = js.costs.predict(collective, n=n, workers=workers)
    assert counted.agreements == predicted.agreements
    if collective.traits.sizes_vary:
      assert all(was <= most for was, most in zip(counted, predicted, strict=True)), (
        counted,
        predicted,
      )
      if case.is_sparse and "wire" not in str(case):
        # of any sparse all-reduce in 32 bits (SparDL, §2)
        assert counted.words >= 2 * k * (workers - 1) / workers
    else:
      assert counted == predicted
    if workers == 1:
      assert counted == js.Cost(0, 0)


# All-reduces by which workers agree on sizes, boundaries or thresholds, in most steps.
AGREEMENTS = {
  "gaussiank": 1,
  "oktopk": 3,
  "oktopk-nudge=fixed": 2,
  "oktopk-nudge=none": 2,
  "oktopk-threshold_period=2-region_period=1": 4,  # boundaries in every step
  "rows": 1,
  "topkdsa": 2,
}


@each(CASES, [6, 8], quick=[6], options="oktopk-nudge=none|spardl-teams=3")
def test_law_w_agreements(case, workers):
  """Of all others none: what they agree on is in a message that they send anyway."""
  collective = case.make(k=7).for_leaves(((8, 12),))
  counted = js.costs.count(collective, n=96, workers=workers)
  expected = AGREEMENTS.get(str(case), AGREEMENTS.get(case.name, 0))
  assert counted.agreements == expected * agreement_messages(workers)


# Regions, blocks and messages end in the middle of each other, or beyond the vector.
ENDS = (1, 2, 31, 33, 520, 1000, 4095, 4097, 12_000, 32_769, 65_535, 70_000)


@pytest.mark.parametrize("name", js.collective_names())
@pytest.mark.parametrize(
  ("workers", "sizes"),
  [
    row(64, (520,), quick=True),
    *(row(workers, ENDS) for workers in (7, 64, 300)),
    *(row(workers, ENDS[1::2]) for workers in (2, 100, 256)),
  ],
)
def test_any_number_of_workers_and_entries(name, workers, sizes, subtests):
  """Traced only: shapes are all that could be wrong."""
  for n in sizes:
    with subtests.test(n=n):
      collective = Case(name).make(density=0.01).for_leaves(((n,),))
      traced = schedule(collective, n, workers)
      assert traced.outvars[0].aval.shape == (n,)
      counted = count_jaxpr(traced, workers)
      assert any(counted)
      assert counted.words <= js.costs.predict(collective, n=n, workers=workers).words


@each_case(CASES, ["a2sgd", "dense", "qsgd", "spardl"])
def test_the_state_keeps_its_types_under_x64(case):
  """Traced only: types are all that 64-bit mode could change."""
  workers, n = max(3, 2 * dict(case.options).get("teams", 1)), 300
  collective = case.make(density=0.1)
  describe = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
  grads = jax.ShapeDtypeStruct((workers, n), jnp.float32)
  with jax.enable_x64(False):
    expected = describe(
      jax.eval_shape(lambda: simulation.initial(collective, workers, n))
    )
  with jax.enable_x64(True):
    state = jax.eval_shape(lambda: simulation.initial(collective, workers, n))
    totals, after = jax.eval_shape(
      functools.partial(simulation.reduce_all, collective), grads, state
    )
  assert totals.dtype == jnp.float32
  assert describe(state) == expected
  assert describe(after) == expected


@pytest.mark.parametrize("name", js.collective_names())
def test_options_outside_their_choices_are_refused(name):
  kind = _kinds()[name]
  wrong = [(option, "other", "choose one of ") for option in choices_of(kind)]
  for option, low, high in kind.ranges:
    bad = (low - 1, low + 0.5, True, *([high + 1] if high else []))
    wrong += [(option, value, f"choose a whole number from {low} ") for value in bad]
  for option, value, message in wrong:
    with pytest.raises(ValueError, match=f"{name}: {option}={value!r}, {message}"):
      make_collective(name, **Case(name).config(density=0.1), **{option: value})


@pytest.mark.long
def test_oktopk_gives_the_same_under_x64():
  """Its thresholds, counts and regions are compared, added up and divided."""
  totals = []
  for wide in (False, True):
    with jax.enable_x64(wide):
      state = None
      for step in range(3):
        out = js.simulate("oktopk", normals(step, 3, 200), state=state, k=20)
        state = out.state
      totals.append(out.total)
  assert_same_bits(*totals)


# engines_test.py compares the bits of all; these send all kinds of messages.
@each_case(FEWER, ["dense", "topka"])
def test_the_mesh_sends_these_messages_and_agrees_with_the_simulator_bit_for_bit(
  case, subtests
):
  n, k, workers = 103, 13, case.workers([6, 8, 5])[0]
  collective, simulated = case.make(k=k), simulation.initial(case.make(k=k), workers, n)
  tx = js.make_transform(case.name, "workers", **case.config(k=k))
  on_mesh, rows = (
    js.init(tx, jnp.zeros(n), mesh_of(workers)),
    jax.ShapeDtypeStruct((workers, n), jnp.float32),
  )
  program = update_program(tx, on_mesh, workers).lower(rows, on_mesh).compile(AS_USERS)
  simulator = simulation.reduce_all.lower(collective, rows, simulated).compile(AS_USERS)
  with subtests.test("the compiler keeps the messages as they are (law W)"):
    check_messages(program.as_text(), collective, workers, n)
  with subtests.test("bit equality"):
    for step in range(3):
      grads = jnp.asarray(normals(step, workers, n))
      sharded = jax.device_put(grads, NamedSharding(mesh_of(workers), P("workers")))
      updates, on_mesh = program(sharded, on_mesh)
      totals, simulated = simulator(grads, simulated)
      # steps of blocks are divided, and not the entries that are multiples of them
      if case.name == "nbit":
        np.testing.assert_array_max_ulp(
          np.asarray(updates), np.asarray(mean(totals, workers))
        )
      else:
        assert_same_bits(updates, mean(totals, workers))
      assert_same_bits(
        residuals_of(on_mesh, workers, n), residuals_of(simulated, workers, n)
      )


# by a constant, as in the update
mean = jax.jit(lambda total, workers: total / workers, static_argnums=1)


def check_messages(text, collective, workers, n):
  """The collective ops of the compiled program, those of all branches of its switches."""
  buffers = re.findall(r"(\w+)\[([\d,]*)\]\S* collective-permute(?:-start)?\(", text)
  # An all-to-all has a result for each worker, the one for itself is no message.
  for results in re.findall(r"= \(?(.*?)\)? all-to-all(?:-start)?\(", text):
    buffers += re.findall(r"(\w+)\[1,(\d+)\]", results)[1:]
  # Integers are agreements.
  reduces = re.findall(r"[fb]\w+\[([\d,]*)\]\S* all-reduce(?:-start)?\(", text)
  others = re.findall(
    r"\s(all-gather|reduce-scatter|collective-broadcast)(?:-start)?\(", text
  )
  assert not others
  assert all(dtype == "u32" for dtype, _ in buffers)
  itemsize = jnp.dtype(getattr(collective, "dtype", "float32")).itemsize
  sizes = [int(np.prod([int(d) for d in dims.split(",") if d])) for dims in reduces]
  dense = [all_reduce_cost(size, workers, itemsize) for size in sizes if size > 1]
  cost = count_jaxpr(schedule(collective, n, workers), workers, branch="every")
  if workers > 1:
    assert len(buffers) + sum(c.messages for c in dense) == cost.messages
    assert (
      sum(int(dims) for _, dims in buffers) + sum(c.words for c in dense) == cost.words
    )
