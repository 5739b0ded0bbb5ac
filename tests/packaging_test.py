"""What a user gets: the wheel outside the tree."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, **kwargs):
  done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **kwargs)
  assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
  return done.stdout


@pytest.mark.long
def test_the_wheel_works_outside_the_tree(tmp_path):
  run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
  (wheel,) = tmp_path.glob("*.whl")
  site = tmp_path / "site"
  run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
  assert (site / "jaxsparse" / "py.typed").exists()
  assert not (site / "benchmarks").exists()
  program = "import jaxsparse as js, numpy as np; print(js.__file__, js.simulate('spardl', np.ones((3, 6)), k=6).total)"
  out = run(sys.executable, "-c", program, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)})
  assert out.startswith(str(site))
  assert "[3. 3. 3. 3. 3. 3.]" in out
