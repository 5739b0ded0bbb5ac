"""MaxText: its own training loop on a toy configuration, as it is and after the diff of docs/how_to/trainers.md."""

import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs_test import ROOT, blocks
from tests.trainers.diffs import files_changed, lines_changed

pytest.importorskip("maxtext")
PACKAGES = pathlib.Path(
  importlib.util.find_spec("maxtext").submodule_search_locations[0]
).parent
(DIFF,) = [
  diff for diff in blocks("docs/how_to/trainers.md", "diff") if "vanilla_diloco" in diff
]
SIGNS = 'js.onebit_transform("diloco")'
# Two replicas of two devices each, which exchange after every three steps.
FLAGS = (
  "dataset_type=synthetic steps=13 learning_rate=0.01 warmup_steps_fraction=0.0 "
  "skip_jax_distributed_system=true enable_checkpointing=false enable_goodput_recording=false attention=dot_product "
  "run_name=toy enable_diloco=true diloco_sync_period=3 ici_diloco_parallelism=2 "
  "ici_fsdp_parallelism=2 base_emb_dim=32 base_mlp_dim=64 base_num_decoder_layers=1 "
  "base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 vocab_size=128 "
  "max_target_length=16 per_device_batch_size=1"
)
PROGRAM = """
import sys
import jax, jax.numpy as jnp
import jaxsparse as js
from maxtext.trainers.pre_train import train

state = train.train_loop(*train.initialize(sys.argv))
print("params", *jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(state.params)]))
if "js" in vars(sys.modules["maxtext.trainers.diloco.diloco"]):
  print("words", int(js.metrics(state.outer_opt_state).words_sent))
"""


def trained(folder, diff=""):
  """(parameters, words that a replica sends in an exchange) after the loop of MaxText."""
  shutil.copytree(PACKAGES / "maxtext", folder / "maxtext", copy_function=os.symlink)
  for path, code in files_changed(PACKAGES, diff).items():
    (folder / path).unlink()
    (folder / path).write_text(code)
  (folder / "program.py").write_text(PROGRAM)
  given = [
    str(PACKAGES / "maxtext/configs/base.yml"),
    *FLAGS.split(),
    f"base_output_directory={folder}/out",
  ]
  own = {
    "PYTHONPATH": f"{folder}:{ROOT}",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 --xla_dump_to={folder}/programs --xla_dump_hlo_as_text",
  }
  done = subprocess.run(
    [sys.executable, "program.py", *given],
    env=os.environ | own,
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=280,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  found = {
    line.split()[0]: line.split()[1:]
    for line in done.stdout.splitlines()
    if line.startswith(("params", "words"))
  }
  return [float(entry) for entry in found["params"]], *map(int, found.get("words", []))


def sent_between_replicas(folder):
  """{operation: largest number of entries} of the messages of the compiled step between devices 0 and 2 or 1 and 3."""
  program = min((folder / "programs").glob("*train_step.after_optimizations.txt"))
  largest = {}
  for line in program.read_text().splitlines():
    found = re.search(
      r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
      line,
    )
    if found and re.search(r"(groups|pairs)=(\{\{0,2\}|mesh\S* \{[^}]*'diloco')", line):
      sizes = [
        math.prod(map(int, filter(None, one.split(","))))
        for one in re.findall(r"\[([\d,]*)\]", found[1])
      ]
      largest[found[2]] = max(largest.get(found[2], 0), *sizes)
  return largest


def test_dense_is_theirs_and_signs_have_fewer_words(tmp_path):
  assert lines_changed(DIFF) == (6, 6)
  (theirs,) = trained(tmp_path / "theirs")
  dense, words = trained(
    tmp_path / "dense", DIFF.replace(SIGNS, 'js.dense_transform("diloco")')
  )
  assert dense == pytest.approx(theirs, rel=1e-4, abs=1e-5)
  assert words == len(theirs)  # 2 (P − 1) / P of them
  signs, words = trained(tmp_path / "signs", DIFF)
  assert 0 < words < len(theirs) / 15  # 8,240 entries of a device, padded
  assert sent_between_replicas(tmp_path / "signs") == {
    "all-reduce": 1,
    "collective-permute": words / 4,
  }
  assert signs != pytest.approx(theirs, rel=1e-4, abs=1e-5)
