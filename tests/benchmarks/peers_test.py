"""`benchmarks.peers` with a stand-in for PyTorch's ranks: how they are started, and what becomes of their lines."""

import contextlib
import json
import math
import pathlib
import sys

import numpy as np
import pytest

from benchmarks import netlab, recipes
from benchmarks.peers import ranks, training
from benchmarks.peers import rows as rows_of
from benchmarks.race.results import Curve, Pace, Results, Whole
from benchmarks.tasks import registry
from benchmarks.tasks.base import model_of
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
  ranks.run(
    HOSTS,
    str(python),
    {"size": 2, "shapes": [[3]], "rows": str(rows), "methods": methods},
    "torch_ddp.py",
  )
  return [json.loads(line)["method"] for line in rows.read_text().splitlines()]


def test_every_rank_gets_the_setting_and_the_first_one_writes_a_line_for_each_method(
  tmp_path,
):
  labels = ranks.in_buckets(["dense", "powersgd:rank=4"], [25, 50])
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
  rows = rows_of.fastest(
    [slow, row("ddp", "dense:bucket=1000", LINE), row("mpi", "dense", LINE)]
  )
  assert [(one.program, one.method) for one in rows] == [
    ("ddp", "dense:bucket=1000"),
    ("mpi", "dense"),
  ]


def test_goals_compare_the_same_method_and_the_fastest_ones():
  network = ("vgg16", 2, "100mbit")
  make = lambda program, method, seconds, size=1e6, wrong=0.0: rows_of.Row(
    *network, program, method, seconds, size, wrong
  )
  theirs = [
    make("ddp", "dense:bucket=25", 8.0),
    make("ddp", "powersgd:rank=4:bucket=1000", 1.0),
  ]
  rows = [
    *theirs,
    make("mpi", "powersgd:rank=4", 0.3, 0.9e6),
    make("mpi", "onebit", 0.2),
  ]
  best, ms, size = rows_of.goals(rows)
  assert [goal.met for goal in (best, ms, size)] == [True] * 3
  assert (best.measured, ms.measured, size.measured) == (0.2, 0.3, 0.9)
  missed = rows_of.goals(
    [*theirs, make("mpi", "powersgd:rank=4", 0.6, 1.1e6, wrong=1.0)]
  )
  assert [goal.met for goal in missed] == [False] * 4
  slow = rows_of.goals(
    [make("ddp", "fp16:bucket=25", 1.0, wrong=1.5), make("mpi", "dense", 0.3)]
  )
  assert [goal.met for goal in slow] == [False, True]
  averages = rows_of.row_of(
    network, "hivemind", "hivemind:float16", [LINE | {"wrong": 2**-11}]
  )
  assert averages.wrong == 0.5
  (best,) = rows_of.goals([averages, make("mpi", "dense", 0.4)])
  assert (best.met, best.measured) == (False, 2.0)
  assert "dense / hivemind:float16 ≤ 0.35" in best.what
  assert rows_of.table(rows).row_count == 4


TRAINER = """#!{python}
import json, pathlib, sys
import numpy as np
setting = json.loads(sys.argv[2])
assert pathlib.Path(sys.argv[1]).name == "torch_training.py"
data = np.load(setting["data"])
batches = setting["most"], setting["size"] * setting["batch_size"]
assert data["input"].shape == (*batches, 8, 8, 1) and data["label"].shape == batches
assert setting["adam"] == {{"lr": 0.002, "betas": [0.8, 0.999]}} and setting["clip"] == 1.0
assert setting["muon"] is None
if setting["rank"] == 0:
  with open(setting["rows"], "a") as file:
    for label in setting["methods"]:
      pace = {{"seconds": 0.3, "compute": 0.1, "rest": 0.02}}
      row = {{"method": label, "steps": [5, 10], "seconds": [1.0, 2.0], "loss": [1.5, setting["target"]]}}
      file.write(json.dumps(row | {{"first": {first}, "accuracy": [0.5, 0.6], "bytes": 400.0, "pace": pace}}) + "\\n")
"""


@pytest.fixture
def race(tmp_path):
  setting = {
    "task": "cnn",
    "data": "digits",
    "hosts": 2,
    "batch_size": 3,
    "recipe": "constant rate, clipping at 1",
  }
  results = Results(tmp_path / "race.json", setting)
  for seed in (0, 1):
    results.add(
      Curve("dense", "adam:0.001", seed, [5, 10], [2.0, 1.0 + seed], [0.5, 0.5], 30.0)
    )
  return results


def train(race, tmp_path, monkeypatch, first, rate):
  python = tmp_path / "python"
  python.write_text(TRAINER.format(python=sys.executable, first=first))
  python.chmod(0o755)
  monkeypatch.setattr(
    netlab, "lab", lambda hosts, _: contextlib.nullcontext(HOSTS[:hosts])
  )
  plan = training.Plan(
    str(python), ["dense", "powersgd:rank=4"], rate, steps=10, most=20, every=5
  )
  (adam,) = recipes.parse_optimizers(["adam:0.002:b1=0.8"], 0.1)
  return training.train(race, registry.make("cnn"), plan, adam, seed=0)


