"""Notes which blocks of the package run: in a file that a test process shares with its child processes.

A block is the body of a function, a branch, a loop or a handler. The import of a module
puts a statement before each block, which sets the block's byte. That costs little, works
in threads, and holds for processes that are killed. Code that runs at import is left
out: no test runs it alone.
"""

import ast
import builtins
import importlib.machinery
import mmap
import os
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
VARIABLE = "JAXSPARSE_REACHED"  # names the shared file
MOST = 1 << 10  # blocks of a file
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files() -> list[pathlib.Path]:
  """The modules of the package; the bytes of a file begin at its index times `MOST`."""
  return sorted((ROOT / "jaxsparse").rglob("*.py"))


def blocks(
  node: ast.AST, name: str = "", line: int = 1, runs: bool = False
) -> Iterator[tuple[str, list[ast.stmt]]]:
  """(`function+lines from its start`, statements) of each block in a function."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
      inner = f"{name}.{child.name}" if name else child.name
      is_function = isinstance(child, _FUNCTIONS)
      yield from blocks(child, inner, child.lineno, runs or is_function)
    else:
      yield from blocks(child, name, line, runs)
  for field in ("body", "orelse", "finalbody"):
    body = getattr(node, field, None)
    if runs and isinstance(body, list) and body:
      yield f"{name}+{body[0].lineno - line}", body


def note_blocks(source: str, first: int) -> ast.Module:
  """The module of a source whose blocks set the bytes from `first` on."""
  tree = ast.parse(source)
  for number, (_, body) in enumerate(list(blocks(tree))):
    (note,) = ast.parse(f"__reached__[{first + number}] = 1").body
    for node in ast.walk(note):
      ast.copy_location(node, body[0])
    body.insert(_has_docstring(body), note)
  return tree


def _has_docstring(body: list[ast.stmt]) -> bool:
  constant = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
  return constant and isinstance(body[0].value.value, str)


class _Loader(importlib.machinery.SourceFileLoader):
  """Compiles with notes, and caches that apart from what other runs compile."""

  @property
  def _first(self):
    return files().index(pathlib.Path(self.path)) * MOST

  def source_to_code(self, data, path, *, _optimize=-1):
    tree = note_blocks(data.decode(), self._first)
    return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

  def get_data(self, path):
    return super().get_data(self._cache_of(path))

  def set_data(self, path, data, **options):
    super().set_data(self._cache_of(path), data, **options)

  def _cache_of(self, path):
    cache, _, suffix = path.rpartition(".")
    return f"{cache}.reached-{self._first}.pyc" if suffix == "pyc" else path


class _Finder(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, fullname, path=None, target=None):
    if fullname.partition(".")[0] != "jaxsparse":
      return None
    spec = super().find_spec(fullname, path, target)
    if spec and spec.origin and ROOT / "jaxsparse" in pathlib.Path(spec.origin).parents:
      spec.loader = _Loader(fullname, spec.origin)
    return spec


def install() -> None:
  """Imports modules of the package with notes, into the file that the environment names."""
  if not hasattr(builtins, "__reached__"):
    with open(os.environ[VARIABLE], "r+b") as file:
      builtins.__reached__ = mmap.mmap(file.fileno(), 0)
    sys.meta_path.insert(0, _Finder)
