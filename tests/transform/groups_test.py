"""Groups of leaves: which collective each leaf has, their k, their order, and `special=` on a plain transform."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse.arrays.flatten import leaf_shapes
from jaxsparse.transform.groups import Bundle, assign_collectives, groups_of
from tests.cases import (
  assert_same_bits,
  averaged,
  mesh_of,
  normals,
  quick_of,
  row,
  sim,
  start,
)

SHAPES = {"bias": (3,), "embedding": (6, 4), "none": (0, 2), "w": [(8, 5), (5, 3)]}
PARAMS = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))


def groups(special, bundles=None, tree=PARAMS, **options):
  """The groups of a pytree whose leaves are reduced by TopkA, but for the special ones."""
  assignment = assign_collectives(
    js.make_collective("topka", **options or {"density": 1.0}), special
  )
  return groups_of(leaf_shapes(tree), assignment, bundles)


@hypothesis.given(
  st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 400)
)
def test_k_is_shared_out_in_proportion(sizes, more):
  k = min(len(sizes) + more, sum(sizes))
  shares = [one.k for one in js.make_collective("topka", k=k).for_groups(sizes)]
  assert sum(shares) == k
  rest, free = k - len(sizes), max(1, sum(sizes) - len(sizes))
  for share, size in zip(shares, sizes, strict=True):
    assert 1 <= share <= size
    assert abs(share - 1 - rest * (size - 1) / free) <= 1


def test_k_of_special_leaves_is_theirs_together():
  """The k of an expression is shared out over its groups, and is not that of the default, though both are equal."""
  bundles = [Bundle((leaf,), tuple(range(leaf))) for leaf in range(5)]
  special = {"bias": "dense", "0|embedding": "topka:k=12"}
  k = {
    group.leaves: getattr(group.collective, "k", None)
    for group in groups(special, bundles, k=12)
  }
  assert k == {(0,): None, (1,): k[1,], (3,): 12 - k[1,], (4,): 12}
  assert 0 < k[1,] < 12


def test_the_first_expression_that_matches_counts():
  made = groups({"0": "dense", "0|1": "spardl:density=0.5", "w": "dense"})
  assert {group.leaves: group.collective.name for group in made} == {
    (3,): "dense",
    (4,): "spardl",
    (0, 1): "topka",
  }


@hypothesis.given(
  st.lists(st.tuples(st.sets(st.integers(0, 7)), st.booleans()), min_size=1, max_size=8)
)
def test_each_group_follows_all_that_its_bundle_waits_for_perhaps_through_others(drawn):
  """Bundles of a weight, some with a bias too, which is a group of its own; each waits for some of those before it."""
  names, bundles, bundle_of = [], [], []
  for number, (after, with_bias) in enumerate(drawn):
    start = len(names)
    names += ["bias", "weight"] if with_bias else ["weight"]
    bundle_of += [number] * (len(names) - start)
    bundles.append(
      Bundle(
        tuple(range(start, len(names))),
        tuple(other for other in after if other < number),
      )
    )
  special = {"bias": "dense"} if "bias" in names else {}
  tree = [{name: np.ones(1, np.float32)} for name in names]
  made = groups(special, bundles, tree)
  follows = []
  for number, group in enumerate(made):
    assert group.leaves == (number,)
    follows.append(
      set(group.waits_for).union(*(follows[before] for before in group.waits_for))
    )
    before = bundles[bundle_of[number]].waits_for
    waits = {
      n
      for n in range(number)
      if bundle_of[n] in before or bundle_of[n] == bundle_of[number]
    }
    assert follows[number] == waits.union(*(follows[before] for before in waits))


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (
      lambda: js.a2sgd_transform("workers", {"bias": "dense"}),
      ValueError,
      "a2sgd: its workers go on with gradients",
    ),
    (
      lambda: js.dense_transform("workers", {"bias": "a2sgd"}),
      ValueError,
      "a2sgd: its workers go on with gradients",
    ),
    (
      lambda: js.dense_transform("workers", {"bias": "none"}),
      ValueError,
      "unknown collective 'none', choose one of",
    ),
    (
      lambda: js.dense_transform("workers", {"bias": "topka:rho=1"}),
      TypeError,
      "topka: unknown option rho",
    ),
    (
      lambda: js.dense_transform("workers", {"bias": "topka:k"}),
      ValueError,
      "'k' is not of the form option=value",
    ),
    (
      lambda: js.dense_transform("workers", {"norm": "dense"}),
      ValueError,
      r"special: 'norm' is found in none of the",
    ),
    (
      lambda: js.dense_transform("workers", {"(": "dense"}),
      ValueError,
      r"special: '\(' is not a regular expression: ",
    ),
    (
      lambda: js.make_transform("dense", "workers", {"bias": "topka:k=4"}),
      ValueError,
      "k=4, choose at most .*, 3",
    ),
  ],
)
def test_bad_input(make, error, message):
  with pytest.raises(error, match=message):
    js.init(make(), PARAMS, mesh_of(3))


# Transforms without an entry.

EMPTY = {
  "sparse": js.spardl_transform("workers", k=3),
  "dense": js.dense_transform("workers"),
  "groups": js.make_transform("topka", "workers", density=0.5, special={"w": "dense"}),
  "corrected": js.momentum_corrected(
    js.warmed_up(js.make_transform("topka", "workers", k=2), {2: 1.0})
  ),
  "local": js.local_steps(optax.sgd(1.0), averaged(), every=2),
}


@pytest.mark.parametrize(
  "leaves",
  [
    row({}, quick=True, id="no leaf"),
    row({"none": jnp.zeros((0, 2)), "no": jnp.zeros(0)}, id="empty leaves"),
  ],
)
@pytest.mark.filterwarnings("ignore:js.resize")  # of workers of local steps
@pytest.mark.parametrize("name", quick_of(EMPTY, quick=["groups", "corrected"]))
def test_a_label_without_an_entry_sends_nothing(leaves, name):
  """Parameters are those without it, after a skipped step, with other workers, and when all is delivered."""
  tx, params = js.make_transform("topka", "workers", k=4), {"w": jnp.ones(9)}
  labels = {"w": "full"} | dict.fromkeys(leaves, "empty")
  both = optax.multi_transform({"full": tx, "empty": EMPTY[name]}, labels)
  step, given, state = start(both, sim(3), params | leaves)
  alone, params2, state2 = start(tx, sim(3), params)
  for number in range(4):
    batch = normals(number, 3, 9)
    batch[1, 2] = np.nan if number == 2 else 0.0
    given, state, metrics = step(given, state, batch)
    params2, state2, _ = alone(params2, state2, batch)
    assert metrics.skipped == (number == 2)
  assert_same_bits(given["w"], params2["w"])
  assert js.metrics(state).total_words == js.metrics(state2).total_words
  resized, resized2 = (
    js.resize(*pair, sim(2)) for pair in ((state, given), (state2, params2))
  )
  delivered, delivered2 = (
    js.flush(*pair, sim(2))[0] for pair in ((resized, given), (resized2, params2))
  )
  assert_same_bits(delivered["w"], delivered2["w"])


def test_parameters_without_an_entry_are_refused():
  for params in ({}, {"none": jnp.zeros((0, 2))}):
    with pytest.raises(
      ValueError, match="hold no entry: give a pytree with at least one non-empty array"
    ):
      js.init(EMPTY["dense"], params, sim(2))


@pytest.mark.parametrize("delay", quick_of([0, 1], quick=[1]))
def test_a_fragment_without_an_entry_sends_nothing(delay):
  """In its turn workers agree on NaN all the same, which one of them has."""
  tx = js.local_steps(optax.sgd(1.0), averaged(), every=6, fragments=3, delay=delay)
  step, params, state = start(
    tx, sim(3), {"a": jnp.ones(4), "b": jnp.ones(5), "none": jnp.zeros(0)}
  )
  batch, faulty = np.ones((3, 9), np.float32), np.ones((3, 9), np.float32)
  faulty[1, 2] = np.nan
  for _ in range(12):
    before, after = (params, state), step(params, state, faulty)
    assert after[2].skipped
    assert_same_bits((after[0], after[1].moved), (before[0], before[1].moved))
    params, state, _ = step(params, state, batch)
  if not delay:
    own = jax.tree.map(lambda p, moved: p - moved[0], params, state.moved)
    np.testing.assert_array_equal(
      np.concatenate([own["a"], own["b"]]), -11 * np.ones(9)
    )
