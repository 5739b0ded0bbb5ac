"""Runs notebooks and saves them with their outputs: `python -m tests.notebooks colabs/*.ipynb`."""

import pathlib
import sys
import tempfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
METADATA = {
  "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
  "language_info": {"name": "python"},
}


def executed(path: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook after a run from top to bottom in a fresh kernel and an empty folder, without times and versions."""
  notebook = nbformat.read(path, as_version=4)
  with tempfile.TemporaryDirectory() as folder:
    where = {"metadata": {"path": folder}}
    nbclient.NotebookClient(
      notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=where
    ).execute()
  notebook.metadata = nbformat.from_dict(METADATA)
  return notebook


if __name__ == "__main__":
  for name in sys.argv[1:]:
    nbformat.write(executed(pathlib.Path(name)), name)
