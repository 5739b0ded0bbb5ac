"""Algorithm 2: the number of entries that each team sends in B-SAG follows how much the teams' entries overlap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Adaptive(NamedTuple):
  """The state of Algorithm 2, the same on every worker.

  Attributes:
    h: i32[], entries of a block that each team sends, ⌈L/d⌉ … L.
    step: i32[], what was last added to h.
    right: bool[], whether that step was already in the right direction.
  """

  h: jax.Array
  step: jax.Array
  right: jax.Array

  @classmethod
  def start(cls, low: int, share: int) -> "Adaptive":
    """Begins with h = ⌈L/d⌉ and a step of 1 % of the range of h."""
    return cls(jnp.int32(low), jnp.int32(max(1, round(0.01 * (share - low)))), jnp.bool_(False))


def adapt(state: Adaptive, merged: jax.Array, low: int, share: int) -> Adaptive:
  """Algorithm 2: moves h so that the union of what teams send has about L indices (the directions of its pseudocode).

  Two steps in the right direction double the step, one in the wrong direction turns it and halves it.

  Args:
    state: of this step.
    merged: i32[], the largest number N of different indices of any block, the same on every worker.
    low: ⌈L/d⌉, the least that h can be.
    share: L, the most.
  """
  right_way = (merged > share) ^ (state.step > 0)
  doubled = jnp.clip(2 * state.step, -share, share)
  turned = -jnp.sign(state.step) * jnp.maximum(1, jnp.abs(state.step) // 2)
  step = jnp.where(right_way, jnp.where(state.right, doubled, state.step), turned)
  h = jnp.clip(state.h + step, low, share)
  return Adaptive(h, step, right_way & ~state.right)
