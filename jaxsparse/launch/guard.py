r"""Runs one command, and ends it with all its descendants as soon as the launcher has ended.

    python -I -S guard.py PARENT KIND COMMAND...

The guard is a program of the standard library only, which starts in less than 0.1 s:

    launcher ── guard ── rank ── processes of the rank                              --engine=processes
    launcher ── guard ── mpirun ── guard ── rank ── processes of the rank           --engine=mpi

PARENT is the process id of the launcher, 0 for a rank of mpirun. When that process
ends, even by SIGKILL, the kernel sends the guard SIGTERM; when the guard is killed, the
kernel kills its child. The guard adopts orphaned descendants, so it also finds
processes that left its process group. Only Linux has these functions: on other systems
a guard ends its child alone, and the launcher, unless it was killed, then kills the
process group. KIND is "rank" or "mpirun": the guard of a rank records when the rank
stops, continues and ends, and prefixes the rank's output by `[rank r]`.
"""

import collections
import contextlib
import ctypes
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

# Variables of the environment that the launcher gives its ranks: the folder of records,
# whether lines of output get a prefix, the address of JAX's coordinator, the number of
# this rank, the number of ranks, of devices of each rank, and of restarts of the run.
# Ranks of mpirun get neither the address nor the number of this rank.
RECORDS = "JAXSPARSE_RECORDS"
PREFIX = "JAXSPARSE_PREFIX"
COORDINATOR = "JAXSPARSE_COORDINATOR"
RANK = "JAXSPARSE_RANK"
RANKS = "JAXSPARSE_RANKS"
DEVICES = "JAXSPARSE_DEVICES"
ATTEMPT = "JAXSPARSE_ATTEMPT"
MPI = {
  "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
  "PMI_RANK": "PMI_SIZE",
  "PMIX_RANK": "",
}
"""Variables that launchers of MPI set: the number of a rank, and the number of ranks, which PMIx does not state."""
# a guard finds its children in /proc
HAS_PROC = sys.platform == "linux" and os.path.exists("/proc/self/stat")
KILL_AFTER = 1.0  # seconds between SIGTERM and SIGKILL

_KILL_MPIRUN_AFTER = 6.0  # the same for mpirun, which ends its ranks first
_GIVE_UP = 10.0  # seconds that a guard waits for processes to end after SIGKILL
# seconds to read the last output of a rank that has ended, while its descendants keep
# the pipe open
_DRAIN = 0.2
_MEMORY = "/dev/shm"
FOLDER = "jaxsparse-"  # begins the name of a folder of records
_LONGEST = 2000  # characters of a line in a record
_LONGEST_OUTPUT = 1 << 16  # characters of a line that the guard reads at once
# options of prctl(2): a signal when the parent ends; adoption of orphaned descendants
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# the signals that a guard waits for: its child has changed, or it is to end
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# pieces of the line that gloo writes, without its numbers
_GLOO = r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
_GLOO_OUTPUT = re.compile(rf"(?:{_GLOO})(?:{_GLOO}|\d)*\n")


def rank() -> int | None:
  """Number of this rank; None in a process that no launcher started."""
  # the first variable that is set, of our launcher or of MPI
  ranks = filter(None, map(os.environ.get, (RANK, *MPI)))
  return next(map(int, ranks), None)


def record(**facts: Any) -> None:
  """Appends fields of `watch.Life` to the records of this rank; does nothing without a launcher."""
  folder = os.environ.get(RECORDS)
  rank_number = rank()
  if folder and rank_number is not None:
    # Where the launcher has ended, its folder is removed.
    with (
      contextlib.suppress(OSError),
      open(os.path.join(folder, str(rank_number)), "a") as file,
    ):
      file.write(json.dumps(facts) + "\n")


def shorten(text: str) -> str:
  """The first line of a text, cut after a word to the length of a record."""
  line = text.strip().partition("\n")[0]
  return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rpartition(' ')[0]} …"


