"""What states of collectives and wrappers mean when workers leave, join, are replaced, or are others than before.

For each of them, over rounds and `js.resize`:

- of what conserves, updates and residuals add up to what was given, whoever is there;
- updates end when nothing more is given: nobody goes on moving parameters by what
  somebody once gave;
- what adds up what each worker gave last (`tracks_workers`) is refused in rounds.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.transform import state as states
from tests.cases import FEWER, linear, quick_of
from tests.partial.outer_step_test import PARAMS, N, Team, flat, trees

KINDS = {
  str(case): lambda comm, case=case: js.make_transform(
    case.name, comm, **case.config(density=0.5)
  )
  for case in FEWER
  if case.make(density=0.5).traits.replicates and "teams" not in str(case)
}
KINDS |= {
  "momentum_corrected": lambda comm: js.momentum_corrected(
    js.make_transform("topka", comm, density=0.5), 0.5
  ),
  "warmed_up": lambda comm: js.warmed_up(
    js.make_transform("topka", comm, density=0.25), {4: 0.5}
  ),
  "special": lambda comm: js.dense_transform(comm, special={"w": "topka:density=0.5"}),
  "ef21": lambda comm: js.ef21(js.onebit_transform(comm)),
}
# what a group has before and after: the members of rounds
EVENTS = {
  "leave": [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2)],
  "join": [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2)],
  "replace": [(0, 1), (0, 1), (0, 2), (0, 2)],
}
QUICK = [
  ("onebit", "leave"),
  *itertools.product(("ef21",), EVENTS),
  ("ef21", 2),
]
ROUNDS = 24  # in which nothing is given


def collectives_of(make):
  comm = js.SimComm("workers", members=2)
  first = js.init(make(comm), PARAMS, comm)
  return [one for node in states.reduce_states(first) for one in node.collectives]


def conserves(make):
  """Exactly: dense of bfloat16 rounds the total."""
  found = [one.traits for one in collectives_of(make)]
  return all(one.conserves and one.decay == 1 and not one.rounds for one in found)


def tracks(make):
  return any(one.traits.tracks_workers for one in collectives_of(make))


@pytest.mark.parametrize(
  ("kind", "event"), quick_of(itertools.product(KINDS, EVENTS), quick=QUICK)
)
def test_a_round_moves_the_anchor_by_what_was_given_and_by_nothing_else(kind, event):
  make, rounds = KINDS[kind], EVENTS[event]
  team = Team(lambda comm: optax.chain(make(comm), optax.sgd(1.0)), workers=3)
  if tracks(make):
    with pytest.raises(ValueError, match="outer has .* adds up what each worker has"):
      team.steps[0].chain_digest(team.anchors[0])
    return
  here, content, given = set(), None, np.zeros(N)
  zeros = [jax.tree.map(np.zeros_like, PARAMS)] * 3
  for number, members in enumerate([*rounds, *[rounds[-1]] * ROUNDS]):
    for worker in here - set(members):  # it leaves, and one that stays is its heir
      heir, left = members[0], team.steps[worker].residual(team.anchors[worker])
      team.anchors[heir] = team.steps[heir].add_residual(team.anchors[heir], left)
      team.anchors[worker] = team.steps[worker].add_residual(
        team.anchors[worker], -left
      )
    for worker in set(members) - here if content else ():
      team.catch_up(worker, content)
    here, before = set(members), team.flat(members[0]) if content else flat(PARAMS)
    rows = trees(number, 3) if number < len(rounds) else zeros
    content = team.round(members, rows)
    given += sum(flat(rows[worker]) for worker in members) / len(members)
    last = np.abs(team.flat(members[0]) - before).max()
  if not conserves(make):
    assert last < 1e-2
  else:
    moved = flat(PARAMS).astype(np.float64) - team.flat(rounds[-1][0])
    np.testing.assert_allclose(moved + team.residuals(), given, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
  ("kind", "after"), quick_of(itertools.product(KINDS, [2, 3, 4]), quick=QUICK)
)
def test_a_state_of_other_workers_moves_parameters_by_what_is_owed_and_by_nothing_else(
  kind, after
):
  make, before = KINDS[kind], js.SimComm("workers", members=3)
  chain = lambda comm: optax.chain(make(comm), optax.sgd(1.0))
  params = jax.tree.map(jnp.asarray, PARAMS)
  update = js.make_train_step(linear, chain(before), before, donate=False)
  state = js.init(chain(before), params, before)
  rows = [np.stack([flat(tree) for tree in trees(seed, 3)]) for seed in range(3)]
  for batch in rows:
    params, state, _ = update(params, state, batch)
  comm = js.SimComm("workers", members=after)
  state = js.resize(state, params, comm)
  (node,) = states.reduce_states(state)
  update = js.make_train_step(linear, chain(comm), comm, donate=False)
  start, owed = flat(params), owes(node, after)
  for _ in range(ROUNDS):
    was = flat(params)
    params, state, _ = update(params, state, np.zeros((after, N), np.float32))
  (node,) = states.reduce_states(state)
  if tracks(make):
    assert after == 3 or not np.any(flat(params) - start)
  elif not conserves(make):
    assert np.abs(flat(params) - was).max() < 1e-2
  else:
    np.testing.assert_allclose(
      start - flat(params) + owes(node, after), owed, rtol=1e-4, atol=2e-5
    )


def owes(node, workers):
  """Σ r / P, in the order of the parameters."""
  owed = np.zeros(N)
  method = node.layout.method
  ends = np.cumsum([np.prod(shape, dtype=int) for shape in method.shapes])
  leaves = [*map(slice, [0, *ends[:-1]], ends)]
  for group, residual in zip(method.groups, node.carried.residual, strict=True):
    if residual is not None:
      mean = np.asarray(residual, np.float64).reshape(workers, -1).mean(axis=0)
      entries = np.concatenate([np.arange(N)[leaves[leaf]] for leaf in group.leaves])
      owed[entries] = mean[: entries.size]
  return owed
