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
