"""A warning, once, where many training steps in a row are skipped."""

import collections
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse._compat import local_shard
from jaxsparse.sparse.flatten import leaves_by_name

# A loss scale that begins too large is halved a few times in a row.
MANY = 8


class SkipWatch:
  """Counts the steps that are skipped in a row, and warns once when they are `MANY`.

  It reads flags of steps that have ended, so that no step waits for the host.

  Args:
    what: the name of the function that makes the steps, for the warning.
    unit: "steps", or "rounds".

  Example:
    >>> watch = SkipWatch("make_train_step")
    >>> watch.add(False)
    >>> watch.look()
  """

  def __init__(self, what: str, unit: str = "steps"):
    self._what = what
    self._unit = unit
    self._flags = collections.deque[tuple[Any, Any]]()
    self._in_a_row = 0
    self._has_warned = False

  def add(self, skipped: Any, loss: Any = None) -> None:
    """Notes a step, which may still run.

    Args:
      skipped: flags, arrays or bool, whether it is skipped; under a trace there is
        nothing to note.
      loss: f32[] of the step, if it is known.
    """
    is_traced = [isinstance(flag, jax.core.Tracer) for flag in jax.tree.leaves(skipped)]
    if not (self._has_warned or any(is_traced)):
      self._flags.append((skipped, loss))

  def look(self, stacklevel: int = 3, **given: Any) -> None:
    """Reads the flags of the steps that have ended.

    Args:
      stacklevel: of the warning.
      given: pytrees of the last step by name, in which NaN and Inf are looked for if
        there is a warning: `batch`, `params`, `state`, ….

    Warns:
      UserWarning: at the `MANY`th step in a row that was skipped, the first time.
    """
    loss = None
    while self._flags and all(map(_has_ended, jax.tree.leaves(self._flags[0][0]))):
      skipped, loss = self._flags.popleft()
      is_skipped = any(map(_read, jax.tree.leaves(skipped)))
      self._in_a_row = self._in_a_row + 1 if is_skipped else 0
    if self._in_a_row < MANY:
      return
    self._has_warned = True
    self._flags.clear()
    findings = "; ".join(_findings(loss, given))
    warnings.warn(
      f"{self._what}: {self._in_a_row} {self._unit} in a row were skipped and changed nothing, because of NaN or Inf: "
      f"{findings}. This is said once",
      stacklevel=stacklevel,
    )
    self._in_a_row = 0


def _has_ended(flag: Any) -> bool:
  """Whether a flag can be read at once; one that was donated to a program of the user's is read as False."""
  array = cast(Any, flag)  # JAX's stubs have no `is_ready`
  return not isinstance(flag, jax.Array) or array.is_deleted() or array.is_ready()


def _read(flag: Any) -> bool:
  if isinstance(flag, jax.Array) and flag.is_deleted():
    return False
  return bool(np.any(local_shard(flag)))


def _findings(loss: Any, given: dict[str, Any]) -> list[str]:
  """What is not finite, or else what is."""
  found = []
  for what, tree in given.items():
    # the best loss so far of a schedule begins with Inf
    is_wrong = np.isnan if what == "state" else _is_not_finite
    if names := [
      name for name, leaf in leaves_by_name(tree).items() if _holds(is_wrong, leaf)
    ]:
      more = f" and {len(names) - 1} more" if len(names) > 1 else ""
      found.append(f"{what}{names[0]}{more} holds NaN or Inf")
  if loss is not None:
    found.append(f"the loss is {float(local_shard(loss)):g}")
  if len(found) > (loss is not None):
    return found
  found.append(
    f"{', '.join(given)} are finite, so a gradient, an update or a sum over workers is not"
  )
  narrow = [
    f"{name} is {leaf.dtype}"
    for name, leaf in leaves_by_name(given.get("params")).items()
    if leaf.dtype == jnp.float16
  ]
  return found + [f"params{one}, at most 65504" for one in narrow[:1]]


def _is_not_finite(x: np.ndarray) -> np.ndarray:
  return ~np.isfinite(x)


def _holds(is_wrong: Callable[[np.ndarray], np.ndarray], leaf: Any) -> bool:
  """Whether an array, or its part on this process, holds such a number."""
  if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
    return False
  if not isinstance(leaf, jax.Array):
    return bool(is_wrong(np.asarray(leaf)).any())
  shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
  return any(bool(is_wrong(shard).any()) for shard in shards)
