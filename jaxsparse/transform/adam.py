"""Adam for a worker that trains by itself: its second moment is about that of the mean gradient of all workers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.types import check_whole


class WindowAdamState(NamedTuple):
  """The state of `js.scale_by_window_adam`.

  Attributes:
    step: number of steps so far, i32[].
    mu: m, the moving average of gradients, like the parameters.
    average: a, a moving average of gradients over the window, without bias correction.
    nu: v, the moving average of the squares of â.
  """

  step: jax.Array
  mu: optax.Updates
  average: optax.Updates
  nu: optax.Updates


def scale_by_window_adam(
  window: int, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
  """Adam whose second moment is that of averages over W gradients instead of single ones.

      m ← b₁ m + (1 − b₁) g
      a ← b a + (1 − b) g,           b = (W − 1)/(W + 1)
      v ← b₂ v + (1 − b₂) â²
      u = m̂ / (√v̂ + ε)               with the hat for bias correction

  Noise that is independent from step to step has W times as much variance in g as in â,
  after many steps. The mean of P workers' gradients has 1/P of the variance of each. So
  if P workers train with optimizers of their own, as in `js.local_steps`, a window of P
  gives each of them about the second moment of one Adam behind a dense all-reduce, and
  the mean of their updates is about that Adam's. With `optax.adam` a worker sees P
  times the noise, and the mean moves too little where gradients are noisy. If that one
  Adam has a window itself, take P times as much. W = 1 is `optax.scale_by_adam`.

  The momentum is that of g: in a chain of `optax.ema` and `optax.adam` it is an average
  of averages, which comes later and is stable at much smaller rates only. Where a
  gradient was zero for long and then is not, the first update is up to (W + 1)/2 times
  as large as Adam's; clip the updates if that happens in your model.

  Args:
    window: W, a whole number from 1 to 2²⁰.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: ε, added to the denominator.

  Returns:
    An `optax.GradientTransformation`; multiply by the rate after it.

  Raises:
    ValueError: for a window that is no such number.

  Example:
    The updates of four workers, each with an Adam of its own, exchanged as signs:

    >>> import optax, jaxsparse as js
    >>> tx = js.local_steps(
    ...   optax.chain(js.scale_by_window_adam(window=4), optax.scale_by_learning_rate(0.001)),
    ...   optax.chain(js.onebit_transform("workers"), optax.sgd(1.0)),
    ...   every=1, apply_residual=True)
  """
  check_whole("scale_by_window_adam", 1, 2**20, window=window)
  # the arithmetic of a number of numpy would overflow, and change dtypes
  window = int(window)
  decay = (window - 1) / (window + 1)

  def init(params: optax.Params) -> WindowAdamState:
    # a step that takes its state needs each apart
    mu, average, nu = (optax.tree.zeros_like(params) for _ in range(3))
    return WindowAdamState(jnp.zeros([], jnp.int32), mu, average, nu)

  def update(
    updates: optax.Updates, state: WindowAdamState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, WindowAdamState]:
    del params
    step = optax.safe_increment(state.step)
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    average = optax.tree.update_moment(updates, state.average, decay, 1)
    recent = optax.tree.bias_correction(average, decay, step)
    nu = optax.tree.update_moment_per_elem_norm(recent, state.nu, b2, 2)
    scaled = jax.tree.map(
      lambda m, v: m / (jnp.sqrt(v) + eps),
      optax.tree.bias_correction(mu, b1, step),
      optax.tree.bias_correction(nu, b2, step),
    )
    return scaled, WindowAdamState(step, mu, average, nu)

  return optax.GradientTransformation(init, update)
