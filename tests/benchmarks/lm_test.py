"""The language model: its text is the same everywhere, what is held out was never trained on, and it learns."""

import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jaxsparse as js
from benchmarks import recipes, workers
from benchmarks.tasks import lm
from benchmarks.tasks.base import model_of
from benchmarks.train import report
from benchmarks.train.run import Run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task():
  return lm.small()


def test_an_untrained_model_knows_nothing(task):
  model = model_of(task, seed=0)
  assert task.entries == 136_896
  for on in (None, task.train):
    loss, accuracy = model.evaluate(model.params, model.statistics, on)
    assert abs(loss - math.log(256)) < 0.1
    assert accuracy < 0.1


def test_batches_are_windows_and_the_next_bytes(task):
  comm = js.SimComm("workers", members=2)
  place = workers.Workers(comm, comm, 2, shares=2, number=0)
  first, again = (next(task.batches(0, place, 3)) for _ in range(2))
  assert first["input"].shape == first["label"].shape == (6, lm.LENGTH)
  np.testing.assert_array_equal(first["input"][:, 1:], first["label"][:, :-1])
  np.testing.assert_array_equal(first["input"], again["input"])
  for number in range(2):  # a rank of MPI gives its own share alone
    own = next(task.batches(0, place._replace(shares=1, number=number), 3))
    np.testing.assert_array_equal(own["input"], first["input"][3 * number : 3 * number + 3])


def test_the_text_is_the_same_in_another_process():
  text = lm.load()
  program = "from benchmarks.tasks import lm; print(lm.load().digest)"
  for seed in ("1", "2"):  # of the hashes of strings
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == text.digest


def test_the_committed_results_are_of_this_text():
  kept = json.loads((ROOT / "benchmarks" / "results" / "lm.json").read_text())
  runs = [(run["algorithm"], run["optimizer"], run["seed"]) for run in kept["runs"]]
  assert len(set(runs)) == len(runs)
  version = ".".join(map(str, sys.version_info[:3]))
  if f"Python {version} " not in kept["title"]:
    pytest.skip(f"the results are of another Python than {version}, which brings another text")
  assert str(lm.load()) in kept["title"]


def test_what_is_held_out_is_not_trained_on():
  text = lm.load()
  assert len(text.train) == pytest.approx(9 * len(text.held_out), rel=1e-4)
  train, held_out = (set(part.tobytes().split(b"\n\n")) for part in (text.train, text.held_out))
  assert not train & held_out
  assert len(text.train) > 200_000


def test_windows_predict_each_byte_once():
  text = np.arange(200, dtype=np.uint8)
  windows = lm.windows(text)
  np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 193))


def test_optimizers_are_parsed_and_refused():
  assert [tuple(one) for one in recipes.parse_optimizers(["adamw:0.003,sgd", "window_adam:window=8", "sgd"], 0.1)] == [
    ("adamw", 0.003, ()),
    ("sgd", 0.1, ()),
    ("window_adam", 0.1, (("window", 8),)),
  ]
  for wrong, message in {
    "lion": "--optimizer=lion, choose one of sgd, momentum, adam, adamw, lars",
    "sgd:fast": "--optimizer=sgd:fast, choose a positive learning rate, as in sgd:0.001",
    "sgd:-1": "--optimizer=sgd:-1, choose a positive learning rate",
    "sgd:inf": "--optimizer=sgd:inf, choose a positive learning rate",
    "window_adam:window=0": "--optimizer=window_adam:window=0: .*window=0, choose a whole number from 1 to",
    "sgd:0.1:window=4": "--optimizer=sgd:0.1:window=4: .*window",
    "adam:0.1:0.2": "--optimizer=adam:0.1:0.2: .*'0.2' is not of the form option=value; options are as in window_adam",
  }.items():
    with pytest.raises(ValueError, match=message):
      recipes.parse_optimizers([wrong], 0.1)


@pytest.mark.long
def test_each_run_is_kept_and_reported(tmp_path):
  flags = ("--task=lm", "--engine=sim", "--workers=2", "--batch_size=2", "--steps=4", f"--report_dir={tmp_path}")
  grid = ("--algorithm=dense", "--optimizer=adamw:0.003,sgd:0.3", "--json")
  command = [sys.executable, "-m", "benchmarks.train", *flags, *grid]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  runs, kept = json.loads(done.stdout)["runs"], json.loads((tmp_path / "train.json").read_text())
  assert [run["optimizer"] for run in kept["runs"]] == ["adamw:0.003", "sgd:0.3"]
  assert [run["test_loss"] for run in kept["runs"]] == pytest.approx([run["test_loss"] for run in runs], rel=1e-5)
  assert all(run["loss"][-1] < math.log(256) + 0.1 for run in runs)
  assert "adamw:0.003, dense, seed 0: test accuracy 0." in done.stderr
  assert "transformer (136,896 parameters) on the help topics of Python" in kept["title"]


def test_a_kept_file_is_replaced_whole(tmp_path):
  run = Run("dense", "sgd:0.1", 0, 0.5, 1 / 3, 1.0, 2.0, 3, 0.1, 0.0, [1], [0.5], [1.0], {"drift": [0.0]})
  path = tmp_path / "new" / "train.json"
  report.keep([run], 'a "title"', path)
  report.keep([run, run._replace(seed=1)], 'a "title"', path)
  kept = json.loads(path.read_text())
  assert kept["title"] == 'a "title"'
  assert [one["seed"] for one in kept["runs"]] == [0, 1]
  assert kept["runs"][0]["test_loss"] == 0.333333
  assert [file.name for file in path.parent.iterdir()] == ["train.json"]
