"""VGG-16 with batch normalization for images of 32 × 32 (Simonyan & Zisserman 2014): 14,728,266 parameters."""

from collections.abc import Sequence

import jax
from flax import nnx

from benchmarks.tasks import images
from benchmarks.tasks.base import Task
from benchmarks.tasks.data import CLASSES
from benchmarks.tasks.resnet20 import convolution

VGG16 = (2, 2, 3, 3, 3)  # convolutions of each stage
VGG19 = (2, 2, 4, 4, 4)
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nnx.Module):
  """Stages of convolutions, each with a bias and batch normalization, a pooling behind each stage, one dense layer."""

  def __init__(self, stages: Sequence[int], classes: int, rngs: nnx.Rngs):
    widths = [width for width, count in zip(_WIDTHS, stages, strict=True) for _ in range(count)]
    pairs = zip([3, *widths[:-1]], widths, strict=True)
    self.stages = tuple(stages)
    self.convs = nnx.List([convolution(*pair, rngs, bias=True) for pair in pairs])
    self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in widths])
    self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, 32, 32, 3] to logits f32[batch, classes]."""
    layers = iter(zip(self.convs, self.norms, strict=True))
    for count in self.stages:
      for _ in range(count):
        conv, norm = next(layers)
        x = nnx.relu(norm(conv(x)))
      x = nnx.max_pool(x, (2, 2), strides=(2, 2))
    return self.head(x.reshape(len(x), -1))


def make(data_dir: str | None = None) -> Task:
  """The task on CIFAR-10 in `data_dir`, or on digits."""
  return images.make("vgg16", lambda seed: VGG(VGG16, CLASSES, nnx.Rngs(seed)), data_dir)
