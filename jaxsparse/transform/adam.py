"""Adam for a worker that trains by itself: its second moment is about that of the mean gradient of all workers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.flatten import wide_dtype
from jaxsparse.types import ArrayTree, check_whole


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
  b₂ and ε to the dtype of the parameters, unless it has `hyperparam_dtype=jnp.float32`.
  A decay that it has rounded to 1 is taken as 1 − 2⁻⁹ (bfloat16) or 1 − 2⁻¹² (float16),
  and an ε of 0 in float16 as 1.5e-8: numbers that round to 1 and to 0.

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
    ValueError: for a window outside its choices, or a dtype that is not
      floating-point.

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
  adam = _WindowAdam(
    # A Python int: a numpy integer could overflow, and its dtype could promote results.
    int(window),
    # optax.inject_hyperparams may have rounded these to 16 bits: decays to 1, ε to 0.
    _unrounded_decay(b1),
    _unrounded_decay(b2),
    _unrounded_eps(eps),
    mu_dtype,
  )
  return optax.GradientTransformation(adam.init, adam.update)


class _WindowAdam(NamedTuple):
  """The arguments of `scale_by_window_adam`: numbers, or scalar arrays as `optax.inject_hyperparams` gives them."""

  window: int
  b1: Any
  b2: Any
  eps: Any
  mu_dtype: Any

  def init(self, params: optax.Params) -> WindowAdamState:
    """The state before the first step."""
    # Averages of 16-bit parameters are float32.
    wide = lambda leaf: jnp.zeros_like(leaf, wide_dtype(leaf))
    zeros = lambda: jax.tree.map(wide, params)

    # `zeros()` is called for each average, since a buffer cannot be donated twice.
    mu = self._stored(zeros())
    return WindowAdamState(jnp.int32(0), mu, average=zeros(), nu=zeros())

  def update(
    self,
    updates: optax.Updates,
    state: WindowAdamState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, WindowAdamState]:
    """Adam's update, in the dtypes of `updates`, and the next state."""
    del params
    # `safe_increment` stays at the largest i32: bias corrections are 1 by then.
    step = optax.safe_increment(state.step)
    of_leaf = functools.partial(self._update_leaf, step)
    moments = (state.mu, state.average, state.nu)
    # For complex leaves optax adds complex and real arrays, a promotion that the user's
    # settings may forbid.
    with jax.numpy_dtype_promotion("standard"):
      leaves = jax.tree.map(of_leaf, updates, *moments)
    # `leaves`, a pytree of tuples (update, m, a, v), becomes four pytrees; `transpose`
    # of JAX refuses one without leaves.
    column_of = lambda column: jax.tree.map(lambda _, row: row[column], updates, leaves)
    scaled, mu, average, nu = map(column_of, range(4))
    return scaled, WindowAdamState(step, self._stored(mu), average, nu)

  def _update_leaf(
    self,
    step: jax.Array,
    grad: jax.Array,
    mu: jax.Array,
    average: ArrayTree,
    nu: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The update of one leaf, in its dtype, and the next m, a and v, as `scale_by_window_adam` defines them.

    `step` is the number of this step, from 1; `mu`, `average` and `nu` are m, a and v
    before it.
    """
    # The dtype of averages and of the update before its cast: that of the parameter,
    # float32 for 16 bits.
    dtype = average.dtype
    # The exponent of decays in bias corrections: float64 where x64 is on.
    count = step.astype(jnp.result_type(float))
    window_decay = (self.window - 1) / (self.window + 1)
    # Options may be arrays, of one dtype for all leaves. In the real dtype of this leaf
    # they do not promote it.
    real = jnp.finfo(dtype).dtype
    options = self.b1, self.b2, self.eps
    b1, b2, eps = (_cast_number(x, real) for x in options)
    # x / (1 − decay^count), the hat of the formulas.
    corrected = lambda x, decay: optax.tree.bias_correction(
      x, _cast_number(decay, count.dtype), count
    )
    wide = grad.astype(dtype)
    # m averages g itself: an average of averages would lag.
    mu = optax.tree.update_moment(wide, mu.astype(dtype), b1, 1)
    average = optax.tree.update_moment(wide, average, window_decay, 1)
    # v averages the squares of â, not of g: with W = P, â has about the noise of the
    # mean gradient of all workers.
    recent = corrected(average, window_decay)
    # `per_elem_norm` takes |â|², which is real for complex entries, too.
    nu = optax.tree.update_moment_per_elem_norm(recent, nu, b2, 2)
    scaled = corrected(mu, b1) / (jnp.sqrt(corrected(nu, b2)) + eps)
    return scaled.astype(grad.dtype), mu, average, nu

  def _stored(self, mu: optax.Updates) -> optax.Updates:
    """The average `mu` in `mu_dtype`; None leaves it as it is."""
    if self.mu_dtype is None:
      return mu
    # A complex m would lose its imaginary part.
    cast = lambda m: m if jnp.iscomplexobj(m) else m.astype(self.mu_dtype)
    return jax.tree.map(cast, mu)


def _unrounded_decay(decay: Any) -> Any:
  """A decay in float32; below 1, where rounding to 16 bits has made it 1.

  A number of Python, or an array of 32 bits or more, is returned as it is.
  """
  # `wide_dtype` is float32 for 16 bits, else the dtype itself.
  if wide_dtype(decay) == jnp.result_type(decay):
    return decay
  # Halfway between 1 and the largest number below it in 16 bits: decays above it were
  # rounded to 1.
  largest = 1 - float(jnp.finfo(decay.dtype).epsneg) / 2
  return jnp.minimum(decay.astype(jnp.float32), largest)


def _unrounded_eps(eps: Any) -> Any:
  """ε in float32; above 0, where rounding to 16 bits has made it 0.

  A number of Python, or an array of 32 bits or more, is returned as it is.
  """
  # `wide_dtype` is float32 for 16 bits, else the dtype itself.
  if wide_dtype(eps) == jnp.result_type(eps):
    return eps
  # Numbers up to half of the smallest positive one round to 0: take half of that limit.
  least = float(jnp.finfo(eps.dtype).smallest_subnormal) / 4
  return jnp.maximum(eps.astype(jnp.float32), least)


def _cast_number(x: Any, dtype: Any) -> Any:
  """An array of one number in another real dtype; a number of Python as it is."""
  return jnp.real(x).astype(dtype) if hasattr(x, "dtype") else x
