"""Whether the tests find defects: `python -m tests.mutants` puts each defect of mutants.toml into a copy and tests it.

A mutant is the package with one defect, such as a rank in place of another one or a
check that is gone. The tests that it names run first, they take seconds. Where they
pass, everything that `make test` runs follows. A mutant that survives shows a gap in
the tests: add a row to them, or choose another defect if this one changes nothing.

`--draw=60` draws small changes of the package instead of reading the list
(tests/mutations.py). Each runs against the tests that run its line, the quickest first:
a map has them, which `pytest -p tests.reach` writes. Without a map they are the tests
of its module's folder. The same seed, names and commit draw the same changes.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

from tests import mutations, reach

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 600.0  # seconds for the tests that a mutant names
WHOLE_LIMIT = 7200.0  # seconds for all of `make test`, in one process
SLOWER = 8.0  # how much longer tests may take than the map says
HANGS = 90  # seconds of a test that a drawn change keeps from ending
# Tests that read the package's source, which every change makes fail.
CHECK_SOURCES = (
  "tests/contributing_test.py",
  "tests/mutants_test.py",
  "tests/structure_test.py",
)
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]


class Mutant(NamedTuple):
  """A defect: `file` with `new` in place of `old`, and the tests that fail first."""

  number: int
  what: str
  file: str
  old: str
  new: str
  tests: list[str]

  def text(self, root: pathlib.Path = ROOT) -> str:
    """The file with the defect; `old` is found however its line is broken."""
    source = (root / self.file).read_text()
    if source.count(self.old) == 1:
      return source.replace(self.old, self.new)
    words = re.findall(r"\w+|\S", self.old)
    closing = lambda word: r",?\s*" + re.escape(word)
    pattern = r"\s*".join(
      closing(word) if word in ")]}" else re.escape(word) for word in words
    )
    text, count = re.subn(pattern, lambda _: self.new, source)
    if count != 1:
      raise ValueError(
        f"mutant {self.number}: {self.file} has the text to replace {count} times, not once: {self.old}"
      )
    return text


def read_mutants() -> list[Mutant]:
  entries = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
  return [Mutant(number, **entry) for number, entry in enumerate(entries, 1)]


@contextlib.contextmanager
def copy_tree() -> Iterator[pathlib.Path]:
  """A copy of the working tree in a temporary folder, without the test of the list, which every mutant fails."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
  names = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.splitlines()
  with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
    root = pathlib.Path(folder)
    for name in names:
      if (ROOT / name).is_file() and name != "tests/mutants_test.py":
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    yield root


class NoSuchTests(Exception):
  """Pytest finds not all of the tests that it is to run."""


def find_failure(root: pathlib.Path, tests: list[str], limit: float) -> str | None:
  """What fails first in a copy: a test, or how pytest ends; None if nothing fails. No `tests` are all of them."""
  options = {
    "cwd": root,
    "env": os.environ | {"PYTHONPATH": str(root)},
    "stdin": subprocess.DEVNULL,
  }
  with tempfile.TemporaryFile(
    "w+"
  ) as output:  # a pipe would stay open as long as any descendant
    process = subprocess.Popen(
      [*PYTEST, *tests], stdout=output, stderr=output, start_new_session=True, **options
    )
    try:
      status = process.wait(limit)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    output.seek(0)
    text = output.read()
  if status in (4, 5):
    raise NoSuchTests(f"`make test` does not run all of {', '.join(tests)}")
  failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
  return failed[1] if failed else f"status {status} of pytest" if status else None


def kill(mutant: Mutant, whole: bool) -> bool:
  """Whether a test fails; prints which."""
  start = time.monotonic()
  with copy_tree() as root:
    (root / mutant.file).write_text(mutant.text())
    try:
      failure = None if whole else find_failure(root, mutant.tests, LIMIT)
      late = "" if failure or whole else ", and by none of the tests that it names,"
      failure = failure or find_failure(root, [], WHOLE_LIMIT)
    except subprocess.TimeoutExpired as error:
      failure, late = f"the limit of {error.timeout:g} s", ""
  outcome = f"killed by {failure}{late}" if failure else "SURVIVED"
  print(
    f"{mutant.number} {mutant.file}, {mutant.what}: {outcome} in {time.monotonic() - start:.0f} s",
    flush=True,
  )
  return failure is not None


def check_original(mutants: list[Mutant], whole: bool) -> None:
  """Ends the program unless the tests are those of a copy, and pass without a defect."""
  with copy_tree() as root:
    find = [
      sys.executable,
      "-c",
      "import importlib.util as u; print(u.find_spec('jaxsparse').origin)",
    ]
    found = subprocess.run(
      find,
      cwd="/",
      env=os.environ | {"PYTHONPATH": str(root)},
      capture_output=True,
      text=True,
    )
    if pathlib.Path(found.stdout.strip()) != root / "jaxsparse" / "__init__.py":
      sys.exit(f"error: a copy imports {found.stdout.strip()}, not its own package")
    tests = (
      [] if whole else sorted({test for mutant in mutants for test in mutant.tests})
    )
    if failure := find_failure(root, tests, WHOLE_LIMIT):
      sys.exit(f"error: without a defect the tests end by {failure}")


