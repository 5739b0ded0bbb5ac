"""PowerSGD and ACP-SGD against numpy: factors, what they deliver, and what each worker keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from jaxsparse import _compat
from jaxsparse.arrays import noise
from jaxsparse.arrays.low_rank import orthonormal
from jaxsparse.comm import all_reduce_cost
from tests.cases import assert_same_bits, mesh_of, normals, quick_of
from tests.reference.powersgd import PowerSGD

SHAPES = {
  "a": (12, 9),
  "bias": (5,),
  "kernel": (3, 3, 4, 8),
  "small": (3, 3),
  "tall": (40, 6),
}
# those that rank 2 shortens
MATRICES = {
  "a": (12, 9),
  "kernel": (9, 32),
  "tall": (40, 6),
}
TIGHT = 1e-4


@pytest.mark.parametrize("alternate", quick_of([False, True], quick=[True]))
def test_equals_the_papers_in_numpy(alternate):
  """Five steps of three workers on a mesh, on leaves of two axes, four and one, and one too small to be factorized."""
  workers, rank = 3, 2
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  loss = lambda p, batch: sum(jnp.vdot(p[name], batch[name][0]) for name in p)
  tx, mesh = (
    js.powersgd_transform("workers", rank=rank, alternate=alternate),
    mesh_of(workers),
  )
  chain = optax.chain(tx, optax.sgd(1.0))
  step, state = (
    js.make_train_step(loss, chain, mesh, donate=False),
    js.init(chain, params, mesh),
  )
  first = zip(MATRICES, state[0].carried.shared[0].right, strict=True)
  references = {
    name: PowerSGD(np.asarray(right, np.float64), alternate) for name, right in first
  }
  for number in range(5):
    grads = {
      name: normals(10 * number + i, workers, *shape)
      for i, (name, shape) in enumerate(SHAPES.items())
    }
    before = params
    params, state, _ = step(params, state, grads)
    kept = []
    for name, rows in grads.items():
      total = rows.astype(np.float64).sum(0)
      if name in MATRICES:
        total = (
          references[name]
          .reduce(rows.astype(np.float64).reshape(-1, *MATRICES[name]))
          .reshape(SHAPES[name])
        )
      np.testing.assert_allclose(
        before[name] - params[name], total / workers, atol=TIGHT, err_msg=name
      )
      kept.append(
        references[name].residual.reshape(workers, -1)
        if name in MATRICES
        else np.zeros((workers, total.size))
      )
    np.testing.assert_allclose(
      np.reshape(state[0].carried.residual[0], (workers, -1)),
      np.hstack(kept),
      atol=TIGHT,
    )
    rows, columns, others = 2 * (12 + 9 + 40), 2 * (9 + 32 + 6), 5 + 9
    messages = (
      [rows + others, columns + others] if alternate else [rows + others, columns]
    )
    expected = [all_reduce_cost(count, workers).words for count in messages]
    assert int(js.metrics(state).words_sent) == (
      expected[number % 2] if alternate else sum(expected)
    )


@pytest.mark.parametrize("alternate", quick_of([False, True], quick=[False]))
def test_factors_in_bfloat16_lose_nothing(alternate):
  """Five steps of matrices and vectors: half the words, the same totals to rounding, nothing lost."""
  grads = {
    name: jnp.asarray(normals(i, 3, *shape))
    for i, (name, shape) in enumerate(SHAPES.items())
  }
  options = {"rank": 2, "alternate": alternate}
  exact = rounded = None
  totals = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), grads)
  for number in range(1, 6):
    exact = js.simulate("powersgd", grads, state=exact and exact.state, **options)
    rounded = js.simulate(
      "powersgd", grads, state=rounded and rounded.state, wire="bf16", **options
    )
    totals = jax.tree.map(jnp.add, totals, rounded.total)
    for name, total in totals.items():
      entered = number * np.asarray(grads[name], np.float64).sum(0)
      np.testing.assert_allclose(
        total + rounded.residuals[name].sum(0), entered, rtol=0, atol=TIGHT
      )
      assert not np.array_equal(rounded.total[name], exact.total[name])
    words = [int(out.metrics.words_sent) for out in (rounded, exact)]
    assert 0 <= 2 * words[0] - words[1] <= 16
  first = (
    js.simulate("powersgd", grads, wire="bf16", **options).total,
    js.simulate("powersgd", grads, **options).total,
  )
  np.testing.assert_allclose(first[0]["bias"], first[1]["bias"], rtol=0.01, atol=0.03)
  np.testing.assert_allclose(first[0]["a"], first[1]["a"], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("alternate", quick_of([False, True], quick=[True]))
@pytest.mark.parametrize("scale", [1e-24, 1.0, 1e18])
def test_a_gradient_of_zeros_loses_no_direction(alternate, scale):
  """As the first one of a layer below zeros; some rows never have another. And the scale is not squared."""
  grads = {"w": scale * jnp.asarray(normals(5, 2, 20, 10)).at[:, :4].set(0.0)}
  state, total = (
    js.simulate("powersgd", {"w": 0 * grads["w"]}, rank=4, alternate=alternate).state,
    0,
  )
  for _ in range(30):
    out = js.simulate("powersgd", grads, state=state, rank=4, alternate=alternate)
    state, total = out.state, total + out.total["w"] / scale
    assert not out.metrics.skipped
  missing = np.linalg.norm(total / 30 - grads["w"].sum(0) / scale) / np.linalg.norm(
    grads["w"].sum(0) / scale
  )
  assert missing < 0.1


def test_matrices_under_x64_are_those_without():
  grads = {
    name: normals(i, 2, *shape) for i, (name, shape) in enumerate(SHAPES.items())
  }
  found = []
  for wide in (False, True):
    with jax.enable_x64(wide):
      out = js.simulate("powersgd", grads, rank=2)
      found.append((out.total, out.state.carried))
  assert_same_bits(*found)


def test_a_state_of_other_leaves():
  state = js.simulate("powersgd", {"w": jnp.ones((2, 4, 6))}, rank=1).state
  for grads, rank in ((jnp.ones((2, 6, 4)), 1), (jnp.ones((2, 4, 6)), 2)):
    with pytest.raises(
      ValueError, match="the state is not one of powersgd with these options"
    ):
      js.simulate("powersgd", {"w": grads}, state=state, rank=rank)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("alternate", quick_of([False, True], quick=[True]))
def test_no_number_in_a_matrix_skips_the_step(alternate, value):
  """Also where the factor that a worker multiplies it with is 0."""
  grads = {"bias": np.ones((2, 3), np.float32), "w": normals(0, 2, 9, 7)}
  bad = dict(grads, w=grads["w"].copy())
  bad["w"][1, 4, 5] = value
  first = js.simulate("powersgd", grads, rank=1, alternate=alternate).state
  for state in (
    first,
    js.simulate("powersgd", grads, state=first, rank=1, alternate=alternate).state,
  ):
    out = js.simulate("powersgd", bad, state=state, rank=1, alternate=alternate)
    assert out.metrics.skipped
    assert not np.any(out.total["w"])
    assert not np.any(out.total["bias"])
    jax.tree.map(np.testing.assert_array_equal, out.state.carried, state.carried)


def test_bases_are_orthonormal_and_made_without_lapack():
  """Of columns that depend on each other and differ in scale, too. Batches of LAPACK's QR block each other on CPUs."""
  factors = [jnp.asarray(normals(0, 50, 6)), jnp.asarray(normals(1, 9, 6))]
  factors[0] = (
    factors[0]
    .at[:, 2]
    .set(2 * factors[0][:, 0])
    .at[:, 4]
    .multiply(1e30)
    .at[:, 5]
    .multiply(1e-30)
  )
  key = noise.key_of(0)
  bases = jax.jit(orthonormal)(factors, key)
  for factor, rows in zip(factors, bases, strict=True):
    basis = np.asarray(rows[:, : len(factor)].T)
    assert not np.any(rows[:, len(factor) :])
    np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-5)
    columns = np.asarray(factor, np.float64)
    columns = columns / np.linalg.norm(columns, axis=0)
    np.testing.assert_allclose(basis @ (basis.T @ columns), columns, atol=1e-5)
  drawn = np.asarray(orthonormal([jnp.zeros((4, 2))], key)[0])
  np.testing.assert_allclose(drawn @ drawn.T, np.eye(2), atol=1e-5)
  assert "custom_call" not in jax.jit(orthonormal).lower(factors, key).as_text()


