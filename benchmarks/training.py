"""Training runs: the same task, batches and first parameters for each all-reduce, and the measurements of each run."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsparse as js
from benchmarks import data, methods, models
from benchmarks.workers import Workers
from jaxsparse.train.engine import here

CLASSES = 10
CURVE_POINTS = 40  # evaluations during a run


def window_adam(rate: Any, window: int = 4) -> optax.GradientTransformation:
  """Adam with the second moment of averages over a window of gradients."""
  return optax.chain(js.scale_by_window_adam(window), optax.scale_by_learning_rate(rate))


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "sgd": optax.sgd,
  "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
  "adam": optax.adam,
  "adamw": optax.adamw,
  "lars": optax.lars,
  "window_adam": window_adam,
}


class Optimizer(NamedTuple):
  """The optimizer behind the all-reduce.

  Attributes:
    name: one of `OPTIMIZERS`.
    rate: peak learning rate.
    options: of the optimizer, besides the rate.
  """

  name: str
  rate: float
  options: tuple[tuple[str, Any], ...] = ()

  def __str__(self) -> str:
    return " ".join([self.name, f"{self.rate:g}", *(f"{option}={value}" for option, value in self.options)])

  def make(self, rate: Any) -> optax.GradientTransformation:
    """The optax transformation, with this rate or schedule."""
    return OPTIMIZERS[self.name](rate, **dict(self.options))


def parse_optimizers(values: Sequence[str], rate: float) -> list[Optimizer]:
  """The optimizers that the flag names, each once; `rate` is for those that name none of their own.

  Raises:
    ValueError: for an unknown name or option, or a rate that is not a positive number.

  Example:
    >>> [str(optimizer) for optimizer in parse_optimizers(["window_adam:0.003:window=4,sgd"], rate=0.1)]
    ['window_adam 0.003 window=4', 'sgd 0.1']
  """
  labels = [label for value in values for label in value.split(",")]
  return [_optimizer(label, rate) for label in dict.fromkeys(labels)]


def _optimizer(label: str, rate: float) -> Optimizer:
  name, *parts = label.split(":")
  if name not in OPTIMIZERS:
    raise ValueError(f"--optimizer={label}, choose one of {', '.join(OPTIMIZERS)}")
  own = parts.pop(0) if parts and "=" not in parts[0] else ""
  try:
    rate = float(own) if own else rate
  except ValueError:
    rate = 0.0
  if not 0 < rate < math.inf:
    raise ValueError(f"--optimizer={label}, choose a positive learning rate, as in {name}:0.001")
  try:
    _, options = js.costs.collective_of(":".join([name, *parts]))
    optimizer = Optimizer(name, rate, tuple(options.items()))
    optimizer.make(rate)
  except (TypeError, ValueError) as error:
    raise ValueError(f"--optimizer={label}: {error}; options are as in window_adam:0.001:window=4") from None
  return optimizer


class Run(NamedTuple):
  """The measurements of one algorithm from one seed.

  Attributes:
    algorithm: as it was asked for.
    optimizer: what followed the all-reduce.
    learning_rate: its peak.
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
  learning_rate: float
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


