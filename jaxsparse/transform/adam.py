"""Adam for a worker that trains by itself: its second moment is about that of the mean gradient of all workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.sparse.flatten import wide_dtype
from jaxsparse.types import check_whole


class WindowAdamState(NamedTuple):
  """The state of `js.scale_by_window_adam`.

  All averages are float32 where the parameters have 16 bits, else of their dtype.

  Attributes:
    step: number of steps so far, i32[].
    mu: m, the moving average of gradients, or as `mu_dtype` says.
    average: a, a moving average of gradients over the window, without bias correction.
    nu: v, the moving average of the squares of â.
  """

  step: jax.Array
  mu: optax.Updates
  average: optax.Updates
  nu: optax.Updates


def scale_by_window_adam(
  window: int,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  mu_dtype: Any = None,
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

  With parameters of 16 bits all averages and the arithmetic are float32, which
  `optax.adam` does not do: bfloat16 takes b₂ = 0.999 for 1, and float16 takes ε = 1e-8
  for 0. Updates have the dtype of the gradients. `optax.inject_hyperparams` rounds b₁,
  b₂ and ε to the dtype of the parameters; where that makes a decay 1, or ε 0, the
  number of float32 that is rounded so and is nearest to the one given is unknown, and
  1 − 2⁻⁹ (bfloat16), 1 − 2⁻¹² or 1.5e-8 (float16) is taken. Its
  `hyperparam_dtype=jnp.float32` keeps them.

  Args:
    window: W, a whole number from 1 to 2²⁰.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: ε, added to the denominator.
    mu_dtype: the floating-point dtype in which m is stored, as in `optax.adam`; None
      stores it as the other averages. Complex m stays complex.

  Returns:
    An `optax.GradientTransformation`; multiply by the rate after it.

  Raises:
    ValueError: for a window that is no such number, or such a dtype.

  Example:
    The updates of four workers, each with an Adam of its own, exchanged as signs:

    >>> import optax, jaxsparse as js
    >>> tx = js.local_steps(
    ...   optax.chain(js.scale_by_window_adam(window=4), optax.scale_by_learning_rate(0.001)),
    ...   optax.chain(js.onebit_transform("workers"), optax.sgd(1.0)),
    ...   every=1, apply_residual=True)
  """
  check_whole("scale_by_window_adam", 1, 2**20, window=window)
  if mu_dtype is not None and not jnp.issubdtype(mu_dtype, jnp.floating):
    raise ValueError(
      f"scale_by_window_adam: mu_dtype={mu_dtype!r}, choose a floating-point dtype, or None"
    )
  # the arithmetic of a number of numpy would overflow, and change dtypes
  window = int(window)
  decay = (window - 1) / (window + 1)
  b1, b2, eps = _unrounded_decay(b1), _unrounded_decay(b2), _unrounded_eps(eps)

  def stored(mu: optax.Updates) -> optax.Updates:
    keeps = lambda m: mu_dtype is None or jnp.iscomplexobj(m)
    return jax.tree.map(lambda m: m if keeps(m) else m.astype(mu_dtype), mu)

  def init(params: optax.Params) -> WindowAdamState:
    zeros = lambda leaf: jnp.zeros_like(leaf, wide_dtype(leaf))
    # a step that takes its state needs each apart
    mu, average, nu = (jax.tree.map(zeros, params) for _ in range(3))
    return WindowAdamState(jnp.zeros([], jnp.int32), stored(mu), average, nu)

  def update(
    updates: optax.Updates, state: WindowAdamState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, WindowAdamState]:
    del params
    step = optax.safe_increment(state.step)
    count = step.astype(jnp.result_type(float))
    widen = lambda x, v: x.astype(wide_dtype(v))
    grads, mu, average, nu = (
      jax.tree.map(widen, tree, state.nu) for tree in (updates, *state[1:])
    )
    mu = optax.tree.update_moment(grads, mu, b1, 1)
    average = optax.tree.update_moment(grads, average, decay, 1)
    recent = optax.tree.bias_correction(average, decay, count)
    nu = optax.tree.update_moment_per_elem_norm(recent, nu, b2, 2)
    scaled = jax.tree.map(
      lambda m, v, grad: (m / (jnp.sqrt(v) + eps)).astype(grad.dtype),
      optax.tree.bias_correction(mu, b1, count),
      optax.tree.bias_correction(nu, b2, count),
      updates,
    )
    return scaled, WindowAdamState(step, stored(mu), average, nu)

  return optax.GradientTransformation(init, update)


def _unrounded_decay(decay: Any) -> Any:
  """A decay in float32; below 1, where rounding to 16 bits has made it 1."""
  dtype = jnp.result_type(decay)
  if wide_dtype(decay) == dtype:
    return decay
  most = 1 - float(jnp.finfo(dtype).epsneg) / 2
  return jnp.minimum(jnp.asarray(decay, jnp.float32), most)


def _unrounded_eps(eps: Any) -> Any:
  """ε in float32; above 0, where rounding to 16 bits has made it 0."""
  dtype = jnp.result_type(eps)
  if wide_dtype(eps) == dtype:
    return eps
  least = float(jnp.finfo(dtype).smallest_subnormal) / 4
  return jnp.maximum(jnp.asarray(eps, jnp.float32), least)
