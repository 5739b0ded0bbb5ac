"""A reader's end of the chain: follows links, or starts from an anchor, and refuses what its digest does not prove.

A version is a number; its files are a link or an anchor, or both, and one of each kind
from each process of the publisher. Publishers of a folder follow one another, each with
a larger number, its run. A subscriber has in `_state` the version that it has returned
last, and in `_published` its parameters.
"""

from typing import Any, NamedTuple

from jaxsparse.sparse import packing
from jaxsparse.weights import files
from jaxsparse.weights.digests import chained
from jaxsparse.weights.folder import Folder, Patterns


class Published(NamedTuple):
  """A version of the parameters as it was published, in the serving dtype.

  Example:
    >>> version, params = Published(3, {"w": 0.5})
  """

  version: int
  params: Any


class _Part(NamedTuple):
  """What one process wrote of a version: patterns, their digest, and an id that is chained to the version before.

  The digest is that which the file states; `_follow` compares it with the patterns.
  """

  id: int
  digest: int
  patterns: Patterns


class _State(NamedTuple):
  """A version of a publisher, whose number is `run`; `parts` has one part for each of its processes.

  As tuples of (version, run) a newer one is larger.
  """

  version: int
  run: int
  parts: list[_Part]


_NONE = _State(0, -1, [])  # no version: older than all others


class Subscriber(Folder):
  """Reads what a `Publisher` publishes to a folder; any number of them, in any processes.

  Args:
    folder: the publisher's, or an address at which it is served, as "http://host:8000"
      by `python -m http.server`.
    params_like: the parameters, or their shapes and dtypes; leaves that are read have
      the shardings of these.
    dtype: the publisher's.

  Attributes:
    refused: why files were refused in the last call of `latest`; empty before it.

  Raises:
    ValueError: for an address of a protocol that fsspec does not know, a dtype that is
      not floating-point, and a leaf that JAX would narrow, such as one in int64 without
      `jax_enable_x64`.
    ImportError: if the package for the protocol of an address is not installed.

  Example:
    >>> import tempfile, jax.numpy as jnp, jaxsparse as js
    >>> params, folder = {"w": jnp.arange(4)}, tempfile.mkdtemp()
    >>> js.weights.Publisher(folder, params).publish(params)
    1
    >>> reader = js.weights.Subscriber(folder, params)
    >>> reader.latest().params["w"].tolist(), reader.refused
    ([0, 1, 2, 3], [])
  """

  _state = _NONE
  _published: Published | None = None
  refused: list[str] = []  # noqa: RUF012, since `latest` sets another list

  def latest(self) -> Published:
    """The newest version that can be read; the same object if there is no newer one.

    It reads links from the version that it has, or else the newest anchor and the links
    behind it. A file that is missing, damaged, of another model, dtype or branch is
    refused. A reader that finds nothing else keeps what it has.

    Raises:
      LookupError: if it has nothing; the message names the folders of the dtypes and
        models that are there.
    """
    self.refused = []
    state = _NONE
    try:
      if versions := files.complete_versions(files.names(self._folder)):
        state = self._newest(versions)
    except OSError as error:
      self.refused.append(str(error))
    # The same object is returned again where nothing is new.
    if state.version and state is not self._state:
      self._published = Published(
        state.version, self._params([part.patterns for part in state.parts])
      )
      self._state = state
    if self._published is None:
      raise LookupError(
        f"Subscriber: {self._folder.path}: {'; '.join(self.refused) or 'no version is there'}; "
        f"dtypes and models there: {files.models_beside(self._folder)}"
      )
    return self._published

  def _newest(self, versions: files.Versions) -> _State:
    """The newest version that is reached; `_NONE` without one.

    Args:
      versions: the names of files by version, run and kind, of all that are complete.
    """
    # (version, run): the largest number first, then the run.
    newest = max(versions)[:2]
    # A folder without the version that is held, nor a later one, was made anew: then
    # that version does not count.
    best = self._state if self._state[:2] <= newest else _NONE
    best = self._follow(versions, best, best)  # by links from the version held
    # From the newest anchor back, until one leads to the newest version. Keys are
    # (version, run, kind); `best[:2]` is (version, run).
    for key in sorted(versions, reverse=True):
      is_ahead = key[1] != best.run or key[0] > best.version
      if key[2] == "anchor" and is_ahead and best[:2] < newest:
        anchor = self._step(best, versions[key])
        reached = self._follow(versions, anchor, best)
        best = max(best, reached, key=lambda state: state[:2])
    if best[:2] < newest and not self.refused:
      self.refused.append(f"version {best.version + 1} has no whole link")
    return best

  def _follow(
    self, versions: files.Versions, start: _State, otherwise: _State
  ) -> _State:
    """`start` after the links that are there, if the digests of the last version prove it.

    Args:
      versions: the names of files by version, run and kind.
      start: the version from which links lead on.
      otherwise: the version to return if the digests prove nothing.
    """
    state = start
    while link := versions.get((state.version + 1, state.run, "link")):
      after = self._step(state, link)
      if after is state:
        break
      state = after
    # Patterns of a version that was returned before are proven. The digest of the last
    # version proves those before it, as its patterns are computed from theirs.
    if state is otherwise or all(
      part.patterns.digest() == part.digest for part in state.parts
    ):
      return state
    self.refused.append(f"version {state.version} has another digest")
    return otherwise

  def _step(self, state: _State, names: list[files.Name]) -> _State:
    """The version after a link, or of an anchor; `state` itself if a file is refused.

    Args:
      state: the version before a link; for an anchor any.
      names: of the link, or of the anchor: one file from each process.
    """
    parts = []
    try:
      # An anchor stands alone, and may be from more or fewer processes than `state`.
      olds = state.parts if names[0].kind == "link" else [None] * len(names)
      for name, old in zip(names, olds, strict=True):
        header, arrays = files.read(self._folder, name)
        # `before`: the id of the version before, of this process's part of it
        before, digest = header["before"], header["digest"]
        if old is None:
          patterns = Patterns(header["boxes"], arrays)
        elif before != old.id:
          # A link of another branch has the right number and the wrong id.
          raise ValueError(f"{name} follows another version {state.version}")
        else:
          # A link has one array, the words of the difference.
          boxes, words = old.patterns
          patterns = Patterns(boxes, packing.after(words, *arrays))
        parts.append(_Part(chained(before, digest), digest, patterns))
    except (ValueError, OSError) as error:
      self.refused.append(str(error))
      return state
    return _State(name.version, name.run, parts)
