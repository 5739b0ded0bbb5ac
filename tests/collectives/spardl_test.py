"""SparDL against the paper, written out in numpy, and against what the authors' implementation gives."""

import pathlib

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse.costs.counting import schedule
from tests.cases import WORKERS, bits, check_steps, normals, quick_of, row
from tests.reference import spardl_options as options
from tests.reference.spardl import spardl

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "spardl_golden.npz")


def test_equals_the_authors_results_bit_for_bit():
  state = None
  for step, grads in enumerate(GOLDEN["gradients"]):
    out = js.simulate("spardl", grads, state=state, k=96)
    state = out.state
    np.testing.assert_array_equal(
      bits(np.asarray(out.total) / np.float32(6)), bits(GOLDEN["result"][step])
    )
    np.testing.assert_array_equal(bits(out.residuals), bits(GOLDEN["residual"][step]))


@pytest.mark.parametrize(
  ("workers", "n", "k"),
  [
    *(row(workers, 50, 9, quick=workers == 3) for workers in WORKERS),
    *(
      row(workers, n, k, quick=workers * k in (2, 3))
      for workers in (1, 3, 8)
      for n, k in ((1, 1), (4, 2), (50, 50))
    ),
  ],
)
def test_equals_the_paper_in_numpy(workers, n, k):
  check_steps(
    "spardl", normals(0, 3, workers, n), lambda grads, left: spardl(grads, left, k), k=k
  )


def test_partial_residuals_worked_by_hand():
  """The second worker has entry 1 too, which is delivered of the first one alone, and keeps its own (§4.1.3)."""
  out = js.simulate(
    "spardl", np.float32([[9, 1, 0, 0], [2, 3, 0, 0]]), k=2, residual="partial"
  )
  np.testing.assert_array_equal(out.residuals, [[0, 1, 0, 0], [2, 3, 0, 0]])


@pytest.mark.parametrize(
  ("workers", "kind"),
  quick_of([(3, "partial"), (6, "partial"), (6, "local")], quick=[(3, "partial")]),
)
def test_the_ablations_of_the_paper_equal_numpy(workers, kind):
  reference = lambda grads, left: options.spardl(grads, left, 9, kind)
  check_steps("spardl", normals(0, 3, workers, 50), reference, k=9, residual=kind)


