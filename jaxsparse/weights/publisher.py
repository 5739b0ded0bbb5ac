"""A trainer's end of the chain: writes links, anchors now and then, and removes old ones.

A publisher has, in each process of the trainer:

    version    the number of its newest version; 0 before the first one
    _run       the number of this publisher, in the names of its files; 0 before the first version
    _before    the id of the newest version and its bit patterns; None if it is not known to be whole
    _since     the bytes of the files of links behind the newest anchor
    _folder    where the files are

Files are named by version, run, process and kind: "link" or "anchor".
"""

import os
import secrets
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsparse.sparse import packing
from jaxsparse.weights import files
from jaxsparse.weights.digests import chained
from jaxsparse.weights.folder import Folder, Patterns


class Publisher(Folder):
  """Publishes versions of parameters to a folder, for any number of readers, each a `Subscriber`.

  A version has a link, the bit patterns' differences to the version before, or an
  anchor, all bit patterns, or both: links whose files have at most an anchor's bytes,
  then an anchor. Two anchors are kept, and the links behind the older one. The first
  version of every publisher is an anchor.

  Args:
    folder: a path, or an address of a bucket, as "s3://bucket/run", by fsspec; the first
      version makes it if it is not there. If several processes train, each makes a
      publisher of the same folder, and writes its shards.
    params_like: the parameters, or their shapes and dtypes.
    dtype: the serving dtype, of floating-point leaves; None leaves them as they are.

  Attributes:
    version: the number of its newest version; 0 before the first one, which follows
      those that are in the folder.

  Raises:
    ValueError: for an address that can only be read, or of a protocol that fsspec does
      not know, a dtype that is not floating-point, and a leaf that JAX would narrow,
      such as one in int64 without `jax_enable_x64`.
    ImportError: if the package for the protocol of an address is not installed.

  Example:
    >>> import tempfile, jax.numpy as jnp, jaxsparse as js
    >>> params = {"w": jnp.arange(4.0)}
    >>> folder = tempfile.mkdtemp()
    >>> publisher = js.weights.Publisher(folder, params)
    >>> publisher.publish(params), publisher.publish({"w": params["w"].at[1].set(7.0)})
    (1, 2)
    >>> js.weights.Subscriber(folder, params).latest()
    Published(version=2, params={'w': Array([0, 7, 2, 3], dtype=bfloat16)})
  """

  version = 0
  _run = 0  # of the first version and all later ones; above those of other publishers
  # id and patterns of the version before, unless it was not written whole
  _before: tuple[int, Patterns] | None = None
  _since = 0  # bytes of the files of links behind the newest anchor

  def __init__(
    self, folder: str | os.PathLike[str], params_like: Any, dtype: Any = "bfloat16"
  ):
    if files.is_http(folder):
      raise ValueError(
        f"Publisher: {folder} can only be read: choose a folder or a bucket"
      )
    super().__init__(folder, params_like, dtype)

  def publish(self, params: Any) -> int:
    """Writes the next version, and returns its number.

    After an error the version may be there or not, and the next one is an anchor. All
    processes call it together. If one of them cannot read the folder, all raise; but at
    the first version the others wait for it.

    Raises:
      ValueError: for parameters of another model, a leaf that JAX would narrow, and if
        another publisher has begun to write since this one did.
      OSError: for a full disk, for example, or if another process failed.
    """
    patterns = self._patterns(params)
    if not self._run:
      self._begin()
    self.version += 1
    # Unset until the version is whole: after an error the next one is an anchor.
    before = self._before
    self._before = None
    size = sum(array.nbytes for array in patterns.arrays)  # bytes of an anchor
    # Bytes of links above those of an anchor; without a link an anchor is due. It is a
    # float in every process, since a gather of different dtypes mixes up their bits.
    excess = np.nan
    try:
      # again, as the folder may have been removed since
      self._folder.makedirs("", exist_ok=True)
      names = files.names(self._folder)
      anchors = [
        version
        for version, _, kind in files.complete_versions(names)
        if kind == "anchor"
      ]
      # A link is of the boxes (shards) of the version before, and leads on from an
      # anchor.
      if before and (not anchors or before[1].boxes != patterns.boxes):
        before = None
      if before:
        link = packing.difference(before[1].arrays, patterns.arrays)
      excess = float(self._since + link.nbytes - size) if before else np.inf
    finally:
      # All processes write an anchor, or none, since a version needs a file of each.
      # The sum decides: a process without shards has an anchor of 0 bytes, which the
      # headers of its links exceed. After an error above `excess` is NaN: without a
      # number of this process the others would wait.
      total = multihost_utils.process_allgather(excess).sum()
    if np.isnan(total):
      raise OSError(
        f"Publisher: another process failed: version {self.version} is not written"
      )
    is_due = total > 0
    # Before writing, so that a full disk gets room; the newest two anchors stay.
    # `anchors` are ascending; with fewer than two nothing is removed.
    self._prune(names, [0, 0, *anchors][-2])
    content = patterns.digest()
    # The id of the version before; without one the chain begins with the run.
    id_ = before[0] if before else self._run
    header: files.Header = {"before": id_, "digest": content}
    name = files.Name(
      self.version, self._run, jax.process_index(), jax.process_count(), "link"
    )
    # Beside an anchor no link is written that has more bytes than it.
    if before and not (is_due and link.nbytes > size):
      self._since += files.write(self._folder, name, header, [link])
    if is_due:
      name = name._replace(kind="anchor")
      header["boxes"] = patterns.boxes
      files.write(self._folder, name, header, patterns.arrays)
      self._since = 0
    self._before = chained(id_, content), patterns
    return self.version

  def _begin(self) -> None:
    """Sets `_run`, larger than all in the folder, and `version`, the newest there, alike in all processes."""
    self._folder.makedirs("", exist_ok=True)
    # unfinished files of former publishers
    files.remove_unfinished(self._folder)
    there = [name[:2] for name in files.names(self._folder)]
    # The largest version and the largest run that are there; 0 where none is.
    version, run = map(max, zip((0, 0), *there, strict=True))
    # The lower half is random, so that two publishers that begin at once, or in a
    # folder made anew, have different runs.
    random = secrets.randbits(31)
    proposed = np.array([version, (run >> 31) + 1, random], np.int32)
    # Process 0 decides, so that all parts are of one run.
    agreed = multihost_utils.broadcast_one_to_all(proposed)
    self.version, count, random = map(int, agreed)
    self._run = count << 31 | random

  def _prune(self, names: list[files.Name], oldest: int) -> None:
    """Removes the files of versions before `oldest`; each process removes its own.

    Args:
      names: of all files.
      oldest: the first version to keep, that of the second newest anchor.

    Raises:
      ValueError: if a later publisher, which has a larger run, has written to the
        folder. Old files that it does not need either may be removed before.
    """
    for name in names:
      # A later publisher has taken over: two chains would have the same numbers.
      if name.run > self._run:
        raise ValueError(
          f"Publisher: {self._folder.path} has {name}: another publisher writes to it"
        )
      # Files of a run with more processes are shared out among the present ones.
      is_own = name.process % jax.process_count() == jax.process_index()
      if is_own and name.version < oldest:
        files.remove(self._folder, str(name))