def memory_of(folder: str) -> str:
  """The folder in /dev/shm for the files of MPI, removed with this folder of records: ranks that die leave files there.

  Example:
    >>> memory_of("/tmp/jaxsparse-outer/jaxsparse-inner")  # the folder of a launcher in a rank of another one
    '/dev/shm/jaxsparse-outer/jaxsparse-inner'
  """
  parent, name = os.path.split(folder)
  is_nested = os.path.basename(parent).startswith(FOLDER)
  return os.path.join(memory_of(parent) if is_nested else _MEMORY, name)


def die_with_parent(signal_number: int, parent: int) -> None:
  """Asks the kernel to send this process a signal when its parent ends; call it first in a new process.

  The parent is the thread that started this process. The setting survives `exec`,
  except of a program that changes the user, and children do not inherit it. Only Linux
  has it.

  Args:
    signal_number: the signal.
    parent: process id of the parent. If the parent has already ended, this process ends
      at once.
  """
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
  if os.getppid() != parent:
    os._exit(128 + signal_number)


def _main() -> None:
  """Runs the guard; its exit status is that of the command, 128 + n if signal n ended it; 143 if told to end."""
  launcher, kind, *command = int(sys.argv[1]), *sys.argv[2:]
  is_rank = kind == "rank"
  # Signals are blocked, and received by `sigwait` in `_wait`. SIGCHLD would never come
  # where the parent process ignores it, which is inherited.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
  die_with_parent(signal.SIGTERM, launcher or os.getppid())
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
  # the output of a rank: `_relay` reads it
  source, sink = os.pipe()
  process = _start(command, sink if is_rank else None)
  os.close(sink)  # or the pipe would have no end
  # the last line of output that is not blank
  last = collections.deque([""], maxlen=1)
  relay = threading.Thread(target=_relay, args=(source, last), daemon=True)
  relay.start()
  status = _wait(process.pid, is_rank)
  relay.join(_DRAIN)
  # None: a signal told the guard to end, and the rank has not ended by itself.
  if is_rank and status is not None:
    record(ended=time.monotonic(), status=status, line=last[0], stopped=math.inf)
  # mpirun itself ends its ranks, and then removes their files.
  _end_children(KILL_AFTER if is_rank else _KILL_MPIRUN_AFTER, process)
  relay.join(_DRAIN)
  # The launcher was killed, and has not removed its folders.
  if launcher and os.getppid() != launcher and (folder := os.environ.get(RECORDS)):
    import shutil

    for left in (
      folder,
      memory_of(folder),
    ):
      shutil.rmtree(left, ignore_errors=True)
  os._exit(
    128 + signal.SIGTERM if status is None else status if status >= 0 else 128 - status
  )


