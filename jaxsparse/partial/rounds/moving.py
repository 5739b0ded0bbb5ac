"""What a worker of rounds has moved: the parameters that it goes on from, and what is left after a round."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.flatten import leaves_by_name


@functools.partial(jax.jit, static_argnums=2)
def parameters(
  base: jax.Array, moved: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """θ_w, for the optimizer of the worker."""
  return (base - moved).astype(dtype)


@jax.jit
def movement(
  base: optax.Params, before: optax.Params, params: optax.Params
) -> optax.Params:
  """Base − θ_w: what it was when `step` returned parameters last, and what was moved since.

  Raises:
    ValueError: for parameters whose leaves have other names or shapes.
  """
  named = lambda tree: [
    f"params{name} of {[*leaf.shape]}" for name, leaf in leaves_by_name(tree).items()
  ]
  for expected, leaf in itertools.zip_longest(
    named(base), named(params), fillvalue="nothing"
  ):
    if leaf != expected:
      raise ValueError(
        f"Rounds: {leaf}, where training started from {expected}: give what `step` returned, trained"
      )

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
  """What was moved since it was given."""
  return moved - delta


@functools.partial(jax.jit, static_argnums=0)
def mix(
  mixing: float, moved: jax.Array, _: jax.Array, before: jax.Array, after: jax.Array
) -> jax.Array:
  """θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u."""
  return mixing * (moved + (after - before))
