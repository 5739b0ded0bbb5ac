r"""Runs one command, and ends it with all its descendants as soon as the launcher has ended.

    python -I -S guard.py PARENT KIND COMMAND...

The guard is a program of the standard library only, which starts in milliseconds:

    launcher ── guard ── rank ── processes of the rank                              --engine=processes
    launcher ── guard ── mpirun ── guard ── rank ── processes of the rank           --engine=mpi

PARENT is the process id of the launcher, 0 for a rank of mpirun. When that process ends, even by SIGKILL, the kernel
sends the guard SIGTERM; when the guard is killed, the kernel kills its child. The guard adopts orphaned descendants, so
it also finds processes that left its process group. Only Linux has these functions: on other systems a guard ends its
child alone, and the launcher, unless it was killed, then kills the process group. KIND is "rank" or "mpirun": the guard
of a rank records when the rank stops, continues and ends, and prefixes the rank's output by `[rank r]`.
"""

import collections
import contextlib
import ctypes
import json
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

RECORDS, PREFIX, COORDINATOR, RANK, RANKS, DEVICES, GRACE, ATTEMPT = (
  f"JAXSPARSE_{name}" for name in ("RECORDS", "PREFIX", "COORDINATOR", "RANK", "RANKS", "DEVICES", "GRACE", "ATTEMPT")
)
RANK_OF = (
  RANK,
  "OMPI_COMM_WORLD_RANK",
  "PMI_RANK",
  "PMIX_RANK",
)  # variables with the number of a rank, one for each launcher
STEPS = struct.Struct("<q")  # format of a rank's number of steps
HAS_PROC = sys.platform == "linux" and os.path.exists("/proc/self/stat")  # a guard finds its descendants in /proc
KILL_AFTER = 1.0  # seconds between SIGTERM and SIGKILL

_KILL_MPIRUN_AFTER = 6.0
_GIVE_UP = 10.0  # seconds that a guard waits for processes to end after SIGKILL
_DRAIN = 0.2  # seconds to read the last output of a rank that has ended, while its descendants keep the pipe open
_LONGEST = 300  # characters of a line in a record
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_GLOO = rb"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
_GLOO_LINES = re.compile(rb"(?:%s)(?:%s|\d|\n)*\n" % (_GLOO, _GLOO))


def rank() -> int | None:
  """Number of this rank; None in a process that no launcher started."""
  return next((int(os.environ[name]) for name in RANK_OF if os.environ.get(name)), None)


def record(event: str, **facts: Any) -> None:
  """Appends an event of this rank and its time to the file that the launcher reads; does nothing without a launcher."""
  folder, number = os.environ.get(RECORDS), rank()
  if not folder or number is None:
    return
  line = json.dumps({"event": event, "time": time.monotonic(), **facts}) + "\n"
  with contextlib.suppress(OSError):  # the launcher has ended, and the folder with it
    file = os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
      os.write(file, line.encode())
    finally:
      os.close(file)


def shortened(text: str) -> str:
  """The first line of a text, cut to the length of a record."""
  lines = text.strip().splitlines()
  return lines[0][:_LONGEST] if lines else ""


def die_with_parent(number: int, parent: int) -> None:
  """Asks the kernel to send this process a signal when its parent ends; call it first in a new process.

  The parent is the thread that started this process. The setting survives `exec`, except of a program that changes the
  user, and children do not inherit it. Only Linux has it.

  Args:
    number: of the signal.
    parent: process id of the parent. If the parent has already ended, this process ends at once.
  """
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
  if os.getppid() != parent:
    os._exit(128 + number)


def _main() -> None:
  launcher, kind, *command = int(sys.argv[1]), *sys.argv[2:]
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
  die_with_parent(signal.SIGTERM, launcher or os.getppid())
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
  is_rank = kind == "rank"
  source, sink = os.pipe() if is_rank else (None, None)
  child = _start(command, before, sink)
  said: collections.deque[str] = collections.deque(maxlen=1)
  relay = threading.Thread(target=_relay, args=(source, said), daemon=True)
  if source is not None and sink is not None:
    os.close(sink)
    relay.start()
  status, told = _wait(child, is_rank)
  if is_rank:
    relay.join(_DRAIN)
    if status is not None:
      record("ended", status=status, said="".join(said), told=told)
  # mpirun itself ends its ranks, and then removes their files.
  _end_descendants(KILL_AFTER if is_rank else _KILL_MPIRUN_AFTER, child if status is None else None)
  if is_rank:
    relay.join(_DRAIN)
  if launcher and os.getppid() != launcher:
    _remove_records()
  os._exit(128 + signal.SIGTERM if status is None else status if status >= 0 else 128 - status)


