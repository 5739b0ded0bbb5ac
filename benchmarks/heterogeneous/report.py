"""Tables and figures of `benchmarks.heterogeneous`, ours beside the paper's, and its goal."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import optax
import rich.table

from benchmarks import papers, report
from benchmarks.heterogeneous.lab import Lab, Simulation, shared_paces
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
Runs = Mapping[tuple[str, Environment], list[Simulation]]  # one for each seed and fold
_COLORS = {"work": "tab:blue", "wait": "tab:green", "average": "tab:red"}
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
  lines = []
  for one in rows:
    missed = f"N/A ({one.reached} of {one.runs} reach it)", "–", f"{one.per_update:.3f}", "–"
    own = f"{one.seconds or 0:.0f} ± {one.deviation:.0f}", f"{one.updates:,.0f}", missed[2], f"{one.gradients:,.0f}"
    seconds, *more = missed if one.seconds is None else own
    lines.append([one.label, seconds, report.ratio(base, one.seconds), *more, report.number(one.rho, ".3f")])
  heads = "method", "run time", "× all-reduce", "updates", "per update", "gradients", "ρ"
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
  rows = sorted((one for one in rows if one.part == "scale"), key=lambda one: one.environment.workers)
  alone = next((one.seconds for one in rows if one.environment.workers == 1), None)
  found: dict[str, dict[int, float]] = {}
  for one in rows:
    if alone and one.seconds and one.environment.workers > 1:
      found.setdefault(one.label, {1: 1.0})[one.environment.workers] = alone / one.seconds
  return found


def scale_table(found: Mapping[str, Mapping[int, float]]) -> rich.table.Table:
  """Speed-ups over one worker, Figure 11."""
  sizes = sorted({workers for points in found.values() for workers in points})
  lines = [[label, *(report.number(points.get(size), ".2f") for size in sizes)] for label, points in found.items()]
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
      found |= {f"{name}, HL = {level}": value / dynamic for name, value in ratios.items() if value}
  for own in group_by_environment(one for one in rows if one.part == "tail"):
    ours = {one.label: one for one in own}
    if "allreduce" in ours and "dynamic:4" in ours:
      dense, dynamic_4 = ours["allreduce"], ours["dynamic:4"]
      found["seconds an update"] = dense.per_update / dynamic_4.per_update
      found |= {"run time": dense.seconds / dynamic_4.seconds} if dense.seconds and dynamic_4.seconds else {}
  scale = {label: points.get(32) for label, points in speed_ups(rows).items()}
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
  what = "dynamic partial reduce (P = 3) ≥ 1.48 × as fast as all-reduce at HL = 3, simulated"
  return [report.goal(what, base / dynamic if base and dynamic else None, least=1.48)]


def draw_curves(runs: Mapping[str, Simulation], environment: Environment, target: float, path: pathlib.Path) -> None:
  """Accuracy over virtual time, by the label of the method, Figure 7(a)."""
  plot, panel = report.pyplot.subplots(figsize=(9, 4.5), layout="constrained")
  panel.set_prop_cycle(color=[report.pyplot.get_cmap("tab20")(number) for number in range(20)])
  for label, run in runs.items():
    seconds, _, accuracy = zip(*run.curve, strict=True)
    panel.plot(seconds, accuracy, label=label, linewidth=1)
  panel.axhline(target, color="black", linewidth=0.5)
  panel.set(xlabel="seconds of virtual time", ylabel="test accuracy", ylim=(0.8, 1.0))
  panel.grid(alpha=0.3)
  panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
  report.save(plot, f"{environment}, digits", path)


def draw_timeline(runs: Mapping[str, Simulation], environment: Environment, path: pathlib.Path) -> None:
  """When each worker computed, waited and averaged in the first seconds, Figure 3."""
  until, size = 4.0 * environment.level, (9, 2.4 * len(runs))
  plot, panels = report.pyplot.subplots(len(runs), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
  for panel, (label, run) in zip(panels[:, 0], runs.items(), strict=True):
    for activity, color in _COLORS.items():
      spans = [span for span in run.timeline if span.activity == activity and span.start < until]
      places = [span.worker for span in spans], [span.end - span.start for span in spans], 0.8
      left = [span.start for span in spans]
      panel.barh(*places, left, color=color, edgecolor="white", linewidth=0.3, label=activity)
    panel.set(title=label, ylabel="worker", xlim=(0, until))
    panel.title.set_fontsize("small")
    panel.invert_yaxis()
  panels[-1, 0].set(xlabel="seconds of virtual time")
  handles, labels = panels[0, 0].get_legend_handles_labels()
  plot.legend(handles, labels, loc="outside right upper", fontsize="small")
  report.save(plot, f"{environment.workers} workers, the last {environment.level} share an accelerator", path)
