"""What training may start from: finite parameters whose leaves, options and values all workers of a run have alike."""

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
import optax

from jaxsparse.arrays.flatten import (
  all_finite,
  check_are_arrays,
  check_not_overwritten,
  leaf_shapes,
  leaves_by_name,
)
from jaxsparse.partial.net import strict_json

# characters of `layout`, or of `start`; longer ones, of models with some ten thousand
# leaves, are replaced by their digest
_LONGEST = 1 << 19
MOST_ID = 1 << 62  # ids of a lineage are digests of 62 bits
# so many models of one worker in succession that are not finite raise an error
REFUSALS = 10


def first_not_finite(params: optax.Params) -> str | None:
  """The path of the first leaf with NaN or Inf (in float32); None if there is none.

  Example:
    >>> first_not_finite({"b": np.zeros(2), "w": np.array([1.0, np.nan])})
    "params['w']"
  """
  # A float64 that overflows in float32 counts as Inf, without a warning of numpy.
  with np.errstate(over="ignore"):
    for name, leaf in leaves_by_name(params).items():
      # All processes of a worker get the same answer for a leaf that they share.
      if not all_finite(jnp.asarray(leaf, jnp.float32)):
        return f"params{name}"
  return None


def check_start(params: optax.Params) -> None:
  """Raises TypeError or ValueError, with the name of the leaf, if training cannot start from `params`.

  Example:
    >>> check_start({"step": 3})
    Traceback (most recent call last):
    ...
    TypeError: params['step'] has dtype int32, choose floating point: keep other leaves out of the parameters
  """
  leaves = leaves_by_name(params)
  if not leaves:
    raise ValueError(f"params={params!r} has no arrays: give the parameters of a model")
  check_are_arrays(params, "params")
  check_not_overwritten(params, "params")
  for name, leaf in leaves.items():
    if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
      raise TypeError(
        f"params{name} has dtype {dtype.name}, "
        "choose floating point: keep other leaves out of the parameters"
      )
  if path := first_not_finite(params):
    raise ValueError(
      f"{path} is not finite: training has to start from finite parameters"
    )


def check_leaves(name: str, params: optax.Params, start: optax.Params) -> None:
  """Raises ValueError, with the first such leaf, unless the leaves of `params` have the names and shapes of `start`.

  Args:
    name: of what checks, for the error.
    params: the parameters to check.
    start: the parameters that training started from.
  """
  named = lambda tree: [
    f"params{leaf} of {[*shape]}" for leaf, shape in leaf_shapes(tree).items()
  ]
  for expected, leaf in itertools.zip_longest(
    named(start), named(params), fillvalue="nothing"
  ):
    if leaf != expected:
      raise ValueError(
        f"{name}: {leaf}, where training started from {expected}: give what the last call returned, trained"
      )


class Alike(NamedTuple):
  """What the server compares when a worker joins, in words.

  Attributes:
    layout: the names, dtypes and shapes of all leaves, and options.
    start: checksums of the values that training starts from.
    run: in rounds a number of the run, that of its first server; 0 before a worker has
      joined.
    lineage: in rounds the ids of the last rounds of its anchor.

  Example:
    >>> Alike.of({"w": np.zeros((2, 3), np.float32)}, every=4)[:2]
    (("params['w'] of float32[2, 3]", 'every=4'), ("params['w'] with the checksum a3c1ca20",))
  """

  layout: tuple[str, ...] = ()
  start: tuple[str, ...] = ()
  run: int = 0
  lineage: tuple[int, ...] = ()

  @classmethod
  def of(
    cls, params: optax.Params, start: optax.Params | None = None, **options: Any
  ) -> Self:
    """The `Alike` of a worker that starts from `params`, without `run` and `lineage`.

    Args:
      params: the parameters of the worker, whose layout is compared.
      start: the part of `params` in this process, a pytree of the same structure whose
        values are compared; `params` itself by default.
      options: by name, values that all workers need alike, with short representations.
    """
    layout = list[str]()
    values = list[str]()
    parts = leaves_by_name(params if start is None else start)
    for name, leaf in leaves_by_name(params).items():
      # Values are compared in float32, as they are averaged; the layout has the dtypes.
      checksum = zlib.crc32(
        np.ascontiguousarray(np.asarray(parts[name], np.float32)).data
      )
      layout.append(
        f"params{name} of {jnp.result_type(leaf).name}{list(jnp.shape(leaf))}"
      )
      values.append(f"params{name} with the checksum {checksum:08x}")
    layout += [f"{option}={value!r}" for option, value in options.items()]
    return cls(_shortened(layout), _shortened(values))

  def joined(self, others: Iterable["Alike"]) -> "Alike":
    """The `Alike` of a worker of several processes: `self` is that of process 0, `others` those of processes 1, 2, ….

    All have the same layout; their lines of `start` are concatenated.
    """
    values = itertools.chain(self.start, *(other.start for other in others))
    return self._replace(start=_shortened([*values]))

  @classmethod
  def parse(cls, text: str) -> Self:
    """The inverse of `str`; raises ValueError for any other text."""
    match strict_json.parse(text):
      case [[*layout], [*start], run, [*lineage]] if (
        all(isinstance(line, str) for line in layout + start)
        and strict_json.is_whole(run)
        and all(strict_json.is_whole(id_, most=MOST_ID - 1) for id_ in lineage)
      ):
        return cls(tuple(layout), tuple(start), run, tuple(lineage))
    raise ValueError("no two lists of strings, a number and a list of numbers")

  def __str__(self) -> str:
    return json.dumps(self)

  def difference(self, others: "Alike", *, at_start: bool) -> str | None:
    """The first difference between this worker and the others, in words; None if there is none.

    Args:
      others: the `Alike` of the workers that have joined.
      at_start: whether none of them has trained yet, so that start values are compared.

    Example:
      >>> Alike.of(np.zeros(2)).difference(Alike.of(np.zeros(3)), at_start=True)
      'params of float32[2], the others have params of float32[3]'
    """
    # (own lines, their lines) of `layout`, and at the start also of `start`: later a
    # worker gets the values of a donor in place of its own.
    parts = [(self.layout, others.layout), *[(self.start, others.start)] * at_start]
    pairs = itertools.chain(
      *(itertools.zip_longest(*sides, fillvalue="nothing") for sides in parts)
    )
    return next(
      (f"{line}, the others have {other}" for line, other in pairs if line != other),
      None,
    )


def _shortened(lines: list[str]) -> tuple[str, ...]:
  """The lines, or one line with their digest if they are too long for a message."""
  text = "\n".join(lines)
  if len(text) < _LONGEST:
    return tuple(lines)
  return (
    f"leaves and options with the digest {hashlib.sha256(text.encode()).hexdigest()[:16]}",
  )
