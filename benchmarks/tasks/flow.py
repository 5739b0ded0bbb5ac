"""Flow matching: the velocity from noise to a digit of scikit-learn (Lipman et al., 2023)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks import data
from benchmarks.tasks.base import Arrays, Batches, Stream, Task, score_squares
from benchmarks.tasks.images import Perceptron

_PIXELS = 64
_HELD_OUT = 4  # noises of each digit that is held out


class Flow(nnx.Module):
  """A perceptron of a point and its time: 84,934 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    self.layers = Perceptron((_PIXELS + 9, 230, 230, _PIXELS), rngs)

  def __call__(self, points: jax.Array) -> jax.Array:
    """Points and times f32[batch, 65] to velocities f32[batch, 64]."""
    place, time = points[:, :-1], points[:, -1:]
    waves = time * 2.0 ** jnp.arange(4) * jnp.pi
    known = [place, time, jnp.sin(waves), jnp.cos(waves)]
    return self.layers(jnp.concatenate(known, 1))


def score(module: nnx.Module, points: jax.Array, velocities: jax.Array) -> tuple:
  """The squared errors of velocities."""
  return score_squares(module(points), velocities)


def make(apart: bool = False) -> Task:
  """Velocities at x₀ + t (x₁ − x₀); `apart`: a worker has the digits of few classes, from Dirichlet(0.1)."""
  digits = data.load("digits")
  train = digits.train_images, digits.train_labels
  stream = data.apart(*train, 0.1) if apart else data.epochs(*train)
  held_out = digits.test_images.repeat(_HELD_OUT, 0)
  return Task(
    "flow" + "_apart" * apart,
    "digits" + ", workers' classes from Dirichlet(0.1)" * apart,
    lambda seed: Flow(nnx.Rngs(seed)),
    _mix_noise(stream),
    _noisy(np.random.default_rng(0), held_out),
    score=score,
  )


def _mix_noise(stream: Stream) -> Stream:
  """The batches of digits as batches of points between noise and them."""

  def batches(seed: int, workers: int, size: int) -> Batches:
    for step, batch in enumerate(stream(seed, workers, size)):
      random = np.random.default_rng([seed, step])
      yield dict(zip(("input", "label"), _noisy(random, batch["input"]), strict=True))

  return batches


def _noisy(random: np.random.Generator, images: np.ndarray) -> Arrays:
  """Points with their times f32[count, 65], and velocities f32[count, 64]."""
  flat = images.reshape(len(images), -1).astype(np.float32)
  noise = random.normal(size=flat.shape).astype(np.float32)
  time = random.random((len(flat), 1), np.float32)
  return np.concatenate([noise + time * (flat - noise), time], 1), flat - noise
