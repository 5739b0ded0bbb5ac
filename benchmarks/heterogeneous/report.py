"""Tables of `benchmarks.heterogeneous`, ours beside the paper's, and its goal."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import optax
import rich.table

from benchmarks import papers, report
from benchmarks.heterogeneous.lab import Lab, shared_paces
from benchmarks.heterogeneous.methods import make_method
from benchmarks.heterogeneous.virtual import Environment, Row, rho

_TABLE_1 = {
  "all-reduce": "allreduce",
  "AD-PSGD": "adpsgd",
  "PS BSP": "bsp",
  "PS ASP": "asp",
  "PS HETE": "hete",
  "PS, 3 backup workers": "backup",
  "constant, P = 3": "constant:3",
}


class Spread(NamedTuple):
  """One environment of the paper's Figure 4: ρ of the groups, and in how many of them the slowest worker is."""

  what: str
  paper: float
  rho: float
  paper_share: float
  share: float


def table(rows: Sequence[Row], title: str) -> rich.table.Table:
  """The rows of one environment."""
  settings, runs = rows[0].settings, rows[0].runs
  base = next((one.seconds for one in rows if one.label == "allreduce"), None)
  folds = f", {settings.folds} folds" * (settings.folds > 1)
  result = rich.table.Table(
    title=f"{title}: {rows[0].environment}, seconds of virtual time to {settings.target:g}, {runs} runs{folds}"
  )
  result.add_column("method", no_wrap=True)
  for head in ("run time", "× all-reduce", "updates", "per update", "gradients", "ρ"):
    result.add_column(head, justify="right", no_wrap=True)
  for one in rows:
    reached = one.seconds is not None
    result.add_row(
      one.label,
      f"{one.seconds:.0f} ± {one.deviation:.0f}" if reached else f"N/A ({one.reached} of {one.runs} reach it)",
      f"{base / one.seconds:.2f}" if base and one.seconds else "–",
      f"{one.updates:,.0f}" if reached else "–",
      f"{one.per_update:.3f}",
      f"{one.gradients:,.0f}" if reached else "–",
      "–" if one.rho is None else f"{one.rho:.3f}",
    )
  return result


def group_by_environment(rows: Iterable[Row]) -> list[list[Row]]:
  """The rows of each environment, few workers first."""
  groups: dict[Environment, list[Row]] = {}
  for one in rows:
    groups.setdefault(one.environment, []).append(one)
  return [groups[environment] for environment in sorted(groups)]


def speed_ups(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
  """Seconds of one worker / those of N, by method and N; without rows of one worker there are none."""
  alone = next((one.seconds for one in rows if one.environment.workers == 1), None)
  found: dict[str, dict[int, float]] = {}
  for one in sorted(rows, key=lambda one: one.environment.workers):
    if alone and one.seconds and one.environment.workers > 1:
      found.setdefault(one.label, {1: 1.0})[one.environment.workers] = alone / one.seconds
  return found


def scale_table(found: Mapping[str, Mapping[int, float]]) -> rich.table.Table:
  """Speed-ups over one worker, Figure 11."""
  result = rich.table.Table(title="speed-up over one worker, in seconds of virtual time to the target")
  result.add_column("method", no_wrap=True)
  sizes = sorted({workers for points in found.values() for workers in points})
  for workers in sizes:
    result.add_column(f"N = {workers}", justify="right")
  for label, points in found.items():
    result.add_row(label, *(f"{points[size]:.2f}" if size in points else "–" for size in sizes))
  return result


def paper_cells(rows: Sequence[Row]) -> dict[str, float]:
  """The paper's cells that these rows measure, by their names."""
  found: dict[str, float] = {}
  for own in group_by_environment(one for one in rows if one.part == "levels"):
    level, seconds = own[0].environment.level, {one.label: one.seconds for one in own}
    dynamic = seconds.get("dynamic:3")
    if dynamic and own[0].environment.occupancy == 1:
      ratios = {name: seconds.get(label) for name, label in _TABLE_1.items()}
      found |= {f"{name}, HL = {level}": value / dynamic for name, value in ratios.items() if value}
  for own in group_by_environment(one for one in rows if one.part == "tail"):
    ours = {one.label: one for one in own}
    if "allreduce" in ours and "dynamic:4" in ours:
      dense, dynamic_4 = ours["allreduce"], ours["dynamic:4"]
      found["seconds an update"] = dense.per_update / dynamic_4.per_update
      found |= {"run time": dense.seconds / dynamic_4.seconds} if dense.seconds and dynamic_4.seconds else {}
  scale = {label: points.get(32) for label, points in speed_ups([one for one in rows if one.part == "scale"]).items()}
  for name, label in (("all-reduce", "allreduce"), ("backup workers", "backup")):
    partial, other = scale.get("constant:4"), scale.get(label)
    found |= {f"P = 4 / {name}": partial / other} if partial and other else {}
  return found


def figure_4(groups: int = 1000) -> list[Spread]:
  """The two environments of Figure 4, N = 3 and P = 2, with step times drawn."""
  found = []
  for what, slow, share in (("homogeneous", 1.0, 2 / 3), ("one twice as slow", 2.0, 1 / 2)):
    paces = [*shared_paces(2, 1), *shared_paces(1, 1, seconds=slow)]
    batches = lambda _: itertools.repeat(jnp.zeros(1))
    lab = Lab(lambda x, batch: jnp.sum(x * batch), jnp.zeros(1), batches, paces, optax.identity())
    run = lab.run(make_method("constant", lab, group_size=2), seconds=groups * 2 / (2 + 1 / slow))
    slow_ones = sum(2 in group.members for group in run.groups) / len(run.groups)
    paper = papers.number("Partial Reduce", "Figure 4", what)
    found.append(Spread(what, paper, rho(run.groups, 3), share, slow_ones))
  return found


def goals(rows: Sequence[Row]) -> list[report.Goal]:
  """The goal of the simulation."""
  plain = [one for one in rows if one.part == "levels" and one.environment.occupancy == 1]
  seconds = {(one.label, one.environment.level): one.seconds for one in plain}
  base, dynamic = seconds.get(("allreduce", 3)), seconds.get(("dynamic:3", 3))
  ratio = base / dynamic if base and dynamic else None
  what = "dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated"
  return [report.Goal(what, ratio, None if ratio is None else ratio >= 1.48)]
