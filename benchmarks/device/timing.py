"""Times compiled programs on one device: blocked calls, calls in a queue, and what a profiler sees of one."""

import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

_WARM_UP = (
  3  # calls before those that count; an update has an empty residual in its first
)
_LONG = (
  2.0  # seconds of blocked calls, after which fewer than the repetitions have to do
)
_QUEUED = 2**29  # entries of the inputs of all queued calls together, at most


class Times(NamedTuple):
  """Seconds of a call."""

  seconds: float  # median of calls of which each is waited for
  p90: float  # their 90th percentile
  calls: int  # their number
  # of a call among `in_queue` that are waited for together, so that the host prepares
  # the next meanwhile
  queued: float
  in_queue: int


def times_of(
  program: Callable[[Any, Any], tuple[Any, Any]],
  fresh: Callable[[int], Any],
  state: Any,
  repetitions: int,
) -> tuple[Times, Any, Any]:
  """Times `result, state = program(x, state)`, which may donate both arguments.

  Args:
    program: a compiled program.
    fresh: gives the x of a call, an array, by the number of the call.
    state: before the first call.
    repetitions: the most blocked calls.

  Returns:
    The times, the last result and the last state.
  """
  blocked: list[float] = []
  result: Any = None
  while len(blocked) < _WARM_UP + repetitions and sum(blocked[_WARM_UP:]) < _LONG:
    x = jax.block_until_ready(fresh(len(blocked)))
    start = time.perf_counter()
    result, state = jax.block_until_ready(program(x, state))
    blocked.append(time.perf_counter() - start)
  in_queue = max(1, min(8, _QUEUED // max(1, x.size)))
  inputs = jax.block_until_ready([fresh(number) for number in range(in_queue)])
  start = time.perf_counter()
  for x in inputs:
    result, state = program(x, state)
  jax.block_until_ready((result, state))
  queued = (time.perf_counter() - start) / in_queue
  counted = blocked[_WARM_UP:]
  p90 = float(np.quantile(counted, 0.9))
  return (
    Times(statistics.median(counted), p90, len(counted), queued, in_queue),
    result,
    state,
  )


def peak_so_far() -> int | None:
  """The most bytes that arrays took on the device since the process began; None where the backend does not count."""
  stats = jax.devices()[0].memory_stats()
  return stats.get("peak_bytes_in_use") if stats else None


class Launches(NamedTuple):
  """What the streams of a GPU ran in one call."""

  kernels: int
  copies: int  # of memory, and fills
  busy: float  # seconds of both together


def launches_of(call: Callable[[], Any]) -> Launches | None:
  """Profiles one call; None where the profiler has no stream of a GPU."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(call())
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    lines = [
      line
      for plane in planes
      if plane.name.startswith("/device:GPU")
      for line in plane.lines
    ]
    events = [
      event for line in lines if line.name.startswith("Stream") for event in line.events
    ]
    names = [event.name.lower() for event in events]
    nanoseconds = math.fsum(event.duration_ns for event in events)
  copies = sum(name.startswith(("memcpy", "memset")) for name in names)
  return Launches(len(names) - copies, copies, 1e-9 * nanoseconds) if names else None
