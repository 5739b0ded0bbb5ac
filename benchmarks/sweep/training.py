"""Trains a method with several rates and seeds by one compiled program, on simulated workers."""

import functools
import itertools
import math
import pathlib
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxsparse as js
from benchmarks import methods, recipes, workers
from benchmarks.methods import Method
from benchmarks.race.results import Curve
from benchmarks.recipes import Optimizer, Recipe
from benchmarks.tasks.base import Model, Task, model_of
from jaxsparse.train.worker import WorkerStep
from jaxsparse.transform import state as states

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

  def batches(self, seed: int) -> Any:
    """All batches, by evaluation, step and worker."""
    stream = self.task.stream(seed, self.workers, self.batch_size)
    chosen = list(itertools.islice(stream, self.steps))
    shape = EVALUATIONS, self.steps // EVALUATIONS, self.workers, self.batch_size
    stack = lambda *leaves: np.stack(leaves).reshape(*shape, *leaves[0].shape[1:])
    return jax.tree.map(stack, *chosen)


class Program(NamedTuple):
  """The training of one method as one program, for any rate, model and batches."""

  setting: Setting
  method: Method
  optimizer: Optimizer
  model: Model  # from any seed

  @property
  def comm(self) -> js.SimComm:
    """The workers."""
    return js.SimComm(workers.AXIS, members=self.setting.workers)

  def over_workers(self, function: Callable, in_axes: Any) -> Callable:
    """The function at every worker."""
    size = self.setting.workers
    return jax.vmap(function, in_axes, axis_name=workers.AXIS, axis_size=size)

  def run(self, rate: jax.Array, values: Any, batches: Any) -> tuple[jax.Array, ...]:
    """Loss, accuracy and words at each evaluation, from parameters and statistics."""
    params, statistics = values
    optimizer = self.optimizer._replace(rate=rate)  # type: ignore[arg-type]  # traced
    tx = self.method.make(self.comm, self.setting.recipe(optimizer).make())
    start = lambda params: states.with_own_keys(tx.init(params), self.comm.rank)
    state = self.over_workers(start, None)(params)
    spread = lambda x: jnp.broadcast_to(x, (self.setting.workers, 1, *jnp.shape(x)))
    carry = params, state, jax.tree.map(spread, statistics)
    block = functools.partial(self._train_and_evaluate, tx)
    return jax.lax.scan(block, carry, batches)[1]

  def _train_and_evaluate(self, tx: Any, carry: tuple, batches: Any) -> tuple:
    """The steps of these batches, and what the model is worth then."""
    step = functools.partial(self._step, tx)
    carry, words = jax.lax.scan(step, carry, batches)
    params, _, running = carry
    first = jax.tree.map(lambda x: x[0, 0], running)
    module = nnx.merge(self.model.structure, params, *first)
    module.eval()
    losses, right, count = self.model.test(
      module, *map(jnp.asarray, self.model.held_out)
    )
    return carry, (losses / count, right / count, jnp.sum(words))

  def _step(self, tx: Any, carry: tuple, batch: Any) -> tuple[tuple, jax.Array]:
    """A step of all workers, and the words that the first one sends."""
    worker = WorkerStep(self.model.loss, tx, False, "mean", "worker", 1)

    def step(params: Any, state: Any, running: Any, batch: Any) -> tuple[Any, ...]:
      given = {"model_state": running}
      params, state, metrics = worker.step(self.comm, params, state, batch, given)
      words = js.metrics(state, self.comm).words_sent
      return params, state, metrics.model_state, words.astype(jnp.float32)

    mapped = self.over_workers(step, (None, 0, 0, 0))
    rows, state, running, words = mapped(*carry, batch)
    return (jax.tree.map(lambda x: x[0], rows), state, running), words[0]


def curves(
  setting: Setting,
  method: Method,
  optimizer: Optimizer,
  rates: list[float],
  seeds: list[int],
  is_known: Callable[[str, int], bool] = lambda *_: False,
) -> Iterator[Curve]:
  """A curve for each rate and seed that is not known."""
  program = Program(setting, method, optimizer, model_of(setting.task, 0))
  run = jax.jit(program.run)
  every = setting.steps // EVALUATIONS
  for seed in seeds:
    missing = [rate for rate in rates if not is_known(_label(optimizer, rate), seed)]
    if not missing:
      continue
    model, batches = model_of(setting.task, seed), setting.batches(seed)
    for rate in missing:
      found = run(rate, (model.params, model.statistics), batches)
      losses, right, words_sent = (np.asarray(x, float) for x in found)
      finite = np.isfinite(losses)
      ends = len(losses) if finite.all() else int(np.argmin(finite)) + 1
      steps = [every * (number + 1) for number in range(ends)]
      kept = np.where(finite, losses, math.inf)[:ends].tolist()
      words = float(words_sent.sum()) / setting.steps
      key = method.label, _label(optimizer, rate), seed
      yield Curve(*key, steps, kept, right[:ends].tolist(), words)


def _label(optimizer: Optimizer, rate: float) -> str:
  return str(optimizer._replace(rate=rate))


def parsed(recipe: dict[str, str], hosts: int) -> tuple[Method, Optimizer]:
  """The method and the optimizer of a recipe, whose rate is 1."""
  (method,) = methods.parse("method", [recipe["method"]], hosts)
  options = recipe.get("options", "").replace("window=4", f"window={hosts}")
  label = ":".join(filter(None, [recipe["optimizer"], "1", options]))
  (optimizer,) = recipes.parse_optimizers([label], 1.0)
  return method, optimizer