@pytest.mark.parametrize(
  ("workers", "n", "k", "selector", "wire"),
  [
    row(
      *sizes,
      selector,
      wire,
      quick=(sizes[0], selector, wire)
      in ((6, "chunked", "bf16"), (3, "reuse", "bf16")),
    )
    for sizes in ((1, 50, 9), (3, 50, 9), (6, 70, 30))
    for selector in ("exact", "chunked", "reuse")
    for wire in ("f32", "bf16")
  ],
)
def test_selectors_and_a_rounding_wire_equal_numpy(workers, n, k, selector, wire):
  share = -(-k // workers)
  rounded = (
    (lambda value: value)
    if wire == "f32"
    else lambda value: value.astype(jnp.bfloat16).astype(np.float32)
  )
  reuse = options.Reusing(share, workers)

  def reference(grads, left):
    if selector == "chunked":
      chunked = options.Chunked(share, grads + left, workers)
      return options.spardl(
        grads,
        left,
        k,
        choose=chunked.choose,
        rounded=rounded,
        received=chunked.received,
      )
    return options.spardl(
      grads, left, k, choose=reuse if selector == "reuse" else None, rounded=rounded
    )

  out = check_steps(
    "spardl", normals(0, 5, workers, n), reference, k=k, selector=selector, wire=wire
  )
  if selector == "reuse":
    by_row = (np.arange(workers)[:, None] + np.arange(workers)) % workers
    bounds = np.reshape(out.state.carried.worker[0].bounds, (workers, workers))
    np.testing.assert_allclose(
      bounds, np.take_along_axis(reuse.bounds, by_row, 1), rtol=1e-6
    )


@pytest.mark.long
@hypothesis.given(
  shape=st.sampled_from([(2, 5, 1), (6, 30, 9), (9, 20, 20)]),
  seed=st.integers(0, 2**32 - 1),
  least=st.sampled_from([-2, 0]),
)
def test_equals_the_paper_with_ties(shape, seed, least):
  """Few distinct values: what is selected depends on the rule for ties, everywhere."""
  workers, n, k = shape
  grads = (
    np.random.default_rng(seed).integers(least, 3, (workers, n)).astype(np.float32)
  )
  check_steps("spardl", grads[None], lambda grads, left: spardl(grads, left, k), k=k)


TEAMS = [
  *(
    (workers, teams, "auto", 70, 24)
    for workers, teams in ((2, 2), (6, 2), (6, 3), (6, 6), (8, 4), (8, 8), (15, 5))
  ),
  *((workers, teams, "bruck", 70, 24) for workers, teams in ((6, 2), (8, 4), (8, 8))),
  *((workers, teams, "auto", 7, 3) for workers, teams in ((6, 2), (15, 5))),
]


@pytest.mark.parametrize(
  ("workers", "teams", "sag", "n", "k"),
  quick_of(TEAMS, quick=[(6, 2, "bruck", 70, 24)]),
)
def test_teams_equal_the_paper_in_numpy(workers, teams, sag, n, k):
  bruck = sag == "bruck" or teams & (teams - 1) > 0
  adaptive = options.first_h(k, workers, teams)

  def reference(grads, left):
    nonlocal adaptive
    totals, left, adaptive = options.teams(grads, left, k, teams, bruck, adaptive)
    return totals, left

  out = check_steps(
    "spardl", normals(0, 6, workers, n), reference, k=k, teams=teams, sag=sag
  )
  assert (
    int(out.metrics.merged) > 0
  ) == bruck  # only B-SAG counts the indices of a sum
  if bruck:
    assert (
      tuple(int(value[0]) for value in out.state.carried.shared[0].adaptive) == adaptive
    )


@pytest.mark.long
def test_h_grows_where_teams_agree_and_shrinks_where_they_do_not():
  """Algorithm 2: about L different indices are to come together."""
  same = np.tile(normals(0, 1, 1200), (6, 1))
  apart = np.zeros((6, 1200), np.float32)
  for worker in range(6):
    apart[worker, worker::6] = 1 + normals(worker, 200) ** 2
  for grads, h, merged in ((same, 40, 40), (apart, 14, 42)):
    state = None
    for _ in range(40):
      # L = 40 in two blocks, h = 14 … 40
      out = js.simulate("spardl", grads, state=state, k=80, teams=3)
      state = out.state
    assert abs(int(state.carried.shared[0].adaptive.h[0]) - h) <= 2
    assert abs(int(out.metrics.merged) - merged) <= 4


@pytest.mark.long
def test_the_wire_shrinks_with_h():
  grads = np.tile(normals(0, 1, 1200), (6, 1))
  first = js.simulate("spardl", grads, k=80, teams=3)
  most = js.costs.predict("spardl", n=1200, workers=6, k=80, teams=3).words
  # L there, h from two teams, L and N back
  assert int(first.metrics.words_sent) == 2 * (40 + 2 * 14 + 40) + 1
  assert most == 2 * (40 + 2 * 40 + 40) + 1


def test_teams_that_do_not_fit():
  with pytest.raises(
    ValueError,
    match=r"teams=4 does not divide the 6 workers, choose one of \[1, 2, 3, 6\]",
  ):
    js.simulate("spardl", normals(0, 6, 20), k=3, teams=4)
  with pytest.raises(
    ValueError, match="sag='recursive' with teams=3, choose a power of two"
  ):
    js.spardl_transform("workers", k=3, teams=3, sag="recursive")
  with pytest.raises(
    ValueError,
    match="selector='chunked' with teams=2: .*, choose teams=1, or another selector",
  ):
    js.spardl_transform("workers", k=3, teams=2, selector="chunked")


def test_the_schedule_compiles_as_fast_for_many_workers():
  """A round is a few operations on rows, whatever the number of rows: the program grows with log P."""
  size = {}
  for workers in (16, 256):
    jaxpr = schedule(js.make_collective("spardl", density=0.01), 10_000, workers)
    size[workers] = len(str(jaxpr).split(" = "))
  assert size[256] < 2.5 * size[16]


@pytest.mark.parametrize("spike", [1e2, 1e8, 3.3e38])
def test_a_reused_threshold_recovers_from_a_spike(spike):
  """One batch with k giant entries raises the thresholds far above all that follows."""
  workers, n, k = 2, 400, 20
  state, selected, skipped = None, [], []
  for step in range(8):
    grads = normals(step, workers, n)
    if step == 2:
      grads = np.zeros_like(grads)
      grads[:, ::20] = np.where(np.arange(20) % 2, 1, -1) * np.float32(spike) / workers
    out = js.simulate("spardl", grads, state=state, k=k, selector="reuse")
    state = out.state
    selected.append(int(out.metrics.selected))
    skipped.append(bool(out.metrics.skipped))
    assert np.isfinite(state.carried.worker[0].bounds).all()
  assert not any(skipped)
  assert min(selected[5:]) > k / 2
