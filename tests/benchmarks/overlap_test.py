"""The paper's setting on paper: real layers, and the numbers that the paper's own tables say."""

import functools
import json

import jax.numpy as jnp
import pytest

import jaxsparse as js
from benchmarks import architectures, hiding, overlap, workers
from tests.benchmarks import commands
from tests.quick_compilation import CHILDREN

# Tensors as in Table III; parameters of the published models.
SIZES = {
  "resnet152": (467, 60_192_808),
  "densenet201": (604, 20_013_928),
  "inception_v4": (449, 42_679_816),
  "bert_base": (206, 110_106_428),
}


benchmark = functools.partial(commands.run, "benchmarks.overlap", **CHILDREN)


@pytest.mark.parametrize("model", SIZES)
def test_the_networks_are_the_real_ones(model):
  tensors = architectures.MODELS[model]()
  assert (len(tensors), sum(tensor.entries for tensor in tensors)) == SIZES[model]
  assert sum(tensor.seconds for tensor in tensors) == pytest.approx(overlap.PAPER[model].backward, rel=0.6)


@pytest.mark.parametrize("model", SIZES)
def test_the_bound_is_the_one_of_table_v(model):
  assert overlap.bound_of(model) == pytest.approx(overlap.PAPER[model].bound, abs=0.06)


def test_rows_as_a_table_a_figure_and_json(tmp_path):
  done = benchmark("--model=bert_base", "--plan=single,wfbp,mg_wfbp,asc_wfbp", f"--report_dir={tmp_path}", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  rows = {row["plan"]: row for row in json.loads(done.stdout)}
  assert rows["wfbp"]["groups"] == 206
  assert rows["asc_wfbp"]["seconds"] <= rows["mg_wfbp"]["seconds"] <= rows["wfbp"]["seconds"]
  assert rows["asc_wfbp"]["measured"] == 0.924
  one = overlap.PAPER["bert_base"]
  computing = one.forward + one.backward
  assert rows["single"]["seconds"] == pytest.approx(computing + 1.4e-3 + 1.7e-9 * 4 * 110_106_428)
  assert rows["single"]["speed_up"] == pytest.approx(32 * computing / rows["single"]["seconds"])
  assert (tmp_path / "overlap_bert_base.png").stat().st_size > 10_000
  assert "S_max" in done.stderr


BAD_FLAGS = [
  (["--model=vgg16"], "--model=vgg16, choose from resnet152, densenet201, inception_v4, bert_base"),
  (["--plan="], "--plan=, choose from single, wfbp, mg_wfbp, theorem_1, asc_wfbp, optimal"),
  (["--rate=1gbit", "--workers=1"], "--workers=1, choose at least 2"),
  (["--model=bert_base", "--gamma=0.5"], "gamma=0.5, choose a number from 1"),
]


def test_bad_flags(subtests):
  commands.check_refusals("benchmarks.overlap", BAD_FLAGS, subtests)


def test_a_lab_on_one_device_measures_what_it_plans():
  """All of the lab's measuring but for the network and SparDL, with simulated workers."""
  simulated = js.SimComm("workers", members=2)
  lab = hiding.Lab(workers.Workers(simulated, simulated, 2, 2, 0), "none", 2, 8, 16, 0.1, 1)
  rows = {row.name: row for row in lab.rows(["mg_wfbp", "wfbp"])}
  assert list(rows) == ["xla default", "no communication", "mg_wfbp, dense", "wfbp, dense"]
  assert rows["wfbp, dense"].groups == lab.setting.tensors == 4
  assert rows["wfbp, dense"].predicted >= rows["mg_wfbp, dense"].predicted > rows["no communication"].seconds > 0


def test_a_plan_that_leads_elsewhere_is_no_row():
  with pytest.raises(RuntimeError, match="parameters of a plan are 1.0e\\+00 from those of a plain all-reduce"):
    hiding._check_same([jnp.zeros(2)], [jnp.ones(2)])
