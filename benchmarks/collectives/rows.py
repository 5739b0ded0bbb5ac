"""Rows of updates: kept as JSON lines while they are measured, and shown as lines and a table."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.table

from benchmarks import report
from benchmarks.collectives.updates import Row

SETTING = ("workers", "rate", "n", "density")  # of a row, beside its algorithm


class Kept:
  """The rows of one run of the benchmark in a file of JSON lines that later runs are appended to."""

  def __init__(self, path: pathlib.Path, run: str):
    self._path, self._run = path, run

  def add(self, line: dict[str, Any]) -> None:
    """Appends a line and waits until it is on disk."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open("a") as file:
      file.write(json.dumps({"run": self._run, **line}) + "\n")
      file.flush()
      os.fsync(file.fileno())

  def read(self) -> list[Row]:
    """The rows of this run so far."""
    lines = map(json.loads, self._path.read_text().splitlines() if self._path.exists() else [])
    return [Row(**{name: line[name] for name in Row._fields}) for line in lines if line["run"] == self._run]


def heading(predicts: bool) -> str:
  """The heading of `line`s, in the columns and terms of nccl-tests."""
  heads = f"{'ms':>9} {'mean':>9} {'p90':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>7} {'steps':>6}"
  return f"# {'algorithm':<34} {heads}{' predicted' if predicts else ''}"


def line(row: Row) -> str:
  """One row as text of fixed width, to print as soon as it is measured."""
  times = " ".join(f"{report.milliseconds(seconds):>9}" for seconds in (row.seconds, row.mean, row.p90))
  counts = " ".join(f"{width:>7.3f}" for width in row.bandwidths) + f" {_wrong(row):>7} {row.steps:>6}"
  predicted = "" if row.predicted is None else f" {report.milliseconds(row.predicted):>9}"
  return f"  {row.algorithm:<34} {times} {counts}{predicted}"


def _wrong(row: Row) -> str:
  return f"{row.wrong:,}" if row.checked else "–"


def table(rows: Sequence[Row]) -> rich.table.Table:
  """All rows: what was measured, on what, how often, and how it compares with dense of the same setting."""
  several = [name for name in SETTING if len({getattr(row, name) for row in rows}) > 1]
  predicts = any(row.predicted is not None for row in rows)
  lines = []
  for row in rows:
    own = [f"{value:,}" if isinstance(value, int) else str(value) for value in (getattr(row, name) for name in several)]
    gains = [report.ratio(_dense(row, rows, dense), row.seconds) for dense in ("dense", "dense:dtype=bfloat16")]
    bandwidths = [f"{width:.3f}" for width in row.bandwidths]
    times = map(report.milliseconds, (row.seconds, row.mean, row.p90))
    parts = [f"{100 * part / row.seconds:.0f} %" for part in (row.selection, row.wire, row.merge)]
    counts = _wrong(row), f"{row.words:,.0f}"
    predicted = [report.milliseconds(row.predicted)] * predicts
    lines.append([row.algorithm, *own, *times, *predicted, str(row.steps), *gains, *bandwidths, *counts, *parts])
  heads = ["algorithm", *several, "ms", "mean", "p90", *["predicted"] * predicts, "steps", "× f32", "× bf16"]
  heads += ["algbw", "busbw", "#wrong", "words", "select", "wire", "merge"]
  caption = "ms: median; mean and p90 likewise over the steps, of the slowest rank; algbw, busbw: GB/s as in nccl-tests"
  return report.table(f"one update of all ranks, {_setting(rows, several)}", heads, lines, caption=caption)


def _dense(row: Row, rows: Sequence[Row], label: str) -> float | None:
  """The seconds of dense in the same setting."""
  setting = lambda row: [getattr(row, name) for name in SETTING]
  return next((one.seconds for one in rows if one.algorithm == label and setting(one) == setting(row)), None)


def _setting(rows: Sequence[Row], besides: Sequence[str]) -> str:
  """The setting that all rows have in common."""
  same = [f"{name} {getattr(rows[0], name):,}" for name in ("workers", "n") if name not in besides]
  same += [f"density {rows[0].density:g}"] if "density" not in besides else []
  same += [f"{rows[0].rate} links"] if rows[0].rate and "rate" not in besides else []
  pinned = ", a core a rank" if rows[0].pinned else ""
  return f"engine {rows[0].engine}, {', '.join(same)}, {rows[0].gradients} gradients{pinned}"
