"""Training runs: one task with one method from one seed, and what is measured of it."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import jaxsparse as js
from benchmarks.methods import Method
from benchmarks.recipes import Recipe
from benchmarks.tasks.base import Task
from benchmarks.trainer import Trainer
from benchmarks.workers import Workers

CURVE_POINTS = 40  # evaluations during a run


class Run(NamedTuple):
  """The measurements of one algorithm from one seed.

  Attributes:
    algorithm: as it was asked for.
    optimizer: with its peak rate, as the flag names it.
    seed: of the parameters and the order of the batches.
    test_accuracy: fraction of the test set classified correctly after the last step.
    test_loss: mean loss over the test set after the last step.
    train_loss: mean loss over the training set after the last step.
    words_per_step: 4-byte words that a worker sent in one step, mean over the steps.
    messages_per_step: messages that one worker sends in one step, one after the other, counted from the schedule.
    seconds_per_step: median, evaluation and compilation left out.
    residual_norm: ℓ₂ norm of all residuals after the last step.
    steps: the steps at which the accuracy was measured.
    accuracy: test accuracy at those steps.
    loss: training loss of the batch at those steps.
    trace: metrics of `js.metrics` by name, in every step.
    fold: of cross-validation, that was left out for the test.
  """

  algorithm: str
  optimizer: str
  seed: int
  test_accuracy: float
  test_loss: float
  train_loss: float
  words_per_step: float
  messages_per_step: int
  seconds_per_step: float
  residual_norm: float
  steps: list[int]
  accuracy: list[float]
  loss: list[float]
  trace: dict[str, list[float]]
  fold: int = 0


def train(
  task: Task,
  method: Method,
  recipe: Recipe,
  place: Workers,
  batch_size: int,
  seed: int,
  on_step: Callable[[int, float], None],
) -> Run:
  """Trains for the steps of the recipe; calls `on_step` with the step and the last measured accuracy."""
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
    on_step(trainer.steps, accuracies[-1] if accuracies else 0.0)
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
