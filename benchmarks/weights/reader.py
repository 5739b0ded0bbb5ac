"""A reader of published weights that copies the publisher's folder over the network, and writes which versions it has.

    python -m benchmarks.weights.reader SETTINGS

It asks the server for the list of files, copies those that it needs, each written aside
and renamed, removes those that the publisher has removed, and reads its own folder by a
`js.weights.Subscriber`, until it is killed.
"""

import json
import os
import pathlib
import re
import shutil
import sys
import time
import urllib.request
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxsparse as js
from jaxsparse.weights import files
from jaxsparse.weights.digests import digest

_PAUSE = 0.02  # seconds between two lists
_TIMEOUT = 60.0  # seconds without a byte
ASIDE = ".copy"  # where a file is until all of it has come


class Settings(NamedTuple):
  """The settings of a reader."""

  server: str  # the address of the folder of the model
  folder: str  # its own one
  log: str  # the file of its events, a JSON object a line
  shapes: list[list[int]]  # of the leaves
  dtype: str


def digest_of(leaves: Any) -> int:
  """A number that differs where a bit of the leaves does."""
  return digest(np.asarray(leaf).tobytes() for leaf in leaves)


def needed(names: list[files.Name], version: int) -> list[files.Name]:
  """The links behind a version, where all of them are there, else the newest anchor and the links behind that."""
  links = [name for name in names if name.kind == "link" and name.version > version]
  newest = max((name.version for name in names), default=0)
  if [name.version for name in links] == [*range(version + 1, newest + 1)] and version:
    return links
  anchors = [name for name in names if name.kind == "anchor" and name.version > version]
  if not anchors:
    return []
  return [anchors[-1], *(name for name in links if name.version > anchors[-1].version)]


def _listed(server: str) -> list[files.Name]:
  with urllib.request.urlopen(f"{server}/", timeout=_TIMEOUT) as response:
    entries = re.findall('href="([^"]+)"', response.read().decode())
  # the parts of a name, as `files.names` reads them
  matches = map(files._NAME.fullmatch, entries)
  fields = [match.groups() for match in matches if match]
  rows = [[*map(int, numbers), kind] for *numbers, kind in fields]
  return sorted(map(files.Name._make, rows))


def _copy(server: str, name: files.Name, folder: pathlib.Path) -> int:
  """Copies a file whole, or not at all; its bytes."""
  aside = folder / ASIDE
  with urllib.request.urlopen(f"{server}/{name}", timeout=_TIMEOUT) as response:
    with open(aside, "wb") as file:
      shutil.copyfileobj(response, file, 1 << 16)
    size = int(response.headers["Content-Length"])
  if aside.stat().st_size != size:
    raise OSError(f"{name} has {aside.stat().st_size} bytes of {size}")
  os.replace(aside, folder / str(name))
  return size


def _copy_needed(server: str, version: int, folder: pathlib.Path) -> int:
  """Copies what a reader of a version needs; bytes."""
  names = _listed(server)
  there = set(files.names(folder))
  copied = [
    _copy(server, name, folder) for name in needed(names, version) if name not in there
  ]
  for name in there.difference(names):
    os.unlink(folder / str(name))
  return sum(copied)


def run(one: Settings) -> None:
  """Reads until it is killed."""
  like = [jax.ShapeDtypeStruct(tuple(shape), one.dtype) for shape in one.shapes]
  subscriber = js.weights.Subscriber(one.folder, like, one.dtype)
  own = subscriber._folder
  own.mkdir(parents=True, exist_ok=True)
  with pathlib.Path(one.log).open("a", buffering=1) as log:
    say = lambda **facts: log.write(json.dumps(facts) + "\n")
    say(event="started", time=time.monotonic())
    version = received = 0
    while True:
      try:
        latest = subscriber.latest()
      except LookupError:  # nothing is there yet
        latest = js.weights.Published(0, [])
      if latest.version != version:
        jax.block_until_ready(latest.params)
        now = time.monotonic()
        version = latest.version
        facts = {"version": version, "bytes": received}
        say(event="version", time=now, digest=digest_of(latest.params), **facts)
        received = 0
      try:
        copied = _copy_needed(one.server, version, own)
      except OSError as error:  # a file was removed behind the list, or no answer
        say(event="error", time=time.monotonic(), what=str(error))
        copied = 0
      received += copied
      if not copied:
        time.sleep(_PAUSE)


if __name__ == "__main__":
  run(Settings(*json.loads(sys.argv[1])))
