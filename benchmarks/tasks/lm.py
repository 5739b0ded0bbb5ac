"""Language models of bytes: `small` of `benchmarks.train` on Python's help topics, the others of `benchmarks.race`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.tasks import text as texts
from benchmarks.tasks.base import IGNORED, Arrays, Batches, Task, drawn
from benchmarks.tasks.text import BYTES

LENGTH = 64  # of a window
SAMPLE = 128  # held-out windows of the race's tasks
_MASKED = 0.15
load = texts.help_topics


def small() -> Task:
  """A transformer of 2 blocks of width 64: 136,896 parameters."""
  text = load()

  def stream(seed: int, workers: int, size: int) -> Batches:
    random = np.random.default_rng(seed)
    while True:
      inputs, labels = _predict(draw(text.train, random, workers * size))
      yield {"input": inputs, "label": labels}

  test, train = (_predict(windows(part)) for part in (text.held_out, text.train))
  return Task(
    "transformer",
    str(text),
    lambda seed: Transformer(nnx.Rngs(seed)),
    stream,
    test,
    train,
  )


def several(apart: bool) -> Task:
  """`small` on four sources of text: each worker has one of its own, or each window comes from any of them."""
  every = texts.sources()

  def stream(seed: int, workers: int, size: int) -> Batches:
    randoms = [np.random.default_rng([seed, worker]) for worker in range(workers)]
    while True:
      rows = []
      for worker, random in enumerate(randoms):
        chosen = (
          np.full(size, worker % len(every))
          if apart
          else random.integers(0, len(every), size)
        )
        rows += [draw(every[source].train, random, 1) for source in chosen]
      inputs, labels = _predict(np.concatenate(rows))
      yield {"input": inputs, "label": labels}

  held_out = _predict(
    np.concatenate([_at(one.held_out, np.arange(0, 9_900, 99)) for one in every])
  )
  train = _predict(np.concatenate([windows(one.train) for one in every]))
  names = ", ".join(one.name for one in every) + (
    ", one for each worker" if apart else ", mixed"
  )
  return Task(
    "transformer",
    names,
    lambda seed: Transformer(nnx.Rngs(seed)),
    stream,
    held_out,
    train,
  )


def large() -> Task:
  """A transformer of 4 blocks of width 256: 3,295,232 parameters."""
  return _next_byte(
    "lm", lambda rngs: Transformer(rngs, width=256, blocks=4, bias=False)
  )


def wide() -> Task:
  """A transformer of 4 blocks of width 512: 12,881,920 parameters."""
  return _next_byte(
    "lm_wide", lambda rngs: Transformer(rngs, width=512, blocks=4, bias=False)
  )


def narrow() -> Task:
  """A transformer of 2 blocks of width 64: 135,424 parameters."""
  return _next_byte(
    "lm_small", lambda rngs: Transformer(rngs, width=64, blocks=2, bias=False)
  )


def medium() -> Task:
  """A transformer of 3 blocks of width 128: 664,320 parameters."""
  return _next_byte(
    "lm_medium", lambda rngs: Transformer(rngs, width=128, blocks=3, bias=False)
  )


def recurrent() -> Task:
  """The papers' LSTM-PTB at a size that fits, bytes and width 256: 1,184,000 parameters."""
  return _next_byte("lstm", lambda rngs: LSTM(BYTES, 256, rngs))


def masked() -> Task:
  """A small BERT: `medium` without its causal mask, to predict 15 % of the bytes, which are replaced by byte 0.

  The text does not have it. (BERT itself leaves a tenth of these as they are and
  replaces another by random words.)
  """
  module = lambda seed: Transformer(
    nnx.Rngs(seed), width=128, blocks=3, bias=False, causal=False
  )
  source = texts.library()

  def hide(random: np.random.Generator, text: np.ndarray) -> Arrays:
    hidden = random.random(text.shape) < _MASKED
    return np.where(hidden, np.uint8(0), text), np.where(
      hidden, text.astype(np.int32), IGNORED
    )

  held_out = hide(np.random.default_rng(0), _sample(source.held_out)[:, :-1])
  one = lambda random, size: hide(random, draw(source.train, random, size)[:, :-1])
  return Task("bert", str(source), module, drawn(one), held_out)


def _next_byte(name: str, module: Callable[[nnx.Rngs], nnx.Module]) -> Task:
  """The task of predicting each next byte of topics and docstrings, a window of `LENGTH` an input."""
  source = texts.library()
  one = lambda random, size: _predict(draw(source.train, random, size))
  return Task(
    name,
    str(source),
    lambda seed: module(nnx.Rngs(seed)),
    drawn(one),
    _predict(_sample(source.held_out)),
  )


