"""Wrappers around the collectives of a transform: momentum, clipping, masking, EF21, and rising sparsity.

    momentum_corrected    momentum of each worker before the exchange; masks it; clips gradients
    ef21                  exchanges changes of mean gradients
    warmed_up             other densities in the first steps

`atomic` skips steps, `restored` scales means, `averaging` averages momentum of optimizers.

Deep Gradient Compression: momentum of each worker's own before a sparse exchange, none
after it (Lin et al., 2018).

Momentum after a sparse exchange sees an entry when it is delivered, with all that has
accumulated, and multiplies that by 1/(1 − m). Here it is applied to the gradient of
each worker before the residual is added, as if each entry were delivered at once:

    u ← m u + g            momentum, f32[n] of each worker
    acc = residual + u     the accumulator, reduced by any collective

Where mass of a worker has left its residual, its momentum is zero from then on (factor
masking): it would push further in the direction of an old gradient.
"""

import numbers
from collections.abc import Mapping

import jax
import optax

from jaxsparse.arrays.flatten import wide_dtype
from jaxsparse.collectives import Collective, SparseCollective
from jaxsparse.collectives._wrapped import EF21, Corrected, WarmedUp, Wrapped
from jaxsparse.transform.update import Transform
from jaxsparse.types import MOST_STEPS, check_fraction, check_whole, is_number


def momentum_corrected(
  transform: optax.GradientTransformation,
  momentum: float = 0.9,
  *,
  nesterov: bool = False,
  masking: bool = True,
  clip_norm: float | None = None,
) -> optax.GradientTransformation:
  """The transform with the momentum of each worker's own before it (Deep Gradient Compression, §3).

      u ← m u + g,  reduced: u          with nesterov:  u ← m (u + g),  reduced: u + g

  and then `u = 0` at each entry whose next residual is not what entered the exchange,
  the residual before + u: there mass has left this worker. Law C is that of the
  collective, for u in place of the gradient. The momentum is f32[n] for each worker in
  the state, and starts anew after `js.resize` and `js.convert`, unless workers,
  collectives and groups of leaves stay the same. A skipped step keeps it.

  The optimizer that follows has **no momentum of its own**: `optax.sgd(rate)`. With a
  collective that delivers all entries the update is that of momentum after a dense
  average.

  Args:
    transform: a jaxsparse transform, `js.spardl_transform(...)` for instance, not a
      chain.
    momentum: m in (0, 1].
    nesterov: Nesterov's momentum, as above.
    masking: whether momentum is zeroed where mass has left. Collectives that select no
      entries never do it.
    clip_norm: c, clips the gradient of each worker, all leaves together, to an ℓ₂ norm
      of c/√P before everything else; None does not. The norm of the sum of P
      independent gradients is then about c. As in optax, a norm beyond 1.8e19, whose
      square overflows float32, gives zeros; largest magnitudes would take another pass.

  Returns:
    An `optax.GradientTransformation`, to be the first of its chain.

  Raises:
    TypeError: for a transformation that is not a jaxsparse transform.
    ValueError: for a momentum or a norm outside its choices, or for `masking` with
      coefficients instead of entries (`js.make_transform("dcttopk", …)`).

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> tx = optax.chain(js.momentum_corrected(js.spardl_transform("workers", density=0.01)), optax.sgd(0.1))
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> state = js.init(tx, jnp.zeros(300), mesh)
    >>> state[0].carried.worker[0].momentum.size == 300 * len(jax.devices())
    True
  """
  transform = checked_transform("momentum_corrected", transform)
  check_fraction("momentum_corrected", "momentum", momentum)
  if clip_norm is not None and not (
    is_number(clip_norm, numbers.Real) and clip_norm > 0
  ):
    raise ValueError(
      f"momentum_corrected: clip_norm={clip_norm!r}, choose a number above 0, or None"
    )
  corrected = transform.with_collectives(
    lambda collectives: [
      Corrected(
        collective=collective, momentum=momentum, nesterov=nesterov, masking=masking
      )
      for collective in collectives
    ]
  )
  if clip_norm is None:
    return corrected
  # A function, since the number of workers P is known inside the axis only. The norm of
  # the sum of P independent gradients is √P times that of one: with c/√P each, about c.
  largest = lambda: float(clip_norm) * transform.comm.size**-0.5

  def clip(grads: optax.Updates, params: optax.Params) -> optax.Updates:  # noqa: ARG001
    # In float16 the square of 256 is Inf, so that the norm is Inf and the result 0.
    wide = jax.tree.map(lambda grad: grad.astype(wide_dtype(grad)), grads)
    clipped, _ = optax.clip_by_global_norm(largest()).update(wide, optax.EmptyState())
    return optax.tree.cast_like(clipped, grads)

  return optax.chain(optax.stateless(clip), corrected)


