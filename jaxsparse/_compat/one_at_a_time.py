"""Programs of several CPU devices, dispatched one at a time.

XLA's CPU runtime runs the devices of a process on a small pool of threads. Collectives
of several programs in flight wait for threads that other programs occupy, until XLA
aborts the process. So a program starts when its arguments are computed and the program
that was dispatched last has finished. On other devices programs queue up, and none
waits.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

# a result of the program that was dispatched last, if its caller did not wait for it
_last: Any = None


def dispatch(
  program: Callable, *arguments: Any, follow: Callable[[Any], jax.Array] | None = None
) -> Any:
  """`program(*arguments)`; on several CPU devices only after the program that was dispatched before has ended.

  Args:
    program: a jitted function.
    arguments: pytrees of arrays that lie on the same devices.
    follow: on several CPU devices, chooses the result that the next dispatch waits for;
      None waits for all now.

  Example:
    >>> import jax.numpy as jnp
    >>> dispatch(jax.jit(jnp.square), jnp.arange(3))
    Array([0, 1, 4], dtype=int32)
  """
  global _last
  leaves = jax.tree.leaves(arguments)
  if not _share_threads(leaves):
    return program(*arguments)
  # Arguments may be results that are still computed, by the same threads.
  jax.block_until_ready(leaves)
  # The result of the last program, to wait for it; deleted if a later program got it as
  # a donated argument.
  before = _last
  _last = None
  if before is not None and not before.is_deleted():
    # The error of a program that failed is raised where its results are read.
    with contextlib.suppress(Exception):
      jax.block_until_ready(before)
  results = program(*arguments)
  # Without `follow` this call waits, so nothing is in flight afterwards.
  _last = follow(results) if follow else None
  return results if follow else jax.block_until_ready(results)


def _share_threads(leaves: list[Any]) -> bool:
  """Whether the first array among the leaves lies on several devices of CPUs."""
  # Under a trace no program starts, so no device counts.
  first = next((x for x in leaves if isinstance(x, jax.Array)), None)
  devices: list[Any] = (
    []
    if first is None or isinstance(first, jax.core.Tracer)
    else [*first.sharding.device_set]
  )
  return len(devices) > 1 and devices[0].platform == "cpu"
