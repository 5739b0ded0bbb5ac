"""What a worker of rounds has moved: the parameters that it goes on from, and what is left after a round."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.arrays.flatten import leaves_by_name


@functools.partial(jax.jit, static_argnums=2)
def parameters(base: jax.Array, moved: jax.Array, dtype: Any) -> jax.Array:
  """θ_w, for the optimizer of the worker."""
  return (base - moved).astype(dtype)


@jax.jit
def movement(base: Any, before: Any, params: Any) -> Any:
  """Base − θ_w: what it was when `step` returned parameters last, and what was moved since.

  Raises:
    ValueError: for parameters whose leaves have other names or shapes.
  """
  named = lambda tree: [
    f"params{name} of {[*leaf.shape]}" for name, leaf in leaves_by_name(tree).items()
  ]
  for expected, found in itertools.zip_longest(
    named(base), named(params), fillvalue="nothing"
  ):
    if found != expected:
      raise ValueError(
        f"Rounds: {found}, where training started from {expected}: give what `step` returned, trained"
      )

  def add(base: jax.Array, moved: jax.Array, param: jax.Array) -> jax.Array:
    return moved + (
      parameters(base, moved, param.dtype).astype(jnp.float32)
      - param.astype(jnp.float32)
    )

  return jax.tree.map(add, base, before, params)


@jax.jit
def keep(moved: jax.Array, given: jax.Array, *_: jax.Array) -> jax.Array:
  """What was moved since it was given."""
  return moved - given


@functools.partial(jax.jit, static_argnums=0)
def mix(
  mixing: float, moved: jax.Array, _: jax.Array, before: jax.Array, after: jax.Array
) -> jax.Array:
  """θ′ − (α θ_w + (1 − α) θ′) = α (θ − θ_w + u), with θ′ = θ + u."""
  return mixing * (moved + (after - before))