@pytest.mark.long
def test_a_long_matrix_beside_short_ones_costs_no_padding():
  """No array is larger than the gradient: not the factors of all, padded to the longest."""
  params = [jnp.zeros((3000, 8)), *[jnp.zeros((24, 24))] * 12]
  n = sum(leaf.size for leaf in params)
  program = jax.make_jaxpr(lambda grads: js.simulate("powersgd", grads, rank=3))(
    [leaf[None] for leaf in params]
  )
  assert max(_sizes(program.jaxpr)) <= n


@pytest.mark.long
def test_simulated_workers_find_the_bound_once():
  """XLA put its 2,000 comparisons into the loop over all entries: a step took 30 times as long, and more."""
  params = {
    "a": jnp.ones((3, 3, 16)),
    "kernel": jnp.ones((3, 3, 16, 32)),
    "out": jnp.ones((512, 32)),
  }
  comm = js.SimComm("workers", members=4)
  tx = optax.chain(js.powersgd_transform(comm, rank=2), optax.sgd(1.0))
  step = js.make_train_step(
    lambda params, batch: sum(jnp.vdot(x, x) for x in params.values()) * batch.sum(),
    tx,
    comm,
  )
  program = step.lower(params, js.init(tx, params, comm), jnp.ones((4, 1))).compile()
  assert program.as_text().count(" maximum(") < 400


def _sizes(jaxpr):
  for equation in jaxpr.eqns:
    yield from (out.aval.size for out in equation.outvars)
    for body in _compat.inner_jaxprs(equation.params):
      yield from _sizes(body)


def test_words_of_a_model_are_those_of_its_leaves():
  """Counted from the schedule, by the formula, and of a chain."""
  params = {"bias": jnp.zeros(128), "w": jnp.zeros((512, 128))}
  count = lambda function, **more: function("powersgd", n=params, workers=4, **more)
  cost = count(js.costs.predict)
  assert count(js.costs.count) == cost
  assert cost.words == 2 * 3 * ((4 * 512 + 128) // 4 + 4 * 128 // 4)
  assert count(js.costs.predict, devices=2).words == 2 * 3 * (
    (4 * 256 + 64) // 4 + 4 * 128 // 4
  )
  update = js.costs.count_update(
    optax.chain(js.powersgd_transform("workers"), optax.sgd(1.0)), params, workers=4
  )
  assert update.words == cost.words
  with pytest.raises(
    ValueError, match=r"powersgd: n=100 entries, its leaves of shapes .* have 6"
  ):
    js.costs.count(
      js.make_collective("powersgd").for_leaves(((3, 2),)), n=100, workers=4
    )
