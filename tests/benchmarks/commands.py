"""The commands of the benchmarks as a user runs them."""

import concurrent.futures
import contextlib
import io
import json
import multiprocessing
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import traceback

import pytest

ROOT = pathlib.Path(__file__).parents[2]

needs_lab = pytest.mark.skipif(
  os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2"
)

# A process for each of several runs, forked after the imports that take seconds.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
  ["absl.app", "flax.nnx", "jaxsparse", "matplotlib.pyplot", "sklearn.datasets"]
)


def run(module, *flags, **settings):
  """`python -m module flags`, with these variables in its environment."""
  command = [sys.executable, "-m", module, *map(str, flags)]
  environment = os.environ | settings
  return subprocess.run(
    command,
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=280,
    check=False,
  )


def result_of(name, *flags, **settings):
  """What `python -m benchmarks.NAME flags --json` prints."""
  done = run(f"benchmarks.{name}", *flags, "--json", **settings)
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout)


def _run_here(module, flags):
  """The exit status of `python -m module flags`, and all that it prints, in this process."""
  signal.alarm(120)  # flags that are not refused start what takes hours
  sys.argv, status, output = [module, *flags], 0, io.StringIO()
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
    try:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
      status = (
        end.code if isinstance(end.code, int) else print(end.code, file=output) or 1
      )
    except BaseException:
      status = traceback.print_exc() or 1
  return status, output.getvalue()


def check_refusals(module, rows, subtests):
  """Checks that `module` ends with status 1 and a message, without a traceback, for each (flags, message) of `rows`."""
  with concurrent.futures.ProcessPoolExecutor(1, _FORKS, max_tasks_per_child=1) as pool:
    for flags, message in rows:
      with subtests.test(flags=flags):
        status, output = pool.submit(_run_here, module, flags).result()
        assert status == 1, output
        assert message in output
        assert "Traceback" not in output