def _start(command: list[str], sink: int | None) -> subprocess.Popen:
  """The process of the command.

  Args:
    command: a program and its arguments.
    sink: descriptor for its standard error, and for its standard output unless it is
      rank 0; None redirects neither.
  """
  parent = os.getpid()

  # runs in the child process, before the command
  def prepare() -> None:
    die_with_parent(signal.SIGKILL, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

  try:
    # `rank()` is 0 in rank 0, which writes to the launcher's output; None in mpirun.
    return subprocess.Popen(
      command, stdout=sink if rank() else None, stderr=sink, preexec_fn=prepare
    )
  except OSError as error:
    sys.exit(f"error: cannot run {command[0]!r}: {error.strerror}")


def _wait(child: int, is_rank: bool) -> int | None:
  """Exit status of the child, negative for a signal; None if a signal tells the guard to end.

  Where the child is a rank, it records when it was stopped and continued.
  """
  while True:
    # whether a signal tells the guard to end
    told = signal.sigwait(_SIGNALS) != signal.SIGCHLD
    # (0, 0): no further change; signals of several children may come as one
    while (change := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
      pid, status = change
      if pid != child:
        continue  # an orphan that the guard has adopted
      if os.WIFEXITED(status) or os.WIFSIGNALED(status):
        # mpirun signals the rank and its guard: if such a signal is pending (all but
        # SIGCHLD), a rank that a signal ended was told to end.
        told = told or bool(signal.sigpending() & {*_SIGNALS[1:]})
        return (
          None if told and os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        )
      if is_rank:
        record(stopped=time.monotonic() if os.WIFSTOPPED(status) else math.inf)
    if told:
      return None


def drop_gloo_lines(lines: Iterable[str]) -> Iterator[str]:
  """`lines` without the line that gloo writes for each communicator; no setting of gloo or XLA switches it off.

  Each device has a thread that writes such a line, so pieces of several lines may be
  mixed: a line then has several beginnings, and later lines have only the numbers with
  which the others end.
  """
  unfinished = 0  # lines of gloo that have begun, and end as later lines of numbers
  # Other output before a piece of gloo. The piece goes with its newline, so the next
  # line continues this output.
  before = ""
  for line in lines:
    kept = _GLOO_OUTPUT.sub("", line)
    if kept == line and (not unfinished or line.strip("0123456789\n")):
      yield before + line
      before = ""
    else:  # the line ends a line of gloo, and may begin others
      before += kept if kept != line else ""
      unfinished = max(0, unfinished + line.count("[Gloo]") - 1)
  if before:
    yield before


def _relay(source: int, last: collections.deque[str]) -> None:
  """Copies the output of a rank to standard error, line by line, with a prefix and without gloo's lines.

  Runs in a thread until the pipe is closed.

  Args:
    source: descriptor of the output.
    last: receives the last line that is not blank.
  """
  prefix = f"[rank {rank()}] " if os.environ.get(PREFIX) else ""
  # A pipe takes a line of more than 4,096 bytes in pieces. So that lines of ranks do
  # not mix, the guards of a run lock this file while they write.
  folder = os.environ.get(RECORDS, "")
  turn_file = os.path.join(folder, "turn") if os.path.isdir(folder) else os.devnull
  turn = open(turn_file, "w")  # noqa: SIM115
  with open(
    source, encoding="utf-8", errors="replace", newline=""
  ) as output:  # a line may end with "\r", too
    for line in drop_gloo_lines(iter(lambda: output.readline(_LONGEST_OUTPUT), "")):
      if line.strip():
        last.append(shorten(line))
      end = "" if line.endswith(("\n", "\r")) else "\n"
      text = (prefix + line + end).encode()
      fcntl.flock(turn, fcntl.LOCK_EX)
      # OSError: standard error is closed. The pipe is read on, or the rank would block.
      with contextlib.suppress(OSError):
        while text:
          text = text[os.write(2, text) :]
      fcntl.flock(turn, fcntl.LOCK_UN)


def _end_children(kill_after: float, process: subprocess.Popen) -> None:
  """Ends children, then orphans of them that the guard adopts: SIGTERM, and SIGKILL `kill_after` seconds later."""
  start = time.monotonic()
  asked = set[int]()
  while (children := _children(process)) and (
    waited := time.monotonic() - start
  ) < _GIVE_UP:
    late = waited > kill_after
    # SIGTERM once to each, SIGKILL again and again
    for pid in children if late else children - asked:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
    asked |= children
    time.sleep(0.01)


def _children(process: subprocess.Popen) -> set[int]:
  """Ids of child processes, also adopted ones, that have not ended, from /proc; without it of `process` alone."""
  if not HAS_PROC:
    return {process.pid} if process.poll() is None else set()
  children = set()
  for entry in filter(str.isdigit, os.listdir("/proc")):
    with (
      contextlib.suppress(OSError),
      open(f"/proc/{entry}/stat", errors="replace") as file,
    ):
      # the fields after the name, which is in parentheses and may contain some
      state, parent = file.read().rpartition(")")[2].split()[:2]
      # Z and X: the process has ended
      if state not in "ZX" and int(parent) == os.getpid():
        children.add(int(entry))
  return children


if __name__ == "__main__":
  _main()
