"""Hooks of pytest for a run of all tests: a part of them, its CPU time, and what it leaves behind.

conftest.py imports them. What a run leaves behind is named and removed at its end:
processes, for which the run has failed, and files in shared memory, which Open MPI
leaves where ranks are killed.
"""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pathlib
import re
import resource
import signal
import time

import pytest

_SHARED = pathlib.Path("/dev/shm")
MARK = (
  "TESTS_OF_PROCESS"  # an environment variable of all processes that the tests start
)
_GRACE = 10.0  # seconds


def pytest_addoption(parser):
  parser.addoption(
    "--part",
    metavar="I/N",
    help="the I-th of N parts of the tests, of about the same length",
  )


def pytest_configure(config):
  if part := config.getoption("part"):
    parse_part(part)
  if not _is_worker(config):
    os.environ[MARK] = str(os.getpid())
    config.shared_before = _shared_memory()


def parse_part(text):
  """(the number of a part, from 0 on, the number of parts) of I/N."""
  number, parts = (
    map(int, text.split("/")) if re.fullmatch(r"\d+/\d+", text) else (0, 0)
  )
  if not 1 <= number <= parts:
    raise pytest.UsageError(f"--part={text}, choose one of 1/N … N/N")
  return number - 1, parts


def pytest_collection_modifyitems(config, items):
  """Every N-th test: tests that take long stand next to each other."""
  if part := config.getoption("part"):
    number, parts = parse_part(part)
    chosen = items[number::parts]
    config.hook.pytest_deselected(
      items=[item for item in items if item not in set(chosen)]
    )
    items[:] = chosen


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
  # Both wait for their process, so that its CPU time counts.
  multiprocessing.forkserver._forkserver._stop()
  multiprocessing.resource_tracker._resource_tracker._stop()
  if _is_worker(session.config):
    return
  processes, files = (
    end_processes(),
    sorted(_shared_memory() - session.config.shared_before),
  )
  session.config.left_behind = processes + files
  for file in files:
    pathlib.Path(file).unlink(missing_ok=True)
  if processes and not session.exitstatus:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
  for what in getattr(config, "left_behind", ()):
    terminalreporter.write_line(f"left behind: {what}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
  if not _is_worker(config) and not config.option.collectonly:
    own, children = map(
      resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    user, system = (
      getattr(own, name) + getattr(children, name) for name in ("ru_utime", "ru_stime")
    )
    print(
      f"CPU time: user {user:.0f} s + system {system:.0f} s = {(user + system) / 60:.1f} minutes"
    )


def _is_worker(config):
  """Whether this is one of the processes that pytest-xdist runs tests in."""
  return hasattr(config, "workerinput")


def _shared_memory():
  """The files that Open MPI has in shared memory."""
  return {str(path) for path in _SHARED.glob("sm_segment.*")}  # of Open MPI


def end_processes():
  """Ends the processes that the tests started and that are still there after some seconds, and names them."""
  end = time.monotonic() + _GRACE
  while (left := _processes()) and time.monotonic() < end:
    time.sleep(0.1)
  for pid in left:
    os.kill(pid, signal.SIGKILL)
  return [f"process {pid}: {command}" for pid, command in left.items()]


def _processes():
  """The command of each process with the mark, without this one, by its number."""
  mark, found = f"{MARK}={os.getpid()}".encode(), {}
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if (
        mark in (folder / "environ").read_bytes().split(b"\0")
        and int(folder.name) != os.getpid()
      ):
        words = (folder / "cmdline").read_bytes().split(b"\0")
        found[int(folder.name)] = (
          b" ".join(words).decode(errors="replace").strip()[:200]
        )
    except OSError:  # of another user, or gone
      pass
  return found
