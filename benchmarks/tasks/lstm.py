"""A byte-level language model with recurrence, the papers' LSTM-PTB at a size that fits.

Two layers behind an embedding, as in the papers (A2SGD, Table I): with 10,000 words and width 1500 it has their
66,034,000 parameters.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.tasks import lm
from benchmarks.tasks.base import Task


class Layer(nnx.Module):
  """An LSTM over a sequence, from a state of zeros; both of its products have a bias, as in PyTorch."""

  def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
    self.width = width
    self.input, self.hidden = nnx.Linear(inputs, 4 * width, rngs=rngs), nnx.Linear(width, 4 * width, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, length, inputs] to f32[batch, length, width]."""

    def step(carry: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
      cell, out = carry
      keep, write, new, show = jnp.split(given + self.hidden(out), 4, -1)
      cell = nnx.sigmoid(keep + 1) * cell + nnx.sigmoid(write) * jnp.tanh(new)  # it forgets little at first
      out = nnx.sigmoid(show) * jnp.tanh(cell)
      return (cell, out), out

    zero = jnp.zeros((len(x), self.width))
    _, outs = jax.lax.scan(step, (zero, zero), jnp.swapaxes(self.input(x), 0, 1))
    return jnp.swapaxes(outs, 0, 1)


class LSTM(nnx.Module):
  """Predicts each next symbol."""

  def __init__(self, symbols: int, width: int, rngs: nnx.Rngs, layers: int = 2):
    self.embed = nnx.Embed(symbols, width, rngs=rngs)
    self.layers = nnx.List([Layer(width, width, rngs) for _ in range(layers)])
    self.head = nnx.Linear(width, symbols, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Symbols [batch, length] to logits f32[batch, length, symbols] of the symbol behind each."""
    x = self.embed(text.astype(jnp.int32))
    for layer in self.layers:
      x = layer(x)
    return self.head(x)


def make() -> Task:
  """Bytes and width 256: 1,184,000 parameters."""
  return lm.next_byte("lstm", lambda seed: LSTM(lm.BYTES, 256, nnx.Rngs(seed)))
