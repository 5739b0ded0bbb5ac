"""LoRA (Hu et al., 2022): a perceptron that knows digits learns mirrored ones by products of two thin matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.tasks import data
from benchmarks.tasks.base import Task, score_labels
from benchmarks.tasks.images import Perceptron

_WIDTHS = (64, 128, 128, data.CLASSES)
_RANK = 12
_STEPS = 200  # of the training before, full batch


class Frozen(nnx.Variable):
  """A leaf that is not trained."""


class Adapted(nnx.Module):
  """A perceptron whose matrices stay as they are, each with a product A B added: 7,032 parameters."""

  def __init__(self, layers: list, rngs: nnx.Rngs):
    self.kernels = nnx.List([Frozen(kernel) for kernel, _ in layers])
    self.biases = nnx.List([Frozen(bias) for _, bias in layers])
    shapes = [kernel.shape for kernel, _ in layers]
    start = nnx.initializers.he_normal()
    down = lambda rows: nnx.Param(start(rngs.params(), (rows, _RANK)))
    self.down = nnx.List([down(rows) for rows, _ in shapes])
    self.up = nnx.List(
      [nnx.Param(jnp.zeros((_RANK, columns))) for _, columns in shapes]
    )

  def __call__(self, images: jax.Array) -> jax.Array:
    """f32[batch, 8, 8, 1] to logits f32[batch, 10]."""
    x = images.reshape(len(images), -1)
    layers = zip(self.kernels, self.biases, self.down, self.up, strict=True)
    for number, (kernel, bias, down, up) in enumerate(layers):
      x = nnx.relu(x) if number else x
      x = x @ kernel[...] + (x @ down[...]) @ up[...] + bias[...]
    return x


def make(apart: bool = False) -> Task:
  """Mirrored digits; `apart`: a worker has few of their classes, from Dirichlet(0.1)."""
  digits = data.load("digits")
  train = digits.train_images[:, :, ::-1], digits.train_labels
  layers = _train_layers()
  return Task(
    "adapters" + "_apart" * apart,
    "mirrored digits" + ", workers' classes from Dirichlet(0.1)" * apart,
    lambda seed: Adapted(layers, nnx.Rngs(seed)),
    data.apart(*train, 0.1) if apart else data.epochs(*train),
    (digits.test_images[:, :, ::-1], digits.test_labels),
    train,
  )


@functools.cache
def _train_layers() -> list[tuple[jax.Array, jax.Array]]:
  """Kernel and bias of each layer of a perceptron that was trained on digits as they are."""
  digits = data.load("digits")
  images, labels = digits.train_images, np.asarray(digits.train_labels)
  structure, params = nnx.split(Perceptron(_WIDTHS, nnx.Rngs(0)), nnx.Param)
  adam = optax.adam(0.01)

  def loss(params: nnx.State) -> jax.Array:
    losses, _, count = score_labels(nnx.merge(structure, params), images, labels)
    return losses / count

  def step(carry: tuple, _: None) -> tuple[tuple, None]:
    params, state = carry
    updates, state = adam.update(jax.grad(loss)(params), state)
    return (optax.apply_updates(params, updates), state), None

  start = params, adam.init(params)
  (params, _), _ = jax.jit(lambda x: jax.lax.scan(step, x, None, _STEPS))(start)
  layers = nnx.merge(structure, params).layers
  return [(layer.kernel[...], layer.bias[...]) for layer in layers]  # type: ignore[index]
