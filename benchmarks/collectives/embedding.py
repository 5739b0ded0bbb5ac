"""Gradients of an embedding whose ids follow Zipf's law."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.specs import Shapes
from jaxsparse.train.engine import Engine

WIDTH = 64  # of a row
_STEPS = 16  # that differ


def shapes(n: int) -> Shapes:
  """The shape of the only leaf."""
  return ((n // WIDTH, WIDTH),)


def draw(rows: int, workers: int, ids: int, exponent: float) -> np.ndarray:
  """The ids that the workers look up in every step, i32[steps, P, ids]; of id i with a share of (i + 1)^−exponent.

  Example:
    >>> draw(rows=1000, workers=4, ids=50, exponent=1.1).shape
    (16, 4, 50)
  """
  weights = np.arange(1.0, rows + 1) ** -exponent
  shares = np.cumsum(weights) / weights.sum()
  return np.searchsorted(
    shares, np.random.default_rng(0).random((_STEPS, workers, ids))
  ).astype(np.int32)


def describe(ids: np.ndarray) -> str:
  """How many rows are touched in a step."""
  own = [len(np.unique(worker)) for step in ids for worker in step]
  of_all = [len(np.unique(step)) for step in ids]
  return f"rows touched: {np.mean(own):,.0f} a worker, at most {max(own):,}; {np.mean(of_all):,.0f} of all workers"


def gradients(engine: Engine, n: int, ids: np.ndarray) -> Callable[[int], jax.Array]:
  """Makes the gradients of all workers in a step, f32[n] each: normal numbers for each id."""

  def make(ids: jax.Array, step: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(step), engine.comm.rank)
    own = ids[step % _STEPS, engine.comm.rank]
    return (
      jnp.zeros((n // WIDTH, WIDTH))
      .at[own]
      .add(jax.random.normal(key, (own.size, WIDTH)))
      .reshape(-1)
    )

  program = engine.jit(
    make, (PartitionSpec(), PartitionSpec()), PartitionSpec(engine.axis)
  )
  return lambda step: program(ids, np.int32(step))
