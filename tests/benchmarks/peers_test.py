"""`benchmarks.peers` with a stand-in for PyTorch's ranks: how they are started, and what becomes of their lines."""

import json
import pathlib
import sys

import pytest

from benchmarks.peers import ddp
from benchmarks.peers import rows as rows_of
from jaxsparse.launch.start import Host

LINE = {"seconds": [0.1, 0.3, 0.2], "bytes": [10.0, 10.0, 40.0], "wrong": 0.0}
HOSTS = [Host("a", "127.0.0.1", []), Host("b", "127.0.0.1", [])]
STAND_IN = """#!{python}
import json, pathlib, sys
setting = json.loads(sys.argv[2])
assert pathlib.Path(sys.argv[1]).name == "torch_ddp.py"
assert {{"address", "port", "threads", "size", "shapes"}} <= set(setting)
if setting["rank"] == 0:
  with open(setting["rows"], "a") as file:
    for label in setting["methods"]:
      file.write(json.dumps({{"method": label, "seconds": [0.2], "bytes": [1.0], "wrong": 0.0}}) + "\\n")
sys.exit(setting["rank"] if "fail" in setting["methods"] else 0)
"""


def run(tmp_path: pathlib.Path, methods: list[str]) -> list[str]:
  python, rows = tmp_path / "python", tmp_path / "rows.jsonl"
  python.write_text(STAND_IN.format(python=sys.executable))
  python.chmod(0o755)
  ddp.run(HOSTS, str(python), {"size": 2, "shapes": [[3]], "rows": str(rows), "methods": methods})
  return [json.loads(line)["method"] for line in rows.read_text().splitlines()]


def test_every_rank_gets_the_setting_and_the_first_one_writes_a_line_for_each_method(tmp_path):
  labels = ddp.in_buckets(["dense", "powersgd:rank=4"], [25, 50])
  assert labels == ["dense:bucket=25", "dense:bucket=50", "powersgd:rank=4:bucket=1000"]
  assert run(tmp_path, labels) == labels


def test_a_rank_that_fails_is_an_error(tmp_path):
  with pytest.raises(RuntimeError, match=r"PyTorch's ranks ended with \[0, 1\]"):
    run(tmp_path, ["fail"])


def test_rows_are_medians_of_all_rounds_and_the_fastest_buckets_count():
  network = ("vgg16", 2, "1gbit")
  row = lambda program, method, *lines: rows_of.row_of(network, program, method, lines)
  slow = row("ddp", "dense:bucket=25", LINE, LINE | {"seconds": [0.4], "bytes": [20.0]})
  assert (slow.seconds, slow.bytes) == (0.25, 15.0)
  rows = rows_of.fastest([slow, row("ddp", "dense:bucket=1000", LINE), row("mpi", "dense", LINE)])
  assert [(one.program, one.method) for one in rows] == [("ddp", "dense:bucket=1000"), ("mpi", "dense")]


def test_goals_compare_the_same_method_and_the_fastest_ones():
  network = ("vgg16", 2, "100mbit")
  make = lambda program, method, seconds, size=1e6, wrong=0.0: rows_of.Row(
    *network, program, method, seconds, size, wrong
  )
  theirs = [make("ddp", "dense:bucket=25", 8.0), make("ddp", "powersgd:rank=4:bucket=1000", 1.0)]
  rows = [*theirs, make("mpi", "powersgd:rank=4", 0.3, 0.9e6), make("mpi", "onebit", 0.2)]
  best, ms, size = rows_of.goals(rows)
  assert [goal.met for goal in (best, ms, size)] == [True] * 3
  assert (best.measured, ms.measured, size.measured) == (0.2, 0.3, 0.9)
  missed = rows_of.goals([*theirs, make("mpi", "powersgd:rank=4", 0.6, 1.1e6, wrong=1.0)])
  assert [goal.met for goal in missed] == [False] * 4
  slow = rows_of.goals([make("ddp", "fp16:bucket=25", 1.0, wrong=1.5), make("mpi", "dense", 0.3)])
  assert [goal.met for goal in slow] == [False, True]
  assert rows_of.table(rows).row_count == 4
