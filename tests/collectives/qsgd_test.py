"""QSGD: unbiased, packed, and bounded."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.arrays import noise
from jaxsparse.collectives.baselines import qsgd
from jaxsparse.collectives.baselines.qsgd import (
  LevelLayout,
  count_levels,
  decode,
  draw_noise,
)
from tests.cases import normals, quick_of, row
from tests.reference import rounding


def rounding_of(key, x, levels):
  return qsgd.LevelRounding(
    key,
    qsgd.scale_of(x, levels),
    levels,
    js.make_collective("qsgd", levels=levels).bits,
  )


@functools.partial(jax.jit, static_argnums=(2, 3))
def noise_of(step, rank, n, levels):
  """f32[n], the random numbers of the entries of a message."""
  key, rows = (
    noise.fold(noise.fold(noise.key_of(0), step), rank),
    32 // js.make_collective("qsgd", levels=levels).bits,
  )
  drawn = jnp.stack([draw_noise(key, row, n // rows + 1) for row in range(rows)])
  return jnp.concatenate([drawn[:, :-1].reshape(-1), drawn[: n % rows, -1]])


@pytest.mark.parametrize("levels", quick_of([1, 127], quick=[127]))
def test_equals_the_paper_in_numpy(levels):
  """Three steps of the same noise; a norm that is rounded up may move few entries to the next level."""
  workers, n, state = 3, 2000, None
  for step in range(3):
    grads = normals(step, workers, n)
    drawn = np.stack([noise_of(step, rank, n, levels) for rank in range(workers)])
    out = js.simulate("qsgd", grads, state=state, levels=levels)
    state, sent = out.state, rounding.qsgd(grads.astype(np.float64), drawn, levels)
    same = np.abs(np.asarray(out.total) - sent.sum(0)) < 1e-3 * np.abs(sent).max()
    assert same.mean() > 0.98
    assert (
      np.abs(np.asarray(out.total) - sent.sum(0)).max()
      < 1.01 * np.linalg.norm(grads, axis=1).max() / levels
    )


@pytest.mark.parametrize("levels", quick_of([1, 4, 127], quick=[4]))
def test_the_mean_over_seeds_is_the_gradient(levels):
  grads, draws = normals(0, 1, 8)[0], 20_000
  layout = LevelLayout.of(8, js.make_collective("qsgd", levels=levels).bits, workers=1)

  @jax.jit
  @jax.vmap
  def rounded(draw):
    return rounding_of(noise.fold(noise.key_of(levels), draw), grads, levels).rounded(
      grads, layout
    )

  values = np.asarray(rounded(np.arange(draws)))
  # The standard error of a mean of values that are at most one level from the entry,
  # five times over.
  tolerance = 5 * np.linalg.norm(grads) / levels / 2 / np.sqrt(draws)
  np.testing.assert_allclose(values.mean(0), grads, atol=tolerance)
  assert np.abs(values - grads).max() <= np.linalg.norm(grads) / levels * (1 + 2**-14)


@pytest.mark.parametrize("levels", [1, 3, 4, 127])
def test_a_scale_is_rounded_up_so_that_its_products_with_levels_are_exact(levels):
  for seed in range(4):
    x = normals(seed, 1, 50)[0]
    scale = np.asarray(qsgd.scale_of(x, levels))
    exact = np.linalg.norm(x.astype(np.float64)) / levels
    assert exact <= scale < exact * 1.001
    level = np.arange(levels + 1, dtype=np.float32)
    np.testing.assert_array_equal(scale * level, np.float64(scale) * level)


@pytest.mark.parametrize(
  "levels", quick_of([1, 2, 7, 127, 128, 40_000, 2**23], quick=[2**23])
)
def test_levels_survive_packing(levels):
  values = (
    np.random.default_rng(0).integers(-levels, levels + 1, 101).astype(np.float32)
  )
  values[:3] = -levels, levels, 0
  bits = js.make_collective("qsgd", levels=levels).bits
  layout = LevelLayout.of(101, bits, workers=1)

  @jax.jit
  def packed(values):
    rounding = rounding_of(noise.key_of(0), values, levels)
    head = rounding.encode_head(values, layout)
    words = jnp.concatenate([rounding.encode(values, layout, piece=0), head[1:]])
    rows = jnp.stack([decode(words, row, bits) for row in range(layout.rows)])
    return head[0], rows, count_levels(words, bits)

  scale, rows, count = map(np.asarray, packed(values))
  scale = scale.view(np.float32)
  whole = layout.words
  level = np.concatenate([rows[:, :whole].reshape(-1), rows[:, whole:].reshape(-1)])
  assert (np.abs(level[:101] - values / scale) < 1).all()
  assert not level[101:].any()
  assert count == np.count_nonzero(level)


def test_noise_is_uniform_and_differs_between_rows_workers_and_steps():
  key = noise.key_of(0)
  draw = jax.jit(
    lambda number, row: draw_noise(noise.fold(key, number), row, 50_000),
    static_argnums=1,
  )
  drawn = np.stack([draw(number, row) for number in (0, 1) for row in (0, 1, 2)])
  assert (drawn >= 0).all()
  assert (drawn < 1).all()
  counts = np.stack([np.histogram(one, 100, (0, 1))[0] for one in drawn])
  assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
  apart = np.corrcoef(
    np.vstack([drawn, drawn[:, 1:].repeat(2, 1)[:, :50_000]])
  ) - np.eye(12)
  assert np.abs(apart).max() < 5 / np.sqrt(25_000)


# One block of the wire less an entry, one, more than two; short blocks, with words and
# entries that are left.
@pytest.mark.parametrize(
  ("n", "levels", "block"),
  [
    *(
      row(n, levels, qsgd._BLOCK)
      for n, levels in itertools.product([131_071, 131_072, 300_003], [127, 130])
    ),
    row(1007, 127, 50, quick=True),
  ],
)
def test_long_gradients_are_sent_in_pieces_to_within_a_level(
  n, levels, block, monkeypatch
):
  monkeypatch.setattr(qsgd, "_BLOCK", block)
  workers, grads = 3, normals(0, 3, n)
  out = js.simulate("qsgd", grads, levels=levels)
  layout = LevelLayout.of(n, js.make_collective("qsgd", levels=levels).bits, workers)
  assert layout.pieces == max(1, layout.words // qsgd._BLOCK)

  @jax.jit
  def rounded(rank, x):
    rounding = rounding_of(noise.fold(noise.fold(noise.key_of(0), 0), rank), x, levels)
    return rounding.rounded(x, layout), rounding.scale

  values, scales = map(np.stack, zip(*map(rounded, range(workers), grads), strict=True))
  assert (np.abs(values - grads) <= scales[:, None]).all()
  np.testing.assert_array_equal(out.total, (values[0] + values[1]) + values[2])
  assert float(out.metrics.selected) == pytest.approx((values != 0).sum(axis=1).mean())
  cost = js.costs.count("qsgd", n=n, workers=workers, levels=levels)
  assert cost == js.costs.predict("qsgd", n=n, workers=workers, levels=levels)
  assert cost.messages == 2 * layout.pieces
