"""The diffs of CONTRIBUTING.md apply to the package, one after the other, and what they add works."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import jaxsparse

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(jaxsparse.__file__).parent
SECTIONS = [
  "a collective",
  "a metric",
  "a selector",
  "a format of values",
  "an engine",
  "a wrapper of a collective",
  "a wrapper of an optimizer",
]
USE = """
import sys
import warnings

import jax
import jax.numpy as jnp
import optax

import jaxsparse as js
from jaxsparse.comm import SoloComm
from tests.cases import CASES, Case

assert js.__file__.startswith(sys.argv[1])
grads = jnp.array([[3.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.5]])

assert Case("ring") in CASES
assert js.simulate("ring", grads).total.tolist() == [3.0, 3.0, 0.0, 0.5]
assert js.costs.count("ring", n=7, workers=5) == js.costs.predict("ring", n=7, workers=5)
assert js.ring_transform.__name__ in js.__all__
js.make_transform("ring", "workers", special={"bias": "dense"})

assert float(js.simulate("topka", grads, k=1).metrics.threshold) == 2.5

assert Case("spardl", (("selector", "nonzero"),)) in CASES
assert float(js.simulate("spardl", grads, k=4, selector="nonzero").metrics.selected) == 2.0
assert float(js.simulate("spardl", grads, k=4, selector="exact").metrics.selected) == 4.0

assert Case("spardl", (("wire", "int8_nearest"),)) in CASES
out = js.simulate("spardl", grads, k=4, wire="int8_nearest")
assert jnp.allclose(out.total, grads.sum(0), rtol=1 / 127)
assert jnp.allclose(out.total + out.residuals.sum(0), grads.sum(0), rtol=1e-6)

comm = SoloComm(6)
tx = optax.chain(js.dense_transform(comm), optax.sgd(0.1))
params = jnp.zeros(3)
step = js.make_train_step(lambda params, batch: jnp.mean((params - batch) ** 2), tx, comm)
params, state, metrics = step(params, js.init(tx, params, comm), jnp.ones((4, 3)))
assert float(metrics.loss) > 0

from jaxsparse.transform.centering import centered

comm, params = js.SimComm("workers", members=2), jnp.zeros(4)
tx = centered(js.spardl_transform(comm, k=4))
step = js.make_train_step(lambda params, batch: jnp.vdot(params, batch[0]), tx, comm)
params, state, metrics = step(params, js.init(tx, params, comm), grads)
wanted = (grads - grads.mean(1, keepdims=True)).mean(0)
assert jnp.allclose(params, wanted), params

comm, params = js.SimComm("workers", members=4), jnp.zeros(3)
tx = js.clip_to_recent(optax.chain(js.spardl_transform(comm, k=2), optax.sgd(0.1)))
step = js.make_train_step(lambda params, batch: jnp.vdot(params, batch[0]), tx, comm)
state = js.init(tx, params, comm)
for factor, norms in ((1, [1, 2, 3, 4]), (10, [1.1, 2.2, 3.3, 4.4]), (jnp.nan, [1.1, 2.2, 3.3, 4.4])):
  batch = factor * jnp.diag(jnp.arange(1.0, 5.0))[:, :3].at[3].set(jnp.array([0.0, 0.0, 4.0]))
  params, state, metrics = step(params, state, batch)
  assert jnp.allclose(state.norm, jnp.array(norms)), state.norm
assert js.specs(state, "workers").norm == jax.sharding.PartitionSpec("workers")
with warnings.catch_warnings(record=True):
  assert jnp.allclose(js.resize(state, params, js.SimComm("workers", members=2)).norm, jnp.full(2, 2.75))
"""


def diffs():
  """The diff of each section "Adding …" by the rest of its heading."""
  sections = re.split(
    r"^## Adding (.*)\n", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE
  )[1:]
  found = {
    name: re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    for name, text in zip(*[iter(sections)] * 2, strict=True)
  }
  return {name: diff for name, (diff,) in found.items()}


@pytest.mark.long
def test_the_diffs_apply_and_what_they_add_works(tmp_path, subtests):
  shutil.copytree(
    PACKAGE, tmp_path / "jaxsparse", ignore=shutil.ignore_patterns("__pycache__")
  )
  # a repository above would take the paths
  outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
  added = diffs()
  assert list(added) == SECTIONS
  for name, diff in added.items():
    with subtests.test(name):
      apply = ["git", "apply", "--whitespace=nowarn", "-"]
      done = subprocess.run(
        apply,
        input=diff,
        cwd=tmp_path,
        env=outside,
        capture_output=True,
        text=True,
        check=False,
      )
      assert done.returncode == 0, done.stderr
  modules = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
  use = [sys.executable, "-c", USE, str(tmp_path)]
  done = subprocess.run(
    use,
    cwd=tmp_path,
    env=modules,
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
