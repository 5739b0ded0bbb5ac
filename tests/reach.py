"""Which tests run which code: `pytest -p tests.reach` adds a line for each test that passes to out/reach.jsonl.

A line has the test, its seconds, and the names of the blocks of the package that it
ran, by file: `tests/children/reached.py` notes them. A later line of a test replaces
an earlier one. Tests share what JAX and fixtures cache: the first that needs it has it.
"""

import ast
import atexit
import builtins
import collections
import functools
import json
import os
import pathlib
import tempfile
from typing import NamedTuple

import pytest

from tests.children import reached

MAP = reached.ROOT / "out" / "reach.jsonl"


class Test(NamedTuple):
  """A test that passed: its seconds, and the names of the blocks that it ran, by file."""

  test: str
  seconds: float
  blocks: dict[str, list[str]]
  is_long: bool = False


def read(path: pathlib.Path = MAP) -> list[Test]:
  """The tests of a map, the quickest first; [] without a map."""
  if not path.exists():
    return []
  tests = map(json.loads, path.read_text().splitlines())
  latest = {test["test"]: Test(**test) for test in tests}
  return sorted(latest.values(), key=lambda test: (test.seconds, test.test))


def reaching(tests: list[Test], file: str, line: int) -> tuple[list[Test], str]:
  """The tests that run the "block" of a line; where none does, its "function"; where none does, its "file".

  Blocks and functions have names, so a map of an older version still serves.
  """
  name = block_at((reached.ROOT / file).read_text(), line)
  function = name.partition("+")[0]
  for unit, is_near in {
    "block": name.__eq__,
    "function": lambda block: block.partition("+")[0] == function,
    "file": bool,
  }.items():
    near = [test for test in tests if any(map(is_near, test.blocks.get(file, ())))]
    if near:
      return near, unit
  return [], "file"


def block_at(source: str, line: int) -> str:
  """The name of the innermost block with a line; for the line of a `def`, of the function; else ""."""
  blocks = list(reached.blocks(ast.parse(source)))
  around = [
    (statement.lineno, name)
    for name, body in blocks
    for statement in body
    if statement.lineno <= line <= statement.end_lineno
  ]
  if around:
    return max(around)[1]
  start = lambda name, body: body[0].lineno - int(name.partition("+")[2])
  of_function = [
    (body[0].lineno, name) for name, body in blocks if start(name, body) == line
  ]
  return min(of_function)[1] if of_function else ""


@functools.cache
def _names(number: int) -> list[str]:
  """The names of a file's blocks in the order of their bytes."""
  tree = ast.parse(reached.files()[number].read_text())
  return [name for name, _ in reached.blocks(tree)]


def _found() -> dict[str, list[str]]:
  """The blocks whose bytes are set."""
  notes = builtins.__reached__[:]
  found = collections.defaultdict(list)
  place = notes.find(1)
  while place >= 0:
    number, block = divmod(place, reached.MOST)
    file = reached.files()[number].relative_to(reached.ROOT)
    found[str(file)].append(_names(number)[block])
    place = notes.find(1, place + 1)
  return found


def pytest_load_initial_conftests():
  """Makes the shared file, before conftest.py and tests import the package."""
  handle, name = tempfile.mkstemp(prefix="reached-")
  os.truncate(handle, len(reached.files()) * reached.MOST)
  os.close(handle)
  os.environ[reached.VARIABLE] = name
  atexit.register(os.unlink, name)
  reached.install()


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
  report = yield
  item.stash[_REPORTS].append(report)
  return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  notes = builtins.__reached__
  notes[:] = bytes(len(notes))
  item.stash[_REPORTS] = []
  result = yield
  reports = item.stash[_REPORTS]
  if all(report.passed for report in reports):
    seconds = round(sum(report.duration for report in reports), 3)
    is_long = item.get_closest_marker("long") is not None
    test = Test(item.nodeid, seconds, _found(), is_long)
    MAP.parent.mkdir(exist_ok=True)
    with MAP.open("a") as file:
      file.write(f"{json.dumps(test._asdict())}\n")
  return result
