"""The training binary as a user runs it."""

import functools
import json

import pytest

from benchmarks.tasks.data import CIFAR10_FILES
from tests.benchmarks import commands
from tests.benchmarks.data_test import batch, write

train = functools.partial(commands.run, "benchmarks.train")


def test_both_algorithms_learn_and_are_reported(tmp_path):
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


@pytest.mark.long
def test_seeds_options_and_a_trace(tmp_path):
  flags = (
    "--seed=0",
    "--seed=3",
    "--algorithm=oktopk:region_period=8,a2sgd",
    "--optimizer=adam",
    "--trace=drift,selected",
  )
  done = train("--steps=8", "--workers=2", "--model=mlp", "--json", *flags, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  runs = json.loads(done.stdout)["runs"]
  assert [(run["algorithm"], run["seed"]) for run in runs] == [
    (name, seed) for name in ("oktopk:region_period=8", "a2sgd") for seed in (0, 3)
  ]
  assert all(len(run["trace"]["selected"]) == 8 for run in runs)
  assert runs[2]["trace"]["drift"][-1] > 0 == runs[0]["trace"]["drift"][-1]
  assert (tmp_path / "trace.png").stat().st_size > 10_000


@pytest.mark.long
def test_folds_are_runs_with_test_sets_of_their_own(tmp_path):
  flags = ("--steps=40", "--workers=2", "--engine=sim", "--model=mlp", "--algorithm=dense", "--folds=3")
  done = train(*flags, "--json", f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  runs = json.loads(done.stdout)["runs"]
  assert [(run["seed"], run["fold"]) for run in runs] == [(0, 0), (0, 1), (0, 2)]
  assert len({run["test_loss"] for run in runs}) == 3
  assert all(run["test_accuracy"] * 599 == pytest.approx(round(run["test_accuracy"] * 599), abs=1e-3) for run in runs)


@pytest.mark.long
def test_cifar10_and_a_table(tmp_path):
  for seed, name in enumerate(CIFAR10_FILES):
    write(tmp_path, name, batch(seed))
  flags = ("--workers=2", "--batch_size=4", "--steps=2", "--model=mlp", "--algorithm=dense", "--algorithm=spardl")
  done = train(*flags, "--dataset=cifar10", f"--data_dir={tmp_path}", f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  assert "words / step" in " ".join(done.stdout.split()) or "residual" in done.stdout
  assert done.stdout.index("dense") < done.stdout.index("spardl")


BAD_FLAGS = [
  (["--algorithm=sparse"], "unknown collective 'sparse', choose one of a2sgd, chunktopk, dcttopk, dense"),
  (["--density=2"], "density=2.0, choose a number in (0, 1]"),
  (["--teams=4"], "teams=4 does not divide the 6 workers, choose one of [1, 2, 3, 6]"),
  (["--workers=0"], "--workers=0, choose at least 1"),
  (["--folds=0"], "--folds=0, choose at least 1"),
  (["--task=lm", "--folds=5"], "--folds=5 is for the digits: other data come with a test set of their own"),
  (["--steps=0"], "--steps=0, choose at least 1"),
  (["--batch_size=1000"], "does not fit in 1437 training images"),
  (["--dataset=cifar10"], "needs --data_dir"),
  (["--data_dir=/nowhere"], "--data_dir=/nowhere is for --dataset=cifar10"),
  (["--dataset=mnist"], "should be one of"),
  (["--task=lm", "--model=mlp"], "--model is for --task=images"),
  (["--optimizer=adamw:none"], "--optimizer=adamw:none, choose a positive learning rate, as in adamw:0.001"),
  (["--trace=loss"], "--trace=loss, choose from words_sent"),
  (["extra"], "unexpected arguments ['extra']"),
]


def test_bad_flags(subtests, tmp_path):
  folder = tmp_path / "none"
  rows = [([*flags, f"--report_dir={folder}"], message) for flags, message in BAD_FLAGS]
  commands.check_refusals("benchmarks.train", rows, subtests)
  assert not folder.exists()
