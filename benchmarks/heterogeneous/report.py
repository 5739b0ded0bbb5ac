"""Tables of `benchmarks.heterogeneous`, the paper's cells that it measures, and its goal."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import optax
import rich.table

from benchmarks import report
from benchmarks.heterogeneous.lab import Lab, shared_paces
from benchmarks.heterogeneous.methods import make_method
from benchmarks.heterogeneous.virtual import Environment, Row, rho

PARTS = {
  "levels": "heterogeneity levels",
  "sweep": "Figure 8",
  "tail": "Figure 9",
  "scale": "Figure 11",
  "decay": "α of dynamic weights",
  "links": "slow links",
}
_TABLE_1 = {
  "all-reduce": "allreduce",
  "AD-PSGD": "adpsgd",
  "PS BSP": "bsp",
  "PS ASP": "asp",
  "PS HETE": "hete",
  "PS, 3 backup workers": "backup",
  "constant, P = 3": "constant:3",
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


def paper_cells(rows: Sequence[Row]) -> dict[str, float]:
  """The paper's cells that these rows measure, by their names."""
  found: dict[str, float] = {}
  for own in group_by_environment(one for one in rows if one.part == "levels"):
    level, seconds = own[0].environment.level, {one.label: one.seconds for one in own}
    dynamic = seconds.get("dynamic:3")
    if dynamic and own[0].environment.occupancy == 1:
      ratios = {name: seconds.get(label) for name, label in _TABLE_1.items()}
      found |= {
        f"{name}, HL = {level}": value / dynamic
        for name, value in ratios.items()
        if value
      }
  for own in group_by_environment(one for one in rows if one.part == "tail"):
    ours = {one.label: one for one in own}
    if "allreduce" in ours and "dynamic:4" in ours:
      dense, dynamic_4 = ours["allreduce"], ours["dynamic:4"]
      found["seconds an update"] = dense.per_update / dynamic_4.per_update
      found |= (
        {"run time": dense.seconds / dynamic_4.seconds}
        if dense.seconds and dynamic_4.seconds
        else {}
      )
  scale = {label: points.get(32) for label, points in speed_ups(rows).items()}
  for name, label in (("all-reduce", "allreduce"), ("backup workers", "backup")):
    partial, other = scale.get("constant:4"), scale.get(label)
    found |= {f"P = 4 / {name}": partial / other} if partial and other else {}
  return found


def figure_4(groups: int = 1000) -> dict[str, float]:
  """ρ in both environments of Figure 4, N = 3 and P = 2, and in what part of the groups the slowest worker is."""
  found = {}
  for what, slow in (("homogeneous", 1.0), ("one twice as slow", 2.0)):
    paces = [*shared_paces(2, 1), *shared_paces(1, 1, seconds=slow)]
    batches = lambda _: itertools.repeat(jnp.zeros(1))
    lab = Lab(
      lambda x, batch: jnp.sum(x * batch),
      jnp.zeros(1),
      batches,
      paces,
      optax.identity(),
    )
    run = lab.run(
      make_method("constant", lab, group_size=2), seconds=groups * 2 / (2 + 1 / slow)
    )
    found[what] = rho(run.groups, 3)
    found[f"{what}, slowest"] = sum(2 in group.members for group in run.groups) / len(
      run.groups
    )
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
