"""A reader's end of the chain: follows links, or starts from an anchor, and refuses what its digest does not prove."""

import collections
import os
from typing import Any, NamedTuple

from jaxsparse.weights import files
from jaxsparse.weights.digests import chained
from jaxsparse.weights.model import Model, Patterns
from jaxsparse.weights.publisher import path_of


class Published(NamedTuple):
  """A version of the parameters as it was published, in the serving dtype."""

  version: int
  params: Any


class _State(NamedTuple):
  """A version: its publisher, and id, digest and patterns of each part."""

  number: int
  run: int
  ids: list[int]
  digests: list[int]
  parts: list[Patterns]


# the files of each version's links and anchors that are there in all parts
_Files = dict[tuple[int, int, str], list[files.Name]]
_NONE = _State(0, -1, [], [], [])


class Subscriber:
  """Reads what a `Publisher` publishes to a folder; any number of them, in any processes.

  Args:
    folder: the publisher's.
    params_like: the parameters, or their shapes and dtypes; leaves that are read have
      the shardings of these.
    dtype: the serving dtype, of floating-point leaves; the publisher's.

  Attributes:
    refused: why files were refused in the last call of `latest`.

  Raises:
    ValueError: for an address.
  """

  def __init__(
    self, folder: str | os.PathLike[str], params_like: Any, dtype: Any = "bfloat16"
  ):
    self._folder = path_of(folder)
    self._model = Model(params_like, dtype)
    self._state = _NONE
    self._published: Published | None = None
    self.refused: list[str] = []

  def latest(self) -> Published:
    """The newest version that can be read; the same object if there is no newer one.

    It reads links from the version that it has, or else the newest anchor and the links
    behind it. A file that is missing, damaged, of another model, dtype or branch is
    refused. A reader that finds nothing else keeps what it has.

    Raises:
      LookupError: if it has nothing.
    """
    self.refused = []
    try:
      found = _whole(files.names(self._folder))
    except OSError as error:
      self.refused.append(str(error))
      found = {}
    state = self._newest(found) if found else _NONE
    if state.number and state is not self._state:
      self._published = Published(state.number, self._model.params(state.parts))
      self._state = state
    if self._published is None:
      reasons = "; ".join(self.refused) or "no version is there"
      raise LookupError(f"Subscriber: {self._folder}: {reasons}")
    return self._published

  def _newest(self, found: _Files) -> _State:
    """The newest version of the newest publisher that is reached; `_NONE` without one."""
    newest, run, _ = max(found)
    own = self._state
    best = own if own.run == run and own.number <= newest else _NONE
    best = self._follow(found, best, best)
    for key in sorted(found, reverse=True):
      if key[1:] == (run, "anchor") and key[0] > best.number:
        anchor = self._step(best, found[key])
        best = self._follow(found, anchor, best)
    return best

  def _follow(self, found: _Files, start: _State, otherwise: _State) -> _State:
    """`start` after the links that are there, if its digests prove it."""
    state = start
    while link := found.get((state.number + 1, state.run, "link")):
      after = self._step(state, link)
      if after is state:
        break
      state = after
    if state is otherwise:
      return state
    if [patterns.digest() for patterns in state.parts] == state.digests:
      return state
    self.refused.append(f"version {state.number} has another digest")
    return otherwise

  def _step(self, state: _State, names: list[files.Name]) -> _State:
    """The version after a link, or of an anchor; `state` itself if a file is refused."""
    name = names[0]
    try:
      headers, bodies = zip(
        *(files.read(self._folder, one) for one in names), strict=True
      )
      before = [header["before"] for header in headers]
      if name.kind == "anchor":
        self._model.check(headers[0]["layout"], str(name))
        boxes = [header["boxes"] for header in headers]
        parts = list(map(self._model.split, boxes, bodies))
      elif before == state.ids:
        parts = list(map(Patterns.after, state.parts, bodies))
      else:
        raise ValueError(f"{name} follows another version {state.number}")
    except (ValueError, OSError) as error:
      self.refused.append(str(error))
      return state
    digests = [header["digest"] for header in headers]
    ids = list(map(chained, before, digests))
    return _State(name.number, name.run, ids, digests, parts)


def _whole(names: list[files.Name]) -> _Files:
  found: _Files = collections.defaultdict(list)
  for name in names:
    found[name.number, name.run, name.kind].append(name)
  return {
    key: parts for key, parts in found.items() if len(parts) == parts[0].processes
  }
