"""The commands of the benchmarks as a user runs them."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# A process for each of several runs, forked after the imports that take seconds; it ends without tearing them down.
_FORKING = """
import gc, json, os, runpy, signal, sys, tempfile, traceback, warnings
import absl.app, flax.nnx, jaxsparse, matplotlib.pyplot, rich.progress, sklearn.datasets
gc.freeze()
warnings.simplefilter("ignore")  # of JAX, which has started no threads here
module, done = sys.argv[1], []
for flags in json.loads(sys.argv[2]):
  with tempfile.TemporaryFile("w+") as output:
    child = os.fork()
    if not child:
      signal.alarm(120)  # flags that are not refused start what takes hours
      os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
      sys.argv = [module, *flags]
      warnings.resetwarnings()
      status = 1
      try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
      except SystemExit as end:
        status = end.code if isinstance(end.code, int) else print(end.code, file=sys.stderr) or 1
      except BaseException:
        traceback.print_exc()
      sys.stdout.flush(), sys.stderr.flush()
      os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output.seek(0)
    done.append((status, output.read()))
print(json.dumps(done))
"""


def run(module, *flags, **settings):
  """`python -m module flags`, with these variables in its environment."""
  command = [sys.executable, "-m", module, *map(str, flags)]
  environment = os.environ | settings
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


def check_refusals(module, rows, subtests):
  """Checks that `module` ends with status 1 and a message, without a traceback, for each (flags, message) of `rows`."""
  command = [sys.executable, "-c", _FORKING, module, json.dumps([flags for flags, _ in rows])]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  for (flags, message), (status, output) in zip(rows, json.loads(done.stdout), strict=True):
    with subtests.test(flags=flags):
      assert status == 1, output
      assert message in output
      assert "Traceback" not in output
