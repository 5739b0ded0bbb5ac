"""Cart-pole by policy gradients: PPO with one pass over each rollout, where its clipping never acts.

A batch is seeds of episodes; the loss plays them with the policy of that moment. What is
held out is other seeds. The loss there is 1 / the mean length of an episode.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks.base import Arrays, Task, drawn
from benchmarks.tasks.images import Perceptron

LIMIT = 400  # steps of an episode
_DISCOUNT = 0.98
_ENTROPY = 0.01
_HELD_OUT = 128  # episodes


class Player(nnx.Module):
  """A perceptron: two logits of the push to the left and to the right, and the value; 4,675 parameters."""

  def __init__(self, rngs: nnx.Rngs):
    self.layers = Perceptron((4, 64, 64, 3), rngs)

  def __call__(self, states: jax.Array) -> jax.Array:
    """States f32[batch, 4] to f32[batch, 3]."""
    return self.layers(states * jnp.array([0.5, 0.5, 5.0, 0.5]))


def move(state: jax.Array, right: jax.Array) -> jax.Array:
  """The state f32[batch, 4] 0.02 s later: position, speed, angle and its speed (Barto et al., 1983)."""
  _, speed, angle, turn = state.T
  force = jnp.where(right, 10.0, -10.0)
  sine, cosine = jnp.sin(angle), jnp.cos(angle)
  common = (force + 0.05 * turn**2 * sine) / 1.1
  fall = (9.8 * sine - cosine * common) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
  push = common - 0.05 * fall * cosine / 1.1
  change = jnp.stack([speed, push, turn, fall], 1)
  return state + 0.02 * change


def play(module: nnx.Module, seeds: jax.Array) -> tuple[jax.Array, ...]:
  """States f32[steps, episodes, 4], which pushes are to the right, and whether the pole stood before each."""
  keys = jax.vmap(jax.random.key)(seeds)
  start = jax.vmap(lambda key: jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05))
  structure, values = nnx.split(module)
  policy = nnx.merge(structure, jax.lax.stop_gradient(values))

  def step(carry: tuple, number: jax.Array) -> tuple[tuple, tuple]:
    state, stands = carry
    logits = policy(state)
    odds = logits[:, 1] - logits[:, 0]
    draws = jax.vmap(lambda key: jax.random.logistic(jax.random.fold_in(key, number)))
    right = odds + draws(keys) > 0
    after = move(state, right)
    still = (jnp.abs(after[:, 0]) < 2.4) & (jnp.abs(after[:, 2]) < 0.2095) & stands
    return (jnp.where(still[:, None], after, state), still), (state, right, stands)

  first = start(keys), jnp.ones(len(seeds), bool)
  return jax.lax.scan(step, first, jnp.arange(LIMIT))[1]


def score(module: nnx.Module, seeds: jax.Array, labels: Any) -> tuple[jax.Array, ...]:
  """The loss of actor, critic and entropy over the steps of the episodes."""
  del labels
  states, right, stands = play(module, seeds)
  later = lambda sums, stood: (sums := stood + _DISCOUNT * sums, sums)
  zeros = jnp.zeros(len(seeds))
  _, returns = jax.lax.scan(later, zeros, stands.astype(jnp.float32), reverse=True)
  out = module(states.reshape(-1, 4)).reshape(*stands.shape, 3)
  logs = jax.nn.log_softmax(out[..., :2])
  chosen = jnp.where(right, logs[..., 1], logs[..., 0])
  value = out[..., 2] * 10
  count = jnp.sum(stands)
  mean = lambda x: jnp.sum(x, where=stands) / count
  advantage = jax.lax.stop_gradient(returns - value)
  advantage -= mean(advantage)
  advantage /= jnp.sqrt(mean(advantage**2)) + 1e-6
  entropy = -jnp.sum(jnp.exp(logs) * logs, -1)
  loss = -chosen * advantage + 0.005 * (returns - value) ** 2 - _ENTROPY * entropy
  return jnp.sum(loss, where=stands), jnp.float32(0), count.astype(jnp.float32)


def test_score(module: nnx.Module, seeds: jax.Array, labels: Any) -> tuple:
  """Episodes, those that stand to the end, and steps of all."""
  del labels
  *_, stands = play(module, seeds)
  steps = jnp.sum(stands, dtype=jnp.float32)
  return jnp.float32(len(seeds)), jnp.sum(stands[-1]), steps


def make() -> Task:
  """Balances a pole for 400 steps."""

  def draw(random: np.random.Generator, size: int) -> Arrays:
    return random.integers(0, 2**31, size, np.uint32), np.zeros(size, np.int32)

  return Task(
    "cartpole",
    "cart-pole, simulated",
    lambda seed: Player(nnx.Rngs(seed)),
    drawn(draw),
    draw(np.random.default_rng(0), _HELD_OUT),
    score=score,
    test=test_score,
  )
