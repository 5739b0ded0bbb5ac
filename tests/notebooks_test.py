"""The notebooks stand alone, are short, are saved with their outputs, and run again."""

import ast
import re

import nbformat
import pytest

from tests import notebooks
from tests.structure_test import imported

EACH = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
MACHINE = re.compile(
  r"/(home|root|tmp|usr|work|opt|Users|content)/|site-packages|Warning|Traceback"
)


def outputs(notebook):
  return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def figures(notebook):
  return [
    output for output in outputs(notebook) if "image/png" in output.get("data", {})
  ]


@EACH
def test_notebooks_are_short_and_stand_alone(path):
  notebook = nbformat.read(path, as_version=4)
  first, install, *_ = notebook.cells
  assert len(notebook.cells) <= 12
  assert (
    f"colab.research.google.com/github/jaxsparse/jaxsparse/blob/main/colabs/{path.name}"
    in first.source
  )
  assert "git+https://github.com/jaxsparse/jaxsparse" in install.source
  code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
  assert all(len(source.splitlines()) <= 45 for source in code)
  plain = "\n".join(
    re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE) for source in code
  )
  names = {name.split(".")[0] for name in imported(ast.parse(plain))}
  # of the repository, which are not installed
  assert names.isdisjoint({"benchmarks", "docs", "tests"})


@EACH
def test_outputs_are_saved_and_name_no_machine(path):
  assert path.stat().st_size < 300_000
  notebook = nbformat.read(path, as_version=4)
  assert notebook.metadata == notebooks.METADATA
  assert figures(notebook)
  counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
  assert counts == [*range(1, len(counts) + 1)]  # from top to bottom, in a fresh kernel
  assert all("execution" not in cell.metadata for cell in notebook.cells)
  assert all(
    output.output_type != "error" and output.get("name") != "stderr"
    for output in outputs(notebook)
  )
  for figure in figures(notebook):
    figure.data.pop("image/png")
  assert not MACHINE.search(nbformat.writes(notebook))


@pytest.mark.long
@pytest.mark.timeout(600)
@EACH
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebooks_run(path):
  assert figures(notebooks.executed(path))
