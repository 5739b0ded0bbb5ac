"""Training that loses and gains workers: no gradient is lost with them, and times are those of the marks."""

import json
import os
import shutil

import pytest

from benchmarks.elastic import phases
from tests.benchmarks import commands

SMALL = ["--workers=3", "--joining=1", "--batch_size=12", "--seed=0"]
SMALL += ["--steps=14", "--kill_at=5", "--join_at=9", "--save_every=2", "--density=0.1"]


def test_the_parts_of_a_recovery(tmp_path):
  phase = {"event": "phase", "began": 1.0, "joined": 2.0, "restored": 2.5, "stepped": 4.0}
  gone = {"event": "gone", "at": 240, "time": 10.0}
  after = phase | {"workers": 5, "begin": 200, "began": 11.0, "joined": 13.0, "restored": 14.0, "stepped": 18.0}
  marks = [phase | {"workers": 6, "begin": 0}, gone, after, gone | {"at": 400}]  # the next phase never stepped
  (tmp_path / "marks").write_text("".join(json.dumps(mark) + "\n" for mark in marks))
  assert phases.recoveries(tmp_path, seed=3) == [phases.Recovery("6 -> 5", 3, [1.0, 2.0, 1.0, 4.0], 40)]


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
