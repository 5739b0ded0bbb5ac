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
