"""Whenever a rank is killed, those that are left train to the end, and leave nothing behind."""

import os
import subprocess
import sys

import pytest

from tests.cases import row
from tests.launch_test import soon
from tests.readme_test import snippets

# Kills rank 1 of the given attempt at a call of a function: before it, or when it returns.
KILL = """
import functools, os, signal

def killed(owner, name, attempt=0, call=1, after=False):
  if (os.environ["JAXSPARSE_RANK"], os.environ["JAXSPARSE_ATTEMPT"]) != ("1", str(attempt)):
    return
  function, calls = getattr(owner, name), []

  @functools.wraps(function)
  def wrapped(*arguments, **options):
    calls.append(1)
    if len(calls) == call and not after:
      os.kill(os.getpid(), signal.SIGKILL)
    found = function(*arguments, **options)
    if len(calls) == call:
      os.kill(os.getpid(), signal.SIGKILL)
    return found

  setattr(owner, name, wrapped)

import orbax.checkpoint
from jaxsparse import launch
from jaxsparse.train import replicas
from jaxsparse.train.step import TrainStep
"""
PHASES = {
  "joining": ["killed(launch, 'join')"],
  "compiling": ["killed(replicas, 'check_processes', call=2)"],
  "stepping": ["killed(TrainStep, '__call__', call=120)"],
  "saving": ["killed(orbax.checkpoint.CheckpointManager, 'save', call=2, after=True)"],
  "restoring": [
    "killed(TrainStep, '__call__', call=120)",
    "killed(orbax.checkpoint.CheckpointManager, 'restore', attempt=1)",
  ],
}


@pytest.mark.parametrize("phase", [row(phase, id=phase) for phase in PHASES])
def test_a_rank_that_is_killed(tmp_path, phase):
  files = tmp_path / "files"
  files.mkdir()
  (program,) = snippets("Checkpoints, other workers, a lost rank")
  (tmp_path / "train.py").write_text("\n".join([KILL, *PHASES[phase], program]))
  options = ["--ranks=3", "--restarts=2", "--start_timeout=60", "--limit=280"]
  done = subprocess.run(
    [sys.executable, "-m", "jaxsparse.launch", *options, "--", sys.executable, "train.py"],
    cwd=tmp_path,
    env=os.environ | {"TMPDIR": str(files)},
    capture_output=True,
    text=True,
    timeout=290,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  lost = len(PHASES[phase])
  assert done.stderr.count("rank 1 was ended by SIGKILL; ") == lost
  assert done.stdout.startswith(f"{3 - lost} workers, attempt {lost}: accuracy ")
  assert float(done.stdout.split()[-1]) > 0.88
  assert sorted(os.listdir(tmp_path / "checkpoints"), key=int)[-1] == "400"
  assert soon(lambda: not [name for name in os.listdir(files) if name.startswith("jaxsparse-")])
