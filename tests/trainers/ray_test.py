"""Ray, on this machine: its workers join, train and sum; where one is killed, the other ends with the reason."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def snippets(page):
  """The blocks of Python of a page."""
  return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(program, folder, file="ray_programs.py"):
  """(status, output, seconds) of a file, and a program in it, in a process of its own."""
  own = {
    "PYTHONPATH": f"{ROOT}:{folder}",
    "JAX_PLATFORMS": "cpu",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
  }
  command = [
    sys.executable,
    str(pathlib.Path(__file__).parent / file),
    program,
    str(folder),
  ]
  begin = time.monotonic()
  done = subprocess.run(
    command,
    env=os.environ | own,
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


@pytest.mark.parametrize(
  ("program", "name"), [("trainer", "Ray Train"), ("actors", "RANK and WORLD_SIZE")]
)
def test_workers_train_together(program, name, tmp_path):
  """Ray Train connects JAX on GPUs and TPUs only, so that `join` does on CPUs; actors get the four variables."""
  status, printed, _ = run(program, tmp_path)
  assert status == 0, printed[-3000:]
  for rank in range(2):
    launcher, found, loss = (tmp_path / str(rank)).read_text().split(", ")
    assert (launcher, found) == (name, f"{rank} of 2 workers")
    assert float(loss.removeprefix("loss ")) < 1e-6


@pytest.mark.parametrize("program", ["trainer, one dies", "actors, one dies"])
def test_a_worker_that_is_killed_ends_the_others(program, tmp_path):
  """Ray names the one that died; the other one says what it lost, and does not wait for it."""
  status, printed, seconds = run(program, tmp_path)
  assert status != 0
  assert seconds < 120
  assert not (tmp_path / "0").exists()
  ends = {
    "trainer": "[Rank 1 Error Snippet]:\nA worker health check failed.",
    "actors": "rank 1: The actor is dead because",
  }
  assert ends[program.partition(",")[0]] in printed, printed[-3000:]
  assert re.search(r"Gloo .* failed: .*Connection (closed|reset) by peer", printed), (
    printed[-3000:]
  )


def test_the_page_runs(tmp_path):
  (trainer,) = snippets("docs/how_to/clusters.md")
  _, program, _ = snippets("docs/how_to/many_hosts.md")
  (tmp_path / "train.py").write_text(
    f"{program}assert step.workers == 2\nassert metrics.loss < 0.05\n"
  )
  (tmp_path / "main.py").write_text(
    f"import ray\n\nray.init(num_cpus=2, include_dashboard=False)\n{trainer}"
  )
  status, printed, _ = run("", tmp_path, tmp_path / "main.py")
  assert status == 0, printed[-3000:]
  assert "2 workers, loss " in printed
