"""Text that every Python brings, hashed: its help topics, and the docstrings of its standard library.

Each paragraph occurs once, so that what is held out never occurs in the training text;
nothing is downloaded.
"""

import ast
import functools
import hashlib
import itertools
import pathlib
import sys
import sysconfig
from collections.abc import Iterable
from pydoc_data import topics
from typing import NamedTuple

import numpy as np

BYTES = 256
HELD_OUT = 0.1
_SOURCE = 100_000  # bytes
_SKIPPED = (
  "test",
  "tests",
  "idlelib",
  "lib2to3",
  "turtledemo",
  "site-packages",
  "dist-packages",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Text(NamedTuple):
  """Text to learn from and text to be tested on."""

  train: np.ndarray  # u8[bytes]
  held_out: np.ndarray  # u8[bytes]
  digest: str  # SHA-256 of both, in hexadecimal
  name: str  # in words

  def __str__(self) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    size = len(self.train) + len(self.held_out)
    return f"the {self.name} of Python {version} ({size:,} bytes, SHA-256 {self.digest[:12]})"


def help_topics() -> Text:
  """The help topics in alphabetical order; the last tenth of the bytes is held out."""
  content = "\n\n".join(_paragraphs([_topics()])).encode()
  text, cut = np.frombuffer(content, np.uint8), round(len(content) * (1 - HELD_OUT))
  return Text(
    text[:cut], text[cut:], hashlib.sha256(content).hexdigest(), "help topics"
  )


@functools.cache
def library() -> Text:
  """The help topics and the docstrings of the standard library, of which a tenth, by their hash, is held out."""
  parts: dict[bool, list[bytes]] = {False: [], True: []}  # by whether they are held out
  for paragraph in (
    paragraph.encode() for paragraph in _paragraphs([_topics(), *_docstrings()])
  ):
    parts[
      int.from_bytes(hashlib.sha256(paragraph).digest()[:4]) < HELD_OUT * 2**32
    ].append(paragraph)
  train, held_out = map(b"\n\n".join, parts.values())
  whole = hashlib.sha256(train + held_out).hexdigest()
  return Text(
    np.frombuffer(train, np.uint8),
    np.frombuffer(held_out, np.uint8),
    whole,
    "help topics and docstrings",
  )


@functools.cache
def sources() -> tuple[Text, ...]:
  """Texts that differ: prose, Python, C and tables of numbers; 100,000 bytes each, the last tenth is held out."""
  import sklearn.datasets

  tables = pathlib.Path(sklearn.datasets.__file__).with_name("data")
  folders = {
    "Python": (pathlib.Path(sysconfig.get_path("stdlib")), "*.py"),
    "C": (pathlib.Path(np.get_include()), "*.h"),
  }
  content = {"prose": _topics().encode()}
  for name, (folder, pattern) in (folders | {"numbers": (tables, "*.csv")}).items():
    content[name] = b"\n".join(
      path.read_bytes() for path in sorted(folder.rglob(pattern))
    )
  found = []
  for name, whole in content.items():
    text, cut = (
      np.frombuffer(whole[:_SOURCE], np.uint8),
      round(_SOURCE * (1 - HELD_OUT)),
    )
    found.append(
      Text(text[:cut], text[cut:], hashlib.sha256(whole[:_SOURCE]).hexdigest(), name)
    )
  return tuple(found)


def _topics() -> str:
  return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _paragraphs(parts: Iterable[str]) -> list[str]:
  """Each paragraph once, in order of its first occurrence."""
  every = itertools.chain.from_iterable(part.split("\n\n") for part in parts)
  return list(dict.fromkeys(filter(str.strip, every)))


def _docstrings() -> Iterable[str]:
  """The docstrings of the modules of the standard library, in order of their paths."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
    if path.parent.name in _SKIPPED or (
      path.parent != root and not (path.parent / "__init__.py").exists()
    ):
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, _DOCUMENTED) and (found := ast.get_docstring(node)):
        yield found
