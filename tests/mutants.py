"""Whether the tests find defects: `python -m tests.mutants` puts each defect of mutants.toml into a copy and tests it.

A mutant is the package with one defect, such as a rank in place of another one or a
check that is gone. The tests that it names run first, they take seconds. Where they
pass, everything that `make test` runs follows. A mutant that survives shows a gap in
the tests: add a row to them, or choose another defect if this one changes nothing.
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
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

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 600.0  # seconds for the tests that a mutant names
WHOLE_LIMIT = 7200.0  # seconds for all of `make test`, in one process
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
    except subprocess.TimeoutExpired:
      return f"the limit of {limit:g} s"
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    output.seek(0)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output.read(), re.MULTILINE)
  if status in (4, 5):
    raise ValueError(f"`make test` does not run all of {', '.join(tests)}")
  return failed[1] if failed else f"status {status} of pytest" if status else None


def kill(mutant: Mutant, whole: bool) -> bool:
  """Whether a test fails; prints which."""
  start = time.monotonic()
  with copy_tree() as root:
    (root / mutant.file).write_text(mutant.text())
    failure = None if whole else find_failure(root, mutant.tests, LIMIT)
    late = "" if failure or whole else ", and by none of the tests that it names,"
    failure = failure or find_failure(root, [], WHOLE_LIMIT)
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
  options = parser.parse_args()
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
