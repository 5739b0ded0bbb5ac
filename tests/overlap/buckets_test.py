"""Plans carried out: the collectives of the compiled program, the laws over all groups, and clear errors."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import bits, integers, mesh_of, normals, row, update_program

WORKERS = 3
WIDTHS = (8, 12, 20, 6, 10, 4)
LINK = {"alpha": 0.4, "beta": 1e-3, "gamma": 1.3}


def params_of():
  """Five weights of different sizes and a bias, in the order of the forward pass."""
  weights = [jnp.asarray(normals(n, a, b)) / 3 for n, (a, b) in enumerate(itertools.pairwise(WIDTHS))]
  return {"layer": weights, "out_bias": jnp.zeros(3)}


SIZES = [4 * leaf.size for leaf in jax.tree.leaves(params_of())]


def plan_of(kind, **options):
  return js.overlap.plan(kind, [1.0, 0.3, 0.3, 1.0, 0.3, 0.2], SIZES, **(LINK | options))


def transform_of(name="dense", kind="asc_wfbp", ways=2, **config):
  return js.bucketed_transform(name, "workers", plan=plan_of(kind, ways=ways), **config)


program_of = functools.partial(update_program, workers=WORKERS)


def grads_of(seed, make=integers):
  return jax.tree.map(lambda p: jnp.asarray(make(seed + p.size, WORKERS, *p.shape)), params_of())


def run(tx, grads, state=None):
  """The updates of all workers, as rows, and the next state."""
  state = js.init(tx, params_of(), mesh_of(WORKERS)) if state is None else state
  return program_of(tx, state)(grads, state)


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


@pytest.mark.parametrize(("kind", "ways"), [("mg_wfbp", 1), ("asc_wfbp", 2), ("wfbp", 1), ("optimal", 3)])
def test_the_program_has_the_collectives_of_the_plan_in_its_order(kind, ways):
  tx, plan = transform_of(kind=kind, ways=ways), plan_of(kind, ways=ways)
  out = lambda p, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), p["layer"], x)
  loss = lambda p, x: jnp.mean(out(p, x)[:, :3] + p["out_bias"][None] * x[:, :3])
  step = js.make_train_step(loss, tx, mesh_of(WORKERS))
  text = step.lower(params_of(), js.init(tx, params_of(), mesh_of(WORKERS)), jnp.ones((6, 8))).compile().as_text()
  sizes, above = all_reduces(text)
  of_loss = sizes.index(1)
  assert [4 * size for size in sizes if size != 1] == [plan.size_of(group) for group in plan.groups]
  number_of = [number for number in range(len(sizes)) if number != of_loss]
  for group, number in zip(plan.groups, number_of, strict=True):
    assert above[number] - {of_loss} == set(number_of[: group.after])


def test_some_of_these_plans_merge_and_some_send_at_once():
  assert {group.kind for kind in ("mg_wfbp", "asc_wfbp") for group in plan_of(kind).groups} == {
    "normal",
    "merged",
    "simultaneous",
  }


def test_without_the_options_a_compiler_merges_what_travels_at_once():
  tx = transform_of()
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  program = program_of(tx, state)
  merged, _ = all_reduces(program.lower(grads_of(0), state).compile().as_text())
  options = js.overlap.compiler_options("cpu")
  apart, _ = all_reduces(program.lower(grads_of(0), state).compile(compiler_options=options).as_text())
  assert len(merged) < len(apart) == len(plan_of("asc_wfbp").groups)


@pytest.mark.parametrize("kind", ["single", "asc_wfbp"])
def test_dense_groups_are_dense_bit_for_bit(kind):
  grads = grads_of(1, normals)
  (got, _), (expected, _) = run(transform_of(kind=kind), grads), run(js.dense_transform("workers"), grads)
  chex.assert_trees_all_equal(jax.tree.map(bits, got), jax.tree.map(bits, expected))


@pytest.mark.parametrize(
  ("name", "kind", "config"),
  [
    row("spardl", "mg_wfbp", {"density": 0.1}),
    row(
      "topka",
      "asc_wfbp",
      {"k": 31, "special": {"bias": "dense", "layer.*0": "spardl:density=0.3:teams=3"}},
      quick=True,
    ),
  ],
)
def test_laws_c_and_r_over_the_whole(name, kind, config):
  tx = transform_of(name, kind, **config)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  sent = held = 0.0
  program = program_of(tx, state)
  for step in range(3):
    grads = grads_of(step)
    updates, state = program(grads, state)
    for leaf in jax.tree.leaves(updates):
      assert (bits(leaf) == bits(leaf)[:1]).all()
      sent += WORKERS * np.asarray(leaf[0], np.float64).sum()
    held += sum(float(leaf.sum()) for leaf in jax.tree.leaves(grads))
  kept = sum(float(leaf.sum()) for leaf in jax.tree.leaves(state.carried.residual))
  assert sent + kept == pytest.approx(held, abs=1e-3)
  assert not js.metrics(state).skipped


def test_law_c_at_every_index_and_the_metrics_of_all_groups():
  """A residual lies where its gradients do: in the order of its group's leaves."""
  tx, grads, plan = transform_of("topka", density=0.1), grads_of(7), plan_of("asc_wfbp")
  updates, state = run(tx, grads)
  leaves, totals, sizes = jax.tree.leaves(grads), jax.tree.leaves(updates), []
  for group, residual in zip(plan.groups, state.carried.residual, strict=True):
    rows = lambda trees, group=group: np.concatenate([trees[n].reshape(WORKERS, -1) for n in group.layers], 1)
    delivered = np.round(WORKERS * rows(totals)[0])
    np.testing.assert_array_equal(delivered + residual.reshape(WORKERS, -1).sum(0), rows(leaves).sum(0))
    sizes.append(round(plan.size_of(group) / 4))
  metrics = js.metrics(state)
  assert int(metrics.words_sent) == sum(js.costs.predict("topka", n=n, workers=3, density=0.1).words for n in sizes)
  norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(state.carried.residual)))
  assert float(metrics.residual_norm) == pytest.approx(norm)
  assert int(metrics.delivered) == sum(int((leaf[0] != 0).sum()) for leaf in totals)
  assert float(metrics.density) == pytest.approx(int(metrics.delivered) / 559)