def ef21(
  transform: optax.GradientTransformation, momentum: float = 0.9
) -> optax.GradientTransformation:
  """The transform of changes of each worker's mean gradient, added up behind it (EF21-SGDM; Fatkhullin et al. 2023).

      mean′_w = m mean_w + (1 − m) g_w,    u_w = mean′_w − a mean_w     of each worker
      total′ = a total + exchange(u)                                    the same on every worker
      update = (total′ − m total) / (P (1 − m))

  What is exchanged becomes small where gradients change slowly, however much the
  workers' gradients differ, and with it what the exchange leaves out. So workers with
  data of their own keep the accuracy of dense training with 4 bits (1/8 of the words),
  where optimizers of each worker's own lose it. Signs are too coarse for one Adam: their
  rounding is most of its second moment. Law:

      total = Σ_w (mean_w − what the exchange still owes of it)

  EF21 has a = 1. Here a = 1 − 2⁻¹³: rounding errors of sums, large where gradients were
  large, decay. For that, 2⁻¹³ of the means is sent again in each step.

  The update is the mean gradient, less what is owed of it, so the optimizer that
  follows is that of dense training, with its rate and **with the momentum m**:
  `optax.adam(rate, b1=0.9)`, `optax.sgd(rate, momentum=0.9)`. Its moving average of
  updates is then total / P to rounding. (If total / P were the update, Adam would
  divide an average by the root mean square of averages. For noise that is
  √((1 − m)/(1 + m)) times that of gradients, so with m = 0.9 Adam's step would be 4.4
  times as large.)

  A worker holds `mean` and what is owed of it, f32[n] each, and `total`. Nothing of
  these is a residual: `js.flush` has nothing to deliver, and after `js.resize` and
  `js.convert` all begin at 0, unless workers, collectives and groups of leaves stay the
  same. A skipped step keeps them.

  Args:
    transform: a jaxsparse transform, `js.onebit_transform(...)` for instance, not a
      chain.
    momentum: m in [0, 1), that of the optimizer that follows; 0 is EF21.

  Returns:
    An `optax.GradientTransformation`, to be the first of its chain.

  Raises:
    TypeError: for a transformation that is not a jaxsparse transform.
    ValueError: for a momentum outside its choices, or a collective that loses a part of
      what it is given.

  Example:
    Gradients of two workers whose mean is (0, 1), by signs:

    >>> import jax.numpy as jnp, optax, jaxsparse as js
    >>> comm = js.SimComm("workers", members=2)
    >>> tx = optax.chain(js.ef21(js.onebit_transform(comm), momentum=0.5), optax.sgd(0.5, momentum=0.5))
    >>> step = js.make_train_step(lambda x, batch: jnp.vdot(x, batch[0]), tx, comm, donate=False)
    >>> x, state = jnp.zeros(2), js.init(tx, jnp.zeros(2), comm)
    >>> for _ in range(30):
    ...   after, state, _ = step(x, state, jnp.array([[5.0, 1.0], [-5.0, 1.0]]))
    >>> -after.round(3)
    Array([0., 1.], dtype=float32)
  """
  transform = checked_transform("ef21", transform)
  if not (is_number(momentum, numbers.Real) and 0 <= momentum < 1):
    raise ValueError(f"ef21: momentum={momentum!r}, choose a number from 0 up, below 1")
  return transform.with_collectives(
    lambda collectives: [
      EF21(collective=collective, momentum=momentum) for collective in collectives
    ]
  )


