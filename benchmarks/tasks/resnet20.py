"""ResNet-20 for CIFAR-10 (He et al. 2016): 269,722 parameters, shortcuts without parameters, batch normalization."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.tasks import images
from benchmarks.tasks.base import Task
from benchmarks.tasks.data import CLASSES

_STAGES = (16, 32, 64)
_BLOCKS = 3  # of each stage, two convolutions each


class Block(nnx.Module):
  """Two convolutions, and what came in: every other pixel of it and channels of zeros where the shape changes."""

  def __init__(self, channels: int, out: int, rngs: nnx.Rngs):
    self.stride, self.wider = (1, 0) if channels == out else (2, (out - channels) // 2)
    self.conv1 = convolution(channels, out, rngs, self.stride)
    self.conv2 = convolution(out, out, rngs)
    self.norm1, self.norm2 = nnx.BatchNorm(out, rngs=rngs), nnx.BatchNorm(out, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, height, width, channels] to f32[batch, height / stride, width / stride, out]."""
    same = jnp.pad(x[:, :: self.stride, :: self.stride], ((0, 0), (0, 0), (0, 0), (self.wider, self.wider)))
    y = nnx.relu(self.norm1(self.conv1(x)))
    return nnx.relu(same + self.norm2(self.conv2(y)))


class ResNet20(nnx.Module):
  """Three stages of three blocks."""

  def __init__(self, rngs: nnx.Rngs):
    self.conv, self.norm = convolution(3, _STAGES[0], rngs), nnx.BatchNorm(_STAGES[0], rngs=rngs)
    widths = [_STAGES[0], *(width for width in _STAGES for _ in range(_BLOCKS))]
    self.blocks = nnx.List([Block(*pair, rngs) for pair in itertools.pairwise(widths)])
    self.head = nnx.Linear(_STAGES[-1], CLASSES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, 32, 32, 3] to logits f32[batch, 10]."""
    x = nnx.relu(self.norm(self.conv(x)))
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((1, 2)))


def convolution(channels: int, out: int, rngs: nnx.Rngs, stride: int = 1, bias: bool = False) -> nnx.Conv:
  """A convolution of 3 × 3, with weights for the activation behind it."""
  start = nnx.initializers.he_normal()
  return nnx.Conv(channels, out, (3, 3), stride, padding=1, use_bias=bias, kernel_init=start, rngs=rngs)


def make(data_dir: str | None = None) -> Task:
  """The task on CIFAR-10 in `data_dir`, or on digits."""
  return images.make("resnet20", lambda seed: ResNet20(nnx.Rngs(seed)), data_dir)
