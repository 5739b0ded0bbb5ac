"""The table of costs as a user prints it, and how benchmarks read the names of algorithms."""

import functools
import json

from benchmarks import specs
from tests.benchmarks import commands

costs = functools.partial(commands.run, "benchmarks.costs")


def test_counts_beside_formulas():
  done = costs("--workers=6,14", "--n=100000", "--json")
  assert done.returncode == 0, done.stderr[-2000:]
  rows = {(row["algorithm"], row["workers"]): row for row in json.loads(done.stdout)}
  assert rows["spardl", 6]["most"] == rows["spardl", 6]["formula"] == {"messages": 6, "words": 3340, "agreements": 0}
  assert rows["a2sgd", 14]["most"]["words"] == 2
  varying = rows["spardl:teams=7", 14]
  assert varying["least"]["words"] < varying["most"]["words"] == varying["formula"]["words"]


def test_one_algorithm_as_a_table():
  done = costs("--workers=4", "--n=1000", "--algorithm=spardl:teams=2,dense")
  assert done.returncode == 0, done.stderr[-2000:]
  assert "spardl:teams=2" in done.stdout


def test_specs():
  values = ["spardl:teams=3:k=5", "dense,dense,qsgd:levels=4"]
  both, same, text = specs.parse(values, workers=6, density=None, teams=1)
  assert both == ("spardl:teams=3:k=5", "spardl", {"density": None, "teams": 3, "k": 5})
  assert (same.label, text.config) == ("dense", {"levels": 4})