def as_pytorch(data, images):
  """Logits of the CNN, as PyTorch defines its layers."""

  def convolved(x, name):
    windows = np.lib.stride_tricks.sliding_window_view(
      np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2)
    )
    x = (
      np.einsum("nhwcij,ocij->nhwo", windows, data[f"start.{name}.weight"])
      + data[f"start.{name}.bias"]
    )
    count, height, width, channels = x.shape
    return (
      np.maximum(x, 0)
      .reshape(count, height // 2, 2, width // 2, 2, channels)
      .max((2, 4))
    )

  linear = lambda x, name: (
    x @ data[f"start.{name}.weight"].T + data[f"start.{name}.bias"]
  )
  x = convolved(convolved(images, "conv1"), "conv2").reshape(len(images), -1)
  return linear(np.maximum(linear(x, "dense"), 0), "head")


def test_pytorch_gets_our_start_in_its_own_layout_and_what_is_held_out(tmp_path):
  task = registry.make("cnn")
  model = model_of(task, 3)
  training.write_data(
    tmp_path / "data.npz", task, model, seed=3, hosts=2, size=4, steps=1
  )
  data = np.load(tmp_path / "data.npz")
  logits, labels = as_pytorch(data, data["held_out.input"]), data["held_out.label"]
  logits -= logits.max(-1, keepdims=True)
  losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
  assert losses.mean() == pytest.approx(
    model.evaluate(model.params, model.statistics)[0], abs=1e-4
  )
  batch = next(task.stream(3, 2, 4))
  np.testing.assert_array_equal(data["input"][0], batch["input"])
  np.testing.assert_array_equal(data["label"][0], batch["label"])


@pytest.mark.usefixtures("standard_promotion")
def test_trainings_of_peers_become_rows_of_the_race_if_their_first_losses_are_ours(
  race, tmp_path, monkeypatch
):
  with pytest.raises(
    RuntimeError, match=r"dense: losses \[2.0, 1.0\] of PyTorch .* ours \["
  ) as refused:
    train(race, tmp_path, monkeypatch, [2.0, 1.0], "10mbit")
  ours = json.loads(str(refused.value).rpartition("ours ")[2])
  assert ours[1] < ours[0]  # a step of Adam
  rows = train(race, tmp_path, monkeypatch, ours, "10mbit")
  assert [type(row) for row in rows] == [Whole, Pace] * 2
  assert rows[0] == Whole(
    "DDP, dense", "adam:0.002:b1=0.8", 0, "10mbit", [5, 10], [1.0, 2.0], [1.5, 1.0]
  )
  assert rows[3].parts == pytest.approx((0.1, 0.02, 0.18))
  curve, _ = train(race, tmp_path, monkeypatch, ours, "none")
  assert (curve.steps, curve.loss, curve.words) == ([5, 10], [1.5, 1.0], 100.0)
  with pytest.raises(RuntimeError, match="ours"):
    train(race, tmp_path, monkeypatch, [ours[0], ours[1] + 2e-4], "none")


def test_races_that_peers_cannot_join_are_refused(race):
  adam, sgd, eps, muon = recipes.parse_optimizers(
    ["adam:0.1", "sgd:0.1", "adam:0.1:eps=0.01", "muon:0.02"], 0.1
  )
  plan = training.Plan("python", ["dense"], "10mbit", steps=10, most=20, every=5)
  start = lambda optimizer, seed: training.train(
    race, registry.make("cnn"), plan, optimizer, seed
  )
  for optimizer in (sgd, eps):
    with pytest.raises(
      ValueError,
      match=f"--optimizer={optimizer}: PyTorch's ranks have adam with b1, and muon",
    ):
      start(optimizer, 0)
  with pytest.raises(
    ValueError, match="--optimizer=muon:0.02: diloco:every=5 takes one inner optimizer"
  ):
    training.train(
      race,
      registry.make("cnn"),
      plan._replace(methods=["dense", "diloco:every=5"]),
      muon,
      0,
    )
  with pytest.raises(
    ValueError, match="race.json has no loss of dense after 10 steps from seed 7"
  ):
    start(adam, 7)
  race.setting["recipe"] = "cosine rate over 10 steps"
  with pytest.raises(
    ValueError,
    match="has the recipe 'cosine rate over 10 steps': choose a constant rate",
  ):
    start(adam, 0)
  race.setting["task"] = "bert"
  with pytest.raises(
    ValueError, match="race.json trains bert, choose one of cnn, lm, lm_medium, lm_wide"
  ):
    training.task_of(race)


def test_the_fastest_peer_is_one_that_reaches_dense_from_every_seed(race):
  whole = lambda method, seed, seconds, loss: race.add(
    Whole(
      method, "adam:0.001", seed, "10mbit", [5, 10], [seconds / 2, seconds], [9.0, loss]
    )
  )
  for method, seconds in {
    "DDP, dense": 8.0,
    "DDP, fp16": 6.0,
    "updates/onebit": 2.0,
  }.items():
    whole(method, 0, seconds, 1.0)
    whole(method, 1, seconds + 2, 2.0)
  whole("DDP, powersgd:rank=1", 0, 1.0, 1.0)
  whole("DDP, powersgd:rank=1", 1, 1.0, 2.1)  # which never has dense's loss
  race.add(Pace("DDP, fp16", "10mbit", 10, 0.5, 0.1, 0.1, 1e6, "adam:0.001"))
  rows = rows_of.trained(race, 10)
  assert [row.method for row in rows] == [
    "updates/onebit",
    "DDP, fp16",
    "DDP, dense",
    "DDP, powersgd:rank=1",
  ]
  assert rows[0].seconds == pytest.approx((3.0, math.sqrt(2), 0))
  (goal,) = rows_of.trained_goals(rows)
  assert goal.met
  assert goal.measured == pytest.approx(3 / 7)
  assert "updates/onebit / DDP, fp16 ≤ 0.5" in goal.what
  assert rows_of.trained_table(rows).row_count == 4
  whole("updates/onebit", 0, 6.0, 1.0)
  (goal,) = rows_of.trained_goals(rows_of.trained(race, 10))
  assert not goal.met
  assert rows_of.trained_goals(rows[1:]) == []
