"""The laws on the path that users run: blocks so long that entries are selected among candidates.

Short rows are sorted. Of blocks of more than 16,384 entries a sample gives a threshold,
and the k largest are found among the candidates, the few entries that reach it; where
these are too few or too many, among all entries.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.select import exact
from jaxsparse.train import simulation
from tests.cases import (
  CONSERVING,
  FEWER,
  REPLICATING,
  Case,
  bits,
  each_case,
  integers,
  normals,
)
from tests.conformance_test import FLUSHED, mass, residuals_of

N, DENSITY = 36_000, 0.3  # blocks of 18,000, and messages of more than 4,096 values

BY_CANDIDATES = ("gaussiank", "gtopk", "micro", "oktopk", "spardl", "topka", "topkdsa")
"""They select the k largest entries; SparDL with selector="chunked" does not."""

# Each pair of a selector, a wire and a number of teams; chunked refuses teams.
COMBINED = [
  Case("spardl", (("selector", selector), ("wire", wire), ("teams", teams)))
  for selector, wires in (
    ("exact", ("f32", "bf16", "int8")),
    ("reuse", ("bf16", "int8", "f32")),
  )
  for teams, wire in enumerate(wires, 1)
] + [
  Case("spardl", (("selector", "chunked"), ("wire", wire), ("teams", 1)))
  for wire in ("f32", "bf16", "int8")
]


def workers_of(case):
  """Two in each team, of which there may be one; teams of one worker where there are many."""
  teams = dict(case.options).get("teams", 1)
  return 2 * teams if teams <= 3 else teams


def inputs(workers, n=N):
  """Gradients f32[P, n] by name."""
  normal, row, rank = normals(0, workers, n), normals(1, n), np.arange(workers)[:, None]
  signs = np.where(rank % 2, -1, 1) * np.where(rank < workers // 2 * 2, 1, 0.001)
  few = np.random.default_rng(200).choice(n, 200, replace=False)
  spikes = np.zeros((workers, n), np.float32)
  spikes[0, few], spikes[-1, few] = 1e30, -1e30 if workers > 1 else 1e30
  sparse = np.zeros((workers, n), np.float32)
  sparse[:, few] = normal[:, few]
  return {
    "normal": normal,
    "each a power of two, all tied": np.broadcast_to(2.0**rank, (workers, n)),
    "few values": integers(2, workers, n),
    "few entries": sparse,
    "few entries among negative zeros": np.where(sparse == 0, -0.0, sparse),
    "one block large": np.where(np.arange(n) < n // 2, 100 + normal, normal),
    "large at the end": np.where(np.arange(n) >= n - 900, 9.0, normal),
    "spikes that cancel": spikes + normal,
    "all that is selected cancels": signs * row,
    "cancels and is large again": np.where(rank == workers - 1, 5, signs) * row,
    "sorted": np.sort(normal),
    "falling": -np.sort(-np.abs(normal)),
    "equal but for the last bit": 1 + (normal > 0) * 2.0**-23,
    "denormal": normal * 1e-40,
  }


def program_of(collective):
  """`simulation.reduce_all`, traced anew: constants of the selection may have changed."""
  return jax.jit(functools.partial(simulation.reduce_all.__wrapped__, collective))


def two_steps(program, collective, grads):
  """(totals, state) after each of two steps, the second of which has the gradients of another worker."""
  state, found = simulation.initial(collective, *grads.shape), []
  for rows in (grads, grads[::-1]):
    totals, state = program(jnp.asarray(rows), state)
    found.append((totals, state))
  return found


def check_laws(case, grads, found):
  """Conservation and replication of two steps. An entry of one of `2**rank` that arrived twice would be mass, too."""
  workers = len(grads)
  before = mass(grads, found[0][1]) - mass(0 * grads, found[0][1])
  for totals, state in found:
    if case in CONSERVING or case in COMBINED:
      after = np.asarray(totals[0], np.float64) + mass(0 * grads, state)
      scale = np.maximum(np.abs(grads, dtype=np.float64).sum(0), np.abs(before))
      scale = scale if case.exact else np.max(scale)
      np.testing.assert_array_less(
        np.abs(after - before), 4 * workers * (case.rounding * scale + FLUSHED)
      )
    if case in REPLICATING or case in COMBINED:
      np.testing.assert_array_equal(
        bits(totals), bits(np.broadcast_to(totals[0], totals.shape))
      )
    assert not np.any(state.counters.skipped)
    before = mass(grads, state)


def check_not_a_number(collective, program, workers):
  """XLA's maximum of thousands of values drops a NaN on CPU, and no comparison with a threshold holds for one."""
  clean = normals(0, workers, N)
  _, state = program(jnp.asarray(clean), simulation.initial(collective, workers, N))
  ends = itertools.product((0, workers - 1), (0, N // 2 + 7, N - 1))
  infinities = [((0, N - 1), np.inf), ((workers - 1, 0), -np.inf)]
  for (worker, index), poison in [
    *((end, np.nan) for end in [*ends, (0, slice(None))]),
    *infinities,
  ]:
    bad = clean.copy()
    bad[worker, index] = poison
    totals, after = program(jnp.asarray(bad), state)
    assert np.all(after.counters.skipped), (worker, index, poison)
    assert not np.any(totals), (worker, index, poison)
    jax.tree.map(np.testing.assert_array_equal, after.carried, state.carried)
    assert np.isfinite(residuals_of(after, workers, N)).all()


# Every way to find candidates, and who bounds a total before it is there; other wires
# meet short gradients.
@each_case([*FEWER, *COMBINED], ["spardl-selector=chunked"])
def test_the_laws_of_long_gradients(case, monkeypatch, subtests):
  """All in one test, since they share a compiled program."""
  workers, collective = workers_of(case), case.make(density=DENSITY)
  program, grads = (
    program_of(collective),
    {name: x.astype(np.float32) for name, x in inputs(workers).items()},
  )
  with subtests.test("not a number anywhere skips the step everywhere"):
    check_not_a_number(collective, program, workers)
  found = {name: two_steps(program, collective, x) for name, x in grads.items()}
  for name, x in grads.items():
    with subtests.test("conservation and replication", input=name):
      check_laws(case, x, found[name])

  start = simulation.initial(collective, workers, N)
  text = program.lower(grads["normal"], start).as_text()
  # rows of any length are sorted, and no block has candidates
  monkeypatch.setattr(exact, "SHORT", 1 << 30)
  plain = program_of(collective)
  same = plain.lower(grads["normal"], start).as_text() == text
  with subtests.test("whether it selects among candidates here"):
    assert same == (case.name not in BY_CANDIDATES or "chunked" in str(case))
  # Noise of int8 belongs to the slots of a message, whose order is another one where
  # there are candidates. And where a worker of MiCRO has too few entries, others
  # deliver theirs at whichever zeros it selects.
  for name, x in (
    {} if same or "int8" in str(case) or case.name == "micro" else grads.items()
  ):
    with subtests.test("the bits of the plain path", input=name):
      jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b),
        found[name],
        two_steps(plain, collective, x),
      )
