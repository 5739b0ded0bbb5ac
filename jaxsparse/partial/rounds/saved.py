"""The saved state of a worker of rounds: sealed with the worker's number and a digest, and checked when it is given."""

import zlib
from typing import Any

import numpy as np

_SEALED = {"anchor": np.uint8, "residual": np.float32, "moved": np.float32}


def seal(state: dict[str, Any], number: int, run: int) -> dict[str, Any]:
  """`state` with the numbers of its worker and of the run, and a digest of its large arrays."""
  return state | {"number": np.int64(number), "run": np.int64(run), "digest": np.int64(_digest(state))}


def check(state: dict[str, Any], number: int, fragments: int) -> None:
  """Raises ValueError for a state of another worker or other options, a changed one, or one that is not finite.

  Example:
    >>> arrays = {"anchor": np.zeros(4, np.uint8), "residual": np.zeros(2, np.float32), "moved": np.ones(2, np.float32)}
    >>> check(seal(arrays | {"fragments": 1}, number=3, run=1), number=2, fragments=1)
    Traceback (most recent call last):
    ...
    ValueError: Rounds: number=2, but the state was saved by worker 3
  """
  if missing := {*_SEALED, "fragments", "number", "run", "digest"} - state.keys():
    raise ValueError(f"Rounds: the state has no {', '.join(sorted(missing))}: give what `Rounds.state` was, whole")
  if int(state["fragments"]) != fragments:
    raise ValueError(f"Rounds: fragments={fragments!r}, but the state was saved with {int(state['fragments'])}")
  if int(state["number"]) != number:
    raise ValueError(f"Rounds: number={number!r}, but the state was saved by worker {int(state['number'])}")
  for name in ("residual", "moved"):
    if not np.isfinite(state[name]).all():
      raise ValueError(f"Rounds: the {name} in the state has NaN or Inf")
  if int(state["digest"]) != (found := _digest(state)):
    changed = f"its digest is {found:08x} in place of {int(state['digest']):08x}"
    raise ValueError(f"Rounds: the state has changed since it was saved, {changed}: give one that was saved before")


def _digest(state: dict[str, Any]) -> int:
  digest = 0
  for name, dtype in _SEALED.items():
    digest = zlib.crc32(np.ascontiguousarray(np.asarray(state[name], dtype)).data, digest)
  return digest
