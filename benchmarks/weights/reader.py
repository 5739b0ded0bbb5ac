"""A reader of published weights at an address, which writes which versions it has.

    python -m benchmarks.weights.reader SETTINGS

It calls `latest` of a `js.weights.Subscriber` until it is killed.
"""

import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxsparse as js
from jaxsparse.weights.digests import digest

_PAUSE = 0.02  # seconds between two lists


class Settings(NamedTuple):
  """The settings of a reader."""

  server: str  # the address of the publisher's folder
  log: str  # the file of its events, a JSON object a line
  shapes: list[list[int]]  # of the leaves
  dtype: str


def digest_of(leaves: Any) -> int:
  """A number that differs where a bit of the leaves does."""
  return digest(np.asarray(leaf).tobytes() for leaf in leaves)


def run(settings: Settings) -> None:
  """Reads until it is killed."""
  like = [
    jax.ShapeDtypeStruct(tuple(shape), settings.dtype) for shape in settings.shapes
  ]
  subscriber = js.weights.Subscriber(settings.server, like, settings.dtype)
  received: list[int] = []  # bytes of the files that were read since the last version
  cat_file = subscriber._folder.cat_file

  def counted(path: str) -> bytes:
    content = cat_file(path)
    received.append(len(content))
    return content

  subscriber._folder.cat_file = counted
  version = 0
  with pathlib.Path(settings.log).open("a", buffering=1) as log:
    say = lambda **facts: log.write(json.dumps(facts) + "\n")
    say(event="started", time=time.monotonic())
    while True:
      try:
        latest = subscriber.latest()
      except LookupError:  # nothing is there yet
        latest = js.weights.Published(0, [])
      if latest.version == version:
        time.sleep(_PAUSE)
        continue
      jax.block_until_ready(latest.params)
      now = time.monotonic()
      version = latest.version
      facts = {"version": version, "bytes": sum(received)}
      say(event="version", time=now, digest=digest_of(latest.params), **facts)
      received.clear()


if __name__ == "__main__":
  run(Settings(*json.loads(sys.argv[1])))
