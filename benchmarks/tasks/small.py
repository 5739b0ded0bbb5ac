"""Small models of images, on digits or CIFAR-10."""

import jax
from flax import nnx

from benchmarks.tasks.base import Task
from benchmarks.tasks.data import CLASSES, Dataset, epochs


class CNN(nnx.Module):
  """Two 3 × 3 convolutions, each followed by 2 × 2 max-pooling, and two dense layers."""

  def __init__(self, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs):
    height, width, channels = shape
    self.conv1 = nnx.Conv(channels, 16, (3, 3), rngs=rngs)
    self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
    self.dense = nnx.Linear((height // 4) * (width // 4) * 32, 128, rngs=rngs)
    self.head = nnx.Linear(128, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """f32[batch, height, width, channels] to logits f32[batch, classes]."""
    x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
    x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
    return self.head(nnx.relu(self.dense(x.reshape(len(x), -1))))


class MLP(nnx.Module):
  """Two hidden layers of 128."""

  def __init__(self, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs):
    height, width, channels = shape
    self.hidden1 = nnx.Linear(height * width * channels, 128, rngs=rngs)
    self.hidden2 = nnx.Linear(128, 128, rngs=rngs)
    self.head = nnx.Linear(128, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """f32[batch, height, width, channels] to logits f32[batch, classes]."""
    x = nnx.relu(self.hidden1(images.reshape(len(images), -1)))
    return self.head(nnx.relu(self.hidden2(x)))


MODELS = {"cnn": CNN, "mlp": MLP}


def make(name: str, images: Dataset) -> Task:
  """The task of classifying images with the model of that name, in epochs over the training set."""
  train, test = (images.train_images, images.train_labels), (images.test_images, images.test_labels)
  module = lambda seed: MODELS[name](train[0].shape[1:], CLASSES, nnx.Rngs(seed))
  return Task(name, images.name, module, epochs(*train), test, train)
