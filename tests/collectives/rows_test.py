"""Whole rows of leaves, in numpy: exact where no worker has more rows than a message holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import assert_same_bits, mesh_of, normals, start

SHAPES = {"bias": (5,), "embedding": (40, 6), "kernels": (9, 2, 3)}


def numpy_step(acc, capacity):
  """(total, residuals) of a leaf f32[P, rows, width], summed in rank order."""
  total, left = np.zeros_like(acc[0]), acc.copy()
  for worker, rows in enumerate(acc):
    chosen = np.argsort(-np.abs(rows).mean(1), kind="stable")[:capacity]
    total[chosen] += rows[chosen]
    left[worker, chosen] = 0
  return total, left


def as_rows(grads):
  return grads.reshape(*grads.shape[:2], -1)


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_equals_numpy(workers):
  """Sixteen workers send most of the rows, whose owners then add them."""
  capacity, state = 7, None
  left = {
    name: np.zeros((workers, shape[0], int(np.prod(shape[1:]))), np.float32)
    for name, shape in SHAPES.items()
  }
  for step in range(3):
    grads = {
      name: normals(10 * step + i, workers, *shape)
      for i, (name, shape) in enumerate(SHAPES.items())
    }
    out = js.simulate("rows", grads, state=state, capacity=capacity)
    state = out.state
    for name in SHAPES:
      total, left[name] = numpy_step(as_rows(grads[name]) + left[name], capacity)
      np.testing.assert_array_equal(out.total[name].reshape(total.shape), total)
      np.testing.assert_array_equal(
        out.residuals[name].reshape(left[name].shape), left[name]
      )
    sent = 5 * 2 + 7 * 7 + 7 * 7
    # ⌈rows / 16⌉ to each owner, and from each
    by_owners = 5 + 7 + 7 + 2 * (1 + 3 * 6 + 1 * 6)
    assert int(out.metrics.words_sent) == (workers - 1) * (
      by_owners if workers == 16 else sent
    )


def test_few_rows_arrive_exactly_and_others_do_not_move():
  """Also tiny ones, in a model of which the other leaves are dense; 64 rows of 3,000 for what 64 rows take."""
  workers, width = 4, 8
  params = {"bias": jnp.ones(5), "embedding": jnp.ones((3000, width))}
  tx = optax.chain(
    js.dense_transform("workers", special={"embedding": "rows:capacity=16"}),
    optax.sgd(1.0),
  )
  loss = lambda p, batch: (
    jnp.sum(p["embedding"][batch["ids"][0]] * batch["x"][0]) + p["bias"].sum()
  )
  step, params, state = start(tx, mesh_of(workers), params, loss)
  touched, expected = set(), np.ones((3000, width), np.float32)
  for number in range(3):
    ids = np.random.default_rng(number).integers(0, 3000, (workers, 16))
    x = normals(number, workers, 16, width) * 10.0 ** np.arange(-25, 7, 2)[:, None]
    x = x.astype(np.float32)
    total = np.zeros_like(expected)
    for worker in range(workers):
      own = np.zeros_like(expected)
      np.add.at(own, ids[worker], x[worker])
      total += own
    expected -= total / workers
    params, state, _ = step(params, state, {"ids": ids, "x": x})
    touched |= set(ids.ravel().tolist())
    assert not np.any(state[0].carried.residual[1])
  np.testing.assert_allclose(params["embedding"], expected, rtol=1e-5)
  still = np.setdiff1d(np.arange(3000), sorted(touched))
  assert_same_bits(params["embedding"][still], jnp.ones((still.size, width)))
  # and those of the bias
  assert int(js.metrics(state).words_sent) == (workers - 1) * 16 * (width + 1) + 12


WORKERS, CAPACITY, WIDTH = 8, 200, 3
# words of a step where every worker adds the rows of all
OF_ALL = (WORKERS - 1) * CAPACITY * (WIDTH + 1)


def touching(numbers):
  """Gradients f32[P, 3000, width] that are not zero in these rows of each worker, of very different magnitudes."""
  grads = np.zeros((WORKERS, 3000, WIDTH), np.float32)
  for worker, rows in enumerate(numbers):
    grads[worker, rows] = (
      normals(worker, len(rows), WIDTH)
      * 10.0 ** (np.arange(len(rows)) % 30 - 20)[:, None]
    )
  return grads


def draw(most):
  """200 different numbers below `most` of each worker."""
  return [
    np.random.default_rng(worker).permutation(most)[:CAPACITY]
    for worker in range(WORKERS)
  ]


SAME, OTHERS = draw(400), draw(3000)
# Of 480 rows worker 0 sends every eighth: all of one region, and more than a message of
# the split holds.
CROWDED = [
  np.arange(0, 480, 8),
  *(np.arange(60 * worker, 60 * worker + 120) % 480 for worker in range(1, WORKERS)),
]


@pytest.mark.parametrize(
  ("numbers", "saves"),
  [(SAME, True), (OTHERS, False), (CROWDED, False), ([[]] * WORKERS, True)],
  ids=["same rows", "other rows", "crowded", "no rows"],
)
def test_owners_add_in_rank_order_where_that_saves_words(numbers, saves):
  grads = touching(numbers)
  out = js.simulate("rows", {"embedding": grads}, capacity=CAPACITY)
  assert_same_bits(
    out.total["embedding"], functools.reduce(np.add, grads, np.zeros_like(grads[0]))
  )
  assert not np.any(out.residuals["embedding"])
  touched = len(set().union(*numbers))
  assert out.metrics.delivered == touched * WIDTH
  # of each worker to each, without any slack
  needed = CAPACITY + WIDTH * (max(map(len, numbers)) + touched) / WORKERS
  words = int(out.metrics.words_sent)
  assert (WORKERS - 1) * needed <= words <= 0.9 * OF_ALL if saves else words == OF_ALL


def test_not_a_number_reaches_all_from_the_owner():
  grads = touching(SAME)
  grads[3, SAME[3][7], 1] = np.nan
  out = js.simulate("rows", {"embedding": grads}, capacity=CAPACITY)
  assert bool(out.metrics.skipped)
  assert not np.any(out.total["embedding"])


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  ("optimizer", "moves"),
  [(optax.sgd, False), (optax.adagrad, False), (optax.adam, True)],
)
def test_a_row_that_was_sent_once_moves_later_with_adam_only(optimizer, moves):
  tx = optimizer(0.1)
  params = jnp.ones((3, 2))
  state = tx.init(params)
  for row in (1, 2):
    grads = jnp.zeros((1, 3, 2)).at[0, row].set(1.0)
    update, state = tx.update(
      js.simulate("rows", {"w": grads}, capacity=1).total["w"], state, params
    )
  assert np.any(update, 1).tolist() == [False, moves, True]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_in_one_row_skips_the_step(value):
  """Beside rows whose sums are too large for float32."""
  grads = {"w": np.ones((2, 30, 4), np.float32)}
  grads["w"][1] = 3e38
  grads["w"][1, 29, 3] = value
  out = js.simulate("rows", grads, capacity=2)
  assert bool(out.metrics.skipped)
  assert not np.any(out.total["w"])


def test_a_state_of_other_leaves():
  with pytest.raises(
    ValueError, match=r"rows: n=100 entries, its leaves of shapes .* have 6"
  ):
    js.costs.count(js.make_collective("rows").for_leaves(((3, 2),)), n=100, workers=4)
  with pytest.raises(
    ValueError, match="rows: capacity=0, choose a whole number from 1 up"
  ):
    js.rows_transform("workers", capacity=0)
  params = {"w": jnp.zeros((50, 3))}
  assert js.costs.predict("rows", n=params, workers=3, capacity=9).words == 2 * 9 * 4
  assert jax.eval_shape(
    lambda: js.simulate("rows", {"w": jnp.zeros((2, 50, 3))})
  ).total["w"].shape == (50, 3)
