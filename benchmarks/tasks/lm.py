"""A byte-level language model on the help topics that every Python brings (`pydoc_data.topics`): nothing is downloaded.

The text is the topics in alphabetical order, each paragraph once: topics quote each other, and a paragraph that is held
out must not occur in the training text. The last tenth of the bytes is held out.
"""

import hashlib
import sys
from collections.abc import Iterator
from pydoc_data import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import training
from benchmarks.workers import Workers

BYTES = 256
LENGTH = 64  # of a window
HELD_OUT = 0.1


class Text(NamedTuple):
  """Text to learn from and text to be tested on.

  Attributes:
    train: u8[bytes].
    held_out: u8[bytes], what follows `train`.
    digest: SHA-256 of both, in hexadecimal.
  """

  train: np.ndarray
  held_out: np.ndarray
  digest: str

  def __str__(self) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    size = len(self.train) + len(self.held_out)
    return f"the help topics of Python {version} ({size:,} bytes, SHA-256 {self.digest[:12]})"


def load() -> Text:
  """The text of the Python that runs this: the same bytes in every process of the same Python version."""
  paragraphs = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).split("\n\n")
  content = "\n\n".join(dict.fromkeys(filter(str.strip, paragraphs))).encode()
  text, cut = np.frombuffer(content, np.uint8), round(len(content) * (1 - HELD_OUT))
  return Text(text[:cut], text[cut:], hashlib.sha256(content).hexdigest())


def make(text: Text, workers: Workers, batch_size: int, seed: int) -> training.Task:
  """The task of predicting each next byte of `text`, `batch_size` windows of `LENGTH` bytes a worker."""
  whole = lambda: batches(text.train, batch_size * workers.size, seed)
  train_set, test_set = _predict(windows(text.train)), _predict(windows(text.held_out))
  return training.classification(Transformer(nnx.Rngs(seed)), train_set, test_set, whole, workers, batch_size)


def batches(text: np.ndarray, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
  """Endless batches of `size` windows that begin anywhere in `text`, the same for the same seed."""
  random = np.random.default_rng(seed)
  while True:
    inputs, labels = _predict(_at(text, random.integers(0, len(text) - LENGTH, size)))
    yield {"input": inputs, "label": labels}


def windows(text: np.ndarray) -> np.ndarray:
  """`text` as u8[count, LENGTH + 1]: each byte is predicted once, but the first and those that fill no window."""
  return _at(text, np.arange(0, len(text) - LENGTH, LENGTH))


def _at(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
  return text[starts[:, None] + np.arange(LENGTH + 1)]


def _predict(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  return windows[:, :-1], windows[:, 1:].astype(np.int32)


class Block(nnx.Module):
  """Causal self-attention and a perceptron, each behind a normalization and added to its input."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
    self.heads = heads
    self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
    self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
    self.out = nnx.Linear(width, width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, length, width] to the same shape."""
    split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
    q, k, v = map(split, jnp.split(self.qkv(self.norm1(x)), 3, -1))
    x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
    return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """A decoder over bytes; 2 blocks of width 64 have 136,896 parameters."""

  def __init__(self, rngs: nnx.Rngs, width: int = 64, heads: int = 4, blocks: int = 2):
    self.byte = nnx.Embed(BYTES, width, rngs=rngs)
    self.position = nnx.Embed(LENGTH, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(blocks)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    small = nnx.initializers.normal(0.1 / width**0.5)  # an untrained model knows nothing: its loss is about log 256
    self.head = nnx.Linear(width, BYTES, kernel_init=small, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Bytes u8[batch, length], length at most `LENGTH`, to logits f32[batch, length, 256] of the byte behind each."""
    text = text.astype(jnp.int32)
    x = self.byte(text) + self.position(jnp.arange(text.shape[1]))[None]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))
