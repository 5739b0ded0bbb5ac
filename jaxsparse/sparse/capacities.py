"""Messages whose size changes at run time: each step chooses one of a few static capacities.

XLA needs every array size at compile time. A collective compiles its exchange for a few capacities, the workers agree
on the number of entries that they need, and the step runs the smallest sufficient one. Entries beyond the largest
capacity overflow: the caller keeps them in its residual.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsparse.types import Comm

_NOT_FINITE = jnp.iinfo(jnp.int32).max


def geometric(low: int, high: int, count: int = 5) -> tuple[int, ...]:
  """At most `count` capacities from `low` to `high` in geometric progression, rounded up.

  Example:
    >>> geometric(10, 160), geometric(3, 4), geometric(7, 7)
    ((10, 20, 40, 80, 160), (3, 4), (7,))
  """
  steps = [low * (high / low) ** (i / (count - 1)) for i in range(count)] if count > 1 else [high]
  return tuple(sorted({min(high, math.ceil(round(step, 6))) for step in steps}))


def agree(comm: Comm, needed: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The largest capacity that any worker needs, and whether the entries of all workers are finite: one all-reduce.

  Selection by a threshold may miss a NaN or Inf, which top-k always selects. So workers exchange here whether there is
  one.

  Args:
    comm: the workers.
    needed: i32[], the number of slots that this worker needs.
    finite: bool[], whether the entries of this worker are finite.

  Returns:
    (finite, needed): bool[] and i32[], the same on every worker.
  """
  most = comm.all_reduce(jnp.where(finite, needed, _NOT_FINITE), "max")
  return most != _NOT_FINITE, most


def switch(capacities: Sequence[int], needed: jax.Array, branch: Callable[[int], Any]) -> Any:
  """`branch(capacity)` for the smallest of `capacities` that is at least `needed`, or for the largest if none is.

  Args:
    capacities: in increasing order.
    needed: i32[], the same on every worker, since `branch` may communicate.
    branch: returns a pytree of the same shapes for every capacity; compiled once for each.

  Example:
    >>> switch((2, 4, 8), jnp.int32(3), lambda capacity: jnp.int32(capacity))
    Array(4, dtype=int32)
  """
  if len(capacities) == 1:
    return branch(capacities[0])
  smaller = jnp.sum(needed > jnp.array(capacities[:-1], jnp.int32), dtype=jnp.int32)
  return jax.lax.switch(smaller, [lambda capacity=c: branch(capacity) for c in capacities])
