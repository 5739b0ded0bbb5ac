"""Removes the network namespaces of a lab, with all processes in them, also behind a signal or a killed owner."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

ETC = pathlib.Path("/etc/netns")  # what `ip netns exec` mounts over /etc
RUN = pathlib.Path("/var/run/netns")
GRACE = 2.0  # seconds to end after SIGTERM, before SIGKILL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end a program
# the owner's process id and when that process started
_NAME = re.compile(r"jslab-(\d+)-(\d+)-(?:switch|\d+)")


def batch(tool: list[str], lines: list[str]) -> "subprocess.CompletedProcess[str]":
  """Has `ip` or `tc` carry out all lines in one process."""
  text = "".join(f"{line}\n" for line in lines)
  return subprocess.run(
    [*tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False
  )


@contextlib.contextmanager
def removed_behind(names: list[str]) -> Iterator[None]:
  """Removes hosts and switches at the end of the block, which signals that end a program end by an exception.

  A program's own handlers are called as before, and signals that it ignores (nohup)
  stay ignored. During the removal all are ignored, also by `ip`.
  """
  # the only one that may have handlers
  mine = threading.current_thread() is threading.main_thread()
  before = {
    number: handler
    for number in _SIGNALS
    if mine and (handler := signal.getsignal(number)) is not None
  }
  try:
    # twice: a signal may arrive between the end of the block and the handlers that
    # ignore it
    try:
      for number in (
        number for number, handler in before.items() if handler == signal.SIG_DFL
      ):
        signal.signal(number, _exit)
      yield
    finally:
      for number in before:
        signal.signal(number, signal.SIG_IGN)
  finally:
    remove(names)
    for number, handler in before.items():
      signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
  raise SystemExit(128 + number)


def remove_leftovers() -> None:
  """Removes the labs whose owner is dead, also where another process has its id by now."""
  names = {
    name for folder in (RUN, ETC) if folder.is_dir() for name in os.listdir(folder)
  }
  owners = {name: owner for name in sorted(names) if (owner := _NAME.fullmatch(name))}
  dead = [name for name, owner in owners.items() if started(int(owner[1])) != owner[2]]
  if dead:
    ended = remove(dead)
    labs = ", ".join(sorted({name.rpartition("-")[0] for name in dead}))
    counts = f"namespaces: {len(dead)}, processes ended: {ended}"
    print(f"netlab: removed what {labs} left behind ({counts})", file=sys.stderr)


def started(pid: int) -> str | None:
  """When a process started, in clock ticks since the machine did; None where there is none, or only its remains."""
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  state, *numbers = text.rpartition(")")[
    2
  ].split()  # the program's name, in parentheses, may have any character
  return None if state in "ZX" else numbers[18]


def remove(names: list[str]) -> int:
  """Removes hosts and switches as far as they are there, and says how many processes it ended in them."""
  ended = _end_processes(names)
  done = batch(
    ["ip", "-force"], [f"netns del {name}" for name in names if (RUN / name).exists()]
  )
  for name in names:
    shutil.rmtree(ETC / name, ignore_errors=True)
  left = [name for name in names if (RUN / name).exists() or (ETC / name).exists()]
  if left:
    print(
      f"netlab: could not remove {', '.join(left)}: {done.stderr.strip()}",
      file=sys.stderr,
    )
  return ended


def _end_processes(names: list[str]) -> int:
  asked: set[int] = set()
  start = time.monotonic()
  while inside := _processes(names):
    waited = time.monotonic() - start
    if waited > 2 * GRACE:
      # not even SIGKILL ends a process that waits for a disk; its namespace goes when
      # it does
      break
    for pid in inside if waited > GRACE else inside - asked:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if waited > GRACE else signal.SIGTERM)
    asked |= inside
    time.sleep(0.01)
  return len(asked)


def _processes(names: list[str]) -> set[int]:
  """The processes in these namespaces, never in our own: one pass over /proc; `ip netns pids` makes one a name."""
  spaces = {
    f"net:[{(RUN / name).stat().st_ino}]" for name in names if (RUN / name).exists()
  }
  spaces -= {os.readlink("/proc/self/ns/net")}
  found = set()
  for pid in filter(str.isdigit, os.listdir("/proc") if spaces else []):
    with contextlib.suppress(OSError):  # it has ended
      if os.readlink(f"/proc/{pid}/ns/net") in spaces:
        found.add(int(pid))
  return found
