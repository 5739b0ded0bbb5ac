"""The protocol of a task that `benchmarks.race` trains: a model, its loss, its batches and what is held out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

IGNORED = -1  # a label that is not to be predicted
_PART = 128  # inputs that are evaluated at once

Arrays = tuple[np.ndarray, np.ndarray]  # inputs and labels


class Task(NamedTuple):
  """A model and its data.

  Attributes:
    name: of the task.
    source: the data in words, with their hash.
    module: seed -> the untrained model, from inputs to logits over the last axis.
    draw: (random, size) -> inputs and labels i32 of a batch of one worker; labels have the shape of the logits but
      their last axis, and `IGNORED` marks those that are not to be predicted.
    held_out: inputs and labels to be tested on.

  Example:
    >>> data = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
    >>> module = lambda seed: nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    >>> task = Task("one", "zeros", module, lambda random, size: tuple(x[:size] for x in data), data)
    >>> task.batch(seed=0, step=0, workers=2, size=1)["input"].shape, task.entries
    ((2, 2), 9)
  """

  name: str
  source: str
  module: Callable[[int], nnx.Module]
  draw: Callable[[np.random.Generator, int], Arrays]
  held_out: Arrays

  def __str__(self) -> str:
    return f"{self.name} ({self.entries:,} parameters) on {self.source}"

  @property
  def entries(self) -> int:
    """Number of gradient entries n."""
    return entries_of(lambda: self.module(0))

  def batch(self, seed: int, step: int, workers: int, size: int) -> dict[str, np.ndarray]:
    """The batch of a step, one worker's inputs after the other's: `size` each, decided by seed, step and worker."""
    shares = [self.draw(np.random.default_rng([seed, step, worker]), size) for worker in range(workers)]
    inputs, labels = (np.concatenate(parts) for parts in zip(*shares, strict=True))
    return {"input": inputs, "label": labels}


class Model(NamedTuple):
  """The model of a task as functions of its parameters.

  Attributes:
    params: before the first step.
    statistics: what the model counts beside them, running means of batch normalization: a pytree, maybe without leaves.
    loss: (params, batch, model_state=statistics) -> (mean cross-entropy f32[], next statistics).
    evaluate: (params, statistics) -> mean loss and accuracy over what is held out.
  """

  params: Any
  statistics: Any
  loss: Callable[..., tuple[jax.Array, Any]]
  evaluate: Callable[[Any, Any], tuple[float, float]]


def model_of(task: Task, seed: int) -> Model:
  """The untrained model of a task."""
  structure, params, *statistics = nnx.split(task.module(seed), nnx.Param, ...)

  def loss(params: Any, batch: dict[str, jax.Array], model_state: Any) -> tuple[jax.Array, Any]:
    module = nnx.merge(structure, params, *model_state, copy=True)  # those of the caller stay as they are
    losses, _, count = _scores(module(batch["input"]), batch["label"])
    _, _, *after = nnx.split(module, nnx.Param, ...)
    return losses / count, after

  @jax.jit
  def scores(params: Any, statistics: Any, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    module = nnx.merge(structure, params, *statistics)
    module.eval()  # batch normalization by the running statistics
    return _scores(module(inputs), labels)

  def evaluate(params: Any, statistics: Any) -> tuple[float, float]:
    inputs, labels = task.held_out
    parts = [slice(start, start + _PART) for start in range(0, len(inputs), _PART)]
    rows = [[float(x) for x in scores(params, statistics, inputs[part], labels[part])] for part in parts]
    losses, right, count = (sum(column) for column in zip(*rows, strict=True))
    return losses / count, right / count

  return Model(params, statistics, loss, evaluate)


def _scores(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sum of the losses, the number of labels that are the most likely ones, and the number of labels."""
  wanted = labels != IGNORED
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(wanted, labels, 0))
  right = (jnp.argmax(logits, -1) == labels) & wanted
  count = jnp.sum(wanted, dtype=jnp.float32)
  return jnp.sum(losses, where=wanted), jnp.sum(right), jnp.maximum(count, 1)


def entries_of(module: Callable[[], nnx.Module]) -> int:
  """Number of parameters of a model, which is not made.

  Example:
    >>> entries_of(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    9
  """
  params = nnx.state(nnx.eval_shape(module), nnx.Param)
  return sum(leaf.size for leaf in jax.tree.leaves(params))