def find_by_name(file: str) -> list[str]:
  """The doctests of a module, and the test files with its name, else all of its folder."""
  parts = pathlib.PurePath(file).relative_to("jaxsparse").with_suffix("").parts
  names = ["door" if part == "__init__" else part for part in parts]
  folder = ROOT / "tests" / names[0]
  candidates = [*folder.glob("*_test.py"), *folder.parent.glob(f"{names[0]}*_test.py")]
  named = [test for test in candidates if test.stem.removesuffix("_test") in names]
  return [file, *sorted(str(test.relative_to(ROOT)) for test in named or candidates)]


def read_map(root: pathlib.Path, flags: list[str]) -> list[reach.Test]:
  """The tests of the map that pytest finds in a copy."""
  tests = reach.read()
  files = {test.test.partition("::")[0] for test in tests} - {*CHECK_SOURCES}
  there = sorted(file for file in files if (root / file).exists())
  if not there:
    return []
  found = subprocess.run(
    [*PYTEST, *flags, "--collect-only", *there],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
    check=True,
  )
  names = {*found.stdout.splitlines()}
  return [test for test in tests if test.test in names]


class Drawn(NamedTuple):
  """A drawn change, the tests that it runs, and which these are."""

  mutation: mutations.Mutation
  tests: list[str]
  which: str


def choose_tests(
  mutation: mutations.Mutation, tests: list[reach.Test], limit: float
) -> Drawn:
  """The quickest tests of a map that run the line of a change, `limit` seconds of them."""
  found, unit = reach.reaching(tests, mutation.file, mutation.statement)
  if not found:
    named = find_by_name(mutation.file)
    return Drawn(mutation, named, ", ".join(named))
  seconds = itertools.accumulate(test.seconds for test in found)
  count = max(1, sum(until <= limit for until in seconds))
  which = f"{count} of {len(found)} tests that run its {unit}"
  return Drawn(mutation, [test.test for test in found[:count]], which)


def judge(drawn: Drawn, root: pathlib.Path, flags: list[str], limit: float) -> str:
  """Runs the tests of a drawn change in a copy, which it restores; prints and returns the outcome."""
  mutation, tests, which = drawn
  start = time.monotonic()
  (root / mutation.file).write_bytes(mutation.text())
  try:
    failure = find_failure(root, [*flags, *tests], limit)
    outcome = "killed" if failure else "SURVIVED"
    by = f"by {failure}" if failure else which
  except (NoSuchTests, subprocess.TimeoutExpired) as error:
    outcome = "undecided"
    by = f"by {which}: {type(error).__name__}"
  finally:
    shutil.copy2(ROOT / mutation.file, root / mutation.file)
  print(f"{mutation}: {outcome} {by} ({time.monotonic() - start:.0f} s)", flush=True)
  return outcome


def run_drawn(options: argparse.Namespace) -> None:
  """Draws changes and runs their tests until the time is over."""
  end = time.monotonic() + 60 * options.minutes
  flags = [f"--timeout={HANGS}", *(["-m", ""] if options.long else [])]
  drawn = mutations.draw(options.draw, options.seed, options.mutants)
  roots = queue.SimpleQueue()
  with contextlib.ExitStack() as copies:
    for _ in range(options.jobs):
      roots.put(root := copies.enter_context(copy_tree()))
    tests = read_map(root, flags)
    print(f"{len(tests)} tests of {reach.MAP}" if tests else "no map, tests by name")

    def run(mutation: mutations.Mutation) -> str:
      left = end - time.monotonic()
      if left <= 0:
        return "not run"
      chosen = choose_tests(mutation, tests, options.limit)
      root = roots.get()
      try:
        return judge(chosen, root, flags, min(left, SLOWER * options.limit))
      finally:
        roots.put(root)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
      outcomes = collections.Counter(threads.map(run, drawn))
  counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
  print(f"{len(drawn)} changes of seed {options.seed}: {counts}")


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="python -m tests.mutants", description=__doc__.partition("\n")[0]
  )
  parser.add_argument(
    "mutants", nargs="*", help="numbers, or parts of names of files; default all"
  )
  parser.add_argument(
    "--jobs", type=int, default=2, help="mutants that are tested at once (%(default)s)"
  )
  parser.add_argument(
    "--whole",
    action="store_true",
    help="all tests of `make test`, not the named ones first",
  )
  parser.add_argument(
    "--unchecked",
    action="store_true",
    help="do not test the package without a defect first",
  )
  parser.add_argument(
    "--draw", type=int, metavar="N", help="N changes drawn at random, not the list"
  )
  parser.add_argument("--seed", default="0", help="of what is drawn (%(default)s)")
  parser.add_argument(
    "--minutes", type=float, default=60, help="for all drawn changes (%(default)s)"
  )
  parser.add_argument(
    "--limit",
    type=float,
    default=60,
    help="seconds of tests for a drawn change, as the map has them (%(default)s)",
  )
  parser.add_argument(
    "--long", action="store_true", help="tests marked long as well, if the map has them"
  )
  options = parser.parse_args()
  if options.draw:
    run_drawn(options)
    return
  is_wanted = lambda one, name: (
    str(one.number) == name if name.isdecimal() else name in one.file
  )
  mutants = [
    one
    for one in read_mutants()
    if any(is_wanted(one, name) for name in options.mutants or [""])
  ]
  for one in mutants:
    one.text()  # raises if the list is not in step with the package
  if not options.unchecked:
    check_original(mutants, options.whole)
  with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
    killed = list(threads.map(lambda one: kill(one, options.whole), mutants))
  print(f"{sum(killed)} of {len(killed)} killed")
  sys.exit(not all(killed))


if __name__ == "__main__":
  main()
