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
from jaxsparse.arrays.flatten import all_finite, leaves_by_name
from jaxsparse.transform.checks import is_traced
from jaxsparse.types import ArrayTree

# Returns the names of gradients with NaN or Inf; None if they cannot be told.
Find = Callable[[], list[str] | None]

# Fewer skipped steps are normal: a loss scale that begins too large is halved at each.
MANY = 8


class SkipWatch:
  """Warns once when `MANY` steps in a row, 8, are skipped.

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
    # (skipped, loss) of each step since the last one that is known to have taken place,
    # oldest first.
    self._flags = collections.deque[tuple[Any, Any]]()
    self._has_warned = False

  def add(self, skipped: Any, loss: ArrayTree = None) -> None:
    """Notes a step, which may still run.

    Args:
      skipped: flags, arrays or bool, whether it is skipped; under a trace there is
        nothing to note.
      loss: f32[] of the step, if it is known.
    """
    if not (self._has_warned or is_traced(skipped)):
      # Flags are not read here, since that would wait for the step.
      self._flags.append((skipped, loss))

  def look(
    self,
    stacklevel: int = 3,
    find: Find = lambda: None,
    **trees: ArrayTree,
  ) -> None:
    """Reads the flags of the steps that have ended.

    Args:
      stacklevel: of the warning, counted from this function.
      find: returns the names of gradients that are not finite, None if it cannot tell;
        called where the loss and all of `trees` are finite.
      trees: of the last step by name, in which NaN and Inf are looked for if
        there is a warning: `batch`, `params`, `state`, ….

    Warns:
      UserWarning: at the `MANY`th step in a row that was skipped, the first time.
    """
    # `_flags` has (skipped, loss) of each noted step, oldest first. A step takes the
    # state of the step before: if the `MANY`th has ended, all before it have.
    while len(self._flags) >= MANY and _has_ended(self._flags[MANY - 1][0]):
      oldest = [skipped for skipped, _ in itertools.islice(self._flags, MANY)]
      # Index of the newest step that was not skipped; None if all were. Newest first:
      # in most runs only one of `MANY` flags is read.
      newest_first = reversed(range(MANY))
      taken = next((step for step in newest_first if not _read(oldest[step])), None)
      if taken is None:
        self._warn(stacklevel + 1, find, trees)
        return
      # That step ends a row of skipped ones, so it and all before it are dropped.
      for _ in range(taken + 1):
        self._flags.popleft()

  def _warn(self, stacklevel: int, find: Find, trees: dict[str, ArrayTree]) -> None:
    """Warns of the first `MANY` noted steps, all skipped; arguments as in `look`."""
    # The loss of the last step of the row.
    _, loss = self._flags[MANY - 1]
    self._has_warned = True
    self._flags.clear()
    findings = "; ".join(_findings(loss, find, trees))
    warnings.warn(
      f"{self._what}: {MANY} {self._unit} in a row were skipped and changed nothing, because of NaN or Inf: "
      f"{findings}. This is said once",
      stacklevel=stacklevel,
    )


def _has_ended(flags: ArrayTree) -> bool:
  """Whether the flags of a step can be read without waiting.

  Deleted flags, which a program of the user has donated, are never read.
  """

  def has_ended(flag: Any) -> bool:
    array: Any = flag  # JAX's stubs have no `is_ready`
    return not isinstance(flag, jax.Array) or array.is_deleted() or array.is_ready()

  return all(map(has_ended, jax.tree.leaves(flags)))


def _read(flags: ArrayTree) -> bool:
  """Whether one of the flags of a step is set; a flag that a program of the user has donated counts as not set."""
  is_gone = lambda flag: isinstance(flag, jax.Array) and flag.is_deleted()
  return any(
    not is_gone(flag) and bool(np.any(local_shard(flag)))
    for flag in jax.tree.leaves(flags)
  )


def _findings(
  loss: ArrayTree,
  find: Find,
  trees: dict[str, ArrayTree],
) -> list[str]:
  """Parts of the warning's text: which arrays and losses have NaN or Inf; if none do, what else may be at fault.

  Args:
    loss: f32[] of a skipped step; None if unknown.
    find: names gradients with NaN or Inf, as in `SkipWatch.look`.
    trees: of the last step, by name.
  """
  not_finite = []
  for what, tree in trees.items():
    # A state may hold Inf, as in the best loss of a schedule before the first step.
    may_be_inf = what == "state"
    leaves = leaves_by_name(tree).items()
    if names := [
      f"{what}{name}" for name, leaf in leaves if not _is_sound_here(leaf, may_be_inf)
    ]:
      not_finite.append(_describe(names))
  if loss is not None and not loss.is_deleted():
    value = float(local_shard(loss))
    if not_finite or not np.isfinite(value):
      return [*not_finite, f"the loss is {value:g}"]
  if not_finite:
    return not_finite
  finite = f"{', '.join(trees)} are finite"
  # None: it is unknown which gradients have NaN or Inf; []: none has.
  at_fault: list[str] | None = None
  # `find` computes gradients once more. Its failure, for want of memory for instance,
  # must not end the training.
  with contextlib.suppress(Exception):
    at_fault = find()
  if at_fault:
    return [finite, _describe(at_fault)]
  # Nothing that could be read is at fault: parameters in float16, and so gradients and
  # their sums, are a likely cause.
  params = leaves_by_name(trees.get("params")).items()
  narrow = [
    f"params{name}" for name, leaf in params if jnp.result_type(leaf) == jnp.float16
  ]
  limit = [f"{narrow[0]} is float16, at most 65504"] if narrow else []
  rest = "an update or a sum over workers is not"
  rest = f"a gradient, {rest}" if at_fault is None else f"gradients are finite, {rest}"
  return [finite, rest, *limit]


def _describe(names: list[str]) -> str:
  more = f" and {len(names) - 1} more" if len(names) > 1 else ""
  return f"{names[0]}{more} holds NaN or Inf"


def _is_sound_here(leaf: ArrayTree, may_be_inf: bool) -> bool:
  """`is_sound` of the part of an array on this process alone.

  A program over all parts would wait for the other processes, which may come to their
  warnings later or never.
  """
  if not isinstance(leaf, jax.Array):
    return is_sound(np.asarray(leaf), may_be_inf)
  # Integers and keys have no NaN, so no shard of them is read.
  shards = leaf.addressable_shards if _is_inexact(leaf) else ()
  return all(is_sound(np.asarray(shard.data), may_be_inf) for shard in shards)


def is_sound(leaf: ArrayTree, may_be_inf: bool = False) -> bool:
  """Whether an array has no NaN, and no Inf unless it `may_be_inf`; True under a trace and for integers.

  Every process that holds a part of the array must call; the call waits for the array.
  """
  if isinstance(leaf, jax.core.Tracer) or not _is_inexact(leaf):
    return True
  # An array of few entries, 65,536 at most, is read to the host, without a compiled
  # program for its shape.
  is_small = np.size(leaf) <= _FEW and getattr(leaf, "is_fully_addressable", True)
  if is_small or isinstance(leaf, np.ndarray):
    values = np.asarray(leaf)
    sound = ~np.isnan(values) if may_be_inf else np.isfinite(values)
    return bool(sound.all())
  return bool(_none_nan(leaf) if may_be_inf else _all_finite(leaf))


def _is_inexact(leaf: ArrayTree) -> bool:
  return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


_FEW = 1 << 16  # entries that are judged without a compiled program
_all_finite = jax.jit(all_finite)
_none_nan = jax.jit(lambda leaf: ~jnp.isnan(leaf).any())