def _start(command: list[str], mask: set[signal.Signals | int], sink: int | None) -> int:
  """Starts the command and returns its process id.

  Args:
    command: a program and its arguments.
    mask: signals that the command blocks.
    sink: descriptor for its standard error, and for its standard output unless it is rank 0; None redirects neither.
  """
  parent = os.getpid()
  child = os.fork()
  if child:
    return child
  try:
    die_with_parent(signal.SIGKILL, parent)
    if sink is not None:
      os.dup2(sink, 2)
      if rank():
        os.dup2(sink, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
      signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execvp(command[0], command)
  except OSError as error:
    os.write(2, f"error: cannot run {command[0]!r}: {error.strerror}\n".encode())
  finally:
    os._exit(127)


def _wait(child: int, is_rank: bool) -> tuple[int | None, bool]:
  """Waits until the child has ended or a signal tells the guard to end.

  Returns:
    Exit status of the child, negative for a signal, None if it still runs; and whether the guard received a signal.
  """
  while True:
    told = signal.sigwait(_SIGNALS) != signal.SIGCHLD
    for pid, status in _changes():
      if pid != child:
        continue
      if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
        return os.waitstatus_to_exitcode(status), told or bool(signal.sigpending() & {*_SIGNALS[1:]})
      if is_rank:
        record("stopped" if os.WIFSTOPPED(status) else "continued")
    if told:
      return None, True


def _changes() -> Iterator[tuple[int, int]]:
  """Process ids and states of children, also adopted ones, that have stopped, continued or ended."""
  with contextlib.suppress(ChildProcessError):
    while (change := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
      yield change


def without_gloo_lines(text: bytes) -> bytes:
  """`text` without the line that gloo writes for each communicator; no setting of gloo or XLA switches it off.

  Threads of a process write such lines at once, one a device, so pieces of several may alternate.
  """
  return _GLOO_LINES.sub(_others, text)


def _others(found: re.Match[bytes]) -> bytes:
  """The lines in a match of `_GLOO_LINES` that are not gloo's: numbers, once all lines that gloo began have ended."""
  kept, unfinished = [], 0
  for line in found.group().splitlines(keepends=True):
    unfinished += line.count(b"[Gloo]")
    if not line.strip() or (line.strip().isdigit() and not unfinished):
      kept.append(line)
    unfinished = max(0, unfinished - 1)
  return b"".join(kept)


def _relay(source: int, said: collections.deque[str]) -> None:
  """Copies the output of a rank to standard error, line by line, with a prefix and without gloo's lines.

  Args:
    source: descriptor of the output.
    said: receives the last line that is not blank.
  """
  prefix = f"[rank {rank()}] ".encode() if os.environ.get(PREFIX) else b""
  rest = b""
  while chunk := os.read(source, _CHUNK):
    *lines, rest = _LINE_END.split(without_gloo_lines(rest + chunk))
    if len(rest) > _CHUNK:
      lines, rest = [*lines, rest], b""
    _write(lines, prefix, said)
  if rest:
    _write([rest + b"\n"], prefix, said)


def _write(lines: list[bytes], prefix: bytes, said: collections.deque[str]) -> None:
  said.extend(shortened(line.decode(errors="replace")) for line in lines if line.strip())
  left = b"".join(prefix + line for line in lines)
  with contextlib.suppress(OSError):  # standard error is closed; the pipe must be read all the same
    while left:
      left = left[os.write(2, left) :]


def _end_descendants(kill_after: float, child: int | None) -> None:
  """Ends all descendants: SIGTERM, and SIGKILL `kill_after` seconds later. Without /proc ends `child` alone."""
  start, asked = time.monotonic(), set[int]()
  while found := _descendants() if HAS_PROC else {child} if child else set():
    waited = time.monotonic() - start
    if waited > _GIVE_UP:
      return
    late = waited > kill_after
    for pid in found if late else found - asked:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
    asked |= found
    for pid, status in _changes():
      if pid == child and not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
        child = None
    time.sleep(0.01)


def _descendants() -> set[int]:
  """Process ids of all descendants that have not ended, from /proc."""
  children: dict[int, list[int]] = {}
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
        if state not in "ZX":
          children.setdefault(int(parent), []).append(int(entry))
  found, new = set[int](), [os.getpid()]
  while new:
    new = [pid for parent in new for pid in children.get(parent, []) if pid not in found]
    found.update(new)
  return found


def _remove_records() -> None:
  """Removes the temporary folder of a launcher that was killed."""
  import shutil

  if folder := os.environ.get(RECORDS):
    shutil.rmtree(os.path.dirname(folder), ignore_errors=True)


if __name__ == "__main__":
  _main()
