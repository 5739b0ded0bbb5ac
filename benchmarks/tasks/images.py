"""Small models of images, and the papers' networks, on CIFAR-10 where the user has it, else on digits.

The papers' MNIST is on no machine. The digits of scikit-learn have 8 × 8 pixels; in the
papers' networks each becomes 4 × 4 in each colour. They are easier than CIFAR-10: a
race on them compares methods, and reproduces no accuracy.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks import data
from benchmarks.tasks.base import Arrays, Task, drawn
from benchmarks.tasks.data import CLASSES, Dataset, apart, epochs


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
    self.layers = nnx.List(
      [nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(widths)]
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, …] to logits f32[batch, classes]."""
    first, *rest = self.layers
    x = first(x.reshape(len(x), -1))
    for layer in rest:
      x = layer(nnx.relu(x))
    return x


VGG16 = (2, 2, 3, 3, 3)  # convolutions of each stage
VGG19 = (2, 2, 4, 4, 4)
_WIDTHS = (64, 128, 256, 512, 512)
_STAGES = (16, 32, 64)
_BLOCKS = 3  # of each stage of ResNet-20, two convolutions each


def convolution(
  channels: int, out: int, rngs: nnx.Rngs, stride: int = 1, bias: bool = False
) -> nnx.Conv:
  """A convolution of 3 × 3, with weights for the activation behind it."""
  start = nnx.initializers.he_normal()
  return nnx.Conv(
    channels,
    out,
    (3, 3),
    stride,
    padding=1,
    use_bias=bias,
    kernel_init=start,
    rngs=rngs,
  )


class Block(nnx.Module):
  """Two convolutions, and what came in: every other pixel of it and channels of zeros where the shape changes."""

  def __init__(self, channels: int, out: int, rngs: nnx.Rngs):
    self.stride, self.wider = (1, 0) if channels == out else (2, (out - channels) // 2)
    self.conv1 = convolution(channels, out, rngs, self.stride)
    self.conv2 = convolution(out, out, rngs)
    self.norm1, self.norm2 = (
      nnx.BatchNorm(out, rngs=rngs),
      nnx.BatchNorm(out, rngs=rngs),
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, height, width, channels] to f32[batch, height / stride, width / stride, out]."""
    same = jnp.pad(
      x[:, :: self.stride, :: self.stride],
      ((0, 0), (0, 0), (0, 0), (self.wider, self.wider)),
    )
    y = nnx.relu(self.norm1(self.conv1(x)))
    return nnx.relu(same + self.norm2(self.conv2(y)))


class ResNet20(nnx.Module):
  """ResNet-20 for CIFAR-10 (He et al. 2016): 269,722 parameters, shortcuts without parameters, batch normalization."""

  def __init__(self, rngs: nnx.Rngs):
    self.conv, self.norm = (
      convolution(3, _STAGES[0], rngs),
      nnx.BatchNorm(_STAGES[0], rngs=rngs),
    )
    widths = [_STAGES[0], *(width for width in _STAGES for _ in range(_BLOCKS))]
    self.blocks = nnx.List([Block(*pair, rngs) for pair in itertools.pairwise(widths)])
    self.head = nnx.Linear(_STAGES[-1], CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, 32, 32, 3] to logits f32[batch, 10]."""
    x = nnx.relu(self.norm(self.conv(x)))
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((1, 2)))


class VGG(nnx.Module):
  """VGG with biases and batch normalization, one dense layer (Simonyan & Zisserman 2014): VGG-16 has 14,728,266."""

  def __init__(self, stages: Sequence[int], classes: int, rngs: nnx.Rngs):
    widths = [
      width for width, count in zip(_WIDTHS, stages, strict=True) for _ in range(count)
    ]
    self.stages = tuple(stages)
    self.convs = nnx.List(
      [convolution(*pair, rngs, bias=True) for pair in itertools.pairwise([3, *widths])]
    )
    self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in widths])
    self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, 32, 32, 3] to logits f32[batch, classes]."""
    layers = iter(zip(self.convs, self.norms, strict=True))
    for count in self.stages:
      for conv, norm in itertools.islice(layers, count):
        x = nnx.relu(norm(conv(x)))
      x = nnx.max_pool(x, (2, 2), strides=(2, 2))
    return self.head(x.reshape(len(x), -1))


NETWORKS: dict[
  str, tuple[Callable[[nnx.Rngs], nnx.Module], tuple[int, int, int]]
] = {  # and the shape of their inputs
  "resnet20": (ResNet20, (32, 32, 3)),
  "vgg16": (lambda rngs: VGG(VGG16, CLASSES, rngs), (32, 32, 3)),
  "fnn3": (
    lambda rngs: Perceptron((28 * 28, 200, 200, CLASSES), rngs),
    (28, 28, 1),
  ),  # A2SGD, Table I
}


def make(name: str, data_dir: str | None = None) -> Task:
  """The task of one of `NETWORKS` on CIFAR-10 in `data_dir`, or on digits."""
  module, shape = NETWORKS[name]
  images = data.load("cifar10", data_dir) if data_dir else data.load("digits")
  train, test = (
    _shaped(part, shape) for part in (images.train_images, images.test_images)
  )
  digest = hashlib.sha256(
    images.train_images.tobytes() + images.test_images.tobytes()
  ).hexdigest()
  source = f"{'CIFAR-10' if data_dir else 'the digits of scikit-learn'} ({len(train):,} images, SHA-256 {digest[:12]})"

  def draw(random: np.random.Generator, size: int) -> Arrays:
    chosen = random.integers(0, len(train), size)
    return train[chosen], images.train_labels[chosen]

  return Task(
    name,
    source,
    lambda seed: module(nnx.Rngs(seed)),
    drawn(draw),
    (test, images.test_labels),
  )


def _shaped(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
  """Images enlarged to at least `shape`, cut around their centre; one colour becomes three, or three become one."""
  times = -(-shape[0] // images.shape[1])
  large = images.repeat(times, 1).repeat(times, 2)
  first = (large.shape[1] - shape[0]) // 2
  large = large[:, first : first + shape[0], first : first + shape[1]]
  return np.broadcast_to(
    large.mean(-1, keepdims=True) if shape[2] == 1 else large, (len(large), *shape)
  )


SMALL: dict[str, Callable[[tuple[int, int, int], nnx.Rngs], nnx.Module]] = {
  "cnn": CNN,
  "mlp": lambda shape, rngs: Perceptron((math.prod(shape), 128, 128, CLASSES), rngs),
}


def make_small(name: str, images: Dataset, alpha: float | None = None) -> Task:
  """The task of classifying images with the model of that name: in epochs, or with data of each worker's own."""
  train, test = (
    (images.train_images, images.train_labels),
    (images.test_images, images.test_labels),
  )
  module = lambda seed: SMALL[name](train[0].shape[1:], nnx.Rngs(seed))
  stream = epochs(*train) if alpha is None else apart(*train, alpha)
  source = (
    images.name
    if alpha is None
    else f"{images.name}, workers' classes from Dirichlet({alpha:g})"
  )
  return Task(name, source, module, stream, test, train)
