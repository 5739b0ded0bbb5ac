"""The papers' numbers: every cell names a benchmark that exists, and verdicts follow from the numbers."""

import importlib.util
import re

import pytest

from benchmarks import papers

CELL = papers.Cell(
  "paper", "Table 1", "one", "seconds", "GPUs", "train", 2.0, "", 2.1, "CPUs"
)


@pytest.mark.parametrize(
  ("changes", "verdict"),
  [
    ({}, "reproduced"),
    ({"ours": 3.0}, "other setting"),
    ({"ours": 3.0, "differs": ""}, "contradicted"),
    ({"ours": None}, "not run"),
    ({"paper_value": None}, "not run"),
    ({"draw": 1, "ours": 1.8}, "reproduced"),  # a gain of 0.8 beside one of 1
    ({"draw": 1, "ours": 1.6}, "other setting"),
    ({"draw": 1, "ours": 1.05}, "contradicted"),
    ({"draw": 1, "paper_value": 0.5, "ours": 1.2}, "contradicted"),
    ({"bound": ">", "paper_value": 1.0, "ours": 1.2}, "reproduced"),
    ({"bound": ">", "paper_value": 1.0, "ours": 1.03, "noise": 0.05}, "undecided"),
    (
      {"bound": ">", "draw": 1, "paper_value": 1.2, "ours": 1.1},
      "other setting",
    ),  # half of the gain, in ours
    ({"bound": ">", "draw": 1, "paper_value": 1.0, "ours": 0.9}, "contradicted"),
    ({"bound": "<", "ours": 0.5}, "reproduced"),
    ({"bound": "<"}, "other setting"),
    ({"draw": 2, "paper_value": 1.5, "ours": 2.05}, "contradicted"),
    ({"noise": 0.1}, "undecided"),
    (
      {"draw": 1, "ours": 1.05, "noise": 0.9},
      "undecided",
    ),  # contradicted to other setting, by way of reproduced
    ({"fitted": True}, "calibrated"),
    ({"repeats": "Table 2", "differs": "", "ours": 3.0}, "repeated"),
    ({"repeats": "Table 2", "ours": None}, "not run"),
    ({"control": 1.04, "noise": 0.05}, "the task does not tell"),
    ({"control": 1.2, "noise": 0.01}, "reproduced"),
    ({"kind": "formula"}, "formula"),
    ({"kind": "formula", "differs": "", "ours": 3.0}, "contradicted"),
    ({"kind": "drawing", "paper_value": None, "ours": None}, "drawing"),
  ],
)
def test_verdicts(changes, verdict):
  assert CELL._replace(**changes).verdict == verdict


def test_every_cell_names_a_benchmark_and_is_named_once():
  cells = papers.every()
  names = [(cell.paper, cell.table, cell.name) for cell in cells]
  assert len(set(names)) == len(names)
  assert all(cell.benchmark for cell in cells if cell.ours is not None)
  assert all(
    importlib.util.find_spec(f"benchmarks.{name}")
    for name in {cell.benchmark for cell in cells} - {""}
  )
  assert not any(
    cell.paper_value == cell.draw and not cell.bound for cell in cells if cell.draw
  )
  tables = {(cell.paper, cell.table) for cell in cells}
  assert all((cell.paper, cell.repeats) in tables for cell in cells if cell.repeats)


def test_every_table_and_figure_of_the_papers_has_an_entry():
  found: dict[str, set[str]] = {}
  for cell in papers.every():
    found.setdefault(cell.paper, set()).add(
      re.match(r"(Table|Figure) \w+", cell.table)[0]
    )
  assert found == {paper: set(names) for paper, names in papers.contents().items()}


def test_numbers_of_this_run_stand_in_for_kept_ones():
  numbers, _ = papers.beside(
    [CELL, CELL._replace(name="two", ours=None)], {"two": 5.0}
  ).renderables
  assert list(numbers.columns[3].cells) == ["2.1", "5*"]
  assert list(numbers.columns[4].cells) == ["reproduced", "other setting"]
