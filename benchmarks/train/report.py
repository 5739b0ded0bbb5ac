"""Training runs as lines, a file, a table and figures."""

import json
import pathlib
import statistics
from collections.abc import Callable, Sequence

import rich.table

from benchmarks import report
from benchmarks.train.run import Run

from matplotlib import pyplot  # isort: skip  # after benchmarks.report, which chooses where it draws to


def by_algorithm(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """The runs of each algorithm, one for each seed and fold; of each optimizer too, where there are several."""
  several = len({run.optimizer for run in runs}) > 1
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(label(run) if several else run.algorithm, []).append(run)
  return groups


def label(run: Run) -> str:
  """Optimizer and algorithm of a run."""
  return f"{run.optimizer}, {run.algorithm}"


def line(run: Run) -> str:
  """One line about the end of a run."""
  reached = f"test accuracy {run.test_accuracy:.4f}, test loss {run.test_loss:.4f}"
  fold = f", fold {run.fold}" * (run.fold > 0)
  return f"{label(run)}, seed {run.seed}{fold}: {reached}, {1e3 * run.seconds_per_step:.1f} ms a step"


def keep(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
  """Writes the runs as JSON, a line each, without their traces; the file is replaced whole, or not at all."""
  lines = [json.dumps(report.rounded(run._replace(trace={}))._asdict()) for run in runs]
  report.replace(path, f'{{"title": {json.dumps(title)}, "runs": [\n' + ",\n".join(lines) + "\n]}\n")


def table(runs: Sequence[Run], title: str) -> rich.table.Table:
  """The algorithms side by side: means over seeds and folds, and the standard deviation where there are several."""
  groups = by_algorithm(runs)
  dense = next((run.words_per_step for run in runs if run.algorithm == "dense"), None)
  several = "; ± is the standard deviation over seeds and folds" if len(runs) > len(groups) else ""
  result = rich.table.Table(title=title + several)
  result.add_column("algorithm", no_wrap=True)
  for head in (
    "test accuracy",
    "test loss",
    "train loss",
    "words / step",
    "vs dense",
    "messages",
    "ms / step",
    "residual norm",
  ):
    result.add_column(head, justify="right", no_wrap=True)
  for label, group in groups.items():
    words = statistics.mean(run.words_per_step for run in group)
    result.add_row(
      label,
      _spread(group, lambda run: run.test_accuracy),
      _spread(group, lambda run: run.test_loss),
      _spread(group, lambda run: run.train_loss),
      f"{words:,.0f}",
      f"{words / dense:.3f}" if dense else "–",
      str(group[0].messages_per_step),
      f"{1e3 * statistics.median(run.seconds_per_step for run in group):.1f}",
      f"{statistics.mean(run.residual_norm for run in group):.3f}",
    )
  return result


def figure(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
  """Test accuracy over steps, and over words sent by each worker; a band from the worst to the best run."""
  plot, (over_steps, over_words) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
  for label, group in by_algorithm(runs).items():
    words = statistics.mean(run.words_per_step for run in group)
    report.band(over_steps, group[0].steps, [run.accuracy for run in group], label)
    report.band(over_words, [max(1, step * words) for step in group[0].steps], [run.accuracy for run in group], label)
  over_steps.set(xlabel="step", ylabel="test accuracy")
  over_words.set(xlabel="words sent by each worker (4 bytes each)", xscale="log")
  over_words.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
  report.save(plot, title, path)


def trace(runs: Sequence[Run], names: Sequence[str], title: str, path: pathlib.Path) -> None:
  """Metrics of `js.metrics` over the steps, one panel each."""
  plot, panels = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False, layout="constrained")
  for panel, name in zip(panels[0], names, strict=True):
    for label, group in by_algorithm(runs).items():
      lines = [run.trace[name] for run in group]
      report.band(panel, range(1, len(lines[0]) + 1), lines, label, linewidth=0.8)
    panel.set(xlabel="step", ylabel=name.replace("_", " "))
  panels[0][-1].legend(fontsize="small")
  report.save(plot, title, path)


def _spread(group: Sequence[Run], value: Callable[[Run], float]) -> str:
  values = [value(run) for run in group]
  deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
  return f"{statistics.mean(values):.4f}{deviation}"