def draw(text: np.ndarray, random: np.random.Generator, size: int) -> np.ndarray:
  """u8[size, LENGTH + 1]: windows that begin anywhere in `text`."""
  return _at(text, random.integers(0, len(text) - LENGTH, size))


def windows(text: np.ndarray) -> np.ndarray:
  """`text` as u8[count, LENGTH + 1]: each byte is predicted once, but the first and those that fill no window."""
  return _at(text, np.arange(0, len(text) - LENGTH, LENGTH))


def _sample(text: np.ndarray) -> np.ndarray:
  """u8[SAMPLE, LENGTH + 1]: windows evenly spaced over `text`."""
  return _at(text, np.linspace(0, len(text) - LENGTH - 1, SAMPLE).astype(int))


def _at(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
  return text[starts[:, None] + np.arange(LENGTH + 1)]


def _predict(windows: np.ndarray) -> Arrays:
  return windows[:, :-1], windows[:, 1:].astype(np.int32)


class Block(nnx.Module):
  """Self-attention and a perceptron, each behind a normalization and added to its input."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs, bias: bool, causal: bool):
    self.heads, self.causal = heads, causal
    linear = lambda inputs, out: nnx.Linear(inputs, out, use_bias=bias, rngs=rngs)
    self.norm1, self.norm2 = (
      nnx.RMSNorm(width, rngs=rngs),
      nnx.RMSNorm(width, rngs=rngs),
    )
    self.qkv = linear(width, 3 * width)
    self.out = linear(width, width)
    self.up = linear(width, 4 * width)
    self.down = linear(4 * width, width)

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, length, width] to the same shape."""
    split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1)
    q, k, v = map(split, jnp.split(self.qkv(self.norm1(x)), 3, -1))
    x = x + self.out(
      jax.nn.dot_product_attention(q, k, v, is_causal=self.causal).reshape(x.shape)
    )
    return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """A decoder over bytes; without `bias` no scale ends the last normalization, without `causal` a byte sees all."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    bias: bool = True,
    causal: bool = True,
  ):
    self.byte = nnx.Embed(BYTES, width, rngs=rngs)
    self.position = nnx.Embed(LENGTH, width, rngs=rngs)
    self.blocks = nnx.List(
      [Block(width, heads, rngs, bias, causal) for _ in range(blocks)]
    )
    self.norm = nnx.RMSNorm(width, use_scale=bias, rngs=rngs)
    # an untrained model knows nothing: its loss is about log 256
    small = nnx.initializers.normal(0.1 / width**0.5)
    self.head = nnx.Linear(width, BYTES, use_bias=bias, kernel_init=small, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Bytes u8[batch, length], length at most `LENGTH`, to logits f32[batch, length, 256] of the byte behind each."""
    text = text.astype(jnp.int32)
    x = self.byte(text) + self.position(jnp.arange(text.shape[1]))[None]
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))


class Layer(nnx.Module):
  """An LSTM over a sequence, from a state of zeros; both of its products have a bias, as in PyTorch."""

  def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
    self.width = width
    self.input, self.hidden = (
      nnx.Linear(inputs, 4 * width, rngs=rngs),
      nnx.Linear(width, 4 * width, rngs=rngs),
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[batch, length, inputs] to f32[batch, length, width]."""

    def step(
      carry: tuple[jax.Array, jax.Array], given: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
      cell, out = carry
      keep, write, new, show = jnp.split(given + self.hidden(out), 4, -1)
      # it forgets little at first
      cell = nnx.sigmoid(keep + 1) * cell + nnx.sigmoid(write) * jnp.tanh(new)
      out = nnx.sigmoid(show) * jnp.tanh(cell)
      return (cell, out), out

    zero = jnp.zeros((len(x), self.width))
    _, outs = jax.lax.scan(step, (zero, zero), jnp.swapaxes(self.input(x), 0, 1))
    return jnp.swapaxes(outs, 0, 1)


class LSTM(nnx.Module):
  """Two layers behind an embedding: 10,000 words and width 1500 are 66,034,000 parameters (A2SGD, Table I)."""

  def __init__(self, symbols: int, width: int, rngs: nnx.Rngs):
    self.embed = nnx.Embed(symbols, width, rngs=rngs)
    self.layers = nnx.List([Layer(width, width, rngs) for _ in range(2)])
    self.head = nnx.Linear(width, symbols, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Symbols [batch, length] to logits f32[batch, length, symbols] of the symbol behind each."""
    x = self.embed(text.astype(jnp.int32))
    for layer in self.layers:
      x = layer(x)
    return self.head(x)
