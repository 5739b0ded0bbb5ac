"""`benchmarks.device` on a CPU: all parts, rows that fail or come too late, and what only accelerators reach."""

import json
import multiprocessing
import types

import jax
import pytest
import rich.console

import jaxsparse as js
from benchmarks.device import right, setting, step, timing, worth
from benchmarks.device.running import Run
from tests.benchmarks import commands

CONSOLE = rich.console.Console(quiet=True)


@pytest.mark.long
def test_a_small_run_measures_every_part(tmp_path):
  done = commands.run(
    "benchmarks.device", "--small", "--name=test", f"--report_dir={tmp_path}"
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  found = json.loads((tmp_path / "device_test.json").read_text())
  assert (found["platform"], found["jax"]) == ("cpu", jax.__version__)
  algorithms = list(setting.SMALL.algorithms)
  others = ["read", "copy", "lax.top_k", "lax.approx_max_k", "js.select.top_k"]
  names = lambda part: [row["row"] for row in found[part]]
  assert names("right") == [
    "selection, normal",
    "selection, ties",
    "selection, not finite",
    "dense",
    "topka",
  ]
  assert all(row["differ"] == 0 for row in found["right"])
  assert names("speed") == names("launches") == [*others, *algorithms]
  assert all(
    0 < row["seconds"] <= row["p90"] and row["queued"] > 0 for row in found["speed"]
  )
  assert all(row["kernels"] is None for row in found["launches"])
  (trained,) = found["step"]
  assert trained["seconds"] > 0
  assert (trained["tokens"], trained["peak"]) == (32, None)
  profile = js.costs.Profile.load(tmp_path / "profile_test.json")
  assert list(profile.algorithms) == [
    "dense",
    "dense:dtype=bfloat16",
    "topka:density=0.01",
  ]
  _, *advice = found["worth"]
  for row, gigabits in zip(advice, (10, 25, 100, 400), strict=True):
    (dense,) = (one for one in row["predictions"] if one["label"] == "dense")
    assert dense["arithmetic"] > 0
    # 2 messages; the 8 devices of a host share its link
    assert dense["wire"] == pytest.approx(
      2 * row["alpha"] + 8 * 32 * dense["words"] / (gigabits * 1e9), rel=1e-4
    )


def test_rows_that_fail_or_are_late_leave_the_others(tmp_path):
  path = tmp_path / "device.json"
  kept = lambda: json.loads(path.read_text())
  run = Run(path, {"device": "none"}, {"right": True, "step": True}, 1000, CONSOLE)
  run.measure("right", "works", 10.0, lambda: {"seconds": 1.0})
  run.measure("right", "fails", 10.0, lambda: {"seconds": 1 / 0})
  run.measure("right", "late", 0.0, lambda: {"seconds": 2.0})
  rows = [
    {"row": "works", "seconds": 1.0},
    {"row": "fails", "error": "ZeroDivisionError: division by zero"},
    {"row": "late", "not_run": "the part had time until 0 s"},
  ]
  assert kept()["right"] == rows
  assert (run.failed, run.measured("right")) == (True, rows[:1])
  assert run.missing() == [
    "right: fails: ZeroDivisionError: division by zero",
    "right: late: the part had time until 0 s",
  ]
  assert run.share(1) == pytest.approx(950)

  def interrupted():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run.measure("step", "interrupted", 10.0, interrupted)
  again = Run(path, {"device": "none"}, {"right": False, "step": True}, 1000, CONSOLE)
  again.measure("step", "works", 10.0, lambda: {"loss": float("nan")})
  assert (kept()["right"], kept()["step"]) == (rows, [{"row": "works", "loss": None}])
  with pytest.raises(
    ValueError, match="is of device none, not another: choose another --name"
  ):
    Run(
      path,
      {"device": "another"},
      {"right": False, "step": True},
      1000,
      CONSOLE,
      ["device"],
    )


def test_goals_of_results():
  row = lambda name, promised, **more: (
    {"row": name, "same_bits_promised": promised, "differ": 0, "distance": 0.0} | more
  )
  rows = [
    row("spardl", True, differ=1),
    row("onebit", False, differ=9, distance=1e-6),
    row("nbit", False, distance=None),
  ]
  assert [goal.met for goal in right.goals(rows)] == [False, True, False]


def test_kernels_are_counted_on_streams_of_gpus(monkeypatch):
  event = lambda name, duration_ns: types.SimpleNamespace(
    name=name, duration_ns=duration_ns
  )
  line = lambda name, *events: types.SimpleNamespace(name=name, events=events)
  kernels = line(
    "Stream #13(Compute,MemcpyD2D)",
    event("fusion", 1e6),
    event("MemcpyD2D", 5e5),
    event("sort", 2e6),
  )
  planes = [
    types.SimpleNamespace(name="/host:CPU", lines=[line("python", event("call", 1e9))]),
    types.SimpleNamespace(
      name="/device:GPU:0", lines=[kernels, line("XLA Ops", event("fusion", 1e6))]
    ),
  ]
  monkeypatch.setattr(
    jax.profiler,
    "ProfileData",
    types.SimpleNamespace(from_file=lambda _: types.SimpleNamespace(planes=planes)),
  )
  assert timing.launches_of(lambda: None) == timing.Launches(
    2, 1, pytest.approx(3.5e-3)
  )


@pytest.mark.long
@pytest.mark.parametrize("one", setting.WHOLE.steps, ids=lambda one: one.label)
def test_each_step_of_a_whole_run(one):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    row = step.time_step(one, setting.SMALL)
  assert row["loss"] < 5
  assert row["peak_by_compiler"] > 0


@pytest.mark.long
def test_the_reference_outlives_a_crash_of_its_process():
  reference = right.Reference(["dense", "topka"], 100, 2, 0.1)
  try:
    for child in multiprocessing.active_children():
      child.kill()
    for label in ("dense", "topka"):
      found = right.differences(
        right.simulate(label, 100, 2, 0.1), reference.of(label, 120)
      )
      assert found["differ"] == 0
  finally:
    reference.stop()


def test_links_are_shared_by_the_devices_of_a_host():
  linked = worth.over(
    js.costs.Profile(workers=2, alpha=0.0, beta=0.0, devices=8),
    gigabits=100,
    alpha=5e-6,
  )
  assert linked.beta == pytest.approx(8 / 12.5e9)  # 100 Gbit/s are 12.5 GB/s
