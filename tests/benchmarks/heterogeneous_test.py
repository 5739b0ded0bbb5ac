"""The benchmark of heterogeneous workers as a user runs it."""

import functools
import json

import pytest

from tests.benchmarks import commands
from tests.quick_compilation import CHILDREN

run = functools.partial(commands.run, "benchmarks.heterogeneous", **CHILDREN)


def test_tables_figures_and_goals(tmp_path):
  methods = "--methods=allreduce,initial:2"
  small = ("--workers=4", "--levels=1,3", "--sweep=2", "--seed=0", "--target=0.8", "--learning_rate=0.1", "--limit=60")
  done = run(methods, *small, f"--report_dir={tmp_path}", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  result = json.loads(done.stdout)
  rows = {(row["label"], row["level"]): row for row in result["rows"]}
  assert list(rows) == [("allreduce", 1), ("initial:2", 1), ("allreduce", 3), ("initial:2", 3)]
  assert all(row["reached"] == 1 for row in rows.values() if row["label"] == "allreduce")
  assert rows["allreduce", 3]["per_update"] > 2.5 * rows["allreduce", 1]["per_update"] > 2.5
  assert 0 < rows["initial:2", 3]["rho"] < 1
  assert rows["allreduce", 3]["rho"] is None
  assert [row["label"] for row in result["sweep"]] == ["constant:2"]
  even, slow = result["figure_4"]
  assert even["rho"] == pytest.approx(0.5, abs=0.05)
  assert slow["rho"] > even["rho"] + 0.05
  assert (
    "goal: dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated: not meas" in done.stderr
  )
  for name in ("heterogeneous", "timeline", "group_size"):
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


BAD_FLAGS = [
  (
    ["--methods=ring"],
    "error: --methods=ring, choose from allreduce, eager, adpsgd, bsp, asp, hete, backup, constant:P",
  ),
  (["--methods=dynamic"], "error: --methods=dynamic: give a group size of 2 … 8 behind a colon"),
]


def test_bad_flags(subtests):
  commands.check_refusals("benchmarks.heterogeneous", BAD_FLAGS, subtests)
