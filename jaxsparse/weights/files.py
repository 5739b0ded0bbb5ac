"""Files that are there whole or not at all, and their names.

magic | digest of the rest, u64 | bytes of the header, u64 | header, JSON | body
"""

import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsparse.weights.digests import BYTES, digest

_MAGIC = b"jaxsparse.wts 1\n"
_NAME = re.compile(r"(\d{12})-(\d+)-(\d+)-(\d+)\.(link|anchor)")


class Damaged(ValueError):
  """A file is not what was written under its name."""


class Name(NamedTuple):
  """The name of a file.

  Attributes:
    number: of the version.
    run: a random number, of the publisher.
    part: the process that wrote it, of `processes`.
    kind: "link" or "anchor".
  """

  number: int
  run: int
  part: int
  processes: int
  kind: str

  def __str__(self) -> str:
    return f"{self.number:012}-{self.run}-{self.part}-{self.processes}.{self.kind}"


def names(folder: pathlib.Path) -> list[Name]:
  """Of all versions, oldest first, and the parts of one in order; other files do not count."""
  found = map(_NAME.fullmatch, os.listdir(folder))
  fields = [one.groups() for one in found if one]
  return sorted(Name._make([*map(int, field[:4]), field[4]]) for field in fields)


def write(
  folder: pathlib.Path, name: Name, header: dict[str, Any], body: Sequence[np.ndarray]
) -> None:
  """Writes a file aside, syncs and renames it.

  Raises:
    OSError: for a full disk, for example; then no such file is there.
  """
  text = json.dumps({"name": str(name)} | header).encode()
  content: list[Any] = [len(text).to_bytes(BYTES), text, *body]
  # The next file replaces one that was not finished.
  aside = folder / f".{name.part}.aside"
  with open(aside, "wb") as file:
    file.write(_MAGIC + digest(content).to_bytes(BYTES))
    for part in content:
      file.write(part)
    file.flush()
    os.fsync(file.fileno())
  os.replace(aside, folder / str(name))


def read(folder: pathlib.Path, name: Name) -> tuple[dict[str, Any], np.ndarray]:
  """Header and body, u8[bytes].

  Raises:
    Damaged: for a file that is foreign, not whole, changed or renamed.
    OSError: for one that is gone.
  """
  content = np.fromfile(folder / str(name), np.uint8)
  magic, seal, rest = np.split(content, [len(_MAGIC), len(_MAGIC) + BYTES])
  if magic.tobytes() != _MAGIC:
    raise Damaged(f"{name} is no file of js.weights, or one of another format")
  if seal.tobytes() != digest([rest]).to_bytes(BYTES):
    raise Damaged(f"{name} is truncated or changed: its digest is another one")
  end = BYTES + int.from_bytes(rest[:BYTES].tobytes())
  header = json.loads(rest[BYTES:end].tobytes())
  if header["name"] != str(name):
    raise Damaged(f"{name} was written as {header['name']}")
  return header, rest[end:]