class Task(NamedTuple):
  """A model and its data, as functions of a parameter pytree.

  Attributes:
    params: before the first step.
    loss: mean cross-entropy of a batch.
    accuracy: fraction of the test set classified correctly.
    test_loss: mean loss over the test set.
    train_loss: mean loss over the training set.
    batches: an endless iterator over what this process gives of each batch.
  """

  params: Any
  loss: Callable[[Any, Any], jax.Array]
  accuracy: Callable[[Any], float]
  test_loss: Callable[[Any], float]
  train_loss: Callable[[Any], float]
  batches: Callable[[], Iterator[Any]]

  @property
  def entries(self) -> int:
    """Number of gradient entries n."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def make_task(model: str, dataset: data.Dataset, workers: Workers, batch_size: int, seed: int) -> Task:
  """The classification task of a model on a data set of images, `batch_size` images a worker."""
  data.check_size(dataset.train_images, batch_size * workers.size)
  module = models.make(model, dataset.train_images.shape[1:], CLASSES, seed)
  train_set = dataset.train_images, dataset.train_labels
  whole = lambda: data.batches(*train_set, batch_size * workers.size, seed)
  return classification(module, train_set, (dataset.test_images, dataset.test_labels), whole, workers, batch_size)


def classification(
  module: nnx.Module,
  train_set: tuple[np.ndarray, np.ndarray],
  test_set: tuple[np.ndarray, np.ndarray],
  whole_batches: Callable[[], Iterator[dict[str, np.ndarray]]],
  workers: Workers,
  batch_size: int,
) -> Task:
  """The task of predicting labels from inputs.

  Args:
    module: inputs to logits, over the last axis.
    train_set: inputs, and labels i32 with the shape of the logits but their last axis: one or many for each input.
    test_set: likewise.
    whole_batches: endless batches of all workers, of arrays `input` and `label`.
    workers: among whom each batch is divided.
    batch_size: inputs of each worker in a batch.
  """
  structure, params = nnx.split(module)

  def results(params: Any, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether each label is the most likely one, and its loss."""
    logits = nnx.merge(structure, params)(inputs)
    return jnp.argmax(logits, -1) == labels, optax.softmax_cross_entropy_with_integer_labels(logits, labels)

  home = jax.local_devices()[0]
  summed = jax.jit(lambda *arguments: jax.tree.map(jnp.sum, results(*arguments)))

  def means(params: Any, inputs: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Accuracy and loss over a whole set."""
    params, sums = jax.device_put(jax.tree.map(here, params), home), []
    for start in range(0, len(inputs), 1000):
      part = slice(start, start + 1000)
      sums.append([float(x) for x in summed(params, *jax.device_put((inputs[part], labels[part]), home))])
    accuracy, loss = (sum(column) / labels.size for column in zip(*sums, strict=True))
    return accuracy, loss

  share = workers.share(batch_size)
  return Task(
    params,
    lambda params, batch: results(params, batch["input"], batch["label"])[1].mean(),
    lambda params: means(params, *test_set)[0],
    lambda params: means(params, *test_set)[1],
    lambda params: means(params, *train_set)[1],
    lambda: (jax.tree.map(lambda x: x[share], batch) for batch in whole_batches()),
  )


def train(
  task: Task,
  method: methods.Method,
  workers: Workers,
  steps: int,
  optimizer: Optimizer,
  seed: int,
  on_step: Callable[[int, float], None],
) -> Run:
  """Trains `task` with one method; calls `on_step` with the step and the last measured accuracy."""
  schedule = optax.cosine_decay_schedule(optimizer.rate, steps)
  tx = method.make(workers.axis, optimizer.make(schedule))
  params = jax.tree.map(jnp.copy, task.params)  # the step donates them
  state = js.init(tx, params, workers.where)
  step = js.make_train_step(task.loss, tx, workers.where)
  read = jax.jit(workers.metrics)
  few = min(steps, CURVE_POINTS // 2)  # closer together where accuracy changes most, at the start
  points = {round(point) for spread in (np.linspace, np.geomspace) for point in spread(1, steps, few)} | {steps}
  trace: dict[str, list[float]] = {name: [] for name in js.Metrics.names()}
  label = js.costs.label_of(optimizer.name, dict(optimizer.options))
  run = Run(method.label, label, optimizer.rate, seed, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, [], [], [], trace)
  times, batches = [], task.batches()
  for number in range(1, steps + 1):
    batch = next(batches)
    start = time.perf_counter()
    params, state, metrics = step(params, state, batch)
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - start)
    found = read(state).as_dict()
    for name, values in run.trace.items():
      values.append(found[name])
    if number in points:
      run.steps.append(number)
      run.accuracy.append(task.accuracy(step.synchronize(params, state)[0]))
      run.loss.append(float(metrics.loss))
    on_step(number, run.accuracy[-1] if run.accuracy else 0.0)
  params, state = step.synchronize(params, state)
  words = statistics.mean(run.trace["words_sent"])
  name, config = method.spec.name, method.spec.config
  return run._replace(
    test_accuracy=run.accuracy[-1],
    test_loss=task.test_loss(params),
    train_loss=task.train_loss(params),
    words_per_step=words,
    messages_per_step=js.costs.count(name, n=task.params, workers=workers.size, **config).messages,
    seconds_per_step=statistics.median(times[1:] or times),  # the first step compiles
    residual_norm=run.trace["residual_norm"][-1],
  )
