"""What is told of a compiled program, and its goals."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import report
from benchmarks.compiled import hlo


class Row(NamedTuple):
  """A compiled program, on one device; an array is one of the n float32 that the device holds."""

  program: str
  seconds: float  # of lowering and compilation
  kernels: int  # outside of branches and loops
  in_branches: int
  in_loops: int
  arrays: float  # moved by kernels
  temp: float  # bytes a parameter of temporary memory
  peak: float  # bytes a parameter of arguments, results and temporaries
  sorts: int
  copies: int  # of three quarters of an array or more
  waits: int  # of the host for the device
  exchanges: list[hlo.Exchange]  # between workers; `covered` in arrays

  @property
  def cells(self) -> list[str]:
    """The row of a table."""
    asynchronous = [one.covered for one in self.exchanges if one.is_asynchronous]
    counts = self.kernels, self.in_branches, self.in_loops
    memory = f"{self.arrays:.1f}", f"{self.temp:.2f}", f"{self.peak:.2f}"
    last = self.sorts, self.copies, self.waits, len(self.exchanges), len(asynchronous)
    return [
      self.program,
      f"{self.seconds:.1f}",
      *map(str, counts),
      *memory,
      *map(str, last),
      f"{sum(asynchronous):.1f}",
    ]


HEADS = (
  *(
    "program",
    "compile s",
    "kernels",
    "in branches",
    "in loops",
    "arrays",
    "temp",
    "peak",
  ),
  *("sorts", "copies", "waits", "exchanges", "async", "covered"),
)


_SECONDS, _TEMP, _STEP_SECONDS, _MORE_MEMORY = (
  {"cuda": 10, "tpu": 60},
  {"cuda": 1.4, "tpu": 2.0},
  120,
  4.4,
)
_KERNELS_AND_ARRAYS = {
  "spardl": (70, 12),
  "spardl:selector=chunked": (40, 8),
  "onebit": (25, 6),
}


def goals(
  platform: str, updates: Sequence[Row], steps: Sequence[Row]
) -> list[report.Goal]:
  """The goals of the rows that were compiled."""
  found = list[report.Goal]()
  most = lambda what, value, limit: found.append(
    report.goal(f"{what} ≤ {limit}", value, most=limit)
  )
  if updates:
    most(
      "compile seconds of an update",
      max(row.seconds for row in updates),
      _SECONDS[platform],
    )
    most(
      "temporary bytes a parameter of an update",
      max(row.temp for row in updates),
      _TEMP[platform],
    )
  for row in updates if platform == "cuda" else ():
    if limits := _KERNELS_AND_ARRAYS.get(row.program):
      most(f"{row.program}: kernels", row.kernels, limits[0])
      most(f"{row.program}: arrays moved", row.arrays, limits[1])
  dense = next((row.peak for row in steps if row.program == "dense"), None)
  for row in steps:
    most(f"step, {row.program}: compile seconds", row.seconds, _STEP_SECONDS)
    if row.exchanges and dense:
      most(
        f"step, {row.program}: bytes a parameter above dense",
        row.peak - dense,
        _MORE_MEMORY,
      )
      most(
        f"step, {row.program}: synchronous exchanges",
        sum(not one.is_asynchronous for one in row.exchanges),
        0,
      )
  return found
