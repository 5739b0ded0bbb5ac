"""The paper's setting on paper: real layers, and the numbers that the paper's own tables say."""

import pytest

import jaxsparse as js
from benchmarks import papers, workers
from benchmarks.overlap import (
  architectures,
  contention,
  hiding,
  iterations,
  report,
  theorem,
)
from tests.benchmarks.commands import needs_lab, result_of

# Tensors as in Table III; parameters of the published models.
SIZES = {
  "resnet152": (467, 60_192_808),
  "densenet201": (604, 20_013_928),
  "inception_v4": (449, 42_679_816),
  "bert_base": (206, 110_106_428),
}


@pytest.mark.parametrize("model", SIZES)
def test_the_networks_are_the_real_ones(model):
  tensors = architectures.MODELS[model]()
  assert (len(tensors), sum(tensor.entries for tensor in tensors)) == SIZES[model]
  assert sum(tensor.seconds for tensor in tensors) == pytest.approx(
    iterations.PAPER[model].backward, rel=0.6
  )
  bound = papers.number("ASC-WFBP", "Table V, S_max", f"{model} bound")
  assert iterations.bound_of(model) == pytest.approx(bound, abs=0.06)


@pytest.mark.long
def test_rows_as_a_table_and_json():
  found = result_of(
    "overlap", "--model=bert_base", "--plan=single,wfbp,mg_wfbp,asc_wfbp"
  )
  rows = {row["plan"]: row for row in found}
  assert rows["wfbp"]["groups"] == 206
  assert (
    rows["asc_wfbp"]["seconds"] <= rows["mg_wfbp"]["seconds"] <= rows["wfbp"]["seconds"]
  )
  one = iterations.PAPER["bert_base"]
  computing = one.forward + one.backward
  assert rows["single"]["seconds"] == pytest.approx(
    computing + 1.4e-3 + 1.7e-9 * 4 * 110_106_428
  )
  assert rows["single"]["speed_up"] == pytest.approx(
    32 * computing / rows["single"]["seconds"]
  )
  for row in rows.values():
    assert row["exposed"] == pytest.approx(row["seconds"] - computing)


@pytest.mark.long
def test_a_lab_on_one_device_measures_what_it_plans():
  """All of the lab's measuring but for the network and SparDL, with simulated workers."""
  simulated = js.SimComm("workers", members=2)
  lab = hiding.Lab(
    workers.Workers(simulated, simulated, 2, 2, 0), "none", 2, 8, 16, 0.1, 1
  )
  rows = {row.name: row for row in lab.rows(["mg_wfbp", "wfbp"])}
  assert list(rows) == [
    "xla default",
    "no communication",
    "mg_wfbp, dense",
    "wfbp, dense",
  ]
  assert rows["wfbp, dense"].groups == lab.setting.tensors == 4
  assert (
    rows["wfbp, dense"].predicted
    >= rows["mg_wfbp, dense"].predicted
    > rows["no communication"].seconds
    > 0
  )
  exposed = list(report.lab_table(lab.setting, list(rows.values())).columns[5].cells)
  seconds = rows["wfbp, dense"].seconds - rows["no communication"].seconds
  assert (exposed[1], float(exposed[3])) == (
    "0.0",
    pytest.approx(1e3 * seconds, abs=0.1),
  )
  assert lab.setting.start_ups > 0
  assert 0 <= lab.setting.hidden <= 1


def test_two_all_reduces_at_once():
  link = js.overlap.Link(alpha=1e-3, beta=1e-9, gamma=1.5)
  curve = contention.predicted(link, workers=4)
  assert [curve.gamma(point) for point in curve.points] == pytest.approx(
    [1.5] * len(contention.SIZES)
  )
  size = contention.full_from(link, workers=4)
  assert curve.share(2 * size, link.alpha + 1.5e-9 * size) == pytest.approx(1)
  assert contention.full_from(link._replace(gamma=20.0), workers=4) == float("inf")
  assert contention.cells(curve) == {"γ, 4 MB": pytest.approx(1.5)}


@pytest.mark.long
@needs_lab
def test_contention_in_the_lab():
  (curve,) = result_of(
    "overlap", "--contention", "--rate=1gbit", "--workers=2", "--repetitions=3"
  )
  longest = curve["points"][-1]
  # a link is no faster than its rate
  assert longest["one"] > 0.9 * longest["size"] / curve["speed"]
  assert longest["two"] > 1.8 * longest["size"] / curve["speed"]


def test_two_layers_contradict_theorem_1():
  """Worked out by hand: merged 2 + 2 + 2 s; at once from 2 s on, 3 s and a penalty of (1 − 1/3)/2."""
  network, best = theorem.counterexample()
  assert network == ((1, 1), (1, 1), js.overlap.Link(2, 1, 1.5))
  assert theorem.theorem_1(network) == {0: False}
  assert best == {1: False, 0: True}
  assert theorem.seconds(network, {0: False}) == 6
  assert theorem.seconds(network, best) == pytest.approx(5 + 1 / 3)
  # one after the other
  assert theorem.seconds(network, {1: False, 0: False}) == 7


def test_no_plan_of_a_search_is_missing():
  """Each layer but the first is sent or merged, and each communication but the first waits or not."""
  assert [len(list(theorem.plans(layers))) for layers in (1, 2, 3)] == [1, 3, 9]
  found = theorem.measure(networks=20, seed=1)
  assert 0 < found.optimal < 1 < found.worst
