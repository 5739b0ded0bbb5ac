"""Groups of leaves: which collective each leaf has, their k, their order, and `special=` on a plain transform."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.transform.groups import Bundle, assign_collectives, groups_of, split_k
from tests.cases import bits, integers, mesh_of, normals, update_program

WORKERS = 3
SPECIAL = {"bias": "dense", "embedding": "topka:density=0.5"}


def params_of():
  return {
    "bias": jnp.zeros(3),
    "embedding": jnp.asarray(normals(1, 6, 4)),
    "none": jnp.zeros((0, 2)),
    "w": [jnp.asarray(normals(2, 8, 5)), jnp.asarray(normals(3, 5, 3))],
  }


program_of = functools.partial(update_program, workers=WORKERS)


def grads_of(seed, make=integers):
  return jax.tree.map(lambda p: jnp.asarray(make(seed + p.size, WORKERS, *p.shape)), params_of())


@hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 400))
def test_k_is_shared_out_in_proportion(sizes, more):
  k = min(len(sizes) + more, sum(sizes))
  shares = [one.k for one in split_k(js.make_collective("topka", k=k), sizes)]
  assert sum(shares) == k
  rest, free = k - len(sizes), max(1, sum(sizes) - len(sizes))
  for share, size in zip(shares, sizes, strict=True):
    assert 1 <= share <= size
    assert abs(share - 1 - rest * (size - 1) / free) <= 1


def test_k_of_special_leaves_is_theirs_together():
  """The k of an expression is shared out over its groups, and is not that of the default, though both are equal."""
  bundles = [Bundle((leaf,), leaf) for leaf in range(5)]
  special = {"bias": "dense", "0|embedding": "topka:k=12"}
  made = groups_of(params_of(), assign_collectives(js.make_collective("topka", k=12), special), bundles)
  k = {group.leaves: getattr(group.collective, "k", None) for group in made}
  assert k == {(0,): None, (1,): k[1,], (3,): 12 - k[1,], (4,): 12}
  assert 0 < k[1,] < 12


def test_the_first_expression_that_matches_counts():
  names = ["['a'][0]", "['a'][1]", "['b']"]
  made = assign_collectives(
    js.make_collective("spardl", density=0.1), {"0": "dense", "0|1": "topka:density=0.5", "a": "dense"}
  )
  assert [made.collectives[number].name for number in made.numbers(names)] == ["dense", "topka", "spardl"]


def test_a_bundle_becomes_a_group_for_each_of_its_collectives_one_after_the_other():
  assignment = assign_collectives(js.make_collective("spardl", density=0.1), SPECIAL)
  made = groups_of(params_of(), assignment)
  assert [(group.leaves, group.entries, group.collective.name, group.after) for group in made] == [
    ((0,), 3, "dense", ()),
    ((1,), 24, "topka", (0,)),
    ((3, 4), 55, "spardl", (1,)),
  ]


@hypothesis.given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=8))
def test_each_group_follows_all_that_its_bundle_waits_for_perhaps_through_others(drawn):
  """Bundles of a weight, some with a bias too, which is a group of its own; each waits for some of the first ones."""
  names, bundles, bundle_of = [], [], []
  for number, (after, with_bias) in enumerate(drawn):
    start = len(names)
    names += ["bias", "weight"] if with_bias else ["weight"]
    bundle_of += [number] * (len(names) - start)
    bundles.append(Bundle(tuple(range(start, len(names))), min(after, number)))
  special = {"bias": "dense"} if "bias" in names else {}
  tree = [{name: np.ones(1, np.float32)} for name in names]
  made = groups_of(tree, assign_collectives(js.make_collective("topka", density=1.0), special), bundles)
  follows = []
  for number, group in enumerate(made):
    assert group.leaves == (number,)
    follows.append(set(group.after).union(*(follows[before] for before in group.after)))
    first = bundles[bundle_of[number]].after
    waits = {n for n in range(number) if bundle_of[n] < first or bundle_of[n] == bundle_of[number]}
    assert follows[number] == waits.union(*(follows[before] for before in waits))


@pytest.fixture(scope="module")
def special():
  """A transform with `special=`, its state, and its program, which takes long to compile."""
  tx = js.topka_transform("workers", special=SPECIAL, density=0.1)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  return tx, state, program_of(tx, state)


def test_special_leaves_conserve_and_replicate_and_have_residuals_of_their_own(special):
  _, state, program = special
  assert [residual if residual is None else residual.size for residual in state.carried.residual] == [None, 72, 165]
  sent = given = 0.0
  for step in range(3):
    grads = grads_of(step)
    updates, state = program(grads, state)
    for leaf in jax.tree.leaves(updates):
      assert (bits(leaf) == bits(leaf)[:1]).all()
      sent += WORKERS * np.asarray(leaf[0], np.float64).sum()
    given += sum(float(leaf.sum()) for leaf in jax.tree.leaves(grads))
    np.testing.assert_allclose(updates["bias"][0], grads["bias"].mean(0), rtol=1e-6)
  pending = sum(float(leaf.sum()) for leaf in jax.tree.leaves(state.carried.residual))
  assert pending
  assert sent + pending == pytest.approx(given, abs=1e-3)


@pytest.mark.parametrize("leaf", ["bias", "embedding"])
def test_a_nan_in_one_group_skips_the_step_of_all(special, leaf):
  _, state, program = special
  _, state = program(grads_of(3), state)
  grads = grads_of(4)
  grads[leaf] = grads[leaf].at[1, 0].set(jnp.nan)
  updates, after = program(grads, state)
  assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
  chex.assert_trees_all_equal(after.carried, state.carried)
  assert js.metrics(after).skipped
  updates, after = program(grads_of(5), after)
  assert any(leaf.any() for leaf in jax.tree.leaves(updates))
  assert int(js.metrics(after).skipped_steps) == 1


def test_special_equals_a_plan_of_one_group(special):
  _, state, program = special
  sizes = [4 * leaf.size for leaf in jax.tree.leaves(params_of())]
  plan = js.overlap.plan("single", [1.0] * len(sizes), sizes, alpha=0.4, beta=1e-3, gamma=1.3)
  tx = js.bucketed_transform("topka", "workers", plan=plan, special=SPECIAL, density=0.1)
  other = js.init(tx, params_of(), mesh_of(WORKERS))
  bucketed = program_of(tx, other)
  for step in range(2):
    got, state = program(grads_of(step, normals), state)
    expected, other = bucketed(grads_of(step, normals), other)
    chex.assert_trees_all_equal(jax.tree.map(bits, got), jax.tree.map(bits, expected))
  chex.assert_trees_all_equal(state, other)


def test_the_state_of_a_plain_transform_is_that_of_its_collective():
  state = js.init(js.make_transform("topka", "workers", density=0.1), params_of(), mesh_of(WORKERS))
  assert state.carried.residual.shape == (WORKERS * 82,)
  assert state.carried.shared == ()


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda: js.a2sgd_transform("workers", {"bias": "dense"}), ValueError, "a2sgd: its workers go on with gradients"),
    (lambda: js.dense_transform("workers", {"bias": "a2sgd"}), ValueError, "a2sgd: its workers go on with gradients"),
    (lambda: js.dense_transform("workers", {"bias": "none"}), ValueError, "unknown collective 'none', choose one of"),
    (lambda: js.dense_transform("workers", {"bias": "topka:rho=1"}), TypeError, "topka: unknown option rho"),
    (lambda: js.dense_transform("workers", {"bias": "topka:k"}), ValueError, "'k' is not of the form option=value"),
    (lambda: js.dense_transform("workers", {"norm": "dense"}), ValueError, r"special: 'norm' is found in none of the"),
    (lambda: js.make_transform("dense", "workers", {"bias": "topka:k=4"}), ValueError, "k=4, choose at most .*, 3"),
  ],
)
def test_bad_input(make, error, message):
  with pytest.raises(error, match=message):
    js.init(make(), params_of(), mesh_of(WORKERS))


def test_states_with_and_without_special_are_told_apart(special):
  tx, grouped, _ = special
  plain = js.topka_transform("workers", density=0.1)
  state = js.init(plain, params_of(), mesh_of(WORKERS))
  with pytest.raises(ValueError, match="the optimizer state is not one of 3 groups: make one of it with js.convert"):
    program_of(tx, state)(grads_of(1), state)
  with pytest.raises(ValueError, match="the optimizer state is not one of a transform without groups: make one of it"):
    program_of(plain, grouped)(grads_of(1), grouped)
