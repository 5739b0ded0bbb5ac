"""Clicks on items of users, whose numbers follow Zipf's law: most rows of the embeddings have no gradient."""

import jax
import numpy as np
from flax import nnx

from benchmarks.tasks.base import Arrays, Task, drawn

USERS = 1000
ITEMS = 2000
GROUPS = 4  # of items, where each worker sells its own
_WIDTH = 24
_TASTES = 6  # numbers that decide what a user likes
_HELD_OUT = 4096


class Recommender(nnx.Module):
  """An embedding of users and one of items, and two dense layers: 75,002 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    small = nnx.initializers.normal(0.1)
    embedding = lambda rows: nnx.Embed(rows, _WIDTH, embedding_init=small, rngs=rngs)
    self.users = embedding(USERS)
    self.items = embedding(ITEMS)
    self.dense = nnx.Linear(3 * _WIDTH, 40, rngs=rngs)
    self.head = nnx.Linear(40, 2, rngs=rngs)

  def __call__(self, pairs: jax.Array) -> jax.Array:
    """Users and items i32[batch, 2] to logits f32[batch, 2] of no click and a click."""
    user = self.users(pairs[:, 0])
    item = self.items(pairs[:, 1])
    both = jax.numpy.concatenate([user, item, user * item], 1)
    return self.head(nnx.relu(self.dense(both)))


def make(apart: bool = False) -> Task:
  """Predicts clicks; `apart`: every fourth item is one that a worker sells, and no other one of four does."""
  random = np.random.default_rng(0)
  tastes = random.normal(size=(USERS, _TASTES))
  kinds = random.normal(size=(ITEMS, _TASTES))
  appeal = random.normal(size=ITEMS)

  def click(random: np.random.Generator, size: int, items: np.ndarray) -> Arrays:
    user = _draw_zipf(random, size, USERS)
    item = items[_draw_zipf(random, size, len(items))]
    likes = appeal[item] + 2 * np.sum(tastes[user] * kinds[item], 1) / _TASTES**0.5
    clicks = random.random(size) < 1 / (1 + np.exp(-likes))
    return np.stack([user, item], 1).astype(np.int32), clicks.astype(np.int32)

  every = np.arange(ITEMS)
  own = lambda random, size, worker: click(
    random, size, every[worker % GROUPS :: GROUPS]
  )
  mixed = lambda random, size: click(random, size, every)
  source = "clicks with Zipf's ids" + ", items of each worker's own" * apart
  held_out = click(np.random.default_rng(1), _HELD_OUT, every)
  return Task(
    "recommender" + "_apart" * apart,
    source,
    lambda seed: Recommender(nnx.Rngs(seed)),
    drawn(own, own=True) if apart else drawn(mixed),
    held_out,
  )


def _draw_zipf(random: np.random.Generator, size: int, count: int) -> np.ndarray:
  """i64[size] below `count`, the number r with a probability in proportion to 1/(r + 1)."""
  weights = 1 / np.arange(1, count + 1)
  return random.choice(count, size, p=weights / weights.sum())
