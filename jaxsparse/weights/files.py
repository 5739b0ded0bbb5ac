"""Files that are there whole or not at all, and their names, in any file system of fsspec.

The bytes of a file:

    magic | digest of name and rest, u64 | bytes of header, u64 | header, JSON | arrays
"""

import collections
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from fsspec.implementations.dirfs import DirFileSystem

from jaxsparse.weights.digests import BYTES, digest

# The number is that of the format: a reader refuses files of another one.
_MAGIC = b"jaxsparse.wts 2\n"
Header = dict[str, Any]  # what JSON holds
_NAME = re.compile(r"(\d{12})-(\d+)-(\d+)-(\d+)\.(link|anchor)")


class Name(NamedTuple):
  """The name of a file.

  Attributes:
    version: its number.
    run: number of the publisher; a later publisher has a larger number.
    process: number of the process that wrote it, of so many `processes`.
    kind: "link" or "anchor".
  """

  version: int
  run: int
  process: int
  processes: int
  kind: str

  def __str__(self) -> str:
    return f"{self.version:012}-{self.run}-{self.process}-{self.processes}.{self.kind}"


# by version, run and kind: a file of each process
Versions = dict[tuple[int, int, str], list[Name]]


def names(folder: DirFileSystem) -> list[Name]:
  """The names of all versions, oldest first, and the files of one version in order; without other files.

  Raises:
    OSError: if the folder cannot be read.
  """
  with _raising_os_errors(folder.path):
    # A folder may hold files of others, and unfinished ones.
    matches = list(map(_NAME.fullmatch, folder.ls("", detail=False)))
  fields = [match.groups() for match in matches if match]
  rows = [[*map(int, numbers), kind] for *numbers, kind in fields]
  return sorted(map(Name._make, rows))


def complete_versions(names: list[Name]) -> Versions:
  """The links and anchors whose files are there from all processes: their names by version, run and kind."""
  versions: Versions = collections.defaultdict(list)
  for name in names:
    versions[name.version, name.run, name.kind].append(name)
  return {
    key: parts for key, parts in versions.items() if len(parts) == parts[0].processes
  }


def write(
  folder: DirFileSystem, name: Name, header: Header, arrays: list[np.ndarray]
) -> int:
  """Writes a file aside, syncs and renames it; returns its size in bytes.

  Args:
    folder: where to write.
    name: of the file.
    header: what JSON holds, without "arrays", which is added.
    arrays: to write behind the header, in any dtype.

  Raises:
    OSError: for a full disk, for example; then no such file is there.
  """
  # `dtype.str` has the order of bytes, too.
  kinds = [(array.dtype.str, array.nbytes) for array in arrays]
  text = json.dumps(header | {"arrays": kinds}).encode()
  content: list[Any] = [len(text).to_bytes(BYTES), text, *arrays]
  # The next file of this process replaces one that was not finished.
  aside = f".{name.run}.{name.process}.aside"
  with folder.open(aside, "wb") as file:
    file.writelines([_seal(name, content), *content])
    size = file.tell()
    # On the disk before it has its name, or a crash could leave the name alone. Objects
    # of buckets have no number of a file, and are there as soon as they are whole.
    with contextlib.suppress(io.UnsupportedOperation):
      number = file.fileno()
      file.flush()
      os.fsync(number)
  folder.mv(aside, str(name))
  return size


def read(folder: DirFileSystem, name: Name) -> tuple[Header, list[np.ndarray]]:
  """The header and the arrays of a file, as they were given to `write`; arrays are flat.

  Raises:
    ValueError: for a file that is foreign, not whole, changed or renamed.
    OSError: for one that is gone, or cannot be read.
  """
  with _raising_os_errors(str(name)):
    content = np.frombuffer(folder.cat_file(str(name)), np.uint8)
  # The seal covers all that follows it.
  seal, rest = np.split(content, [len(_MAGIC) + BYTES])
  if seal.tobytes() != _seal(name, [rest]):
    raise ValueError(f"{name} is truncated, changed or no file of js.weights")
  # The length of the header, the header, and then the arrays, without gaps.
  end = BYTES + int.from_bytes(rest[:BYTES])
  header = json.loads(rest[BYTES:end].tobytes())
  arrays = []
  for dtype, size in header["arrays"]:
    # A view: the bytes are not copied once more.
    arrays.append(rest[end : end + size].view(dtype))
    end += size
  return header, arrays


@contextlib.contextmanager
def _raising_os_errors(what: str) -> Iterator[None]:
  """Raises OSError for any error within, since clients of buckets and of HTTP have errors of their own."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    raise OSError(f"{what}: {error!r}") from error


def _seal(name: Name, content: Sequence[Any]) -> bytes:
  """The first bytes of a file: the format, and a digest of its name and of `content`, all that follows."""
  # A renamed file is refused, as its name is sealed with its content.
  return _MAGIC + digest([str(name).encode(), *content]).to_bytes(BYTES)
