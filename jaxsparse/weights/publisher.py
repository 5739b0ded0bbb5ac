"""A trainer's end of the chain: writes links, anchors now and then, and removes what readers no longer need."""

import contextlib
import os
import pathlib
import secrets
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsparse.weights import files
from jaxsparse.weights.digests import chained
from jaxsparse.weights.model import Model, Patterns


class Publisher:
  """Publishes versions of parameters to a folder, for any number of `Subscriber`s.

  Each version has a link, the bit patterns' differences to the version before, or an
  anchor, all bit patterns, or both. The folder keeps links of at most an anchor's size,
  and an anchor. The first version of every publisher is an anchor.

  Args:
    folder: a path; made if it is not there. If several processes train, each makes a
      publisher of the same folder, and writes its shards.
    params_like: the parameters, or their shapes and dtypes.
    dtype: the serving dtype, of floating-point leaves; None leaves them as they are.

  Raises:
    ValueError: for an address, or a folder of another model or dtype.

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

  def __init__(
    self, folder: str | os.PathLike[str], params_like: Any, dtype: Any = "bfloat16"
  ):
    self._folder = path_of(folder)
    self._model = Model(params_like, dtype)
    self._folder.mkdir(parents=True, exist_ok=True)
    there = files.names(self._folder)
    self._check_model(there)
    newest = max((name.number for name in there), default=0)
    agreed = np.array([newest, secrets.randbits(31)], np.int32)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(agreed))
    self.version, self._run = agreed.tolist()
    self._first = self.version
    # of the version before, unless it was not written whole
    self._before: tuple[int, Patterns] | None = None
    self._since = 0  # bytes of links since the last anchor

  def publish(self, params: Any) -> int:
    """Writes the next version, and returns its number.

    A version that cannot be written is left out: the next one is an anchor. All
    processes call it together.

    Raises:
      ValueError: for parameters of another model, and if another publisher has begun to
        write.
      OSError: for a full disk, for example.
    """
    patterns = self._model.patterns(params)
    before, self._before = self._before, None
    self.version += 1
    size = _bytes_of(patterns.arrays)
    link = before[1].difference(patterns) if before else []
    self._since += _bytes_of(link)
    is_due = multihost_utils.process_allgather(before is None or self._since > size)
    content = patterns.digest()
    id_ = before[0] if before else self._run
    header = {"before": id_, "digest": content}
    self._prune(size, keep_all=before is None)
    if before and _bytes_of(link) <= size:
      self._write("link", header, link)
    if np.any(is_due):
      anchor = {"boxes": patterns.boxes, "layout": self._model.layout}
      self._write("anchor", header | anchor, patterns.arrays)
      self._since = 0
    self._before = chained(id_, content), patterns
    return self.version

  def _write(self, kind: str, header: dict[str, Any], body: list[np.ndarray]) -> None:
    part, processes = jax.process_index(), jax.process_count()
    name = files.Name(self.version, self._run, part, processes, kind)
    files.write(self._folder, name, header, body)

  def _prune(self, room: int, keep_all: bool) -> None:
    """Keeps the newest anchor, the links behind it, and `room` bytes of links."""
    anchors = 0
    for name in reversed(files.names(self._folder)):
      if name.part % jax.process_count() != jax.process_index():
        continue
      is_other = name.run != self._run
      if is_other and name.number > self._first:
        raise ValueError(
          f"Publisher: {self._folder} has {name}: another publisher writes to it"
        )
      path = self._folder / str(name)
      is_anchor = name.kind == "anchor"
      room -= 0 if is_anchor else os.path.getsize(path)
      is_old = anchors > 0 and (is_anchor or room < 0)
      anchors += is_anchor
      if not keep_all and (is_old or is_other):
        os.unlink(path)

  def _check_model(self, names: list[files.Name]) -> None:
    """Raises ValueError if the newest anchor is one of another model, which pruning would remove."""
    for name in reversed(names):
      if name.kind == "anchor":
        with contextlib.suppress(files.Damaged):
          header, _ = files.read(self._folder, name)
          self._model.check(header["layout"], f"Publisher: {self._folder}")
          return


def _bytes_of(arrays: list[np.ndarray]) -> int:
  return sum(array.nbytes for array in arrays)


def path_of(folder: str | os.PathLike[str]) -> pathlib.Path:
  """Raises ValueError for an address."""
  if "://" in str(folder):
    raise ValueError(f"{folder} is an address: choose a folder, or mount it as one")
  return pathlib.Path(folder)
