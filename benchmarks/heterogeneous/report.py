"""Tables of `benchmarks.heterogeneous`, the paper's cells that it measures, and its goal."""

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.heterogeneous.virtual import Environment, Row, rho, theorem_1
from jaxsparse.partial.net.messages import WorkerGroup

PARTS = {
  "levels": "heterogeneity levels",
  "sweep": "Figure 8",
  "tail": "Figure 9",
  "scale": "Figure 11",
  "decay": "α of dynamic weights",
  "links": "slow links",
}
_SCALED = 32  # workers of Figure 11
_FIGURE_8 = {
  "seconds to the accuracy, P = 8 / P = 3": "constant:3",
  "seconds to the accuracy, P = 8 / P = 5": "constant:5",
}
_TABLE_1 = {
  "all-reduce": "allreduce",
  "AD-PSGD": "adpsgd",
  "PS BSP": "bsp",
  "PS ASP": "asp",
  "PS HETE": "hete",
  "PS, 3 backup workers": "backup",
  "constant, P = 3": "constant:3",
  "constant, P = 5": "constant:5",
  "dynamic, P = 5": "dynamic:5",
}


def table(rows: Sequence[Row], title: str) -> rich.table.Table:
  """The rows of one environment."""
  settings, runs = rows[0].settings, rows[0].runs
  base = next((one.seconds for one in rows if one.label == "allreduce"), None)
  folds = f", {settings.folds} folds" * (settings.folds > 1)
  lines = []
  for one in rows:
    missed = (
      f"N/A ({one.reached} of {one.runs} reach it)",
      "–",
      f"{one.per_update:.3f}",
      "–",
    )
    own = (
      f"{one.seconds or 0:.0f} ± {one.deviation:.0f}",
      f"{one.updates:,.0f}",
      missed[2],
      f"{one.gradients:,.0f}",
    )
    seconds, *more = missed if one.seconds is None else own
    lines.append(
      [
        one.label,
        seconds,
        report.ratio(base, one.seconds),
        *more,
        report.number(one.rho, ".3f"),
        report.number(theorem_1(one), ".2f"),
      ]
    )
  heads = (
    "method",
    "run time",
    "× all-reduce",
    "updates",
    "per update",
    "gradients",
    "ρ",
    "Theorem 1",
  )
  text = f"{title}: {rows[0].environment}, seconds of virtual time to {settings.target:g}, {runs} runs{folds}"
  return report.table(text, heads, lines)


def group_by_environment(rows: Iterable[Row]) -> list[list[Row]]:
  """The rows of each environment, few workers first."""
  groups: dict[Environment, list[Row]] = {}
  for one in rows:
    groups.setdefault(one.environment, []).append(one)
  return [groups[environment] for environment in sorted(groups)]


