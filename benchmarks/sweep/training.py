"""Trains a method with several rates and seeds by one compiled program, on simulated workers."""

import itertools
import pathlib
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import methods, recipes
from benchmarks.methods import Method
from benchmarks.race.measuring import Length, Program, Runner, go_on
from benchmarks.race.results import Curve
from benchmarks.recipes import Optimizer, Recipe
from benchmarks.tasks.base import Task

_FILE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
RECIPES: dict[str, dict[str, str]] = _FILE["recipe"]
TASKS: dict[str, dict[str, Any]] = _FILE["task"]
FOLDER = pathlib.Path(__file__).parents[1] / "results" / "sweeps"
MULTIPLES = (0.5, 1.0, 2.0)  # of the rate of a task
EVALUATIONS = 5  # of a training


class Setting(NamedTuple):
  """What the trainings of one task have in common."""

  task: Task
  workers: int
  batch_size: int  # of each worker
  steps: int

  @property
  def fields(self) -> dict[str, Any]:
    """The setting of their file."""
    return {
      "task": self.task.name,
      "data": self.task.source,
      "hosts": self.workers,
      "batch_size": self.batch_size,
      "recipe": str(self.recipe(Optimizer("adam", 1.0))),
    }

  def recipe(self, optimizer: Optimizer) -> Recipe:
    """The optimizer with a rate that decays, so that the last loss has little noise, and clipping."""
    return Recipe(optimizer, "cosine", clip=1.0, steps=self.steps)


def curves(
  setting: Setting,
  method: Method,
  optimizer: Optimizer,
  rates: list[float],
  seeds: list[int],
  is_known: Callable[[str, int], bool] = lambda *_: False,
) -> Iterator[Curve]:
  """A curve for each rate and seed that is not known."""
  runner = Runner(method, setting.recipe(optimizer))
  program = Program(setting.task, runner, setting.workers)
  length = Length(setting.steps, setting.steps, setting.steps // EVALUATIONS)
  for seed, rate in itertools.product(seeds, rates):
    start = runner.at(rate).curve(seed)
    if not is_known(start.optimizer, seed):
      training = program.begin(rate, seed, setting.batch_size)
      *_, curve = go_on(training, length, start)
      yield curve._replace(words=curve.words / curve.steps[-1])


def parsed(recipe: dict[str, str], hosts: int) -> tuple[Method, Optimizer]:
  """The method and the optimizer of a recipe, whose rate is 1."""
  (method,) = methods.parse("method", [recipe["method"]], hosts)
  options = recipe.get("options", "").replace("window=4", f"window={hosts}")
  label = ":".join(filter(None, [recipe["optimizer"], "1", options]))
  (optimizer,) = recipes.parse_optimizers([label], 1.0)
  return method, optimizer
