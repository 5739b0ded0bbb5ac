"""QSGD: unbiased, packed, and bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.qsgd import count_levels, decode, decode_sum, draw_noise, encode
from jaxsparse.sparse import noise
from tests.cases import normals
from tests.reference import rounding


def noise_of(key, n, levels):
  """f32[n], the random numbers of the entries of a message."""
  rows = 32 // js.make_collective("qsgd", levels=levels).bits
  drawn = np.stack([draw_noise(key, row, n // rows + 1) for row in range(rows)])
  return np.concatenate([drawn[:, :-1].reshape(-1), drawn[: n % rows, -1]])


@pytest.mark.parametrize("levels", [1, 127])
def test_equals_the_paper_in_numpy(levels):
  """Three steps of the same noise; a norm that is rounded up may move few entries to the next level."""
  workers, n, state = 3, 2000, None
  for step in range(3):
    grads = normals(step, workers, n)
    keys = [noise.fold(noise.fold(noise.key_of(0), step), rank) for rank in range(workers)]
    drawn = np.stack([noise_of(key, n, levels) for key in keys])
    out = js.simulate("qsgd", grads, state=state, levels=levels)
    state, sent = out.state, rounding.qsgd(grads.astype(np.float64), drawn, levels)
    same = np.abs(np.asarray(out.total) - sent.sum(0)) < 1e-3 * np.abs(sent).max()
    assert same.mean() > 0.98
    assert np.abs(np.asarray(out.total) - sent.sum(0)).max() < 1.01 * np.linalg.norm(grads, axis=1).max() / levels


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_the_mean_over_seeds_is_the_gradient(levels):
  grads, draws = normals(0, 1, 8)[0], 20_000
  keys = jax.vmap(lambda draw: noise.fold(noise.key_of(levels), draw))(jnp.arange(draws))
  bits = js.make_collective("qsgd", levels=levels).bits
  values = jax.jit(jax.vmap(lambda key: decode_sum(encode(key, grads, levels, bits)[None], bits, 8, np.array([0]))))(
    keys
  )
  # The standard error of a mean of values that are at most one level from the entry, five times over.
  tolerance = 5 * np.linalg.norm(grads) / levels / 2 / np.sqrt(draws)
  np.testing.assert_allclose(values.mean(0), grads, atol=tolerance)
  assert np.abs(np.asarray(values) - grads).max() <= np.linalg.norm(grads) / levels * (1 + 2**-14)


@pytest.mark.parametrize("levels", [1, 2, 7, 127, 128, 40_000, 2**23])
def test_levels_survive_packing(levels):
  bits = js.make_collective("qsgd", levels=levels).bits
  values = np.random.default_rng(0).integers(-levels, levels + 1, 101).astype(np.float32)
  values[:3] = -levels, levels, 0
  message = encode(noise.key_of(0), values, levels, bits)
  scale = np.asarray(message[0]).view(np.float32)
  rows = np.stack([decode(message[1:], row, bits) for row in range(32 // bits)])
  whole = 101 // len(rows)
  level = np.concatenate([rows[:, :whole].reshape(-1), rows[:, whole:].reshape(-1)])
  assert (np.abs(level[:101] - values / scale) < 1).all()
  assert not level[101:].any()
  assert count_levels(message, bits) == np.count_nonzero(level)


def test_noise_is_uniform_and_differs_between_rows_workers_and_steps():
  key = noise.key_of(0)
  drawn = np.stack([draw_noise(noise.fold(key, number), row, 50_000) for number in (0, 1) for row in (0, 1, 2)])
  assert (drawn >= 0).all()
  assert (drawn < 1).all()
  counts = np.stack([np.histogram(one, 100, (0, 1))[0] for one in drawn])
  assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
  apart = np.corrcoef(np.vstack([drawn, drawn[:, 1:].repeat(2, 1)[:, :50_000]])) - np.eye(12)
  assert np.abs(apart).max() < 5 / np.sqrt(25_000)


@pytest.mark.parametrize("n", [131_071, 131_072, 300_003])  # one block of the wire less an entry, one, more than two
def test_long_gradients_are_decoded_to_within_a_level(n):
  grads = normals(0, 3, n)
  messages = jax.jit(jax.vmap(lambda x: encode(noise.key_of(0), x, 127, 8)))(grads)
  scales = np.array([np.asarray(messages[:, 0]).view(np.float32)]).reshape(3, 1)
  each = np.stack([decode_sum(message[None], 8, n, np.array([0])) for message in messages])
  assert (np.abs(each - grads) <= scales).all()
  assert [int(count_levels(one, 8)) for one in messages] == (each != 0).sum(axis=1).tolist()
  np.testing.assert_array_equal(decode_sum(messages, 8, n, np.arange(3)), (each[0] + each[1]) + each[2])
