"""A physics-informed network (Raissi et al., 2019): Poisson's equation on a square, from its residual alone."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks.base import Arrays, Task, drawn, score_squares

GROUPS = 4  # strips of the square, where each worker has its own
_WIDTH = 64
_WAVES = np.array([2, 3])  # half periods of the source along each side
_GRID = 32  # points of a side that are held out


class Potential(nnx.Module):
  """A perceptron u of a point that is 0 at the boundary, with its second derivatives: 8,577 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    linear = lambda inputs, out: nnx.Linear(inputs, out, rngs=rngs)
    self.layers = nnx.List([linear(inputs, _WIDTH) for inputs in (2, _WIDTH, _WIDTH)])
    self.head = linear(_WIDTH, 1)

  def __call__(self, points: jax.Array) -> jax.Array:
    """Points f32[batch, 2] to −Δu, f32[batch]."""
    x = 2 * points - 1
    # the first and second derivatives along both axes, f32[axes, batch, width]
    first = jnp.broadcast_to(2 * jnp.eye(2)[:, None], (2, *points.shape))
    second = jnp.zeros_like(first)
    for layer in self.layers:
      x = jnp.tanh(layer(x))
      slope = 1 - x**2
      inner = first @ layer.kernel[...]
      first = slope * inner
      second = slope * (second @ layer.kernel[...]) - 2 * x * slope * inner**2
    kernel = self.head.kernel[...]
    value, first, second = self.head(x), first @ kernel, second @ kernel
    # u is that times the product of x (1 − x) over both coordinates
    across = (points * (1 - points))[:, ::-1].T
    along = points.T * (1 - points.T)
    parts = along * second[..., 0] + 2 * (1 - 2 * points.T) * first[..., 0]
    return -16 * jnp.sum(across * (parts - 2 * value[:, 0]), 0)


def score(module: nnx.Module, points: jax.Array, source: jax.Array) -> tuple:
  """The squared residuals of −Δu = f."""
  return score_squares(module(points), source)


def _source(points: np.ndarray) -> Arrays:
  """Points f32[count, 2] of the square, and f there, f32[count]: of mean square 1."""
  source = 2 * np.prod(np.sin(np.pi * _WAVES * points), -1)
  return points.astype(np.float32), source.astype(np.float32)


def make(apart: bool = False) -> Task:
  """Solves the equation from points of the square; `apart`: a worker has those of one of four strips."""
  mixed = lambda random, size: _source(random.random((size, 2)))

  def own(random: np.random.Generator, size: int, worker: int) -> Arrays:
    points = random.random((size, 2))
    points[:, 0] = (points[:, 0] + worker % GROUPS) / GROUPS
    return _source(points)

  side = (np.arange(_GRID) + 0.5) / _GRID
  grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
  return Task(
    "physics" + "_apart" * apart,
    "Poisson's equation" + ", a strip of the square for each worker" * apart,
    lambda seed: Potential(nnx.Rngs(seed)),
    drawn(own, own=True) if apart else drawn(mixed),
    _source(grid),
    score=score,
  )
