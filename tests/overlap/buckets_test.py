"""Plans carried out: the collectives of the compiled program, the laws over all groups, and clear errors."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from tests.cases import bits, integers, mesh_of, normals, quick_of, update_program

WORKERS = 3
WIDTHS = (8, 12, 20, 6, 10, 4)
LINK = {"alpha": 0.4, "beta": 1e-3, "gamma": 1.3}


# Five weights of different sizes and a bias, in the order of the forward pass.
PARAMS = {
  "layer": [
    jnp.asarray(normals(n, a, b)) / 3
    for n, (a, b) in enumerate(itertools.pairwise(WIDTHS))
  ],
  "out_bias": jnp.zeros(3),
}
SIZES = [4 * leaf.size for leaf in jax.tree.leaves(PARAMS)]


def plan_of(kind, **options):
  return js.overlap.plan(
    kind, [1.0, 0.3, 0.3, 1.0, 0.3, 0.2], SIZES, **(LINK | options)
  )


def transform_of(name="dense", kind="asc_wfbp", ways=2, **config):
  return js.bucketed_transform(name, "workers", plan=plan_of(kind, ways=ways), **config)


def state_of(tx):
  return js.init(tx, PARAMS, mesh_of(WORKERS))


def grads_of(seed, make=integers):
  return jax.tree.map(
    lambda p: jnp.asarray(make(seed + p.size, WORKERS, *p.shape)), PARAMS
  )


def run(tx, grads, state=None):
  """The updates of all workers, as rows, and the next state."""
  state = state_of(tx) if state is None else state
  return update_program(tx, state, WORKERS)(grads, state)


def all_reduces(text):
  """Sizes of the all-reduces of a compiled program, in its order, and the pairs of which one follows from the other."""
  made, sizes, above = {}, [], []
  for line in text[text.index("ENTRY") :].splitlines():
    if not (found := re.match(r"\s*(?:ROOT )?(%[\w.-]+) = (.*)", line)):
      continue
    name, rest = found.groups()
    operands = re.findall(r"%[\w.-]+", rest.partition("metadata=")[0])
    made[name] = set().union(*(made.get(operand, set()) for operand in operands))
    if reduce := re.search(r"^(\S+) all-reduce\(", rest):
      shape = re.findall(r"\d+", reduce[1].partition("{")[0].partition("[")[2])
      sizes.append(int(np.prod([int(side) for side in shape], dtype=int)))
      above.append(made[name])
      made[name] = made[name] | {len(sizes) - 1}
  return sizes, above


KINDS = [
  ("wfbp", 1, {"normal"}),
  ("mg_wfbp", 1, {"normal", "merged"}),
  ("asc_wfbp", 2, {"merged", "simultaneous"}),
  ("optimal", 3, {"simultaneous"}),
]


@pytest.mark.parametrize(("kind", "ways", "kinds"), quick_of(KINDS, quick=KINDS[2:]))
def test_the_program_has_the_collectives_of_the_plan_in_its_order(kind, ways, kinds):
  tx, plan = transform_of(kind=kind, ways=ways), plan_of(kind, ways=ways)
  out = lambda p, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), p["layer"], x)
  loss = lambda p, x: jnp.mean(out(p, x)[:, :3] + p["out_bias"][None] * x[:, :3])
  step = js.make_train_step(loss, tx, mesh_of(WORKERS))
  assert kinds <= {group.kind for group in plan.groups}
  text = step.lower(PARAMS, state_of(tx), jnp.ones((6, 8))).compile().as_text()
  sizes, above = all_reduces(text)
  of_loss = sizes.index(1)
  assert [4 * size for size in sizes if size != 1] == [
    plan.size_of(group) for group in plan.groups
  ]
  number_of = [number for number in range(len(sizes)) if number != of_loss]
  for group, number in zip(plan.groups, number_of, strict=True):
    assert above[number] - {of_loss} == {number_of[other] for other in group.after}


@pytest.mark.parametrize("kind", quick_of(["single", "asc_wfbp"], quick=["asc_wfbp"]))
def test_dense_groups_are_dense_bit_for_bit(kind):
  grads = grads_of(1, normals)
  (got, _), (expected, _) = (
    run(transform_of(kind=kind), grads),
    run(js.dense_transform("workers"), grads),
  )
  chex.assert_trees_all_equal(jax.tree.map(bits, got), jax.tree.map(bits, expected))


def test_laws_c_and_r_at_every_index_and_the_metrics_of_all_groups():
  """A residual lies where its gradients do: in the order of its group's leaves."""
  tx, plan, given = transform_of("topka", density=0.1), plan_of("asc_wfbp"), 0.0
  state = state_of(tx)
  program = update_program(tx, state, WORKERS)
  for step in range(2):
    grads = grads_of(7 + step)
    updates, state = program(grads, state)
    leaves, totals = jax.tree.leaves(grads), jax.tree.leaves(updates)
    assert all((bits(leaf) == bits(leaf)[:1]).all() for leaf in totals)
    flat = lambda trees: [
      trees[layer].reshape(WORKERS, -1)
      for group in plan.groups
      for layer in group.layers
    ]
    given += np.concatenate(flat(leaves), 1).sum(0) - np.round(
      WORKERS * np.concatenate(flat(totals), 1)[0]
    )
  residual = [one.reshape(WORKERS, -1).sum(0) for one in state.carried.residual]
  np.testing.assert_array_equal(np.concatenate(residual), given)
  metrics, sizes = (
    js.metrics(state),
    [round(plan.size_of(group) / 4) for group in plan.groups],
  )
  assert [len(one) for one in residual] == sizes
  assert int(metrics.words_sent) == sum(
    js.costs.predict("topka", n=n, workers=3, density=0.1).words for n in sizes
  )
  norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in state.carried.residual))
  assert float(metrics.residual_norm) == pytest.approx(norm)
  assert int(metrics.delivered) == sum(int((leaf[0] != 0).sum()) for leaf in totals)
  assert float(metrics.density) == pytest.approx(int(metrics.delivered) / 559)


