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
from types import FrameType, TracebackType
from typing import Any

ETC = pathlib.Path("/etc/netns")  # what `ip netns exec` mounts over /etc
RUN = pathlib.Path("/var/run/netns")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end a program
GRACE = 2.0  # seconds to end after SIGTERM, before SIGKILL
_NAME = re.compile(r"jslab-(\d+)-(\d+)-(?:switch|\d+)")  # the owner's process id and when that process started


def batch(tool: list[str], lines: list[str]) -> "subprocess.CompletedProcess[str]":
  """Has `ip` or `tc` carry out all lines in one process."""
  text = "".join(f"{line}\n" for line in lines)
  # Blocked signals are inherited: a Ctrl-C, which goes to all programs of a terminal, does not end it half way.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
  try:
    return subprocess.run([*tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_leftovers() -> None:
  """Removes the labs whose owner is dead, also where another process has its id by now."""
  names = {name for folder in (RUN, ETC) if folder.is_dir() for name in os.listdir(folder)}
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
  state, *numbers = text.rpartition(")")[2].split()  # the program's name, in parentheses, may have any character
  return None if state in "ZX" else numbers[18]


def remove(names: list[str]) -> int:
  """Removes hosts and switches as far as they are there, and says how many processes it ended in them."""
  ended = _end_processes(names)
  done = batch(["ip", "-force"], [f"netns del {name}" for name in names if (RUN / name).exists()])
  for name in names:
    shutil.rmtree(ETC / name, ignore_errors=True)
  left = [name for name in names if (RUN / name).exists() or (ETC / name).exists()]
  if left:
    print(f"netlab: could not remove {', '.join(left)}: {done.stderr.strip()}", file=sys.stderr)
  return ended


def _end_processes(names: list[str]) -> int:
  asked: set[int] = set()
  start = time.monotonic()
  while inside := _processes(names):
    waited = time.monotonic() - start
    if waited > 2 * GRACE:
      break  # not even SIGKILL ends a process that waits for a disk; its namespace goes when it does
    for pid in inside if waited > GRACE else inside - asked:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if waited > GRACE else signal.SIGTERM)
    asked |= inside
    time.sleep(0.01)
  return len(asked)


def _processes(names: list[str]) -> set[int]:
  """Those in the namespaces, never in our own: one pass over /proc, where `ip netns pids` makes one for each name."""
  spaces = {_identity(RUN / name) for name in names} - {None, _identity("/proc/self/ns/net")}
  pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if spaces else []
  return {pid for pid in pids if _identity(f"/proc/{pid}/ns/net") in spaces}


def _identity(path: str | pathlib.Path) -> tuple[int, int] | None:
  try:
    status = os.stat(path)
  except OSError:
    return None
  return status.st_dev, status.st_ino


class Signals:
  """Lets the signals that end a program end a block by an exception, and defers them during the clean-up.

  A program's own handlers are called as before, and signals that it ignores (nohup) stay ignored.
  """

  def __init__(self) -> None:
    self._before: dict[int, Any] = {}
    self._held = False
    self._late: int | None = None

  def __enter__(self) -> "Signals":
    if threading.current_thread() is threading.main_thread():  # the only one that may have handlers
      for number in SIGNALS:
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, None):
          self._before[number] = before
          signal.signal(number, self._arrived)
    return self

  def hold(self) -> None:
    """From now on signals wait for the end of the `with` block."""
    self._held = True

  def _arrived(self, number: int, frame: FrameType | None) -> None:
    before = self._before[number]
    if self._held:
      self._late = number
    elif callable(before):  # among them Python's own for SIGINT, which raises KeyboardInterrupt
      before(number, frame)
    else:
      raise SystemExit(128 + number)

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    for number, before in self._before.items():
      signal.signal(number, before)
    if self._late is not None and error is None:  # otherwise the program is on its way out anyway
      signal.raise_signal(self._late)
