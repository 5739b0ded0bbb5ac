"""A warning, once, where many training steps in a row are skipped."""

import collections
import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse._compat import local_shard
from jaxsparse.arrays.flatten import leaves_by_name

Find = Callable[[], list[str] | None]

# A loss scale that begins too large is halved a few times in a row.
MANY = 8


class SkipWatch:
  """Warns once when `MANY` steps in a row are skipped.

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

  def look(
    self,
    stacklevel: int = 3,
    find: Find = lambda: None,
    **given: Any,
  ) -> None:
    """Reads the flags of the steps that have ended.

    Args:
      stacklevel: of the warning.
      find: returns the names of gradients that are not finite, None if it cannot tell;
        called where the loss and all of `given` are finite.
      given: pytrees of the last step by name, in which NaN and Inf are looked for if
        there is a warning: `batch`, `params`, `state`, ….

    Warns:
      UserWarning: at the `MANY`th step in a row that was skipped, the first time.
    """
    while len(self._flags) >= MANY and _has_ended(self._flags[MANY - 1][0]):
      oldest = [skipped for skipped, _ in itertools.islice(self._flags, MANY)]
      # Newest first: in most runs one of `MANY` flags is read.
      newest_first = reversed(range(MANY))
      taken = next((step for step in newest_first if not _read(oldest[step])), None)
      if taken is None:
        self._warn(stacklevel + 1, find, given)
        return
      for _ in range(taken + 1):
        self._flags.popleft()

  def _warn(self, stacklevel: int, find: Find, given: dict[str, Any]) -> None:
    _, loss = self._flags[MANY - 1]
    self._has_warned = True
    self._flags.clear()
    findings = "; ".join(_findings(loss, find, given))
    warnings.warn(
      f"{self._what}: {MANY} {self._unit} in a row were skipped and changed nothing, because of NaN or Inf: "
      f"{findings}. This is said once",
      stacklevel=stacklevel,
    )


def _has_ended(flags: Any) -> bool:
  """Whether flags can be read at once."""

  def has_ended(flag: Any) -> bool:
    array: Any = flag  # JAX's stubs have no `is_ready`
    return not isinstance(flag, jax.Array) or array.is_deleted() or array.is_ready()

  return all(map(has_ended, jax.tree.leaves(flags)))


def _read(flags: Any) -> bool:
  """Whether one of the flags is set; one that was donated to a program of the user's is not."""
  is_gone = lambda flag: isinstance(flag, jax.Array) and flag.is_deleted()
  return any(
    not is_gone(flag) and bool(np.any(local_shard(flag)))
    for flag in jax.tree.leaves(flags)
  )


def _findings(loss: Any, find: Find, given: dict[str, Any]) -> list[str]:
  """What is not finite, and what is."""
  found = []
  for what, tree in given.items():
    # the best loss so far of a schedule begins with Inf
    is_wrong = np.isnan if what == "state" else _is_not_finite
    leaves = leaves_by_name(tree).items()
    if names := [f"{what}{name}" for name, leaf in leaves if _holds(is_wrong, leaf)]:
      found.append(_describe(names))
  if loss is not None and not loss.is_deleted():
    value = float(local_shard(loss))
    if found or not np.isfinite(value):
      return [*found, f"the loss is {value:g}"]
  if found:
    return found
  finite = f"{', '.join(given)} are finite"
  at_fault: list[str] | None = None
  # training goes on, whether or not there is memory for gradients
  with contextlib.suppress(Exception):
    at_fault = find()
  if at_fault:
    return [finite, _describe(at_fault)]
  params = leaves_by_name(given.get("params")).items()
  narrow = [
    f"params{name}" for name, leaf in params if jnp.result_type(leaf) == jnp.float16
  ]
  least = [f"{narrow[0]} is float16, at most 65504"] if narrow else []
  rest = "an update or a sum over workers is not"
  rest = f"a gradient, {rest}" if at_fault is None else f"gradients are finite, {rest}"
  return [finite, rest, *least]


def _describe(names: list[str]) -> str:
  more = f" and {len(names) - 1} more" if len(names) > 1 else ""
  return f"{names[0]}{more} holds NaN or Inf"


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
