"""The papers' numbers: every cell names a benchmark that exists, and verdicts follow from the numbers."""

import importlib.util

import pytest

from benchmarks import papers

CELL = papers.Cell("paper", "Table 1", "one", "seconds", "GPUs", "train", 2.0, False, 2.1, "CPUs", False, "")


@pytest.mark.parametrize(
  ("changes", "verdict"),
  [
    ({}, "reproduced"),
    ({"ours": 3.0}, "other setting"),
    ({"ours": 3.0, "differs": ""}, "contradicted"),
    ({"ours": None}, "not run"),
    ({"paper_value": None}, "not run"),
    ({"ratio": True, "ours": 1.8}, "reproduced"),  # a gain of 0.8 beside one of 1
    ({"ratio": True, "ours": 1.6}, "other setting"),
    ({"ratio": True, "ours": 1.05}, "contradicted"),
    ({"ratio": True, "paper_value": 0.5, "ours": 1.2}, "contradicted"),
    ({"above": True, "paper_value": 1.0, "ours": 1.2}, "reproduced"),
    ({"above": True, "paper_value": 1.0, "ours": 1.03, "noise": 0.05}, "undecided"),
    ({"noise": 0.1}, "undecided"),
    ({"ratio": True, "ours": 1.05, "noise": 0.9}, "undecided"),  # contradicted to other setting, by way of reproduced
    ({"fitted": True}, "calibrated"),
    ({"repeats": "Table 2", "differs": "", "ours": 3.0}, "repeated"),
    ({"repeats": "Table 2", "ours": None}, "not run"),
  ],
)
def test_verdicts(changes, verdict):
  assert CELL._replace(**changes).verdict == verdict


def test_every_cell_names_a_benchmark_and_is_named_once():
  cells = papers.every()
  names = [(cell.paper, cell.table, cell.name) for cell in cells]
  assert len(set(names)) == len(names)
  assert all(importlib.util.find_spec(f"benchmarks.{cell.benchmark}") for cell in cells)
  assert {cell.paper for cell in cells} == {"SparDL", "Ok-Topk", "A2SGD", "ASC-WFBP", "Partial Reduce"}
  assert not any(cell.ratio and cell.paper_value == 1 and not cell.above for cell in cells)
  tables = {(cell.paper, cell.table) for cell in cells}
  assert all((cell.paper, cell.repeats) in tables for cell in cells if cell.repeats)


def test_numbers_of_this_run_stand_in_for_kept_ones():
  numbers, _ = papers.beside([CELL, CELL._replace(name="two", ours=None)], {"two": 5.0}).renderables
  assert list(numbers.columns[3].cells) == ["2.1", "5*"]
  assert list(numbers.columns[4].cells) == ["reproduced", "other setting"]
