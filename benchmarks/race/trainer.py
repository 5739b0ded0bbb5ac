"""One training of one method, a step at a time, on any engine."""

import time
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from benchmarks.methods import Method
from benchmarks.race.recipes import Recipe
from benchmarks.tasks.base import Model, Task, model_of
from benchmarks.workers import Workers
from jaxsparse.train.engine import here


class Trainer:
  """A training from a seed; every process of the engine makes it and calls the same methods.

  Args:
    task: to train.
    method: what is exchanged.
    recipe: of the optimizer.
    place: the workers.
    batch_size: inputs of each worker in a step.
    seed: of the parameters and the batches.

  Attributes:
    model: that is trained.
    params: after the steps so far.
    state: of the optimizer.
    statistics: of the model, those of all workers.
    steps: that were taken.
    times: seconds of each step.
    words: 4-byte words that the worker sent that sent most, of all steps.
    drift: the largest distance between workers that `count` has seen.
  """

  def __init__(self, task: Task, method: Method, recipe: Recipe, place: Workers, batch_size: int, seed: int):
    self._task, self._place, self._batch_size, self._seed = task, place, batch_size, seed
    self.model: Model = model_of(task, seed)
    tx = method.make(place.axis, recipe.make())
    self.params = self.model.params
    self.state = js.init(tx, self.params, place.where)
    # Each worker normalizes by its own batches, as data-parallel training does that sends gradients alone.
    each = lambda leaf: np.broadcast_to(leaf, (place.size, *leaf.shape))
    self.statistics: Any = jax.tree.map(each, self.model.statistics)
    self._step = js.make_train_step(self.model.loss, tx, place.where, model_state="worker")
    self._read = jax.jit(place.metrics)
    self.steps, self.words, self.drift = 0, 0.0, 0.0
    self.times: list[float] = []

  def next_batch(self) -> Any:
    """What this process gives of the next step's batch."""
    share = self._place.share(self._batch_size)
    batch = self._task.batch(self._seed, self.steps, self._place.size, self._batch_size)
    return jax.tree.map(lambda x: x[share], batch)

  def step(self) -> float:
    """One step; its loss, mean over the workers."""
    batch = self.next_batch()
    start = time.perf_counter()
    arguments = self.params, self.state, batch
    self.params, self.state, metrics = self._step(*arguments, model_state=self.statistics)
    jax.block_until_ready((metrics, self.params))
    self.times.append(time.perf_counter() - start)
    self.statistics = metrics.model_state
    self.steps += 1
    return float(here(metrics.loss))

  def count(self) -> None:
    """Adds the words of the last step, and takes its drift into account."""
    metrics = self._read(self.state)
    self.words += float(here(metrics.words_sent))
    self.drift = max(self.drift, float(here(metrics.drift)))

  def evaluate(self) -> tuple[float, float]:
    """Loss and accuracy on what is held out of the parameters of the last exchange, which all workers have.

    Batch normalization is by the running statistics of this process's first worker.
    """
    statistics = jax.tree.map(lambda leaf: here(leaf)[0], self.statistics)
    home = jax.local_devices()[0]
    return self.model.evaluate(*jax.device_put((jax.tree.map(here, self.params), statistics), home))
