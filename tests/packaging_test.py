"""What a user gets: the wheel outside the tree, the notebook from top to bottom, and a README that is true."""

import os
import pathlib
import subprocess
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


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


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebooks_run(path):
  notebook = nbformat.read(path, as_version=4)
  assert len(notebook.cells) <= 10
  assert "colab.research.google.com" in notebook.cells[0].source
  assert all(not cell.get("outputs") for cell in notebook.cells)
  nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(path.parent)}}).execute()
  assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_there_is_a_notebook():
  assert NOTEBOOKS
