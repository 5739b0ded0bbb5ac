"""Algorithm 2: adapts the number h of entries that each team sends in B-SAG to the overlap of the teams' indices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Adaptive(NamedTuple):
  """The state of Algorithm 2, the same on every worker.

  Attributes:
    h: i32[], the number of entries of a block that each team sends, ⌈L/d⌉ … L.
    step: i32[], the last change of h.
    right: bool[], whether the last step was in the right direction and was not a doubled one.
  """

  h: jax.Array
  step: jax.Array
  right: jax.Array

  @classmethod
  def start(cls, low: int, share: int) -> "Adaptive":
    """The state before the first step: h = ⌈L/d⌉, and a step of 1 % of the range of h."""
    return cls(jnp.int32(low), jnp.int32(max(1, round(0.01 * (share - low)))), jnp.bool_(False))


def adapt(state: Adaptive, merged: jax.Array, low: int, share: int) -> Adaptive:
  """Algorithm 2: changes h so that the union of the indices that teams send has about L elements.

  The direction of a step is right if h grows while N ≤ L, or shrinks while N > L, as in the paper's pseudocode. After
  two steps in the right direction the step is doubled; after one in the wrong direction it is halved and reversed.

  Args:
    state: the state of this step.
    merged: i32[], N, the largest number of different indices of any block, the same on every worker.
    low: ⌈L/d⌉, the minimum of h.
    share: L, the maximum of h.
  """
  right_way = (merged > share) ^ (state.step > 0)
  doubled = jnp.clip(2 * state.step, -share, share)
  turned = -jnp.sign(state.step) * jnp.maximum(1, jnp.abs(state.step) // 2)
  step = jnp.where(right_way, jnp.where(state.right, doubled, state.step), turned)
  h = jnp.clip(state.h + step, low, share)
  return Adaptive(h, step, right_way & ~state.right)
