"""QSGD: unbiased, packed, and bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.collectives.qsgd import (
  decode_sum,
  draw_noise,
  encode,
  pack_levels,
  quantize,
  scale_of,
  unpack_levels,
)
from tests.cases import normals
from tests.reference import rounding


@pytest.mark.parametrize("levels", [1, 127])
def test_equals_the_paper_in_numpy(levels):
  """Three steps of the same noise; a norm that is rounded up may move few entries to the next level."""
  workers, n, state = 3, 2000, None
  for step in range(3):
    grads = normals(step, workers, n)
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), rank) for rank in range(workers)]
    noise = np.stack([draw_noise(jax.random.fold_in(key, 0), n) for key in keys])
    out = js.simulate("qsgd", grads, state=state, levels=levels)
    state, sent = out.state, rounding.qsgd(grads.astype(np.float64), noise, levels)
    same = np.abs(np.asarray(out.total) - sent.sum(0)) < 1e-3 * np.abs(sent).max()
    assert same.mean() > 0.98
    assert np.abs(np.asarray(out.total) - sent.sum(0)).max() < 1.01 * np.linalg.norm(grads, axis=1).max() / levels


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_the_mean_over_seeds_is_the_gradient(levels):
  grads, draws = normals(0, 1, 8)[0], 20_000
  keys = jax.random.split(jax.random.key(levels), draws)
  scale = scale_of(jnp.asarray(grads), levels)
  values = scale * jax.vmap(lambda key: quantize(key, grads, scale, levels))(keys).astype(jnp.float32)
  # The standard error of a mean of values that are at most one level from the entry, five times over.
  tolerance = 5 * np.linalg.norm(grads) / levels / 2 / np.sqrt(draws)
  np.testing.assert_allclose(values.mean(0), grads, atol=tolerance)
  assert np.abs(np.asarray(values) - grads).max() <= np.linalg.norm(grads) / levels * (1 + 2**-14)


@pytest.mark.parametrize("levels", [1, 2, 7, 127, 128, 40_000, 2**23])
def test_levels_survive_packing(levels):
  bits = js.make_collective("qsgd", levels=levels).bits
  values = np.random.default_rng(0).integers(-levels, levels + 1, 101).astype(np.int32)
  values[:2] = -levels, levels
  np.testing.assert_array_equal(unpack_levels(pack_levels(jnp.asarray(values), bits), bits)[:101], values)


@pytest.mark.parametrize("n", [131_071, 131_072, 300_003])  # one block of the wire less an entry, one, more than two
def test_long_gradients_are_decoded_to_within_a_level(n):
  grads = normals(0, 3, n)
  messages, used = jax.jit(jax.vmap(lambda x: encode(jax.random.key(0), x, 127, 8)))(grads)
  scales = np.array([np.asarray(messages[:, 0]).view(np.float32)]).reshape(3, 1)
  each = np.stack([decode_sum(message[None], 8, n, np.array([0])) for message in messages])
  assert (np.abs(each - grads) <= scales).all()
  assert used.tolist() == (each != 0).sum(axis=1).tolist()
  np.testing.assert_array_equal(decode_sum(messages, 8, n, np.arange(3)), (each[0] + each[1]) + each[2])
