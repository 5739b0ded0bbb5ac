"""Small models of images, on digits or CIFAR-10."""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx

from benchmarks.tasks.base import Task
from benchmarks.tasks.data import CLASSES, Dataset, epochs


class CNN(nnx.Module):
  """Two 3 × 3 convolutions, each followed by 2 × 2 max-pooling, and two dense layers."""

  def __init__(self, shape: tuple[int, int, int], rngs: nnx.Rngs):
    height, width, channels = shape
    self.conv1 = nnx.Conv(channels, 16, (3, 3), rngs=rngs)
    self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
    self.dense = nnx.Linear((height // 4) * (width // 4) * 32, 128, rngs=rngs)
    self.head = nnx.Linear(128, CLASSES, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """f32[batch, height, width, channels] to logits f32[batch, 10]."""
    x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
    x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
    return self.head(nnx.relu(self.dense(x.reshape(len(x), -1))))


class Perceptron(nnx.Module):
  """Dense layers between these widths."""

  def __init__(self, widths: Sequence[int], rngs: nnx.Rngs):
    self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(widths)])

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, …] to logits f32[batch, classes]."""
    first, *rest = self.layers
    x = first(x.reshape(len(x), -1))
    for layer in rest:
      x = layer(nnx.relu(x))
    return x


MODELS: dict[str, Callable[[tuple[int, int, int], nnx.Rngs], nnx.Module]] = {
  "cnn": CNN,
  "mlp": lambda shape, rngs: Perceptron((math.prod(shape), 128, 128, CLASSES), rngs),
}


def make(name: str, images: Dataset) -> Task:
  """The task of classifying images with the model of that name, in epochs over the training set."""
  train, test = (images.train_images, images.train_labels), (images.test_images, images.test_labels)
  module = lambda seed: MODELS[name](train[0].shape[1:], nnx.Rngs(seed))
  return Task(name, images.name, module, epochs(*train), test, train)
