"""Files that are there whole or not at all, and their names, in any file system of fsspec.

The bytes of a file:

    magic | digest of name and rest, u64 | bytes of header, u64 | header, JSON | arrays
"""

import collections
import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
import numpy as np
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from jaxsparse.weights.digests import BYTES, digest

# The number is that of the format: a reader refuses files of another one.
_MAGIC = b"jaxsparse.wts 2\n"
Header = dict[str, Any]  # what JSON holds
_NAME = re.compile(r"(\d{12})-(\d+)-(\d+)-(\d+)\.(link|anchor)")
_MODEL = re.compile(r"\w+-[0-9a-f]+/?$")  # the folder of a dtype and a model
_ASIDE = re.compile(r"\.\d+\.\d+\.aside")
_SILENCE = 60.0  # seconds without a byte from a server


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


def is_http(folder: str | os.PathLike[str]) -> bool:
  """Whether a folder is an address of HTTP, which can only be read."""
  return str(folder).startswith(("http://", "https://"))


def system_of(
  folder: str | os.PathLike[str],
) -> tuple[fsspec.AbstractFileSystem, str]:
  """The file system of a path or an address, and the path within it.

  Raises:
    ValueError: for an address of an unknown protocol, or one as a path of pathlib.
    ImportError: if the package for the protocol is not installed.
  """
  address = os.fspath(folder)
  # A path is not read as an address: "::" in its name would be a chain of addresses.
  if "://" not in address:
    if isinstance(folder, os.PathLike) and ":/" in address:
      # pathlib makes one slash of two
      raise ValueError(f"{address} is an address: give a string, not a path")
    return LocalFileSystem(), os.path.abspath(address)
  options = {}
  if is_http(address):
    import aiohttp

    # By default a file has to come within 300 s.
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE)
    options["client_kwargs"] = {"timeout": timeout}
  return fsspec.url_to_fs(address, **options)


def names(folder: DirFileSystem) -> list[Name]:
  """The names of all versions, oldest first, and the files of one version in order; without other files.

  Raises:
    OSError: if the folder cannot be read.
  """
  with _raising_os_errors(folder.path):
    # Others write to the folder.
    folder.invalidate_cache()
    # A folder may hold files of others, and unfinished ones.
    matches = list(map(_NAME.fullmatch, folder.ls("", detail=False)))
  fields = [match.groups() for match in matches if match]
  rows = [[*map(int, numbers), kind] for *numbers, kind in fields]
  return sorted(map(Name._make, rows))


def models_beside(folder: DirFileSystem) -> list[str]:
  """The folders of all dtypes and models beside that of one of them; [] if they cannot be listed."""
  try:
    paths = folder.fs.ls(folder.path.rpartition("/")[0], detail=False)
  except Exception:
    return []
  return sorted(path for path in paths if _MODEL.search(path))


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
  """Writes a file, which has its name once it is whole; returns its size in bytes.

  A local file is written aside, synced and renamed. Objects of buckets are whole.

  Args:
    folder: where to write.
    name: of the file.
    header: what JSON holds, without "arrays", which is added.
    arrays: to write behind the header, in any dtype.

  Raises:
    OSError: for a full disk, for example; then readers refuse what is there of it.
  """
  # `dtype.str` has the order of bytes, too.
  kinds = [(array.dtype.str, array.nbytes) for array in arrays]
  text = json.dumps(header | {"arrays": kinds}).encode()
  content: list[Any] = [len(text).to_bytes(BYTES), text, *arrays]
  content.insert(0, _seal(name, content))
  if not isinstance(folder.fs, LocalFileSystem):
    whole = b"".join(content)
    with _raising_os_errors(str(name)):
      folder.pipe_file(str(name), whole)
    return len(whole)
  # The next file of this process replaces one that was not finished.
  aside = f"{folder.path}/.{name.run}.{name.process}.aside"
  with open(aside, "wb") as file:
    file.writelines(content)
    # On the disk before it has its name, or a crash could leave the name alone.
    file.flush()
    os.fsync(file.fileno())
    size = file.tell()
  os.replace(aside, f"{folder.path}/{name}")
  return size


def remove(folder: DirFileSystem, name: str) -> None:
  """Removes a file, unless another process has."""
  with contextlib.suppress(FileNotFoundError):
    folder.rm_file(name)


def remove_unfinished(folder: DirFileSystem) -> None:
  """Removes the files that publishers of this folder have not finished."""
  for name in filter(_ASIDE.fullmatch, folder.ls("", detail=False)):
    remove(folder, name)


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
  """Raises OSError for any error within: clients of buckets and of HTTP have others; `what` begins its message."""
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
