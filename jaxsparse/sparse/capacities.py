"""Message sizes that change at run time: a few static capacities, and one of them is chosen in each step.

XLA needs every size at compile time. A ladder is a handful of sizes, each compiled; a step takes the smallest that
holds what the workers agreed on, so the wire really shrinks. What does not fit the top rung stays with the caller.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.types import Comm

_NOT_FINITE = jnp.iinfo(jnp.int32).max


def rungs(low: int, high: int, count: int = 5) -> tuple[int, ...]:
  """At most `count` capacities from `low` to `high`, each by the same factor above the one before.

  Example:
    >>> rungs(10, 160), rungs(3, 4), rungs(7, 7)
    ((10, 20, 40, 80, 160), (3, 4), (7,))
  """
  steps = [low * (high / low) ** (i / (count - 1)) for i in range(count)] if count > 1 else [high]
  return tuple(sorted({min(high, math.ceil(round(step, 6))) for step in steps}))


def agree(comm: Comm, needed: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The largest size that any worker needs, and whether all of them have finite numbers only: one agreement.

  A threshold or a random place may miss a NaN that top-k always sees, so it is said here.

  Args:
    comm: the workers.
    needed: i32[], what this worker needs.
    finite: bool[], whether all that this worker holds is finite.

  Returns:
    (finite, needed), the same on every worker.
  """
  most = comm.all_reduce(jnp.where(finite, needed, _NOT_FINITE), "max")
  return most != _NOT_FINITE, most


def climb(capacities: Sequence[int], needed: jax.Array, branch: Callable[[int], Any]) -> Any:
  """`branch(capacity)` for the smallest of `capacities` that is at least `needed`, or for the largest.

  Args:
    capacities: in increasing order.
    needed: i32[], the same on every worker, since `branch` may communicate.
    branch: gives a pytree of the same shapes for every capacity.

  Example:
    >>> climb((2, 4, 8), jnp.int32(3), lambda capacity: jnp.int32(capacity))
    Array(4, dtype=int32)
  """
  if len(capacities) == 1:
    return branch(capacities[0])
  rung = jnp.sum(needed > jnp.array(capacities[:-1], jnp.int32), dtype=jnp.int32)
  return jax.lax.switch(rung, [lambda capacity=c: branch(capacity) for c in capacities])
