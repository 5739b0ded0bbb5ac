"""Two all-reduces at once beside one alone, by message size: Figures 4 and 5 of the ASC-WFBP paper.

Predicted by the paper's model: α + β m seconds for one of m bytes, α + γ β m for each
of two at once, γ constant. Or measured: all-reduces of MPI that do not block, on hosts
of the network lab. γ(m) follows from the seconds t₁ of one and t₂ of two, each without
the start-up α, which is that of the shortest message:

    γ(m) = (t₂(m) − α) / (t₁(m) − α)        1: no contention; 2: two at once are as slow as one after the other

A link that one all-reduce leaves half empty has γ near 1; one that it fills has γ = 2,
whatever the schedule.
"""

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.overlap.iterations import LINK
from jaxsparse.overlap import Link

# bytes; the paper's are 8 kB to 4 MB
SIZES = [
  2**13,
  2**15,
  2**17,
  2**19,
  2**20,
  2**21,
  2**22,
  2**23,
]
_SHORTEST = 64  # bytes, for α


class Point(NamedTuple):
  """All-reduces of `size` bytes: seconds of one alone, and of two at once."""

  size: int
  one: float
  two: float


class Curve(NamedTuple):
  """All-reduces of every size on one network of P workers."""

  name: str  # of the network
  workers: int  # P
  speed: float | None  # of a link, bytes a second; None where it has no limit
  start_up: float  # α, seconds
  points: list[Point]  # by size

  def gamma(self, point: Point) -> float:
    """γ at that size."""
    return (point.two - self.start_up) / max(point.one - self.start_up, 1e-9)

  def share(self, sent: float, seconds: float) -> float | None:
    """Fraction of the link that all-reduces of `sent` bytes in total take: each byte crosses it 2 (P − 1)/P times."""
    return (
      None
      if self.speed is None
      else 2 * (self.workers - 1) / self.workers * sent / seconds / self.speed
    )


def predicted(link: Link, workers: int) -> Curve:
  """The paper's model."""
  points = [
    Point(size, link.seconds(size), link.alpha + link.gamma * link.beta * size)
    for size in SIZES
  ]
  return Curve("the paper's model", workers, LINK, link.alpha, points)


def full_from(link: Link, workers: int) -> float:
  """Bytes of a message from which two at once fill the link in the paper's model; inf if they never do."""
  # to fill the link, less that of the model
  of_a_byte = 4 * (workers - 1) / workers / LINK - link.gamma * link.beta
  return link.alpha / of_a_byte if of_a_byte > 0 else np.inf


def measured(comm: Any, name: str, speed: float | None, repetitions: int) -> Curve:
  """Measures on the ranks of an mpi4py communicator; every rank must call, and all get the same numbers."""
  rng = np.random.default_rng(comm.Get_rank())
  seconds = lambda size, count: _seconds(
    comm, rng.normal(size=(count, size // 4)).astype(np.float32), repetitions
  )
  points = [Point(size, seconds(size, 1), seconds(size, 2)) for size in SIZES]
  return Curve(name, comm.Get_size(), speed, seconds(_SHORTEST, 1), points)


def _seconds(comm: Any, rows: np.ndarray, repetitions: int) -> float:
  """Median seconds of the slowest rank until all rows, started at once, are summed over the ranks, and checked."""
  from mpi4py import MPI  # needs an MPI, which only the ranks of a lab have for certain

  expected, times = comm.allreduce(rows.astype(np.float64)), []
  for _ in range(repetitions + 1):
    sums = np.empty_like(rows)
    comm.Barrier()
    start = time.perf_counter()
    MPI.Request.Waitall(
      [comm.Iallreduce(row, total) for row, total in zip(rows, sums, strict=True)]
    )
    times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    if not np.allclose(sums, expected, atol=1e-4):
      raise RuntimeError(
        f"all-reduces of {rows.nbytes} bytes differ from the sum of all ranks"
      )
  return statistics.median(times[1:])


def cells(curve: Curve) -> dict[str, float]:
  """The paper's cells that a measured curve gives, by their names."""
  return {
    "γ, 4 MB": curve.gamma(next(point for point in curve.points if point.size == 2**22))
  }