def warmed_up(
  transform: optax.GradientTransformation, densities: Mapping[int, float]
) -> optax.GradientTransformation:
  """The transform with other densities in its first steps: a ladder of compiled message sizes.

  The first gradients change fast, and a residual delivers them late: Deep Gradient
  Compression begins with a density of 25 % and divides it by 4 in each epoch. All
  densities are compiled into one program, which takes longer to compile; the step
  chooses one of them, and residuals pass from one to the next.

  Args:
    transform: a jaxsparse transform, not a chain; groups of leaves whose collective is
      not sparse stay as they are. Warm up first, and correct momentum then:
      `js.momentum_corrected(js.warmed_up(...))`.
    densities: `{100: 0.25, 200: 0.0625}` is 25 % before step 100, 6.25 % before step
      200, then that of the transform. A skipped step is not counted.

  Returns:
    An `optax.GradientTransformation`, to be the first of its chain. `js.resize` and
    `js.convert` start at step 0, unless workers, collectives and groups of leaves stay
    the same.

  Raises:
    TypeError: for a transformation that is not a jaxsparse transform.
    ValueError: for steps that do not ascend from 1, or densities outside (0, 1]; when
      used, if no group of leaves has a sparse collective.

  Example:
    >>> import optax, jaxsparse as js
    >>> sparse = js.warmed_up(js.spardl_transform("workers", density=0.01), {100: 0.25, 200: 0.0625})
    >>> tx = optax.chain(js.momentum_corrected(sparse, 0.9), optax.sgd(0.1))
  """
  transform = checked_transform("warmed_up", transform)
  steps = tuple(densities)
  for step, density in densities.items():
    check_whole("warmed_up", 1, MOST_STEPS, step=step)
    check_fraction(f"warmed_up before step {step}", "density", density)
  # Densities hold one after the other, each up to its step: steps ascend strictly.
  if not steps or sorted(set(steps)) != list(steps):
    raise ValueError(
      f"warmed_up: densities={dict(densities)!r}, give at least one density, by ascending steps"
    )

  def change(collectives: list[Collective]) -> list[Collective]:
    names = ", ".join(collective.name for collective in collectives)
    # A wrapper's collective has no density of its own to change: wrap afterwards.
    if any(isinstance(collective, Wrapped) for collective in collectives):
      raise ValueError(
        f"warmed_up: {names} is given, warm up first: js.momentum_corrected(js.warmed_up(...)) or js.ef21(the same)"
      )
    if not any(isinstance(collective, SparseCollective) for collective in collectives):
      raise ValueError(
        f"warmed_up: {names} has no density, choose one with density= or k=, as js.spardl_transform"
      )
    warm = lambda sparse: WarmedUp(
      collective=sparse,
      steps=tuple(map(int, steps)),
      densities=tuple(map(float, densities.values())),
    )
    # Groups that send all entries, as dense ones, stay as they are.
    return [
      warm(collective) if isinstance(collective, SparseCollective) else collective
      for collective in collectives
    ]

  return transform.with_collectives(change)


def checked_transform(name: str, transform: optax.GradientTransformation) -> Transform:
  """`transform`, for a wrapper of that name; raises TypeError if it is not a jaxsparse transform."""
  if not isinstance(transform, Transform):
    raise TypeError(
      f"{name}: a {type(transform).__name__} is no jaxsparse transform: give js.spardl_transform(...) or another one, "
      f"not a chain, and chain what follows after {name}"
    )
  return transform