def test_a_nan_in_one_group_skips_the_step_for_all():
  tx = transform_of("topka", density=0.1)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  program = program_of(tx, state)
  _, state = program(grads_of(3), state)
  grads = grads_of(4)
  grads["layer"][4] = grads["layer"][4].at[1, 0, 0].set(jnp.nan)
  updates, after = program(grads, state)
  assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
  chex.assert_trees_all_equal(after.carried, state.carried)
  assert js.metrics(after).skipped
  assert int(js.metrics(after).skipped_steps) == 1
  updates, after = program(grads_of(5), after)
  assert any(leaf.any() for leaf in jax.tree.leaves(updates))
  assert int(js.metrics(after).skipped_steps) == 1


def test_simulated_workers_give_the_same_bits():
  grads = grads_of(6, normals)
  comm = js.SimComm("workers", members=WORKERS)
  tx = js.bucketed_transform("topka", comm, plan=plan_of("asc_wfbp"), density=0.1)
  one = jax.jit(jax.vmap(lambda grads: tx.update(grads, tx.init(grads))[0], axis_name="workers"))(grads)
  expected, _ = run(transform_of("topka", density=0.1), grads)
  chex.assert_trees_all_equal(jax.tree.map(bits, one), jax.tree.map(bits, expected))


def test_training_with_groups_learns():
  tx = optax.chain(transform_of("topka", density=0.2, special={"bias": "dense"}), optax.sgd(0.3, momentum=0.5))
  params, mesh = params_of(), mesh_of(WORKERS)
  target = jnp.asarray(normals(9, 12, 4))

  def loss(p, batch):
    x, y = batch
    return jnp.mean((functools.reduce(lambda x, w: jnp.tanh(x @ w), p["layer"], x) - y) ** 2) + p["out_bias"].sum() ** 2

  state, step = js.init(tx, params, mesh), js.make_train_step(loss, tx, mesh)
  losses = []
  for _ in range(40):
    params, state, metrics = step(params, state, (jnp.asarray(normals(8, 12, 8)), target))
    losses.append(float(metrics.loss))
  assert losses[-1] < 0.8 * losses[0]


