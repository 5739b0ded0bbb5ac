"""The training binary as a user runs it."""

import functools
import json
import sys

import pytest

from benchmarks.tasks import lm
from tests.benchmarks import commands

train = functools.partial(commands.run, "benchmarks.train")


def test_both_algorithms_learn_and_are_kept_and_reported(tmp_path):
  done = train("--steps=200", "--workers=3", "--json", "--density=0.05", f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  sparse, dense = json.loads(done.stdout)["runs"]
  assert (sparse["algorithm"], dense["algorithm"]) == ("spardl", "dense")
  assert min(sparse["test_accuracy"], dense["test_accuracy"]) > 0.8
  n = 22602
  assert dense["words_per_step"] == 2 * (n // 3) * 2
  assert sparse["words_per_step"] == 4 * -(-1131 // 3) * 2  # ⌈0.05 n⌉ = 1131 entries in three blocks
  assert sparse["residual_norm"] > 0
  assert (tmp_path / "demo.png").stat().st_size > 10_000
  kept = json.loads((tmp_path / "train.json").read_text())["runs"]
  assert [run["test_loss"] for run in kept] == pytest.approx([sparse["test_loss"], dense["test_loss"]], rel=1e-5)


@pytest.mark.long
def test_seeds_folds_optimizers_and_a_trace(tmp_path):
  flags = "--seed=0,3", "--algorithm=oktopk:region_period=8,a2sgd", "--optimizer=adam", "--trace=drift,selected"
  more = "--steps=8", "--workers=2", "--engine=sim", "--folds=3", "--json", f"--report_dir={tmp_path}"
  done = train(*flags, *more)
  assert done.returncode == 0, done.stderr[-2000:]
  runs = json.loads(done.stdout)["runs"]
  grid = [("oktopk:region_period=8", fold, seed) for fold in range(3) for seed in (0, 3)]
  assert [(run["algorithm"], run["fold"], run["seed"]) for run in runs[:6]] == grid
  assert len({run["test_loss"] for run in runs}) == 12
  assert runs[6]["trace"]["drift"][-1] > 0 == runs[0]["trace"]["drift"][-1]
  assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_the_committed_results_are_of_this_text():
  kept = json.loads((commands.ROOT / "benchmarks" / "results" / "lm.json").read_text())
  runs = [(run["algorithm"], run["optimizer"], run["seed"]) for run in kept["runs"]]
  assert len(set(runs)) == len(runs)
  version = ".".join(map(str, sys.version_info[:3]))
  assert f"Python {version} " not in kept["title"] or str(lm.load()) in kept["title"]  # another brings another text
