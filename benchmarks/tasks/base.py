"""The protocol of a task of training: a model, its loss, its batches and what is held out."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.workers import Workers
from jaxsparse.train.engine import local_shard

IGNORED = -1  # a label that is not to be predicted
_PART = 128  # inputs that are evaluated at once

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # inputs and labels
Batch: TypeAlias = dict[str, np.ndarray]  # the same by name: input, label
Batches: TypeAlias = Iterator[Batch]
Stream: TypeAlias = Callable[[int, int, int], Batches]
# (model, inputs, labels) -> the sum of the losses, the number of labels that are the
# most likely ones (0 where there are none), and what the loss is divided by
Score: TypeAlias = Callable[[nnx.Module, Any, Any], tuple[jax.Array, ...]]


def score_labels(module: nnx.Module, inputs: Any, labels: Any) -> tuple[jax.Array, ...]:
  """The cross-entropy of logits over the last axis; labels that are `IGNORED` do not count."""
  return _scores(module(inputs), labels)


def score_squares(found: jax.Array, wanted: Any) -> tuple[jax.Array, ...]:
  """The squared errors of numbers, as a `Score`."""
  return jnp.sum((found - wanted) ** 2), jnp.float32(0), jnp.float32(found.size)


class Task(NamedTuple):
  """A model and its data; labels are i32 with the shape of the logits but their last axis, or `IGNORED`."""

  name: str  # of the task
  source: str  # the data in words
  # seed -> the untrained model, from inputs to logits over the last axis
  module: Callable[[int], nnx.Module]
  # (seed, workers, size) -> endless batches, the same for the same arguments, of `size`
  # inputs of each worker, one worker's after the other's; ValueError at once if there
  # are not so many
  stream: Stream
  held_out: Arrays  # inputs and labels to be tested on
  train: Arrays | None = (
    None  # inputs and labels of the training set, if the loss on all of it is asked for
  )
  score: Score = score_labels  # of a batch
  test: Score | None = None  # of what is held out; `score` by default

  def __str__(self) -> str:
    return f"{self.name} ({self.entries:,} parameters) on {self.source}"

  @property
  def entries(self) -> int:
    """Number of gradient entries n."""
    return entries_of(lambda: self.module(0))

  def batches(self, seed: int, place: Workers, size: int) -> Iterator[Batch]:
    """What this process gives of the batches of all workers, `size` inputs of each."""
    share = place.share(size)
    return (
      jax.tree.map(lambda x: x[share], batch)
      for batch in self.stream(seed, place.size, size)
    )


def drawn(draw: Callable[..., Arrays], own: bool = False) -> Stream:
  """Batches of which each worker draws its share, decided by seed, step and worker: draw(random, size).

  If workers have data of their `own`: draw(random, size, worker).
  """

  def stream(seed: int, workers: int, size: int) -> Iterator[Batch]:
    for step in itertools.count():
      shares = [
        draw(np.random.default_rng([seed, step, worker]), size, *[worker][: int(own)])
        for worker in range(workers)
      ]
      inputs, labels = (np.concatenate(parts) for parts in zip(*shares, strict=True))
      yield {"input": inputs, "label": labels}

  return stream


class Model(NamedTuple):
  """The model of a task as functions of its parameters."""

  structure: nnx.GraphDef  # the model without its values
  params: Any  # before the first step
  # what the model counts beside them, running means of batch normalization: a pytree,
  # maybe without leaves
  statistics: Any
  held_out: Arrays  # inputs and labels to be tested on
  score: Score = score_labels  # of a batch
  test: Score = score_labels  # of what is held out

  def loss(self, params: Any, batch: Batch, model_state: Any) -> tuple[jax.Array, Any]:
    """Mean loss f32[] of a batch, and the next statistics."""
    # those of the caller stay as they are
    module = nnx.merge(self.structure, params, *model_state, copy=True)
    losses, _, count = self.score(module, batch["input"], batch["label"])
    _, _, *after = nnx.split(module, nnx.Param, ...)
    return losses / count, after

  def plain_loss(self, params: Any, batch: Batch) -> jax.Array:
    """Mean loss f32[] of a batch, for a model without statistics."""
    return self.loss(params, batch, self.statistics)[0]

  def evaluate(
    self, params: Any, statistics: Any, on: Arrays | None = None
  ) -> tuple[float, float]:
    """Mean loss and accuracy over what is held out, or over other inputs and labels, on one device of this process."""
    inputs, labels = on or self.held_out
    parts = [slice(start, start + _PART) for start in range(0, len(inputs), _PART)]
    home = jax.device_put(
      jax.tree.map(local_shard, (params, statistics)), jax.local_devices()[0]
    )
    scores = functools.partial(_evaluated, self.structure, self.test, *home)
    rows = [[float(x) for x in scores(inputs[part], labels[part])] for part in parts]
    losses, right, count = (sum(column) for column in zip(*rows, strict=True))
    return losses / count, right / count

  def accuracy(self, params: Any) -> float:
    """The accuracy on what is held out, for a model without statistics."""
    return self.evaluate(params, self.statistics)[1]


def model_of(task: Task, seed: int) -> Model:
  """The untrained model of a task."""
  structure, params, *statistics = nnx.split(task.module(seed), nnx.Param, ...)
  scores = task.score, task.test or task.score
  return Model(structure, params, statistics, task.held_out, *scores)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluated(
  structure: nnx.GraphDef,
  test: Score,
  params: Any,
  statistics: Any,
  inputs: jax.Array,
  labels: jax.Array,
) -> tuple[jax.Array, ...]:
  """The scores of a model."""
  module = nnx.merge(structure, params, *statistics)
  module.eval()  # batch normalization by the running statistics
  return test(module, inputs, labels)


def _scores(
  logits: jax.Array, labels: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sum of the losses, the number of labels that are the most likely ones, and the number of labels."""
  wanted = labels != IGNORED
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, jnp.where(wanted, labels, 0)
  )
  right = (jnp.argmax(logits, -1) == labels) & wanted
  count = jnp.sum(wanted, dtype=jnp.float32)
  return jnp.sum(losses, where=wanted), jnp.sum(right), jnp.maximum(count, 1)


def entries_of(module: Callable[[], nnx.Module]) -> int:
  """Number of parameters of a model, which is not made."""
  params = nnx.state(nnx.eval_shape(module), nnx.Param)
  return sum(leaf.size for leaf in jax.tree.leaves(params))
