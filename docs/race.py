"""The race whose table README.md shows, on a transformer over Python's help topics: `python docs/race.py`."""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js

WIDTH, HEADS, BLOCKS, LENGTH, VOCABULARY = 56, 4, 2, 64, 128
WORKERS, WINDOWS = 8, 2  # windows of a worker in a step

_topics = pydoc_data.topics.topics
_text = "".join(_topics[name] for name in sorted(_topics)).encode("ascii", "ignore")
_bytes = np.frombuffer(_text, np.uint8).astype(np.int32)
_train, _rest = np.split(_bytes, [9 * len(_bytes) // 10])


def windows(part, starts):
  """Inputs and targets, i32[windows, LENGTH] each."""
  rows = part[starts[:, None] + np.arange(LENGTH + 1)]
  return rows[:, :-1], rows[:, 1:]


def batches(step):
  """The windows of all workers in a step."""
  random = np.random.default_rng(step)
  starts = random.integers(0, len(_train) - LENGTH, WORKERS * WINDOWS)
  return windows(_train, starts)


def params(seed):
  """93,184 parameters."""
  keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * BLOCKS))
  matrix = lambda rows, columns: (
    jax.random.normal(next(keys), (rows, columns)) / rows**0.5
  )
  block = lambda: {
    "qkv": matrix(WIDTH, 3 * WIDTH),
    "out": matrix(WIDTH, WIDTH),
    "up": matrix(WIDTH, 4 * WIDTH),
    "down": matrix(4 * WIDTH, WIDTH),
  }
  return {
    "byte": matrix(VOCABULARY, WIDTH),
    "position": matrix(LENGTH, WIDTH),
    "blocks": [block() for _ in range(BLOCKS)],
    "head": 0.1 * matrix(WIDTH, VOCABULARY),
  }


def norm(x):
  """The rows of x, each over its root mean square."""
  return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def loss_fn(params, batch):
  """Mean cross-entropy of the next byte."""
  inputs, targets = batch
  x = 5 * (params["byte"][inputs] + params["position"])
  for block in params["blocks"]:
    split = lambda y: y.reshape(*y.shape[:-1], HEADS, -1)
    q, k, v = map(split, jnp.split(norm(x) @ block["qkv"], 3, -1))
    heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x += heads.reshape(x.shape) @ block["out"]
    x += jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
  logits = norm(x) @ params["head"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


HELD_OUT = windows(_rest, np.arange(0, len(_rest) - LENGTH, len(_rest) // 130))
evaluate = jax.jit(lambda params: loss_fn(params, HELD_OUT))

if __name__ == "__main__":
  race = js.race(
    loss_fn,
    params,
    batches,
    evaluate,
    workers=WORKERS,
    steps=300,
    rate=0.006,
    progress=print,
  )
  print(race)
  print("take", race.best("100mbit", within=2.0).method)
