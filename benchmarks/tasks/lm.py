"""Byte-level language models: a transformer on text that every Python brings; nothing is downloaded.

`small` is that of `benchmarks.train` on the help topics, `large` and `medium` are those of `benchmarks.race` on topics
and docstrings (`benchmarks.tasks.text`).
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks import text as texts
from benchmarks.tasks.base import Arrays, Task, drawn
from benchmarks.tasks.text import BYTES

LENGTH = 64  # of a window
SAMPLE = 128  # held-out windows of the race's tasks
load = texts.help_topics


def small() -> Task:
  """2 blocks of width 64: 136,896 parameters."""
  text = load()
  stream = lambda seed, workers, size: batches(text.train, workers * size, seed)
  test, train = (_predict(windows(part)) for part in (text.held_out, text.train))
  return Task("transformer", str(text), lambda seed: Transformer(nnx.Rngs(seed)), stream, test, train)


def large() -> Task:
  """4 blocks of width 256: 3,295,232 parameters."""
  return next_byte("lm", lambda seed: Transformer(nnx.Rngs(seed), width=256, blocks=4, bias=False))


def medium() -> Task:
  """3 blocks of width 128: 664,320 parameters."""
  return next_byte("lm_medium", lambda seed: Transformer(nnx.Rngs(seed), width=128, blocks=3, bias=False))


def next_byte(name: str, module: Callable[[int], nnx.Module]) -> Task:
  """The task of predicting each next byte of topics and docstrings with `module`, a window of `LENGTH` an input."""
  source = texts.library()

  def one(random: np.random.Generator, size: int) -> Arrays:
    return _predict(draw(source.train, random, size))

  return Task(name, str(source), module, drawn(one), _predict(sample(source.held_out)))


def draw(text: np.ndarray, random: np.random.Generator, size: int) -> np.ndarray:
  """u8[size, LENGTH + 1]: windows that begin anywhere in `text`."""
  return _at(text, random.integers(0, len(text) - LENGTH, size))


def sample(text: np.ndarray) -> np.ndarray:
  """u8[SAMPLE, LENGTH + 1]: windows evenly spaced over `text`."""
  return _at(text, np.linspace(0, len(text) - LENGTH - 1, SAMPLE).astype(int))


def batches(text: np.ndarray, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
  """Endless batches of `size` windows that begin anywhere in `text`, the same for the same seed."""
  random = np.random.default_rng(seed)
  while True:
    inputs, labels = _predict(draw(text, random, size))
    yield {"input": inputs, "label": labels}


def windows(text: np.ndarray) -> np.ndarray:
  """`text` as u8[count, LENGTH + 1]: each byte is predicted once, but the first and those that fill no window."""
  return _at(text, np.arange(0, len(text) - LENGTH, LENGTH))


def _at(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
  return texts.windows(text, starts, LENGTH + 1)


def _predict(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  return windows[:, :-1], windows[:, 1:].astype(np.int32)


class Block(nnx.Module):
  """Self-attention and a perceptron, each behind a normalization and added to its input."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs, bias: bool, causal: bool):
    self.heads, self.causal = heads, causal
    linear = lambda inputs, out: nnx.Linear(inputs, out, use_bias=bias, rngs=rngs)
    self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
    self.qkv = linear(width, 3 * width)
    self.out = linear(width, width)
    self.up = linear(width, 4 * width)
    self.down = linear(4 * width, width)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, length, width] to the same shape."""
    split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
    q, k, v = map(split, jnp.split(self.qkv(self.norm1(x)), 3, -1))
    x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=self.causal).reshape(x.shape))
    return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """A decoder over bytes; 2 blocks of width 64 have 136,896 parameters.

  Without `bias` no layer has one and the last normalization no scale; without `causal` a byte sees those behind it.
  """

  def __init__(
    self, rngs: nnx.Rngs, width: int = 64, heads: int = 4, blocks: int = 2, bias: bool = True, causal: bool = True
  ):
    self.byte = nnx.Embed(BYTES, width, rngs=rngs)
    self.position = nnx.Embed(LENGTH, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, heads, rngs, bias, causal) for _ in range(blocks)])
    self.norm = nnx.RMSNorm(width, use_scale=bias, rngs=rngs)
    small = nnx.initializers.normal(0.1 / width**0.5)  # an untrained model knows nothing: its loss is about log 256
    self.head = nnx.Linear(width, BYTES, use_bias=bias, kernel_init=small, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Bytes u8[batch, length], length at most `LENGTH`, to logits f32[batch, length, 256] of the byte behind each."""
    text = text.astype(jnp.int32)
    x = self.byte(text) + self.position(jnp.arange(text.shape[1]))[None]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))
