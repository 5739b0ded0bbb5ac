"""Figures of `benchmarks.heterogeneous`."""

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks import report
from benchmarks.heterogeneous.lab import Simulation
from benchmarks.heterogeneous.virtual import Environment, Row

from matplotlib import colormaps, pyplot  # isort: skip  # after benchmarks.report, which chooses where it draws to

Runs = Mapping[tuple[str, Environment], list[Simulation]]  # one for each seed and fold

_COLORS = {"work": "tab:blue", "wait": "tab:green", "average": "tab:red"}


def draw_curves(runs: Mapping[str, Simulation], environment: Environment, target: float, path: pathlib.Path) -> None:
  """Accuracy over virtual time, by the label of the method, Figure 7(a)."""
  plot, panel = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
  panel.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
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
  plot, panels = pyplot.subplots(len(runs), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
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


def draw_sweep(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Run time, updates and time per update over P, Figure 8."""
  plot, panels = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
  heads = {"seconds": "run time, s", "updates": "updates", "per_update": "seconds per update"}
  for panel, (name, head) in zip(panels, heads.items(), strict=True):
    panel.plot([int(one.label.partition(":")[2]) for one in rows], [getattr(one, name) for one in rows], marker="o")
    panel.set(xlabel="group size P", ylabel=head, ylim=(0, None))
    panel.grid(alpha=0.3)
  report.save(plot, f"constant partial reduce, {rows[0].environment}", path)


def draw_scale(speed_ups: Mapping[str, Mapping[int, float]], path: pathlib.Path) -> None:
  """Speed-up over one worker, Figure 11; `speed_ups` has that of each method by the number of workers."""
  plot, panel = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
  for label, points in speed_ups.items():
    panel.plot(list(points), list(points.values()), marker="o", label=label)
  most = max(workers for points in speed_ups.values() for workers in points)
  panel.plot([1, most], [1, most], color="black", linewidth=0.5, linestyle="--", label="linear")
  panel.set(xlabel="workers", ylabel="speed-up over one worker", xlim=(0, None), ylim=(0, None))
  panel.grid(alpha=0.3)
  panel.legend(fontsize="small")
  report.save(plot, "seconds of virtual time to the target, heavy-tailed steps", path)


def draw_decays(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Run time over α of dynamic weights; a cross where not every run reaches the target."""
  plot, panel = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
  for name, color in (("dynamic", "tab:blue"), ("initial", "tab:orange")):
    points = [(float(one.label.split(":")[2]), one) for one in rows if one.label.startswith(name)]
    reached = [(alpha, one.seconds, one.deviation) for alpha, one in points if one.seconds is not None]
    x, y, deviations = (list(column) for column in zip(*reached, strict=True)) if reached else ([], [], [])
    panel.errorbar(x, y, deviations, marker="o", capsize=3, color=color, label=name)
    missed = [(alpha, one.settings.limit) for alpha, one in points if one.seconds is None]
    panel.plot([alpha for alpha, _ in missed], [limit for _, limit in missed], "x", color=color)
  panel.set(xlabel="α", ylabel="run time, s", ylim=(0, None))
  panel.grid(alpha=0.3)
  panel.legend(fontsize="small")
  report.save(plot, f"dynamic weights, P = 3, {rows[0].environment}", path)
