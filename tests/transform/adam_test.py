"""Adam with the second moment of averages: optax's with a window of 1, and that of all workers with a window of P."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsparse as js
from tests.cases import normals, sim, start

pytestmark = pytest.mark.usefixtures("standard_promotion")


def after(tx, grads):
  """The last update and state, for f32[steps, n]."""

  def step(state, grad):
    updates, state = tx.update(grad, state)
    return state, updates

  state, updates = jax.lax.scan(step, tx.init(jnp.zeros_like(grads[0])), grads)
  return updates[-1], state


def test_a_window_of_one_is_optax():
  grads = jnp.asarray(normals(0, 20, 50))
  ours, theirs = (
    after(tx, grads)[0] for tx in (js.scale_by_window_adam(1), optax.scale_by_adam())
  )
  np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def test_a_tree_without_leaves_has_no_update():
  """As of `optax.multi_transform` without a leaf of that label."""
  nothing = {"w": optax.MaskedNode()}
  tx = js.scale_by_window_adam(4)
  updates, state = tx.update(nothing, tx.init(nothing))
  assert (updates, int(state.step)) == (nothing, 1)


def test_equals_the_formulas_in_numpy():
  grads, window, (b1, b2, eps) = normals(1, 30, 40), np.uint8(255), (0.8, 0.95, 1e-3)
  b = 254 / 256
  m = a = v = np.zeros(40)
  for t, g in enumerate(grads.astype(np.float64), 1):
    m, a = b1 * m + (1 - b1) * g, b * a + (1 - b) * g
    v = b2 * v + (1 - b2) * (a / (1 - b**t)) ** 2
  expected = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
  got, _ = after(js.scale_by_window_adam(window, b1, b2, eps), jnp.asarray(grads))
  np.testing.assert_allclose(got, expected, rtol=2e-5)


HALF = [jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [*HALF, jnp.float32], ids=str)
@pytest.mark.parametrize("promotion", ["strict", "standard"])
def test_moments_of_16_bit_parameters_are_those_of_float32(dtype, mu_dtype, promotion):
  """Gradients of 0, 1e-4 and 300, all of which become a hundredth after 500 steps: the second moment forgets."""
  first = np.array([0, 1e-4, 300, -2], np.float64)
  size = np.repeat([1, 0.01], [500, 1500])
  grads = jnp.asarray(np.outer(size, first), dtype)
  with jax.numpy_dtype_promotion(promotion):
    got, state = after(js.scale_by_window_adam(4, mu_dtype=mu_dtype), grads)
    expected, _ = after(js.scale_by_window_adam(4), grads.astype(jnp.float32))
  assert got.dtype == dtype
  assert (state.average.dtype, state.nu.dtype) == (jnp.float32, jnp.float32)
  assert state.mu.dtype == (mu_dtype or jnp.float32)
  tolerance = 0.05 if mu_dtype else 0.01 if dtype == jnp.bfloat16 else 0.001
  np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=tolerance)
  # two thousand steps that forgot nothing would leave 0.01
  assert 0.02 < float(expected[2]) < 0.05


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_hyperparameters_that_optax_has_rounded(dtype):
  """0.999 is 1 in bfloat16, 1e-8 and 0.9999 are 0 and 1 in float16."""
  make = optax.inject_hyperparams(js.scale_by_window_adam, static_args="window")
  tx = make(window=2, b2=0.9999)
  params = jnp.zeros(3, dtype)
  state = tx.init(params)
  assert float(state.hyperparams["b2"]) == 1
  grads = jnp.array([0, 0.001, 1], dtype)
  for _ in range(3):
    updates, state = tx.update(grads, state, params)
  np.testing.assert_allclose(updates.astype(jnp.float32), [0, 1, 1], rtol=0.01)


def test_complex_and_double_moments_keep_their_dtype():
  tx = js.scale_by_window_adam(2, mu_dtype=jnp.bfloat16)
  grads = jnp.array([3 + 4j, 1j], jnp.complex64)
  updates, state = tx.update(grads, tx.init(grads))
  np.testing.assert_allclose(updates, [0.6 + 0.8j, 1j], rtol=1e-5)
  assert (state.mu.dtype, state.nu.dtype) == (jnp.complex64, jnp.complex64)
  with jax.enable_x64(True):
    grads = jnp.array([1e-300, 1.0], jnp.float64)
    updates, state = js.scale_by_window_adam(2).update(grads, tx.init(grads))
    assert (updates.dtype, state.nu.dtype) == (jnp.float64, jnp.float64)


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("wide", ["float64", "complex64"])
def test_hyperparameters_of_one_dtype_change_no_other(wide, promotion):
  # `inject_hyperparams` gives numbers of one dtype to leaves of several
  with jax.enable_x64(True), jax.numpy_dtype_promotion(promotion):
    params = {"a": jnp.ones(3, wide), "b": jnp.ones(3, "float32")}
    plain = js.scale_by_window_adam(window=2, b1=0.9, b2=0.99)
    expected = plain.update(params, plain.init(params))
    for dtype in (wide, "float32"):
      b1, b2 = jnp.asarray(0.9, dtype), jnp.asarray(0.99, dtype)
      tx = js.scale_by_window_adam(window=2, b1=b1, b2=b2)
      result = tx.update(params, tx.init(params))
      for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_dtypes_are_checked():
  with pytest.raises(
    ValueError, match=r"mu_dtype=.*int8.*, choose a floating-point dtype, or None"
  ):
    js.scale_by_window_adam(2, mu_dtype=jnp.int8)


@pytest.mark.parametrize("window", [0, -3, 2.5, True, "4", None, 10**9])
def test_windows_are_checked(window):
  with pytest.raises(
    ValueError,
    match=r"scale_by_window_adam: window=.*, choose a whole number from 1 to 1048576",
  ):
    js.scale_by_window_adam(window)


@pytest.mark.long
def test_signs_of_updates_train_to_the_loss_of_dense_adam():
  """A noisy quadratic in the simulator: four workers exchange updates as signs, and one Adam is behind a dense mean."""
  workers, n, steps = 4, 600, 300
  curvature = jnp.logspace(-1, 1, n)
  loss = lambda p, noise: (
    0.5 * jnp.sum(curvature * (p - 1) ** 2) + jnp.vdot(p, noise.sum(0))
  )
  comm = sim(workers)
  rate = optax.scale_by_learning_rate(0.01)
  onebit = js.onebit_transform(comm)

  def signs(window):
    inner, outer = (
      optax.chain(js.scale_by_window_adam(window), rate),
      optax.chain(onebit, optax.sgd(1.0)),
    )
    return js.local_steps(inner, outer, every=1, apply_residual=True)

  def end(tx):
    step, params, state = start(tx, comm, jnp.zeros(n), loss)
    for number in range(steps):
      params, state, _ = step(
        params, state, jnp.asarray(0.3 * normals(number, workers, n))
      )
    return float(loss(params, jnp.zeros((1, n))))

  dense = end(optax.chain(js.dense_transform(comm), optax.scale_by_adam(), rate))
  assert end(signs(window=workers)) < 1.2 * dense
  assert end(signs(window=1)) > 2 * dense  # so it is the window
  # and that updates are exchanged
  assert end(optax.chain(onebit, optax.scale_by_adam(), rate)) > 5 * dense
