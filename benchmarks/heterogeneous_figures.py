"""Rows and figures of `benchmarks.heterogeneous`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jaxsparse as js
from benchmarks import report

from matplotlib import colormaps, pyplot  # isort: skip  # after benchmarks.report, which chooses where it draws to

Runs = Mapping[tuple[str, int], list[js.partial.Simulation]]  # of each method and level, one for each seed

_COLORS = {"work": "tab:blue", "wait": "tab:green", "average": "tab:red"}


class Row(NamedTuple):
  """One method at one heterogeneity level, means over the seeds.

  Attributes:
    label: of the method.
    level: HL.
    reached: how many seeds reached the target.
    seconds: of virtual time to the target, of those that did; None if not all did.
    deviation: of the seconds over the seeds.
    updates: to the target, or until the end.
    gradients: of workers, likewise.
    per_update: seconds of virtual time.
    rho: of the groups; None without groups.
  """

  label: str
  level: int
  reached: int
  seconds: float | None
  deviation: float
  updates: float
  gradients: float
  per_update: float
  rho: float | None


def draw_curves(runs: Runs, level: int, workers: int, target: float, path: pathlib.Path) -> None:
  """Accuracy over virtual time of the first seed, Figure 7(a)."""
  plot, panel = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
  panel.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
  for (label, own), found in runs.items():
    if own == level:
      seconds, _, accuracy = zip(*found[0].curve, strict=True)
      panel.plot(seconds, accuracy, label=label, linewidth=1)
  panel.axhline(target, color="black", linewidth=0.5)
  panel.set(xlabel="seconds of virtual time", ylabel="test accuracy", ylim=(0.8, 1.0))
  panel.grid(alpha=0.3)
  panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
  report.save(plot, f"{workers} workers, {level} of them sharing an accelerator, digits", path)


def draw_timeline(
  runs: Sequence[tuple[str, js.partial.Simulation]], level: int, workers: int, path: pathlib.Path
) -> None:
  """When each worker computed, waited and averaged in the first seconds, Figure 3."""
  until = 4.0 * level
  plot, panels = pyplot.subplots(
    len(runs), 1, figsize=(9, 2.4 * len(runs)), sharex=True, squeeze=False, layout="constrained"
  )
  for panel, (label, run) in zip(panels[:, 0], runs, strict=True):
    for activity, color in _COLORS.items():
      spans = [span for span in run.timeline if span.activity == activity and span.start < until]
      panel.barh(
        [span.worker for span in spans],
        [span.end - span.start for span in spans],
        left=[span.start for span in spans],
        color=color,
        edgecolor="white",
        linewidth=0.3,
        label=activity,
      )
    panel.set(title=label, ylabel="worker", xlim=(0, until))
    panel.title.set_fontsize("small")
    panel.invert_yaxis()
  panels[-1, 0].set(xlabel="seconds of virtual time")
  handles, labels = panels[0, 0].get_legend_handles_labels()
  plot.legend(handles, labels, loc="outside right upper", fontsize="small")
  report.save(plot, f"{workers} workers, the last {level} share an accelerator", path)


def draw_sweep(rows: Sequence[Row], workers: int, path: pathlib.Path) -> None:
  """Run time, updates and time per update over P, Figure 8."""
  plot, panels = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
  heads = {"seconds": "run time, s", "updates": "updates", "per_update": "seconds per update"}
  for panel, (name, head) in zip(panels, heads.items(), strict=True):
    panel.plot([int(one.label.partition(":")[2]) for one in rows], [getattr(one, name) for one in rows], marker="o")
    panel.set(xlabel="group size P", ylabel=head, ylim=(0, None))
    panel.grid(alpha=0.3)
  report.save(plot, f"constant partial reduce, {workers} workers, HL = {rows[0].level}", path)
