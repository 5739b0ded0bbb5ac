"""One training run of one all-reduce: the same task, batches and parameters for all of them, and what was measured."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsparse as js
from benchmarks import data, models, specs
from benchmarks.workers import Workers
from jaxsparse import timing
from jaxsparse.collectives.a2sgd import A2SGD

CLASSES = 10
CURVE_POINTS = 40  # evaluations during a run
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
  "sgd": optax.sgd,
  "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
  "adam": optax.adam,
}


class Run(NamedTuple):
  """What one algorithm reached from one seed.

  Attributes:
    algorithm: as it was asked for.
    seed: of the parameters and the order of the batches.
    test_accuracy: share of the test set classified correctly after the last step.
    train_loss: mean loss over the training set after the last step.
    words_per_step: 4-byte words that a worker sent in one step, mean over the steps.
    messages_per_step: messages that one worker sends in one step, one after the other, counted from the schedule.
    seconds_per_step: median, evaluation and compilation left out.
    residual_norm: ℓ₂ norm of all residuals after the last step.
    steps: the steps at which the accuracy was measured.
    accuracy: test accuracy at those steps.
    loss: training loss of the batch at those steps.
    trace: metrics of `js.metrics` by name, in every step.
  """

  algorithm: str
  seed: int
  test_accuracy: float
  train_loss: float
  words_per_step: float
  messages_per_step: int
  seconds_per_step: float
  residual_norm: float
  steps: list[int]
  accuracy: list[float]
  loss: list[float]
  trace: dict[str, list[float]]


class Task(NamedTuple):
  """A model and its data, as functions of a parameter pytree."""

  params: Any
  loss: Callable[[Any, Any], jax.Array]
  accuracy: Callable[[Any], float]
  train_loss: Callable[[Any], float]
  batches: Callable[[], Iterator[Any]]

  @property
  def entries(self) -> int:
    """Number of gradient entries n."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def make_task(model: str, dataset: data.Dataset, workers: Workers, batch_size: int, seed: int) -> Task:
  """The classification task of a model on a data set, `batch_size` images a worker."""
  module = models.make(model, dataset.train_images.shape[1:], CLASSES, seed)
  structure, params = nnx.split(module)

  def logits(params: Any, images: jax.Array) -> jax.Array:
    return nnx.merge(structure, params)(images)

  def loss(params: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["image"]), batch["label"]).mean()

  correct = lambda params, images, labels: jnp.sum(jnp.argmax(logits(params, images), -1) == labels)
  summed = lambda params, images, labels: loss(params, {"image": images, "label": labels}) * len(labels)
  home = jax.local_devices()[0]

  def mean_over(function: Callable[..., jax.Array], images: np.ndarray, labels: np.ndarray) -> Callable[[Any], float]:
    compiled = jax.jit(function)

    def mean(params: Any) -> float:
      params, total = jax.device_put(jax.tree.map(timing.here, params), home), 0.0
      for start in range(0, len(images), 1000):
        part = slice(start, start + 1000)
        total += float(compiled(params, *jax.device_put((images[part], labels[part]), home)))
      return total / len(images)

    return mean

  size = batch_size * workers.size
  share = workers.share(batch_size)
  train_set = dataset.train_images, dataset.train_labels
  return Task(
    params,
    loss,
    mean_over(correct, dataset.test_images, dataset.test_labels),
    mean_over(summed, *train_set),
    lambda: (jax.tree.map(lambda x: x[share], batch) for batch in data.batches(*train_set, size, seed)),
  )


def train(
  task: Task,
  spec: specs.Spec,
  workers: Workers,
  steps: int,
  optimizer: str,
  learning_rate: float,
  seed: int,
  on_step: Callable[[int, float], None],
) -> Run:
  """Trains `task` with one all-reduce; calls `on_step` with the step and the last measured accuracy."""
  schedule = optax.cosine_decay_schedule(learning_rate, steps)
  tx = optax.chain(js.make_transform(spec.name, workers.axis, **spec.config), OPTIMIZERS[optimizer](schedule))
  params = jax.tree.map(jnp.copy, task.params)  # the step donates them
  state = js.init(tx, params, workers.where)
  step = js.make_train_step(task.loss, tx, workers.where)
  read = jax.jit(workers.metrics)
  few = min(steps, CURVE_POINTS // 2)  # closer together where accuracy changes most, at the start
  points = {round(point) for spread in (np.linspace, np.geomspace) for point in spread(1, steps, few)} | {steps}
  run = Run(spec.label, seed, 0.0, 0.0, 0.0, 0, 0.0, 0.0, [], [], [], {name: [] for name in js.Metrics._fields})
  times, batches = [], task.batches()
  for number in range(1, steps + 1):
    batch = next(batches)
    start = time.perf_counter()
    params, state, metrics = step(params, state, batch)
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - start)
    for name, value in read(state)._asdict().items():
      run.trace[name].append(float(value))
    if number in points:
      run.steps.append(number)
      run.accuracy.append(task.accuracy(step.synchronize(params, state)[0]))
      run.loss.append(float(metrics.loss))
    on_step(number, run.accuracy[-1] if run.accuracy else 0.0)
  params, state = step.synchronize(params, state)
  words = statistics.mean(run.trace["words_sent"])
  if isinstance(spec.collective, A2SGD) and spec.collective.sync_every:  # it averages the parameters now and then
    words += js.costs.predict("dense", n=task.entries, workers=workers.size).words / spec.collective.sync_every
  return run._replace(
    test_accuracy=run.accuracy[-1],
    train_loss=task.train_loss(params),
    words_per_step=words,
    messages_per_step=js.costs.count(spec.name, n=task.entries, workers=workers.size, **spec.config).messages,
    seconds_per_step=statistics.median(times[1:] or times),  # the first step compiles
    residual_norm=run.trace["residual_norm"][-1],
  )
