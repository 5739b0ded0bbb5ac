"""FNN-3 of the A2SGD paper (Table I): three dense layers on images of 28 × 28, 199,210 parameters."""

import itertools

import jax
from flax import nnx

from benchmarks.tasks import images
from benchmarks.tasks.base import Task
from benchmarks.tasks.data import CLASSES

SIDE = 28
_WIDTH = 200


class FNN3(nnx.Module):
  """Two hidden layers of 200."""

  def __init__(self, rngs: nnx.Rngs):
    widths = (SIDE * SIDE, _WIDTH, _WIDTH, CLASSES)
    self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(widths)])

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, 28, 28, 1] to logits f32[batch, 10]."""
    first, *rest = self.layers
    x = first(x.reshape(len(x), -1))
    for layer in rest:
      x = layer(nnx.relu(x))
    return x


def make(data_dir: str | None = None) -> Task:
  """The task on CIFAR-10 in `data_dir`, without its colours, or on digits; the paper's MNIST is on no machine."""
  return images.make("fnn3", lambda seed: FNN3(nnx.Rngs(seed)), data_dir, (SIDE, SIDE, 1))
