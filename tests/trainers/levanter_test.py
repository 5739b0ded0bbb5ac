"""Levanter: its training loop as a worker of rounds, by the diffs of docs/how_to/trainers.md; two processes."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxsparse as js
from tests.docs_test import ROOT, blocks, snippets
from tests.trainers.diffs import changed, lines_changed

pytest.importorskip("levanter")
PLAIN = next(code for code in snippets("docs/how_to/trainers.md") if "levanter" in code)
DIFF, SAVING = [
  diff for diff in blocks("docs/how_to/trainers.md", "diff") if "run_hooks" in diff
]
PROGRAM = changed(PLAIN, DIFF)
ADDRESS, SIGNS = "tcp://127.0.0.1:29500", "js.onebit_transform(comm)"
NOTES = "from levanter_programs import flat\n"
SHOW = "np.save('end.npy', flat(info.state.trainable_model))\n"


def edited(code, *edits):
  for before, after in edits:
    assert code.count(before) == 1, before
    code = code.replace(before, after)
  return code


def train(folder, code, status=0, **variables):
  """What two workers printed, each in a folder of its own; one that hangs is killed, and fails the test."""
  with js.partial.Server(js.partial.Quorum(2, quorum=2, grace=100.0)) as server:
    processes = []
    for number in range(2):
      own = folder / f"{number}"
      own.mkdir(exist_ok=True)
      (own / "worker.py").write_text(
        NOTES + edited(code, (ADDRESS, server.address)) + SHOW
      )
      environment = (
        os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/trainers", "JAX_PLATFORMS": "cpu"}
        | variables
      )
      command = [sys.executable, "worker.py", str(number)]
      with (own / "log").open("w") as log:
        processes.append(
          subprocess.Popen(command, env=environment, cwd=own, stdout=log, stderr=log)
        )
    try:
      found = [process.wait(200) for process in processes]
    finally:
      for process in processes:
        process.kill()
        process.wait()
  logs = [(folder / f"{number}" / "log").read_text() for number in range(2)]
  assert found == [status] * 2, "\n".join(log[-3000:] for log in logs)
  return logs


def rounds_of(folder, number):
  """What the two workers wrote of a round; all that both gave is in its result and in their residuals (Law C)."""
  first, second = (
    dict(np.load(folder / f"{worker}" / f"round{number}.npz")) for worker in range(2)
  )
  for name in ("before", "after"):
    np.testing.assert_array_equal(first[name], second[name])
  kept = first["residual"] + second["residual"]
  total = (first["before"] - first["after"]).sum(dtype=float) + kept
  assert total == pytest.approx(
    (first["given"] + second["given"]).sum(dtype=float), rel=1e-4, abs=1e-4
  )
  return first, second


def test_parameters_are_averaged_and_other_leaves_pass_through(tmp_path):
  """A function, integers, None and a static field are in the model as well."""
  assert lines_changed(DIFF) == (10, 2)
  fields = "activation: object\n  table: jax.Array\n  nothing: None = None\n"
  fields += "  name: str = eqx.field(static=True, default='')"
  code = edited(
    PROGRAM,
    (SIGNS, "js.dense_transform(comm)"),
    ('"every": 16, "delay": 8', '"every": 4'),
    ("  out: hnn.Linear\n", f"  out: hnn.Linear\n  {fields}\n"),
    ("hax.tanh(", "self.activation("),
    ("key=keys[1]))", "key=keys[1]), hax.tanh, np.arange(3))"),
    ("num_train_steps=320", "num_train_steps=60"),
  )
  code += "found = info.model\nassert (found.activation, found.nothing, found.name) == (hax.tanh, None, '')\n"
  train(tmp_path, f"{code}np.testing.assert_array_equal(found.table, np.arange(3))\n")
  for number in range(1, 15):
    first, second = rounds_of(tmp_path, number)
    np.testing.assert_array_equal(first["own"], second["own"])
    assert (first["params"] != second["params"]).any()
    np.testing.assert_allclose(
      first["own"], (first["params"] + second["params"]) / 2, rtol=1e-5, atol=1e-6
    )


def test_signs_train_workers_of_two_devices(tmp_path):
  logs = train(tmp_path, PROGRAM, XLA_FLAGS="--xla_force_host_platform_device_count=2")
  for log in logs:
    assert float(log.rpartition("loss ")[2].split()[0]) < 0.2
  first, second = (np.load(tmp_path / f"{number}" / "end.npy") for number in range(2))
  np.testing.assert_array_equal(first, second)
  for number in range(1, 20):
    rounds_of(tmp_path, number)


def test_a_checkpoint_in_the_middle_of_a_round_goes_on(tmp_path):
  """All are killed then. Each goes on from what Levanter saved; the next round has what was moved since the last."""
  code = edited(
    changed(PROGRAM, SAVING),
    (
      "tracker=NoopConfig()",
      "tracker=NoopConfig(), checkpointer=CheckpointerConfig(keep=[{'every': 27}])",
    ),
    (
      "from levanter.tracker",
      "from levanter.checkpoint import CheckpointerConfig\nfrom levanter.tracker",
    ),
    ("num_train_steps=320", "num_train_steps=70"),
    (
      "    params = state.trainable",
      "    print('step', int(state.step), bool(goes_on))\n    params = state.trainable",
    ),
    (
      "    info = trainer",
      "    np.save('start.npy', flat(params))\n    info = trainer",
    ),
  )
  train(tmp_path, code, status=-signal.SIGKILL, DIES="1")
  (last, _) = rounds_of(tmp_path, 1)
  logs = train(tmp_path, code)
  assert all("step 28 True\n" in log for log in logs)
  found = rounds_of(tmp_path, 2)
  for number, own in enumerate(found):
    start = np.load(tmp_path / f"{number}" / "start.npy")
    np.testing.assert_array_equal(
      start, np.load(tmp_path / f"{number}" / "at_the_checkpoint.npy")
    )
    assert (start != own["before"]).all()
    np.testing.assert_array_equal(own["before"], last["after"])
    np.testing.assert_allclose(
      own["given"], (own["before"] - own["begun"]) / 2, rtol=1e-4, atol=1e-6
    )
