"""One training of one method, a step at a time, on any engine."""

import time
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from benchmarks.methods import Method
from benchmarks.recipes import Recipe
from benchmarks.tasks.base import Arrays, Model, Task, model_of
from benchmarks.workers import AXIS, Workers
from jaxsparse.train.engine import engine_of, local_shard


class Trainer:
  """A training from a seed; every process of the engine makes it and calls the same methods.

  Attributes:
    batches: the batches of the steps to come, this process's part.
    params: of the last exchange; each worker's own, where it has some, are in `state`.
    state: the optimizer state of all workers.
    statistics: running statistics of batch normalization, a row for each worker.
    steps: number of steps so far.
    times: seconds of each step; the first one compiles.
  """

  def __init__(
    self,
    task: Task,
    method: Method,
    recipe: Recipe,
    place: Workers,
    batch_size: int,
    seed: int,
  ):
    self.task, self.method, self.recipe, self.place, self.seed = (
      task,
      method,
      recipe,
      place,
      seed,
    )
    self.engine = engine_of(place.where, AXIS)
    self.batches = task.batches(seed, place, batch_size)
    self.model: Model = model_of(task, seed)
    tx = method.make(place.axis, recipe.make())
    self.params = self.model.params
    self.state = js.init(tx, self.params, place.where)
    # Each worker normalizes by its own batches, as data-parallel training does that
    # sends gradients alone.
    each = lambda leaf: np.broadcast_to(leaf, (place.size, *leaf.shape))
    self.statistics: Any = jax.tree.map(each, self.model.statistics)
    self._step = js.make_train_step(
      self.model.loss, tx, place.where, model_state="worker"
    )
    self._read = jax.jit(place.metrics)
    self.steps = 0
    self.times: list[float] = []

  def step(self) -> float:
    """One step; its loss, mean over the workers."""
    batch = next(self.batches)
    start = time.perf_counter()
    arguments = self.params, self.state, batch
    self.params, self.state, metrics = self._step(
      *arguments, model_state=self.statistics
    )
    jax.block_until_ready((metrics, self.params))
    self.times.append(time.perf_counter() - start)
    self.statistics = metrics.model_state
    self.steps += 1
    return float(local_shard(metrics.loss))

  def metrics(self) -> dict[str, float]:
    """What `js.metrics` says of the last step, over all workers."""
    return self._read(self.state).as_dict()

  def synchronized(self) -> Any:
    """The parameters of all workers together, where each has its own; the training goes on as before."""
    return self._step.synchronize(self.params, self.state)[0]

  def evaluate(
    self, params: Any = None, on: Arrays | None = None
  ) -> tuple[float, float]:
    """Loss and accuracy on what is held out, or `on` others, of the parameters of the last exchange, or `params`."""
    # Statistics of this process's first worker stand for those of all.
    statistics = jax.tree.map(lambda leaf: local_shard(leaf)[0], self.statistics)
    return self.model.evaluate(
      self.params if params is None else params, statistics, on
    )
