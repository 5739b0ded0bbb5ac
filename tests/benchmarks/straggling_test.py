"""The benchmark that really runs; here only what it refuses, since it starts a process a worker three times."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_bad_flags():
  command = [sys.executable, "-m", "benchmarks.straggling", "--slow=5"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 1
  assert done.stderr == "error: --slow=5, choose 0 … 4: two workers at least are fast\n"
