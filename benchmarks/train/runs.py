"""Training runs: one task with one method from one seed; lines, a file, a table and figures of what was measured."""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import rich.table

import jaxsparse as js
from benchmarks import report
from benchmarks.methods import Method
from benchmarks.recipes import Recipe
from benchmarks.tasks.base import Task
from benchmarks.trainer import Trainer
from benchmarks.workers import Workers

CURVE_POINTS = 40  # evaluations during a run


class Run(NamedTuple):
  """The measurements of one algorithm from one seed."""

  algorithm: str  # as it was asked for
  optimizer: str  # with its peak rate, as the flag names it
  seed: int  # of the parameters and the order of the batches
  test_accuracy: float  # fraction of the test set classified correctly after the last step
  test_loss: float  # mean loss over the test set after the last step
  train_loss: float  # mean loss over the training set after the last step
  words_per_step: float  # 4-byte words that a worker sent in one step, mean over the steps
  messages_per_step: int  # messages that one worker sends in one step, one after the other, counted from the schedule
  seconds_per_step: float  # median, evaluation and compilation left out
  residual_norm: float  # ℓ₂ norm of all residuals after the last step
  steps: list[int]  # the steps at which the accuracy was measured
  accuracy: list[float]  # test accuracy at those steps
  loss: list[float]  # training loss of the batch at those steps
  trace: dict[str, list[float]]  # metrics of `js.metrics` by name, in every step
  fold: int = 0  # of cross-validation, that was left out for the test


def train(
  task: Task,
  method: Method,
  recipe: Recipe,
  place: Workers,
  batch_size: int,
  seed: int,
  on_step: Callable[[int, float], None],
) -> Run:
  """Trains for the steps of the recipe; calls `on_step` with each step and its loss."""
  trainer = Trainer(task, method, recipe, place, batch_size, seed)
  few = min(recipe.steps, CURVE_POINTS // 2)  # closer together where accuracy changes most, at the start
  spreads = (np.linspace, np.geomspace)
  points = {round(point) for spread in spreads for point in spread(1, recipe.steps, few)} | {recipe.steps}
  trace: dict[str, list[float]] = {name: [] for name in js.Metrics.names()}
  steps, accuracies, losses = [], [], []
  while trainer.steps < recipe.steps:
    loss, found = trainer.step(), trainer.metrics()
    for name, values in trace.items():
      values.append(found[name])
    if trainer.steps in points:
      steps.append(trainer.steps)
      accuracies.append(trainer.evaluate(trainer.synchronized())[1])
      losses.append(loss)
    on_step(trainer.steps, loss)
  params = trainer.synchronized()
  name, config = method.spec.name, method.spec.config
  return Run(
    algorithm=method.label,
    optimizer=str(recipe.optimizer),
    seed=seed,
    test_accuracy=accuracies[-1],
    test_loss=trainer.evaluate(params)[0],
    train_loss=trainer.evaluate(params, task.train)[0],
    words_per_step=statistics.mean(trace["words_sent"]),
    messages_per_step=js.costs.count(name, n=trainer.params, workers=place.size, **config).messages,
    seconds_per_step=statistics.median(trainer.times[1:] or trainer.times),  # the first step compiles
    residual_norm=trace["residual_norm"][-1],
    steps=steps,
    accuracy=accuracies,
    loss=losses,
    trace=trace,
  )


def by_algorithm(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """The runs of each algorithm, one for each seed and fold; of each optimizer too, where there are several."""
  several = len({run.optimizer for run in runs}) > 1
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(f"{run.optimizer}, " * several + run.algorithm, []).append(run)
  return groups


def line(run: Run) -> str:
  """One line about the end of a run."""
  reached = f"test accuracy {run.test_accuracy:.4f}, test loss {run.test_loss:.4f}"
  name = f"{run.optimizer}, {run.algorithm}, seed {run.seed}" + f", fold {run.fold}" * (run.fold > 0)
  return f"{name}: {reached}, {1e3 * run.seconds_per_step:.1f} ms a step"


def keep(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
  """Writes the runs as JSON, a line each, without their traces; the file is replaced whole, or not at all."""
  report.keep(path, {"title": title}, {"runs": [report.rounded(run._replace(trace={})) for run in runs]})


def table(runs: Sequence[Run], title: str) -> rich.table.Table:
  """The algorithms side by side: means over seeds and folds, and the standard deviation where there are several."""
  groups = by_algorithm(runs)
  dense = next((run.words_per_step for run in runs if run.algorithm == "dense"), None)
  several = "; ± is the standard deviation over seeds and folds" if len(runs) > len(groups) else ""
  lines = []
  for label, group in groups.items():
    words = statistics.mean(run.words_per_step for run in group)
    losses = ([getattr(run, name) for run in group] for name in ("test_accuracy", "test_loss", "train_loss"))
    spreads = [report.spread(values, ".4f") for values in losses]
    sent = f"{words:,.0f}", report.ratio(words, dense, 3), str(group[0].messages_per_step)
    seconds = statistics.median(run.seconds_per_step for run in group)
    residual = statistics.mean(run.residual_norm for run in group)
    lines.append([label, *spreads, *sent, f"{1e3 * seconds:.1f}", f"{residual:.3f}"])
  heads = ("algorithm", "test accuracy", "test loss", "train loss", "words / step", "vs dense", "messages", "ms / step")
  return report.table(title + several, (*heads, "residual norm"), lines)


def figure(runs: Sequence[Run], title: str, path: pathlib.Path) -> None:
  """Test accuracy over steps, and over words sent by each worker; a band from the worst to the best run."""
  plot, (over_steps, over_words) = report.pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
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
  size = (5.5 * len(names), 4)
  plot, panels = report.pyplot.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
  for panel, name in zip(panels[0], names, strict=True):
    for label, group in by_algorithm(runs).items():
      lines = [run.trace[name] for run in group]
      report.band(panel, range(1, len(lines[0]) + 1), lines, label, linewidth=0.8)
    panel.set(xlabel="step", ylabel=name.replace("_", " "))
  panels[0][-1].legend(fontsize="small")
  report.save(plot, title, path)