def test_order_says_which_leaf_a_layer_is():
  order = [5, 0, 1, 2, 3, 4]
  sizes = [SIZES[leaf] for leaf in order]
  plan = js.overlap.plan("mg_wfbp", [1.0] * 6, sizes, **LINK)
  tx = js.bucketed_transform("spardl", "workers", plan=plan, order=order, density=0.5)
  state = js.init(tx, params_of(), mesh_of(WORKERS))
  got = [leaf.size for leaf in state.carried.residual]
  assert got == [round(WORKERS * plan.size_of(group) / 4) for group in plan.groups]


def test_empty_leaves_have_nothing_to_send():
  plan = js.overlap.plan("wfbp", [1.0, 1.0], [0, 16], **LINK)
  tx = js.bucketed_transform("dense", "workers", plan=plan)
  state = js.init(tx, {"a": jnp.zeros((0, 3)), "b": jnp.zeros(4)}, mesh_of(WORKERS))
  assert state.carried.residual == (None,)


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda: transform_of("sparse"), ValueError, "unknown collective 'sparse', choose one of"),
    (lambda: transform_of("spardl", rho=1), TypeError, "spardl: unknown option rho"),
    (lambda: transform_of("a2sgd"), ValueError, "a2sgd: its workers go on with gradients of their own"),
    (lambda: transform_of(special={"bias": "a2sgd"}), ValueError, "a2sgd: its workers"),
    (lambda: transform_of(special={"bias": "spardl:density"}), ValueError, "'density' is not of the form option=value"),
    (lambda: transform_of(special={"norm": "dense"}), ValueError, r"special: 'norm' is found in none of the leaves \["),
    (lambda: transform_of("topka", kind="wfbp", k=5), ValueError, "k=5, choose at least one for each of the 6 groups"),
    (lambda: transform_of("topka", k=9999), ValueError, "k=9999, choose at most the number of gradient entries, 559"),
    (
      lambda: js.bucketed_transform("dense", "workers", plan=js.overlap.plan("wfbp", [1.0], [4], **LINK)),
      ValueError,
      "the plan is for 1 layers, the gradients have 6 leaves",
    ),
    (
      lambda: transform_of(order=[0, 0, 1, 2, 3, 4]),
      ValueError,
      r"order=\[0, 0, 1, 2, 3, 4\]: give the number of each",
    ),
    (
      lambda: transform_of(order=[1, 0, 2, 3, 4, 5]),
      ValueError,
      r"layer 0 of the plan has 384 bytes, and its leaf \['layer'\]\[1\] 960 \(4 for each entry\)",
    ),
  ],
)
def test_bad_input(make, error, message):
  with pytest.raises(error, match=message):
    js.init(make(), params_of(), mesh_of(WORKERS))


def test_a_state_of_another_plan():
  state = js.init(transform_of("spardl", density=0.5), params_of(), mesh_of(WORKERS))
  with pytest.raises(ValueError, match="the optimizer state is not one of 6 groups: make one of it with js.convert"):
    run(transform_of("spardl", kind="wfbp", density=0.5), grads_of(1), state)
  plain = js.init(js.spardl_transform("workers", density=0.5), params_of(), mesh_of(WORKERS))
  with pytest.raises(ValueError, match="is not one of"):
    run(transform_of("spardl", density=0.5), grads_of(1), plain)
  with pytest.raises(ValueError, match="state is not one of group 0 with oktopk and these options: make one of it"):
    run(transform_of("oktopk", density=0.5), grads_of(1), state)


def test_compiler_options_of_an_unknown_platform():
  assert js.overlap.compiler_options("gpu")["xla_gpu_all_reduce_combine_threshold_bytes"] == 0
  with pytest.raises(ValueError, match="platform='abacus', choose one of 'cpu', 'gpu', 'cuda'"):
    js.overlap.compiler_options("abacus")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_this_jax_knows_the_compiler_options(platform):
  """Their names and types are checked wherever the program is compiled for."""
  program = jax.jit(lambda x: x + 1, compiler_options=js.overlap.compiler_options(platform))
  assert float(program(jnp.float32(1))) == 2
  with pytest.raises(Exception, match="xla_gpu_no_such_option"):
    jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": 1})(jnp.float32(1))
