"""Training that loses and gains workers: no gradient is lost with them."""

import json
import os
import shutil

import pytest

from tests.benchmarks import commands

SMALL = ["--workers=3", "--joining=1", "--batch_size=12", "--seed=0"]
SMALL += ["--steps=14", "--kill_at=5", "--join_at=9", "--save_every=2", "--density=0.1"]


def result_of(tmp_path, *more):
  done = commands.run("benchmarks.elastic", *SMALL, *more, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads((tmp_path / "elastic.json").read_text())


@pytest.mark.long
def test_what_a_worker_owes_is_lost_with_it_alone(tmp_path):
  found = result_of(tmp_path, "--nolab")
  lost = {run["run"]: run["lost"] for run in found["simulated"]}
  assert max(lost["no worker lost"], lost["with its residual"]) < 1e-5
  assert lost["without its residual"] > 1e-3
  assert found["lost"][0]["all"] > found["lost"][0]["since"] > 0


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2")
def test_in_the_lab_nothing_is_lost(tmp_path):
  found = result_of(tmp_path)
  assert [run["run"] for run in found["runs"]] == ["3", "3 -> 2 -> 3"]
  assert max(run["lost"] for run in found["runs"]) < 1e-5
  assert [one["change"] for one in found["recoveries"]] == ["3 -> 2", "2 -> 3"]
  assert min(min(one["parts"]) for one in found["recoveries"]) > 0
