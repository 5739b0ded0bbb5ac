"""Benchmarks as a user runs them: their results have what they promise."""

import json
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxsparse as js
from benchmarks import evidence, hierarchy, specs
from benchmarks.race.results import Curve, Results
from benchmarks.rounds.worker import send_garbage
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds import status
from tests.benchmarks import commands
from tests.benchmarks.commands import result_of


@pytest.mark.long
def test_train_learns_and_keeps_its_runs(tmp_path):
  flags = "--steps=200", "--workers=3", "--density=0.05", f"--report_dir={tmp_path}"
  sparse, dense = result_of("train", *flags)["runs"]
  assert (sparse["algorithm"], dense["algorithm"]) == ("spardl", "dense")
  assert min(sparse["test_accuracy"], dense["test_accuracy"]) > 0.8
  n = 22602
  assert dense["words_per_step"] == 2 * (n // 3) * 2
  # ⌈0.05 n⌉ = 1131 entries in three blocks
  assert sparse["words_per_step"] == 4 * -(-1131 // 3) * 2
  assert sparse["residual_norm"] > 0
  assert (tmp_path / "demo.png").stat().st_size > 10_000
  kept = json.loads((tmp_path / "train.json").read_text())["runs"]
  assert [run["test_loss"] for run in kept] == pytest.approx(
    [sparse["test_loss"], dense["test_loss"]], rel=1e-5
  )


@pytest.mark.long
def test_train_with_seeds_and_folds(tmp_path):
  flags = "--seed=0,3", "--algorithm=topka:wire=bf16,a2sgd", "--optimizer=adam"
  more = (
    "--steps=8",
    "--workers=2",
    "--engine=sim",
    "--folds=2",
    f"--report_dir={tmp_path}",
  )
  runs = result_of("train", *flags, *more)["runs"]
  grid = [("topka:wire=bf16", fold, seed) for fold in range(2) for seed in (0, 3)]
  assert [(run["algorithm"], run["fold"], run["seed"]) for run in runs[:4]] == grid
  assert len({run["test_loss"] for run in runs}) == 8
  assert runs[4]["trace"]["drift"][-1] > 0 == runs[0]["trace"]["drift"][-1]


@pytest.mark.long
def test_the_controller_has_throughput_and_latency():
  result = result_of(
    "controller",
    "--workers=5",
    "--group_size=3",
    "--seconds=0.3",
    "--groups=20",
    "--curve",
  )
  assert result["signals_per_second"] > 50
  assert result["groups_per_second"] * 3 == pytest.approx(result["signals_per_second"])
  assert 0 < result["latency"] <= result["latency_99"]
  assert (result["rejected"], result["signal_bytes"]) == (0, 55)


@pytest.mark.long
def test_links_of_weights_are_measured_beside_full_copies(tmp_path):
  flags = "--task=lm_medium", "--rates=1e-5", "--steps=2", "--warm_up=2"
  done = commands.run("benchmarks.weights", *flags, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads((tmp_path / "weights.json").read_text())["rows"]
  for row in rows:
    assert row["whole"] == 2 * row["entries"] == 2 * 664_320
    bits = row["changed"] * (row["index_bits"] + row["difference_bits"])
    assert 8 * row["link"] == pytest.approx(bits, rel=1e-4)
    # Of all leaves; a leaf's share of changes may be another one.
    assert row["index_bits"] > 0.9 * row["entropy"]
    assert row["link"] < row["whole"] / 4
  assert len(rows) == 2


@pytest.mark.long
@commands.needs_lab
def test_readers_of_weights_copy_them_over_links(tmp_path):
  flags = "--task=lm_medium", "--rates=1e-5", "--steps=2", "--warm_up=2"
  flags = *flags, "--parts=readers", "--link=10mbit", f"--report_dir={tmp_path}"
  done = commands.run("benchmarks.weights", *flags)
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads((tmp_path / "weights.json").read_text())["readers"]
  copies, anchor, links, killed, late = rows
  whole = 2 * 664_320
  for row in (copies, anchor, late):
    assert row["bytes"] > whole
  for row in (copies, anchor):
    # All bytes pass the link of the publisher.
    assert row["seconds"] > 4 * 8 * whole / 10e6
  assert links["bytes"] < whole / 8
  assert links["seconds"] < copies["seconds"]
  assert re.match("killed when [3-9][0-9]% of an anchor had come", killed["what"])


@pytest.mark.long
def test_costs_are_counted_beside_formulas():
  found = result_of(
    "costs", "--algorithm=spardl,spardl:teams=7,a2sgd", "--workers=14", "--n=100000"
  )
  rows = {row["algorithm"]: row for row in found}
  assert (
    rows["spardl"]["most"]
    == rows["spardl"]["formula"]
    == {"messages": 8, "words": 3744, "agreements": 0}
  )
  assert rows["a2sgd"]["most"]["words"] == 2
  varying = rows["spardl:teams=7"]
  assert (
    varying["least"]["words"] < varying["most"]["words"] == varying["formula"]["words"]
  )


def test_a_row_of_evidence_from_a_sweep(tmp_path):
  """Losses of two seeds: dense is best at 0.2, 4 bits at 0.1, and diverge once at 0.2."""
  same = {"data": "", "hosts": 4, "batch_size": 1, "recipe": ""}
  results = Results(tmp_path / "flow_adam.json", {"task": "flow_apart"} | same)
  losses = {
    ("dense", "adam:0.1"): [(4, 3, 2.5), (4, 3, 2.5)],
    ("dense", "adam:0.2"): [(3, 2, 1), (3, 2.5, 2)],
    ("nbit:bits=4", "adam:0.1"): [(3, 2, 1.01), (3, 2.5, 2.06)],
    ("nbit:bits=4", "adam:0.2"): [(3, 2, 1.2), (3, 2.5, math.inf)],
  }
  words = {"dense": 1500.0, "nbit:bits=4": 200.0}
  for (method, optimizer), seeds in losses.items():
    for seed, loss in enumerate(seeds):
      key = method, optimizer, seed
      curve = Curve(*key, [10, 40, 50], list(loss), [0.0] * 3, words[method])
      results.add(curve)
  (row,) = evidence.sweep_rows(results)
  assert (row["method"], row["optimizer"]) == ("nbit:bits=4", "adam:0.1")
  assert row["own_data"]
  # 1 % and 3 %
  assert (row["gap"], row["gap_error"]) == pytest.approx((2, 1))
  assert row["gap_untuned"] is None
  assert row["bits"] == pytest.approx(32 * 200 / 1000)


@pytest.mark.usefixtures("standard_promotion")
def test_the_evidence_of_the_library_is_that_of_the_results():
  """After results of a race or of predictions changed: python -m benchmarks.evidence."""
  with jax.numpy_rank_promotion("allow"):
    texts = evidence.texts()
  for name, text in texts.items():
    assert (evidence.COSTS / name).read_text() == text


@pytest.mark.long
def test_selection_checks_and_times_every_program():
  flags = (
    "--n=40000",
    "--inputs=normal,gradients,equal",
    "--repetitions=1",
    "--update=2",
  )
  # Memory is of programs as users have them.
  result = result_of(
    "selection", *flags, XLA_FLAGS="", JAX_DISABLE_MOST_OPTIMIZATIONS="0"
  )
  rows, update = result["selection"], result["update"]
  assert all(
    row[name] > 0 for row in rows for name in ("lax_top_k", "top_k", "threshold")
  )
  assert [row["method"] for row in rows] == ["bracket"] * 3
  assert update["workers"] == 2
  assert 0 < update["buffers"] <= 3  # the mean takes the place of the donated gradients


@pytest.mark.long
def test_scale_predicts_as_js_costs_and_makes_programs():
  result = result_of(
    "scale", "--workers=8,4", "--n=100000", "--repeats=1", "--schedule_of=dense"
  )
  rows = {
    (row["network"], row["workers"], row["algorithm"]): row
    for row in result["predicted"]
  }
  labels = [*specs.of_vectors(), "spardl:teams=best"]
  assert set(rows) == {
    (net, p, label) for net in result["networks"] for p in (4, 8) for label in labels
  }
  cost = lambda teams: js.costs.predict(
    "spardl", n=100_000, workers=8, density=0.01, teams=teams
  )
  seconds = {
    teams: cost(teams).seconds(*result["networks"]["25GbE"]) for teams in (1, 2, 4, 8)
  }
  assert rows["25GbE", 8, "spardl"]["seconds"] == seconds[1]
  best = rows["25GbE", 8, "spardl:teams=best"]  # the fastest divisor
  assert (best["teams"], best["seconds"]) == min(
    seconds.items(), key=lambda one: one[1]
  )
  assert [(row["workers"], row["messages"]) for row in result["compiled"]] == [
    (4, 4),
    (8, 6),
  ]
  assert all(
    row[phase] > 0
    for row in result["compiled"]
    for phase in ("trace", "lower", "compile")
  )


@pytest.mark.long
def test_scale_makes_first_steps():
  (row,) = result_of("scale", "--first_step", "--schedule_of=dense", "--repeats=1")[
    "compiled"
  ]
  assert (row["workers"], row["runs"]) == (4, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax
def test_each_way_of_hosts_with_devices_trains():
  """In one process, which has no network: the way of many hosts is that of the lab."""
  mesh = Mesh(
    np.array(jax.devices()[:4]).reshape(2, 2),
    hierarchy.AXES,
    axis_types=(AxisType.Auto,) * 2,
  )
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    rows = [
      hierarchy.measured(way, mesh, "none", 16, 1, 1, 0.1, steps=4)
      for way in hierarchy.WAYS
    ]
  assert all(row.seconds > 0 for row in rows)
  dense, *sparse = (row.loss for row in rows)
  np.testing.assert_allclose(sparse, dense, rtol=0.1)


@pytest.mark.long
@commands.needs_lab
def test_in_the_lab_between_hosts_sends_at_most_half_of_flat():
  flags = (
    "--rate=100mbit",
    "--way=flat,between",
    "--width=128",
    "--blocks=1",
    "--steps=4",
  )
  flat, between = result_of("hierarchy", *flags)
  # headers of packets and of gloo included
  assert between["bytes"] <= 0.55 * flat["bytes"]


@pytest.mark.long
@pytest.mark.parametrize(
  "lab", ["--nolab", pytest.param("--lab", marks=commands.needs_lab)]
)
def test_elastic_loses_what_a_worker_owes_and_nothing_else(lab, tmp_path):
  flags = (
    "--workers=3",
    "--joining=1",
    "--batch_size=12",
    "--seed=0",
    "--steps=14",
    "--kill_at=5",
    "--join_at=9",
  )
  more = "--save_every=2", "--density=0.1", f"--report_dir={tmp_path}"
  done = commands.run("benchmarks.elastic", *flags, *more, lab)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads((tmp_path / "elastic.json").read_text())
  lost = {run["run"]: run["lost"] for run in (*found["runs"], *found["simulated"])}
  assert lost.pop("without its residual") > 1e-3
  assert max(lost.values()) < 1e-5
  assert found["lost"][0]["all"] > found["lost"][0]["since"] > 0
  expected = [] if lab == "--nolab" else ["3 -> 2", "2 -> 3"]
  assert [one["change"] for one in found["recoveries"]] == expected
  assert all(min(one["parts"]) > 0 for one in found["recoveries"])


def test_a_server_goes_on_after_the_garbage_of_the_faults(tmp_path):
  keys = Keys.make()
  keys.write(tmp_path / "keys")
  with js.partial.Server(js.partial.Quorum(1, quorum=1), keys=keys) as server:
    send_garbage([server.address], tmp_path / "keys", 40)
    assert status.ask(server.address, keys)["workers"] == []


@pytest.mark.long
@commands.needs_lab
def test_rounds_lose_no_worker_but_the_killed_one(tmp_path):
  flags = (
    "--parts=goodput,vector,interrupted,fetches",
    "--workers=3",
    "--quorum=2",
    "--seconds=4",
    "--kill_every=4",
  )
  flags += "--exchanges=onebit", "--entries=1000", "--pace=0.05", "--hold=3"
  done = commands.run("benchmarks.rounds", *flags, f"--report_dir={tmp_path}")
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads((tmp_path / "rounds.json").read_text())
  for part, mode in (("goodput", "rounds"), ("vector", "onebit, H = 5")):
    calm, killed = found[part]
    assert (calm["mode"], calm["kills"], killed["kills"], calm["lost"]) == (
      mode,
      0,
      1,
      0,
    )
    assert calm["equal"]
    assert killed["equal"]
    assert min(killed["trained"], killed["delivered"]) > 0
  assert [one["fault"].partition(": ")[0] for one in found["interrupted"]] == [
    "onebit, H = 5"
  ] * 3
  assert all(one["equal"] and one["again"] is not None for one in found["interrupted"])
  one, several, links, returned = found["fetches"]
  # float32 of 1,000 entries, and headers; so short rounds have links as large as that
  sizes = one["megabytes"], several["megabytes"]
  assert all(0.004 < size < 0.008 for size in sizes)
  assert 0 < links["megabytes"] < 0.008
  assert 0 < returned["megabytes"] < 0.008
  (recovery,) = found["recoveries"]
  assert recovery["round"] > 0
  assert recovery["joined"] > 0
