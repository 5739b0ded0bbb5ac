"""The benchmark of heterogeneous workers as a user runs it."""

import functools
import json

import pytest

from benchmarks import report
from benchmarks.heterogeneous import report as tables
from benchmarks.heterogeneous import virtual
from tests.benchmarks import commands

run = functools.partial(commands.run, "benchmarks.heterogeneous")


def test_tables_figures_and_goals(tmp_path):
  methods = "--methods=allreduce,initial:2"
  small = ("--workers=4", "--levels=1,3", "--sweep=2", "--seed=0", "--target=0.8", "--learning_rate=0.1", "--limit=60")
  done = run(methods, *small, f"--report_dir={tmp_path}", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  result = json.loads(done.stdout)
  rows = {(row["label"], row["environment"]["level"]): row for row in result["rows"] if row["part"] == "levels"}
  assert list(rows) == [("allreduce", 1), ("initial:2", 1), ("allreduce", 3), ("initial:2", 3)]
  assert all(row["reached"] == 1 for row in rows.values() if row["label"] == "allreduce")
  assert rows["allreduce", 3]["per_update"] > 2.5 * rows["allreduce", 1]["per_update"] > 2.5
  assert 0 < rows["initial:2", 3]["rho"] < 1
  assert rows["allreduce", 3]["rho"] is None
  assert [row["label"] for row in result["rows"] if row["part"] == "sweep"] == ["constant:2"]
  even, slow = result["figure_4"]
  assert even["rho"] == pytest.approx(0.5, abs=0.05)
  assert slow["rho"] > even["rho"] + 0.05
  assert (
    "goal: dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated: not meas" in done.stderr
  )
  for name in ("heterogeneous", "timeline"):
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


SETTINGS = virtual.Settings(8, 0.1, 0.8, 60.0)


def test_an_all_reduce_takes_what_its_environment_says():
  """A step of a worker that shares a half-busy accelerator with two others, then an average over a slow link."""
  bench = virtual.Bench(SETTINGS._replace(folds=3, wire=0.2, limit=6.0))
  where = virtual.Environment(4, level=3, jitter=0.0, slow_links=1, occupancy=0.5)
  found = bench.simulate(virtual.parse_method("allreduce", 4), where, seed=0, fold=2)
  messages, models = 4, 2 * 3 / 4  # reduce-scatter and all-gather
  average = 10 * (messages * 0.2 / 100 + models * 0.2)
  assert next(span.end for span in found.timeline if span.activity == "average") == pytest.approx(2 + average, rel=1e-3)


def row(part, label, seconds, **where):
  size = where.pop("workers", 8)
  found = virtual.Row(part, label, virtual.Environment(size, **where), SETTINGS, 1, 1, seconds, 0.0, 1, 1, 2.0, None)
  return found if label != "allreduce" else found._replace(per_update=8.0)


def test_rows_outlive_json_and_give_the_papers_cells():
  levels = ("allreduce", 20.0, 1.0), ("dynamic:3", 10.0, 1.0), ("allreduce", 15.0, 0.5), ("dynamic:3", None, 0.5)
  rows = [row("levels", label, seconds, level=3, occupancy=occupancy) for label, seconds, occupancy in levels]
  rows += [row("tail", label, seconds, workers=16) for label, seconds in (("allreduce", 30.0), ("dynamic:4", 10.0))]
  rows += [row("scale", "allreduce", 90.0, workers=1)]
  rows += [row("scale", label, seconds, workers=32) for label, seconds in (("allreduce", 30.0), ("constant:4", 6.0))]
  assert virtual.from_json(json.loads(json.dumps(report.plain(rows)))) == rows
  assert tables.paper_cells(rows) == {
    "all-reduce, HL = 3": 2.0,
    "seconds an update": 4.0,
    "run time": 3.0,
    "P = 4 / all-reduce": 5.0,
  }
  assert tables.speed_ups(rows) == {"allreduce": {1: 1.0, 32: 3.0}, "constant:4": {1: 1.0, 32: 15.0}}
  assert tables.goals(rows)[0].measured == 2.0


@pytest.mark.long
def test_every_part_is_kept_and_made_again_from_the_file(tmp_path):
  small = ("--workers=4", "--levels=1", "--seed=0", "--limit=3", "--scale=1,4", "--tail_workers=4", "--decays=0.5")
  kept = f"--results={tmp_path / 'rows.json'}"
  done = run("--parts=tail,scale,decay,links", *small, kept, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  again = run("--parts=none", kept, f"--report_dir={tmp_path}", "--json")
  rows = json.loads(again.stdout)["rows"]
  assert rows == json.loads((tmp_path / "rows.json").read_text())["rows"]
  assert {one["part"] for one in rows} == {"tail", "scale", "decay", "links"}