def speed_ups(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
  """Seconds of one worker / those of N, by method and N; without rows of one worker there are none."""
  rows = sorted(
    (one for one in rows if one.part == "scale"),
    key=lambda one: one.environment.workers,
  )
  alone = next((one.seconds for one in rows if one.environment.workers == 1), None)
  found: dict[str, dict[int, float]] = {}
  for one in rows:
    if alone and one.seconds and one.environment.workers > 1:
      found.setdefault(one.label, {1: 1.0})[one.environment.workers] = (
        alone / one.seconds
      )
  return found


def scale_table(found: Mapping[str, Mapping[int, float]]) -> rich.table.Table:
  """Speed-ups over one worker, Figure 11."""
  sizes = sorted({workers for points in found.values() for workers in points})
  lines = [
    [label, *(report.number(points.get(size), ".2f") for size in sizes)]
    for label, points in found.items()
  ]
  title = "speed-up over one worker, in seconds of virtual time to the target"
  return report.table(title, ["method", *(f"N = {size}" for size in sizes)], lines)


class Ratio(NamedTuple):
  """A cell of the paper as these rows measure it."""

  ratio: float
  noise: float  # standard error of the ratio, a fraction of it
  # seconds of workers that exchange nothing / those of the fastest method; inf if they
  # do not reach the target
  control: float | None


def _ratio(above: Row | None, below: Row | None, control: float | None) -> Ratio | None:
  """Seconds to the target of one method / those of another; None where one lacks them."""
  if not above or not below or not above.seconds or not below.seconds:
    return None
  errors = (
    one.deviation / (one.seconds or math.inf) / math.sqrt(one.runs)
    for one in (above, below)
  )
  return Ratio(above.seconds / below.seconds, math.hypot(*errors), control)


def _control(rows: Iterable[Row]) -> float | None:
  """Seconds without an exchange / those of the fastest method of one environment; None if that was not measured."""
  seconds = {one.label: one.seconds or math.inf for one in rows}
  alone = seconds.pop("alone", None)
  return None if alone is None else alone / min(seconds.values())


def paper_cells(rows: Sequence[Row]) -> dict[str, Ratio]:
  """The paper's cells that these rows measure, by their names."""
  found: dict[str, Ratio | None] = {}
  sweep = {one.label: one for one in rows if one.part == "sweep"}
  for own in group_by_environment(one for one in rows if one.part == "levels"):
    where = own[0].environment
    if where.occupancy == 1:
      found |= _cells_of_a_level(own)
    if where == Environment(8):
      found |= _cells_of_sizes(sweep, _control(own))
  for own in group_by_environment(one for one in rows if one.part == "tail"):
    found |= _cells_of_a_tail(own)
  ours = {
    (one.label, one.environment.workers): one for one in rows if one.part == "scale"
  }
  control = _control(one for (_, workers), one in ours.items() if workers == _SCALED)
  for name, label in (("all-reduce", "allreduce"), ("backup workers", "backup")):
    other, partial = ours.get((label, _SCALED)), ours.get(("constant:4", _SCALED))
    found[f"P = 4 / {name}"] = _ratio(other, partial, control)
  return {name: ratio for name, ratio in found.items() if ratio}


def _cells_of_a_level(own: Sequence[Row]) -> dict[str, Ratio | None]:
  """Table 1 at one level."""
  level, control = own[0].environment.level, _control(own)
  ours = {one.label: one for one in own}
  dynamic = ours.get("dynamic:3")
  found: dict[str, Ratio | None] = {}
  for name, label in _TABLE_1.items():
    method = ours.get(label)
    times = _ratio(method, dynamic, control)
    found[f"{name}, HL = {level}"] = times
    if method and dynamic and times:
      updates = times._replace(ratio=method.updates / dynamic.updates)
      found[f"updates, {name}, HL = {level}"] = updates
  dense, eager = ours.get("allreduce"), ours.get("eager")
  if dense and dynamic:
    per_update = dense.per_update / dynamic.per_update
    name = f"all-reduce / dynamic, P = 3, HL = {level}"
    found[name] = Ratio(per_update, 0.0, control)
  if eager:
    reached = eager.reached / eager.runs
    found[f"Eager-Reduce, HL = {level}"] = Ratio(reached, 0.0, control)
  found[f"P = 5, HL = {level}"] = _ratio(
    ours.get("backup"), ours.get("dynamic:5"), control
  )
  return found


def _cells_of_sizes(
  sweep: Mapping[str, Row], control: float | None
) -> dict[str, Ratio | None]:
  """Figure 8, of all 8 workers in a group beside fewer."""
  largest, few = sweep.get("constant:8"), sweep.get("constant:2")
  found = {
    name: _ratio(largest, sweep.get(label), control)
    for name, label in _FIGURE_8.items()
  }
  if few and largest and (times := _ratio(few, largest, control)):
    updates, seconds = few.updates / largest.updates, largest.per_update
    found["updates, P = 2 / P = 8"] = times._replace(ratio=updates)
    found["seconds an update, P = 8 / P = 2"] = times._replace(
      ratio=seconds / few.per_update, noise=0.0
    )
  return found


def _cells_of_a_tail(own: Sequence[Row]) -> dict[str, Ratio | None]:
  """Figure 9 with one distribution of step times."""
  where = f"jitter {own[0].environment.jitter:g}"
  ours = {one.label: one for one in own}
  dense, dynamic = ours.get("allreduce"), ours.get("dynamic:4")
  times = _ratio(dense, dynamic, _control(own))
  found = {f"run time, {where}": times}
  if dense and dynamic and times:
    per_update = dense.per_update / dynamic.per_update
    found[f"seconds an update, {where}"] = times._replace(ratio=per_update, noise=0.0)
  return found


def figure_4(groups: int = 1200) -> dict[str, float]:
  """ρ in both environments of Figure 4, N = 3 and P = 2: steps take as long as the figure says, to the same instant.

  Of workers that are ready at the same instant the one comes first that began first,
  and of a group the one that signalled first begins first. Other orders give up to 0.75.
  """
  environments = {"homogeneous": (1, 1, 1), "one twice as slow": (1, 1, 2)}
  return {
    what: rho(_fixed_groups(seconds, groups), 3)
    for what, seconds in environments.items()
  }


def _fixed_groups(seconds: Sequence[int], count: int) -> list[WorkerGroup]:
  """Groups of two that the library's controller forms of workers whose steps take so long."""
  workers = len(seconds)
  # so long a history that the group filter has nothing to do
  controller = js.partial.Controller(workers, 2, "constant", history=10 * count)
  iterations, found = [0] * workers, list[WorkerGroup]()
  signalled: dict[int, None] = {}  # workers without a group, in order
  # when a worker is ready, and in which order workers began
  scheduled = [(took, worker, worker) for worker, took in enumerate(seconds)]
  begun = itertools.count(workers)
  heapq.heapify(scheduled)
  while len(found) < count:
    now, _, worker = heapq.heappop(scheduled)
    iterations[worker] += 1
    signalled[worker] = None
    for group in controller.ready(worker, iterations[worker]):
      found.append(group)
      for member in [one for one in signalled if one in group.members]:
        del signalled[member]
        iterations[member] = group.iteration
        heapq.heappush(scheduled, (now + seconds[member], next(begun), member))
  return found


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """The goal of the simulation."""
  plain = [
    one for one in rows if one.part == "levels" and one.environment.occupancy == 1
  ]
  seconds = {(one.label, one.environment.level): one.seconds for one in plain}
  base, dynamic = seconds.get(("allreduce", 3)), seconds.get(("dynamic:3", 3))
  what = (
    "dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated"
  )
  return [report.goal(what, base / dynamic if base and dynamic else None, least=1.48)]