def test_order_says_which_leaf_a_layer_is():
  order = [5, 0, 1, 2, 3, 4]
  plan = js.overlap.plan("mg_wfbp", [1.0] * 6, [SIZES[leaf] for leaf in order], **LINK)
  state = state_of(
    js.bucketed_transform("spardl", "workers", plan=plan, order=order, density=0.5)
  )
  assert [leaf.size for leaf in state.carried.residual] == [
    WORKERS * plan.size_of(group) / 4 for group in plan.groups
  ]
  # an empty leaf has nothing to send
  empty = js.overlap.plan("wfbp", [1.0, 1.0], [0, 16], **LINK)
  comm = js.SimComm("workers", members=WORKERS)
  tx = js.bucketed_transform("dense", comm, plan=empty)
  state = js.init(tx, {"a": jnp.zeros((0, 3)), "b": jnp.zeros(4)}, comm)
  assert state.carried.residual == (None,)


BAD = [
  ({"name": "sparse"}, "unknown collective 'sparse', choose one of"),
  ({"name": "a2sgd"}, "a2sgd: its workers go on with gradients of their own"),
  (
    {"name": "topka", "plan": plan_of("wfbp"), "k": 5},
    "k=5, choose at least one for each of the 6 groups",
  ),
  (
    {"name": "topka", "k": 9999},
    "k=9999, choose at most the number of gradient entries, 559",
  ),
  (
    {"plan": js.overlap.plan("wfbp", [1.0], [4], **LINK)},
    "the plan is for 1 layers, the gradients have 6 leaves",
  ),
  (
    {"order": [0, 0, 1, 2, 3, 4]},
    r"order=\[0, 0, 1, 2, 3, 4\]: give the number of each",
  ),
  (
    {"order": [1, 0, 2, 3, 4, 5]},
    r"layer 0 of the plan has 384 bytes, and its leaf \['layer'\]\[1\] 960 \(4 for each",
  ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input(options, message):
  with pytest.raises(ValueError, match=message):
    state_of(
      js.bucketed_transform(
        **({"name": "dense", "axis": "workers", "plan": plan_of("asc_wfbp")} | options)
      )
    )


def test_a_state_of_another_plan():
  state = state_of(transform_of("spardl", density=0.5))
  for name, kind, message in (
    ("spardl", "wfbp", " for other groups of leaves, .* make one of it with js.c"),
    (
      "oktopk",
      "asc_wfbp",
      ", and this transform is oktopk:density=0.5: make one of it",
    ),
  ):
    with pytest.raises(ValueError, match=f"is one of spardl:density=0.5{message}"):
      run(transform_of(name, kind, density=0.5), grads_of(1), state)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_this_jax_knows_the_compiler_options(platform):
  """Their names and types are checked wherever the program is compiled for."""
  program = jax.jit(
    lambda x: x + 1, compiler_options=js.overlap.compiler_options(platform)
  )
  assert float(program(jnp.float32(1))) == 2
  with pytest.raises(Exception, match="xla_gpu_no_such_option"):
    jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": 1})(
      jnp.float32(1)
    )
  with pytest.raises(
    ValueError, match="platform='abacus', choose one of 'cpu', 'gpu', 'cuda'"
  ):
    js.overlap.compiler_options("abacus")
