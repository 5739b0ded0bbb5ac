"""What a worker of rounds has moved: the parameters that it goes on from, and what is left after a round.

The base, f32 leaves, is what worker w goes on from after a round: the anchor θ, with
`apply_residual` less its residual / weight. Its parameters are θ_w = base − moved,
rounded to their dtypes; `moved` is f32.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxsparse.partial.net.alike import check_leaves


@functools.partial(jax.jit, static_argnums=2)
def parameters(
  base: jax.Array, moved: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """θ_w = base − moved, f32 leaves, in `dtype`, for the optimizer of the worker."""
  return (base - moved).astype(dtype)


@jax.jit
def movement(
  base: optax.Params, before: optax.Params, params: optax.Params
) -> optax.Params:
  """Base − θ_w, f32: `before`, plus what was moved since training last went on from the base.

  Args:
    base: f32 leaves from which training goes on.
    before: f32 leaves, base − θ_w when training last went on from the base.
    params: θ_w now, in the dtypes of the parameters.

  Raises:
    ValueError: for parameters whose leaves have other names or shapes.
  """
  check_leaves("Rounds", params, base)

  def add(base: jax.Array, moved: jax.Array, param: jax.Array) -> jax.Array:
    # The difference to the rounded parameters that `step` returned: rounding them to a
    # dtype of 16 bits is no movement.
    return moved + (
      parameters(base, moved, param.dtype).astype(jnp.float32)
      - param.astype(jnp.float32)
    )

  return jax.tree.map(add, base, before, params)


@jax.jit
def keep(moved: jax.Array, delta: jax.Array, *_: jax.Array) -> jax.Array:
  """What was moved since `delta` was given to a round, which has delivered it."""
  return moved - delta


@functools.partial(jax.jit, static_argnums=0)
def mix(
  mixing: float, moved: jax.Array, _: jax.Array, before: jax.Array, after: jax.Array
) -> jax.Array:
  """The movement of a worker that goes on from a mean of its parameters and the anchor after a round.

  θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u

  Args:
    mixing: α.
    moved: θ − θ_w now.
    _: what was given to the round, as `keep` has it.
    before: θ, the base before the round.
    after: θ′, the base after it.
  """
  return mixing * (moved + (after - before))
